"""Costs of a round on this machine: its rows in the target, and the passes of a head before it.

They say how deep a draft pays. They are measured once for a machine, a target and a head, and kept, so that equal runs
draft equally and nothing is measured inside of what is timed.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from bisect import bisect_left
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from specctl import progress, threads
from specctl.decoding.engine import Engine
from specctl.decoding.records import DraftTree, Request
from specctl.decoding.sampling import GREEDY
from specctl.decoding.state import DecodeState
from specctl.decoding.target import Target
from specctl.decoding.timing import synchronise
from specctl.decoding.verify import verify
from specctl.runs import atomic_write

ROWS = (1, 2, 4, 8, 16, 32, 63)
LEVELS = 5  # of a head, timed together
CONTEXT = 64  # tokens of the text that rounds are timed behind
REPEATS, WARM_UP = 15, 2
ENOUGH_S = 20.0  # a large target has its medians of fewer repeats
ENVIRONMENT = "XDG_CACHE_HOME"


@dataclass(frozen=True)
class Costs:
    """Costs in rounds of one row.

    Attributes:
        rounds: of a round with as many rows as `ROWS` says; linear in between and behind.
        first: of a head's first level, with what it reads of the last round.
        level: of each further level.
    """

    rounds: tuple[float, ...]
    first: float
    level: float

    def round(self, rows: int) -> float:
        """A round whose step has so many rows."""
        place = min(max(bisect_left(ROWS, rows), 1), len(ROWS) - 1)
        low, high = ROWS[place - 1], ROWS[place]
        share = (rows - low) / (high - low)
        return self.rounds[place - 1] + share * (self.rounds[place] - self.rounds[place - 1])

    def drafting(self, levels: float) -> float:
        """A head that drafts so many levels."""
        return self.first + (levels - 1) * self.level if levels else 0.0


class LevelDrafter(Protocol):
    """A drafter that grows its drafts level by level (`drafters.hybrid.Grower`)."""

    taps: tuple[int, ...]

    def grow(self, state: DecodeState, budget: int, pays: Callable[[list[float]], bool]) -> Any:
        """Candidates behind the text of every sequence."""
        ...


def costs_of(target: Target, head: LevelDrafter, name: str) -> Costs:
    """The costs of rounds with a head, kept from before or measured. `name`: its family and architecture."""
    path = Path(os.environ.get(ENVIRONMENT) or Path.home() / ".cache") / "specctl" / "costs.json"
    key = json.dumps([_machine(target), target.identity["weights"] or target.name, str(target.dtype), name])
    kept = _read(path)
    with suppress(KeyError, TypeError, ValueError):
        return Costs(tuple(map(float, kept[key]["rounds"])), float(kept[key]["first"]), float(kept[key]["level"]))
    costs = measure(target, head)
    progress.log(
        f"measured once, in rounds of one row: 8 rows {costs.round(8):.2f}, 16 rows {costs.round(16):.2f}, "
        f"drafting one level {costs.first:.2f}, each further level {costs.level:.2f} (kept in {path})"
    )
    with suppress(OSError):  # where it cannot be kept, it is measured again
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, json.dumps(_read(path) | {key: asdict(costs)}, indent=1))
    return costs


def _machine(target: Target) -> str:
    """The processor, and how much of it computes."""
    if target.device.type == "cuda":
        return torch.cuda.get_device_name(target.device)
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
        return f"{model}, {_threads(target)}"
    return f"{platform.processor() or platform.machine()}, {_threads(target)}"


def _threads(target: Target) -> str:
    with threads.suited(target.row_flops):
        return threads.counted(torch.get_num_threads(), "thread")


def _read(path: Path) -> dict[str, Any]:
    """The costs that are kept; none where the file is missing or damaged."""
    try:
        kept = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return kept if isinstance(kept, dict) else {}


@torch.inference_mode()
def measure(target: Target, head: LevelDrafter) -> Costs:
    """Time rounds of all sizes in turn, and the head before them, each beside a round of one row: medians of that."""
    ratios: dict[str, list[float]] = {}
    with threads.suited(target.row_flops):
        state, began = _text(target, head), time.monotonic()
        for repeat in range(REPEATS + WARM_UP):
            if repeat > WARM_UP and time.monotonic() - began > ENOUGH_S:
                break
            if state.rows[0].room < 2 * max(ROWS):
                state = _text(target, head)
            taken: dict[str, float] = {}
            for rows in ROWS:
                draft = DraftTree.from_chains([[0] * (rows - 1)], target.device)
                taken[f"{rows} rows"] = _seconds(target, partial(verify, target, state, draft))
            for levels in (1, LEVELS):
                _commit_a_round(target, state)
                taken[f"{levels} levels"] = _seconds(target, partial(head.grow, state, levels, lambda joint: True))
            for name in taken if repeat >= WARM_UP else ():
                ratios.setdefault(name, []).append(taken[name] / taken["1 rows"])
    return from_ratios({name: statistics.median(values) for name, values in ratios.items()})


def from_ratios(ratios: dict[str, float]) -> Costs:
    """Costs from the relative time of `8 rows`, `1 levels` and so on; more rows are never cheaper than fewer."""
    rounds = [ratios[f"{rows} rows"] for rows in ROWS]
    first, levels = ratios["1 levels"], ratios[f"{LEVELS} levels"]
    level = max(levels - first, 0.0) / (LEVELS - 1)
    return Costs(tuple(max(rounds[: place + 1]) for place in range(len(rounds))), first, level)


def _text(target: Target, head: LevelDrafter) -> DecodeState:
    """A text of random tokens, read by the target and the head, with room for what is timed."""
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(target.vocab_size, (min(CONTEXT, target.context_length // 4),), generator=generator)
    engine = Engine(target, taps=head.taps, host=True)
    engine.add(Request(prompt.tolist(), GREEDY, target.context_length))
    engine.step()
    engine.state.rows[0].stop = None  # its first token may end texts
    head.grow(engine.state, 1, lambda joint: False)
    return engine.state


def _commit_a_round(target: Target, state: DecodeState) -> None:
    """Give the head something to read: the tokens of a round, whether they end the text or not."""
    state.commit(verify(target, state, DraftTree.from_chains([[0]], target.device)))
    state.rows[0].stop = None


def _seconds(target: Target, function: Callable[[], object]) -> float:
    synchronise(target.device)
    # What other processes take of a core is no cost of ours; a GPU's work takes no time of this thread.
    clock = time.thread_time if target.device.type == "cpu" else time.perf_counter
    started = clock()
    function()
    synchronise(target.device)
    return clock() - started
