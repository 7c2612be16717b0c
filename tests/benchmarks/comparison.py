"""Compare our training step with the step of `speculators` for `eagle3` or `dflash`.

Both sides have the same documents, features, head and packing. Each side is a process, and this one waits for them. The
sides take turns of a few steps, so that a machine with a drifting speed slows all sides equally. A file holds the
shared data.
Before the first step, every side reports its losses on the first batch by draft depth; sides with different losses are
not compared.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from specctl.errors import SpecctlError, UsageError
from specctl.progress import Progress
from tests.benchmarks import against_speculators
from tests.benchmarks.comparison_ours import DEFAULT, LIKE, shared

WARM_UP = 2  # steps of each side before the clock runs
TURN = 3  # steps of a turn
BUDGET_S = 150  # seconds after which no turn starts
TOLERANCE = 2e-3  # relative tolerance of losses: bf16 products and rounding in another order

PACKED, SINGLE = "packed", "single"
NAMES = {
    LIKE: "specctl, like for like",
    DEFAULT: "specctl, default recipe",
    PACKED: "speculators, documents packed",
    SINGLE: "speculators, one document a forward",
}


ROOT = Path(__file__).parents[2]


@dataclass
class Measured:
    """Measurements of a side, with memory in bytes. `before` is the peak before the first step."""

    threads: int
    before: int
    losses: list[float]
    peak: int = 0
    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Response tokens per second."""
        return sum(self.tokens) / sum(self.seconds)


def compare(distilled: Path, python: Path, steps: int, arch: str = "eagle3") -> dict[str, Measured]:
    """Time `steps` optimizer steps of each side; `python` is an interpreter with `speculators` 0.9.

    Raises:
        UsageError: `python` does not have it.
        SpecctlError: a side failed, or the sides differ in threads or in their first losses.
    """
    require_speculators(python)
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        ours = [sys.executable, "-m", "tests.benchmarks.comparison_ours", place, str(distilled.resolve()), arch]
        # -I keeps the script's folder off the path, where names of standard modules occur
        theirs = [str(python), "-I", against_speculators.__file__, str(shared(Path(place)))]
        if subprocess.run([*ours, "write", str(WARM_UP + steps)], env=environment()).returncode:
            raise SpecctlError("the target features could not be computed; what went wrong is above")
        commands = {name: [*theirs, name] if name in (PACKED, SINGLE) else [*ours, name] for name in NAMES}
        sides = {name: stack.enter_context(started(command)) for name, command in commands.items()}
        measured = {name: Measured(**answer(side)) for name, side in sides.items()}
        require_equal(measured[LIKE].losses, measured[PACKED].losses)
        if len({one.threads for one in measured.values()}) > 1:
            raise SpecctlError("the sides run on different numbers of threads")
        deadline = time.monotonic() + BUDGET_S
        with Progress("benchmark", total=WARM_UP + steps, unit="steps") as bar:
            for turn in [WARM_UP, *turns(steps)]:
                if time.monotonic() > deadline and len(measured[LIKE].tokens) > 1:
                    break
                for name, side in sides.items():
                    told = ask(side, turn)
                    measured[name].peak = told["peak"]
                    measured[name].tokens.append(told["tokens"])
                    measured[name].seconds.append(told["seconds"])
                bar.update(turn)
    for one in measured.values():
        del one.tokens[0], one.seconds[0]  # the warm-up
    return measured


def report(measured: dict[str, Measured], arch: str = "eagle3") -> Iterator[str]:
    """Yield the lines to print."""
    like = measured[LIKE]
    yield f"{len(like.tokens)} turns, {sum(like.tokens)} response tokens a side, {like.threads} threads"
    yield f"{'':36}{'response tokens/s':>18}{'peak memory':>13}{'by steps':>11}"
    for name, one in measured.items():
        memory = f"{one.peak / 2**30:10.2f} GB{(one.peak - one.before) / 2**30:8.2f} GB"
        yield f"{NAMES[name]:36}{one.rate:18,.0f}{memory}"
    for name in (PACKED, SINGLE):
        other = measured[name]
        by_turn = sorted(b / a for a, b in zip(like.seconds, other.seconds, strict=True))
        spread = f"turns {by_turn[0]:.2f} to {by_turn[-1]:.2f}"
        yield f"like for like: {like.rate / other.rate:.2f} × {NAMES[name]} ({spread})"
    apart = furthest(like.losses, measured[PACKED].losses)
    yield f"losses before the first step, by draft depth; they agree to {apart:.0e}:"
    for name in (LIKE, PACKED):
        yield f"{NAMES[name]:36}{' '.join(f'{loss:.4f}' for loss in measured[name].losses)}"
    if arch == "eagle3":
        yield "speculators runs prompts through all steps, specctl takes keys and values of the first step from them"


def require_speculators(python: Path) -> None:
    """Raise UsageError unless `python` has the supported version of `speculators`."""
    code = "from importlib.metadata import version; print(version('speculators'))"
    try:
        found = subprocess.run([python, "-Ic", code], capture_output=True, text=True).stdout.strip()
    except OSError as error:
        raise UsageError(f"{python} does not run: {error.strerror}") from error
    if not found.startswith("0.9."):
        raise UsageError(f"{python} has speculators {found or '(none)'}, not 0.9", "pip install 'speculators==0.9.*'")


def require_equal(ours: list[float], theirs: list[float]) -> None:
    """Raise SpecctlError if losses differ by more than bf16 explains."""
    if not furthest(ours, theirs) <= TOLERANCE:  # true for NaN
        raise SpecctlError(f"the sides do not compute the same thing: losses {ours} against {theirs}")


def furthest(ours: list[float], theirs: list[float]) -> float:
    """Return the largest relative difference."""
    return (torch.tensor(ours) / torch.tensor(theirs) - 1).abs().max().item()


def turns(steps: int) -> list[int]:
    """Split `steps` into turns of `TURN` steps; the last one may be shorter."""
    return [min(TURN, steps - done) for done in range(0, steps, TURN)]


def environment() -> dict[str, str]:
    """Return the environment of a side: the thread count of this process, and no compilation."""
    return os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads()), "TORCHDYNAMO_DISABLE": "1"}


@contextmanager
def started(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    """Start a side; it ends when its input closes, or at once after an error."""
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment(), cwd=ROOT) as process:
        try:
            yield process
        except BaseException:
            process.kill()
            raise


def answer(side: subprocess.Popen[str]) -> dict[str, Any]:
    """Return the next answer of a side."""
    assert side.stdout is not None
    line = side.stdout.readline()
    if not line:
        raise SpecctlError(f"a side of the benchmark ended with status {side.wait()}; what it said is above")
    return json.loads(line)


def ask(side: subprocess.Popen[str], steps: int) -> dict[str, Any]:
    """Let a side run `steps` steps."""
    assert side.stdin is not None
    print(steps, file=side.stdin, flush=True)
    return answer(side)
