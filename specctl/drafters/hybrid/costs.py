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
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from specctl import processes, progress, regular, threads
from specctl.decoding.engine import Engine
from specctl.decoding.models.lean import LeanModel
from specctl.decoding.records import DraftTree, Request
from specctl.decoding.sampling import GREEDY
from specctl.decoding.state import DecodeState
from specctl.decoding.target import Target
from specctl.decoding.timing import clock_of, synchronise
from specctl.decoding.verify import verify
from specctl.kernels import native
from specctl.runs import atomic_write

ROWS = (1, 2, 4, 8, 16, 32, 63)
LEVELS = 5  # of a head, timed together
TEXTS, ROWS_EACH = 8, (1, 4)  # of the batch that is timed
CONTEXT, FAR = 256, 1024  # tokens of the texts that rounds are timed behind
FAR_ROWS = (1, 16)
ROOM = 512  # tokens that may follow: of a large target, a cache of its whole context would not fit
REPEATS, WARM_UP = 15, 2
ENOUGH_S = 20.0  # a large target has its medians of fewer repeats
ENVIRONMENT = "XDG_CACHE_HOME"
LONGEST = 2**24  # bytes of the file
DEAREST = 1e6  # rounds of one row that anything costs


@dataclass(frozen=True)
class Costs:
    """Costs in rounds of one row behind `context` tokens.

    Attributes:
        rounds: of a round with as many rows as `ROWS` says; linear in between and behind.
        first: of a head's first level, with what it reads of the last round.
        level: of each further level.
        text, text_row: of each further text of a batch, and of each of its rows, beyond what these rows cost one text:
            every text reads keys and values of its own.
        text_first, text_level: of a head's levels, for each further text.
        slot, row_slot: of each token that a text is longer, and again for each further row that reads it.
    """

    rounds: tuple[float, ...]
    first: float
    level: float
    text: float = 0.0
    text_row: float = 0.0
    text_first: float = 0.0
    text_level: float = 0.0
    slot: float = 0.0
    row_slot: float = 0.0
    context: float = CONTEXT

    def at(self, length: float) -> Costs:
        """The costs behind texts of so many tokens, in the same unit; never less than half of what was measured."""
        further = length - self.context
        slots = [further * (self.slot + (rows - 1) * self.row_slot) for rows in ROWS]
        rounds = tuple(max(cost + more, cost / 2) for cost, more in zip(self.rounds, slots, strict=True))
        return replace(self, rounds=rounds, text=max(self.text + further * self.slot, 0.0))

    def round(self, rows: int, texts: int = 1) -> float:
        """A round in which each of `texts` has so many rows."""
        return self._step(texts * rows) + (texts - 1) * (self.text + self.text_row * rows)

    def _step(self, rows: int) -> float:
        """A round whose step has so many rows, all of one text."""
        place = min(max(bisect_left(ROWS, rows), 1), len(ROWS) - 1)
        low, high = ROWS[place - 1], ROWS[place]
        share = (rows - low) / (high - low)
        return self.rounds[place - 1] + share * (self.rounds[place] - self.rounds[place - 1])

    def row(self, texts: int) -> float:
        """A further row of each of so many texts, on average over rounds of usual size."""
        return texts * (self._step(32) - self._step(2)) / 30 + (texts - 1) * self.text_row

    def drafting(self, levels: float, texts: int = 1) -> float:
        """A head that drafts so many levels of so many texts in one."""
        first, level = self.first + (texts - 1) * self.text_first, self.further(texts)
        return first + (levels - 1) * level if levels else 0.0

    def further(self, texts: int) -> float:
        """A further level of a head, of so many texts."""
        return self.level + (texts - 1) * self.text_level


SINGLE = [field.name for field in fields(Costs) if field.name != "rounds"]


class LevelDrafter(Protocol):
    """A drafter that grows its drafts level by level (`drafters.hybrid.drafter.Grower`)."""

    taps: tuple[int, ...]

    def grow(self, state: DecodeState, budget: int, pays: Callable[[list[float]], bool]) -> Any:
        """Candidates behind the text of every sequence."""
        ...


def costs_of(target: Target, head: LevelDrafter, name: str) -> Costs:
    """The costs of rounds with a head, kept from before or measured. `name`: its family and architecture."""
    path = Path(os.environ.get(ENVIRONMENT) or Path.home() / ".cache") / "specctl" / "costs.json"
    sliced = [f"{processes.joined()} slices"] if processes.joined() > 1 else []
    weights = target.identity["weights"] or target.name
    step = [native.version()] if isinstance(target.model, LeanModel) and target.model.native else []
    key = json.dumps([_machine(target), weights, str(target.dtype), name, *sliced, *step])
    known, problem = None, ""
    try:
        if (found := _read(path).get(key)) is not None:
            known = _believed(found)
    except (OSError, ValueError) as error:
        problem = f"{path} is not used: {getattr(error, 'strerror', None) or error}; costs are measured anew"
    if (known := processes.agree(known)) is not None:
        return known
    if problem and not processes.follows():
        progress.warn(problem)
    costs = processes.agree(measure(target, head))
    if processes.follows():
        return costs
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        others = {}
        with suppress(OSError, ValueError):  # what cannot be read is replaced
            others = _read(path)
        atomic_write(path, json.dumps(others | {key: asdict(costs)}, indent=1))
        told = f"kept in {path}"
    except OSError as error:
        told = f"measured again the next time, as {path} cannot be written: {error.strerror}"
    progress.log(
        f"measured once, in rounds of one row: 8 rows {costs.round(8):.2f}, 16 rows {costs.round(16):.2f}, "
        f"{TEXTS} texts {costs.round(1, TEXTS):.2f}, drafting one level {costs.first:.2f}, each further level "
        f"{costs.level:.2f} ({told})"
    )
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
    """The costs that are kept, by machine, target and head; none where there is no file. OSError, ValueError where it
    cannot be read."""
    try:
        kept = regular.parsed(regular.content(path, LONGEST))
    except FileNotFoundError:
        return {}
    if not isinstance(kept, dict):
        raise ValueError("no JSON object")
    return kept


def _believed(found: Any) -> Costs:
    """The costs in an entry of the file. ValueError where `measure` cannot have made it: other keys or sizes of rounds,
    as another version has, or what is no duration."""
    if not isinstance(found, dict) or found.keys() != {"rounds", *SINGLE}:
        raise ValueError("its costs have other keys")
    rounds = found["rounds"]
    if not isinstance(rounds, list) or len(rounds) != len(ROWS):
        raise ValueError(f"its costs are not of {len(ROWS)} rounds")
    singles = [found[name] for name in SINGLE]
    if not all(type(one) in (int, float) and 0 <= one <= DEAREST for one in [*rounds, *singles]):
        raise ValueError("its costs are no durations")
    if min(rounds) <= 0 or rounds != sorted(rounds):
        raise ValueError("its costs of more rows are below those of fewer")
    return Costs(tuple(map(float, rounds)), **{name: float(found[name]) for name in SINGLE})


@torch.inference_mode()
def measure(target: Target, head: LevelDrafter) -> Costs:
    """Time rounds of all sizes in turn, and the head before them, each beside a round of one row: medians of that."""
    ratios: dict[str, list[float]] = {}
    near, far = (min(length, target.context_length // part) for length, part in ((CONTEXT, 4), (FAR, 2)))
    # What is timed, by what its names end in: so many texts of so many tokens, with as many rows.
    timed = {"": (1, near, ROWS), f" of {TEXTS}": (TEXTS, near, ROWS_EACH), " far": (1, far, FAR_ROWS)}
    with threads.suited(target.row_flops):
        states = {name: _texts(target, head, count, length) for name, (count, length, _) in timed.items()}
        began = time.monotonic()
        for repeat in range(REPEATS + WARM_UP):
            if repeat > WARM_UP and processes.agree(time.monotonic() - began > ENOUGH_S):
                break
            taken: dict[str, float] = {}
            for name, (count, length, sizes) in timed.items():
                if states[name].rows[0].room < 2 * max(ROWS):
                    states[name] = _texts(target, head, count, length)
                state = states[name]
                for rows in sizes:
                    draft = DraftTree.from_chains([[0] * (rows - 1)] * count, target.device)
                    taken[f"{rows} rows{name}"] = _seconds(target, partial(verify, target, state, draft))
                for levels in (1, LEVELS) if length == near else ():
                    _commit_a_round(target, state)
                    grow = partial(head.grow, state, levels, lambda joint: True)
                    taken[f"{levels} levels{name}"] = _seconds(target, grow)
            for name in taken if repeat >= WARM_UP else ():
                ratios.setdefault(name, []).append(taken[name] / taken["1 rows"])
    return from_ratios({name: statistics.median(values) for name, values in ratios.items()}, near, far)


def from_ratios(ratios: dict[str, float], near: int = CONTEXT, far: int = FAR) -> Costs:
    """Costs from the relative time of `8 rows`, `1 levels` and so on, behind texts of `near` and, where they are `far`,
    of so many tokens; more rows are never cheaper than fewer."""
    rounds = [ratios[f"{rows} rows"] for rows in ROWS]
    first, levels = ratios["1 levels"], ratios[f"{LEVELS} levels"]
    level = max(levels - first, 0.0) / (LEVELS - 1)
    alone = Costs(tuple(max(rounds[: place + 1]) for place in range(len(rounds))), first, level)
    few, more = ROWS_EACH
    # What every further text adds to a step of as many rows.
    added = {rows: (ratios[f"{rows} rows of {TEXTS}"] - alone.round(TEXTS * rows)) / (TEXTS - 1) for rows in ROWS_EACH}
    text_row = max(added[more] - added[few], 0.0) / (more - few)
    text_first = max(ratios[f"1 levels of {TEXTS}"] - first, 0.0) / (TEXTS - 1)
    together = max(ratios[f"{LEVELS} levels of {TEXTS}"] - ratios[f"1 levels of {TEXTS}"], 0.0) / (LEVELS - 1)
    one, many = FAR_ROWS
    longer = {rows: max(ratios[f"{rows} rows far"] - alone.round(rows), 0.0) / max(far - near, 1) for rows in FAR_ROWS}
    return replace(
        alone,
        text=max(added[few] - few * text_row, 0.0),
        text_row=text_row,
        text_first=text_first,
        text_level=max(together - level, 0.0) / (TEXTS - 1),
        slot=longer[one],
        row_slot=max(longer[many] - longer[one], 0.0) / (many - one),
        context=near,
    )


def _texts(target: Target, head: LevelDrafter, count: int, length: int) -> DecodeState:
    """Texts of `length` random tokens, read by the target and the head, with room for what is timed."""
    generator = torch.Generator().manual_seed(0)
    engine = Engine(target, taps=head.taps, host=True)
    for _ in range(count):
        prompt = torch.randint(target.vocab_size, (length,), generator=generator)
        engine.add(Request(prompt.tolist(), GREEDY, ROOM))
    engine.step()
    for row in engine.state.rows:
        row.stop = None  # their first tokens may end texts
    head.grow(engine.state, 1, lambda joint: False)
    return engine.state


def _commit_a_round(target: Target, state: DecodeState) -> None:
    """Give the head something to read: the tokens of a round, whether they end the texts or not."""
    state.commit(verify(target, state, DraftTree.from_chains([[0]] * state.batch, target.device)))
    for row in state.rows:
        row.stop = None


def _seconds(target: Target, function: Callable[[], object]) -> float:
    synchronise(target.device)
    clock = clock_of(target.device)
    started = clock()
    function()
    synchronise(target.device)
    return clock() - started
