"""Measure the costs of a round on this machine: the target's rows, and the passes of a head before them.

The costs decide how deep a draft pays off. They are measured once per machine, target and head, and cached. So equal
runs draft equally, and no measurement runs inside timed code. Costs that are not saved last until the process ends.
"""

from __future__ import annotations

import json
import statistics
import time
from bisect import bisect_left
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specctl import processes, progress, regular_files, threads
from specctl.decoding.cache import KVCache
from specctl.decoding.controllers import PLAIN, Fixed
from specctl.decoding.engine import Engine, EngineOptions
from specctl.decoding.models.lean import LeanModel
from specctl.decoding.prefix_cache import PrefixCache
from specctl.decoding.records import DraftTree, Request
from specctl.decoding.sampling import GREEDY
from specctl.decoding.state import DecodeState
from specctl.decoding.target import Target
from specctl.decoding.timing import synchronise, work_clock
from specctl.decoding.verify import verify
from specctl.drafters.tree import CandidateDrafter
from specctl.kernels import cache, native
from specctl.runs import atomic_write, cpu_model

ROWS = (1, 2, 4, 8, 16, 32, 63)
LEVELS = 5  # levels of a head that are timed together
READ = "a token read"  # name of the time of each token that a head reads
TEXTS, ROWS_EACH = 8, (1, 4)  # number of texts, and rows per text, in the timed batch
CONTEXT, FAR = 256, 1024  # lengths in tokens of the texts in timed rounds
FAR_ROWS = (1, 16)
ROOM = 512  # tokens that may follow; a cache for a large target's whole context would not fit
REPEATS, WARM_UP = 15, 2
ENOUGH_S = 6.0  # time after which no repeats are added, for large targets
QUIET = 0.5  # number of our cores that other processes may keep busy while costs are measured
LONGEST = 2**24  # maximal bytes of the cache file
MAX_COST = 1e6  # maximal plausible cost, in rounds of one row


@dataclass(frozen=True)
class Costs:
    """Costs in units of a round with one row after `context` tokens.

    Attributes:
        rounds: cost of a round with the number of rows given in `ROWS`; linear in between and beyond.
        first: cost of a head's first level, including its reading of the last round.
        level: cost of each further level.
        text, text_row: extra cost of each further text of a batch and of each of its rows, compared with the same rows
            in one text: every text reads separate keys and values.
        text_first, text_level: extra cost of a head's levels for each further text.
        slot, row_slot: extra cost per token of text length, and per further row that reads it.
        read: cost of each token that a head reads after a pause.
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
    read: float = 0.0

    def at(self, length: float) -> Costs:
        """Costs after texts of `length` tokens, in the same unit; at least half of the measured costs."""
        further = length - self.context
        slots = [further * (self.slot + (rows - 1) * self.row_slot) for rows in ROWS]
        rounds = tuple(max(cost + more, cost / 2) for cost, more in zip(self.rounds, slots, strict=True))
        return replace(self, rounds=rounds, text=max(self.text + further * self.slot, 0.0))

    def with_head(self, measured: Costs) -> Costs:
        """Costs with these rounds, and with the head's costs from `measured`."""
        heads = ("first", "level", "text_first", "text_level", "read")
        return replace(self, **{name: getattr(measured, name) for name in heads})

    def round(self, rows: int, texts: int = 1) -> float:
        """Cost of a round with `rows` rows for each of `texts` texts."""
        return self._step(texts * rows) + (texts - 1) * (self.text + self.text_row * rows)

    def _step(self, rows: int) -> float:
        """Cost of a round with `rows` rows, all in one text."""
        place = min(max(bisect_left(ROWS, rows), 1), len(ROWS) - 1)
        low, high = ROWS[place - 1], ROWS[place]
        share = (rows - low) / (high - low)
        return self.rounds[place - 1] + share * (self.rounds[place] - self.rounds[place - 1])

    def further_rows(self, rows: int, more: int, texts: int) -> float:
        """Extra cost of a round with `more` rows for each of `texts` texts in addition to `rows`."""
        return self.round(rows + more, texts) - self.round(rows, texts)

    def drafting(self, levels: float, texts: int = 1) -> float:
        """Cost of drafting `levels` levels with a head, for `texts` texts together."""
        first, level = self.first + (texts - 1) * self.text_first, self.further(texts)
        return first + (levels - 1) * level if levels else 0.0

    def asking(self, levels: int, rows: int, texts: int) -> float:
        """Cost of drafting `levels` levels with a head, and of as many rows in addition to `rows`."""
        return self.drafting(levels, texts) + self.further_rows(rows, levels, texts)

    def further(self, texts: int) -> float:
        """Cost of one more level of a head for `texts` texts."""
        return self.level + (texts - 1) * self.text_level


SINGLE = [field.name for field in fields(Costs) if field.name != "rounds"]
_unsaved: dict[tuple[Path, str], Costs] = {}
"""Costs of this process that could not be saved, by the cache file and their key in it."""


def costs_of(target: Target, head: CandidateDrafter | None, name: str) -> Costs:
    """Return the costs of rounds, from the cache file or measured now; without a head, its levels cost nothing.

    `name` identifies the head's family and architecture, or says that there is none. Ranks that hold slices of the
    target measure together, and use the costs of rank 0.
    """
    path = cache.directory() / "costs.json"
    key, leads = _key(target, name), not processes.is_follower()
    known = None
    try:
        if (found := _read(path).get(key)) is not None:
            known = _validated(found)
    except (OSError, ValueError) as error:
        if leads:
            reason = getattr(error, "strerror", None) or error
            progress.warn(f"ignoring {path}: {reason}; costs are measured again")
    if (known := processes.broadcast_value(known or _unsaved.get((path, key)))) is not None:
        return known
    if leads:
        progress.log("measuring what rounds cost on this machine")
    others = threads.OtherProcesses()
    costs = processes.broadcast_value(measure(target, head))
    if leads:
        disturbed = _disturbed(target, others.busy() or 0.0)
        unsaved = f"because {disturbed}" if disturbed else _save(path, key, costs)
        where = f"saved in {path}"
        if unsaved:
            _unsaved[path, key] = costs
            where = f"the next command measures them again, {unsaved}"
        levels = "" if head is None else f", drafting one level {costs.first:.2f}, each further level {costs.level:.2f}"
        progress.log(
            f"costs, relative to a round of one row: 8 rows {costs.round(8):.2f}, 16 rows "
            f"{costs.round(16):.2f}, {TEXTS} sequences {costs.round(1, TEXTS):.2f}{levels} ({where})"
        )
    return costs


def _key(target: Target, name: str) -> str:
    """Key of the cached costs: machine, weights, type, drafter, slices and version of the step."""
    sliced = [f"{processes.group_size()} slices"] if processes.group_size() > 1 else []
    step = []
    if isinstance(target.model, LeanModel) and (target.model.native or target.model.quantized):
        step = [native.version(), *(["quantized"] if target.model.quantized else [])]
    weights = target.identity["weights"] or target.name
    return json.dumps([_machine(target), weights, str(target.dtype), name, *sliced, *step])


def _disturbed(target: Target, busy: float) -> str:
    """Reason not to reuse costs that were measured while other processes kept `busy` cores busy; empty if they may be
    reused."""
    with threads.step_threads(target.row_flops):
        free = threads.cores() - torch.get_num_threads()
    if target.device.type == "cuda" or busy < free + QUIET:
        return ""
    return f"other processes kept {busy:.1f} of {threads.counted(threads.cores(), 'core')} busy"


def _save(path: Path, key: str, costs: Costs) -> str:
    """Add costs to the cache file. Returns the reason if they could not be saved, else an empty text."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        others = {}
        with suppress(OSError, ValueError):  # a file that cannot be read is replaced
            others = _read(path)
        atomic_write(path, json.dumps(others | {key: asdict(costs)}, indent=1))
    except OSError as error:
        return f"because {path} cannot be written: {error.strerror}"
    return ""


def _machine(target: Target) -> str:
    """Name of the GPU, or of the processor with the number of threads used."""
    if target.device.type == "cuda":
        return torch.cuda.get_device_name(target.device)
    with threads.step_threads(target.row_flops):
        return f"{cpu_model()}, {threads.counted(torch.get_num_threads(), 'thread')}"


def _read(path: Path) -> dict[str, Any]:
    """Read the cached costs, keyed by machine, target and head; empty without a file.

    Raises OSError or ValueError if the file cannot be read.
    """
    try:
        kept = regular_files.parse_json(regular_files.read_bytes(path, LONGEST))
    except FileNotFoundError:
        return {}
    if not isinstance(kept, dict):
        raise ValueError("not a JSON object")
    return kept


def _validated(found: Any) -> Costs:
    """Validate an entry of the cache file.

    Raises ValueError if `measure` cannot have written it: other keys or sizes of rounds (from another version), or
    values that are not durations.
    """
    if isinstance(found, dict):
        found.setdefault("read", 0.0)  # costs without a head, from an earlier version
    if not isinstance(found, dict) or found.keys() != {"rounds", *SINGLE}:
        raise ValueError("its costs have unexpected keys")
    rounds = found["rounds"]
    if not isinstance(rounds, list) or len(rounds) != len(ROWS):
        raise ValueError(f"its costs are not a list of {len(ROWS)} rounds")
    singles = [found[name] for name in SINGLE]
    if not all(type(one) in (int, float) and 0 <= one <= MAX_COST for one in [*rounds, *singles]):
        raise ValueError("its costs are not valid durations")
    if min(rounds) <= 0 or rounds != sorted(rounds):
        raise ValueError("its costs decrease with the number of rows")
    return Costs(tuple(map(float, rounds)), **{name: float(found[name]) for name in SINGLE})


@torch.inference_mode()
def measure(target: Target, head: CandidateDrafter | None) -> Costs:
    """Time rounds of all sizes and the head's levels, each relative to a round of one row; returns medians.

    Raises Interrupted if a signal has arrived.
    """
    ratios: dict[str, list[float]] = {}
    near, far = (min(length, target.context_length // part) for length, part in ((CONTEXT, 4), (FAR, 2)))
    # Keyed by the suffix of the timed names: number of texts, their length in tokens, and rows per text.
    timed = {"": (1, near, ROWS), f" of {TEXTS}": (TEXTS, near, ROWS_EACH), " far": (1, far, FAR_ROWS)}
    with threads.step_threads(target.row_flops):
        states = {name: _texts(target, head, count, length) for name, (count, length, _) in timed.items()}
        began = time.monotonic()
        for repeat in range(REPEATS + WARM_UP):
            late = processes.broadcast_value(time.monotonic() - began > ENOUGH_S)
            if late and ratios:
                break
            taken: dict[str, float] = {}
            for name, (count, length, sizes) in timed.items():
                if states[name].rows[0].draft_room < 2 * max(ROWS):
                    states[name] = _texts(target, head, count, length)
                state = states[name]
                for rows in sizes:
                    draft = DraftTree.from_chains([[0] * (rows - 1)] * count, target.device)
                    taken[f"{rows} rows{name}"] = _seconds(target, partial(verify, target, state, draft))
                if head is None:
                    continue
                for levels in (1, LEVELS) if length == near else ():
                    # commit one round, so that the head has tokens to read
                    state.commit(verify(target, state, DraftTree.from_chains([[0]] * state.batch, target.device)))
                    taken[f"{levels} levels{name}"] = _grow_seconds(target, head, state, levels)
                if count == 1 and length == near:
                    head.invalidate(state)
                    lag = sum(head.lag(state))
                    taken[READ] = (_grow_seconds(target, head, state, 1) - taken["1 levels"]) / max(lag, 1)
            for name in taken if late or repeat >= WARM_UP else ():
                ratios.setdefault(name, []).append(taken[name] / taken["1 rows"])
    return from_ratios({name: statistics.median(values) for name, values in ratios.items()}, near, far)


def from_ratios(ratios: dict[str, float], near: int = CONTEXT, far: int = FAR) -> Costs:
    """Compute the costs from relative times such as `8 rows` or `1 levels`.

    Texts have `near` tokens, or `far` tokens for the names that say so. More rows are never cheaper than fewer. Without
    times of levels, these cost nothing.
    """
    ratios = {f"{levels} levels{batch}": 0.0 for levels in (1, LEVELS) for batch in ("", f" of {TEXTS}")} | ratios
    rounds = [ratios[f"{rows} rows"] for rows in ROWS]
    first, levels = ratios["1 levels"], ratios[f"{LEVELS} levels"]
    level = max(levels - first, 0.0) / (LEVELS - 1)
    alone = Costs(tuple(max(rounds[: place + 1]) for place in range(len(rounds))), first, level)
    few, more = ROWS_EACH
    # Cost that every further text adds to a step with the same number of rows.
    added = {rows: (ratios[f"{rows} rows of {TEXTS}"] - alone.round(TEXTS * rows)) / (TEXTS - 1) for rows in ROWS_EACH}
    text_row = max(added[more] - added[few], 0.0) / (more - few)
    text_first = max(ratios[f"1 levels of {TEXTS}"] - first, 0.0) / (TEXTS - 1)
    together = max(ratios[f"{LEVELS} levels of {TEXTS}"] - ratios[f"1 levels of {TEXTS}"], 0.0) / (LEVELS - 1)
    one, many = FAR_ROWS
    longer = {rows: max(ratios[f"{rows} rows far"] - alone.round(rows), 0.0) / max(far - near, 1) for rows in FAR_ROWS}
    return replace(
        alone,
        read=max(ratios.get(READ, 0.0), 0.0),
        text=max(added[few] - few * text_row, 0.0),
        text_row=text_row,
        text_first=text_first,
        text_level=max(together - level, 0.0) / (TEXTS - 1),
        slot=longer[one],
        row_slot=max(longer[many] - longer[one], 0.0) / (many - one),
        context=near,
    )


class _Unread(PrefixCache):
    """Prefills texts with random keys, values and features instead of reading them.

    The target would read thousands of tokens, which takes minutes if it is large and runs on a CPU. The contents do not
    change how long a round takes.
    """

    def prefill(
        self, target: Target, prompts: list[list[int]], cache: KVCache, taps: tuple[int, ...], slots: list[int]
    ) -> tuple[Tensor, Tensor | None, list[int]]:
        generator = torch.Generator().manual_seed(0)
        for prompt, slot in zip(prompts, slots, strict=True):
            rows = cache.first_rows(slot, len(prompt))
            cache.set_first_rows(slot, torch.empty_like(rows).normal_(generator=generator))
        features = torch.empty(len(prompts), max(map(len, prompts)), len(taps) * target.hidden_size, dtype=target.dtype)
        logits = torch.zeros(len(prompts), target.vocab_size, dtype=target.dtype)
        return logits, features.normal_(generator=generator) if taps else None, [0] * len(prompts)


def _texts(target: Target, head: CandidateDrafter | None, count: int, length: int) -> DecodeState:
    """Build texts of `length` random tokens, read by the target and the head, with room for the timed rounds."""
    generator = torch.Generator().manual_seed(0)
    options = EngineOptions(on_host=True, prefix_cache=_Unread(most_texts=0) if target.device.type == "cpu" else None)
    engine = Engine(target, Fixed(PLAIN, () if head is None else head.taps), options)
    for _ in range(count):
        prompt = torch.randint(target.vocab_size, (length,), generator=generator)
        engine.add(Request(prompt.tolist(), GREEDY, ROOM))
    for text in engine.waiting.values():
        text.eos_ids = frozenset()  # no token ends a text
    engine.step()
    if head is not None:
        head.propose_candidates(engine.state, 1, lambda joint: False)
    return engine.state


def _grow_seconds(target: Target, head: CandidateDrafter, state: DecodeState, levels: int) -> float:
    return _seconds(target, partial(head.propose_candidates, state, levels, lambda joint: True))


def _seconds(target: Target, function: Callable[[], object]) -> float:
    progress.interrupts.check()
    synchronise(target.device)
    clock = work_clock(target.device)
    started = clock()
    function()
    synchronise(target.device)
    return clock() - started
