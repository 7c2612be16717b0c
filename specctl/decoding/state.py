"""The sequences being generated: committed ids, the target's cache, retained features, drafters' memory, counters."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from specctl.decoding.cache import KVCache
from specctl.decoding.catch_up import RECOMPUTE, CatchUp
from specctl.decoding.sampling import Draws, Sampling

if TYPE_CHECKING:
    from specctl.decoding.target import Target
    from specctl.decoding.verify import Verdict


T = TypeVar("T")
APART = 16  # rows: what a round commits is less


@dataclass(frozen=True)
class Request:
    """A text to be generated: its prompt, how it is sampled, its longest total length and its seed."""

    prompt: list[int]
    sampling: Sampling
    limit: int
    seed: int


class Memory(Protocol):
    """What a drafter keeps for the sequences of a batch."""

    def select(self, index: Tensor) -> None:
        """Keep the sequences in `index` only, in that order."""

    def renew(self, b: int) -> None:
        """Slot b holds another text from now on."""


def far_behind(missing: list[int], device: torch.device) -> list[int]:
    """Of a batch whose sequences miss so many rows, those that should read theirs alone: padding all others to them
    costs more. On a GPU a batch that is far behind as a whole, as at its start, is read at once."""
    far = [b for b, count in enumerate(missing) if count > APART]
    return far if len(missing) > 1 and (device.type == "cpu" or 2 * len(far) <= len(missing)) else []


class PerText(Generic[T]):
    """The memory of a drafter that keeps one `T` for each text."""

    def __init__(self, new: Callable[[], T], batch: int):
        self.new = new
        self.rows = [new() for _ in range(batch)]

    def select(self, index: Tensor) -> None:
        self.rows = [self.rows[b] for b in index.tolist()]

    def renew(self, b: int) -> None:
        self.rows[b] = self.new()


@dataclass
class Sequence:
    """One sequence and its counts. `ids` are the committed tokens, prompt included; the last one is not yet cached.

    `accepted`, `rejections` and the by-depth lists count draft tokens of rounds as committed (trimmed at the end of the
    sequence); `offered[d]` counts the rounds in which a draft token at depth d+1 was verified.
    """

    index: int
    ids: list[int]
    prompt_length: int
    limit: int  # longest total length
    stop: str | None = None  # "eos" or "length" once finished
    target_passes: int = 0
    accepted: int = 0
    rejections: int = 0
    drafted: int = 0
    accepted_by_depth: list[int] = field(default_factory=list)
    offered_by_depth: list[int] = field(default_factory=list)

    @property
    def output(self) -> list[int]:
        return self.ids[self.prompt_length :]

    @property
    def room(self) -> int:
        """Draft tokens that can still matter: the target adds one more, and a finished sequence takes none."""
        return 0 if self.stop is not None else max(0, self.limit - len(self.ids) - 1)

    def count(self, accepted: int, offered: int, rejected: bool, drafted: int) -> None:
        """Book one round: `accepted` of `offered` verified depths, in a draft `drafted` deep."""
        self.target_passes += 1
        self.accepted += accepted
        self.rejections += rejected
        self.drafted += drafted
        missing = offered - len(self.offered_by_depth)
        if missing > 0:
            self.offered_by_depth += [0] * missing
            self.accepted_by_depth += [0] * missing
        for depth in range(offered):
            self.offered_by_depth[depth] += 1
            self.accepted_by_depth[depth] += depth < accepted


class DecodeState:
    """A batch of B live rows; texts that find no place in it wait until one is free.

    Attributes:
        rows: the live sequences, in batch order. Finished ones may stay a while as idle rows.
        cache: the target's keys and values; rows 0 .. len(ids)−2 of each sequence are valid.
        features: [B, capacity, F] tapped target states of the cached positions (None without taps).
        memory: what each drafter keeps for these sequences (keys and values, `cached_len`).
        draws: sampling parameters and seeds.
        replays: rounds so far that were replays of a CUDA graph.
        spare: rows that the caches have behind the longest text.
        exact_rows: > 0 fixes the rows of every step (and the cache span), so that all kernels see one shape.
        catch_up: how much of these texts a drafter reads that has fallen behind.
    """

    def __init__(
        self,
        target: Target,
        requests: list[Request],
        *,
        slots: int,
        taps: tuple[int, ...],
        spare: int,
        exact_rows: int,
        catch_up: CatchUp = RECOMPUTE,
        ends: frozenset[int] = frozenset(),
    ):
        """`ends`: ids that finish a sequence as the target's end-of-sequence tokens do."""
        self.device, self.dtype = target.device, target.dtype
        self.eos_ids = target.eos_ids | ends
        self.requests = requests
        self.rows = [self._sequence(index) for index in range(min(slots, len(requests)))]
        self.waiting = deque(range(len(self.rows), len(requests)))
        self.finished: list[Sequence] = []  # since `take_finished`
        self._draw_for_rows()
        self.taps = taps
        self.exact_rows = exact_rows
        self.catch_up = catch_up
        self.spare = spare
        self.capacity = max(max(request.limit, len(request.prompt)) for request in requests) + spare + 1
        self.cache: KVCache = target.model.new_cache(len(self.rows), self.capacity)
        self.features: Tensor | None = None
        self.memory: dict[Any, Any] = {}  # drafter → Memory
        self.replays = 0

    def _sequence(self, index: int) -> Sequence:
        request = self.requests[index]
        return Sequence(index, list(request.prompt), len(request.prompt), request.limit)

    def _draw_for_rows(self) -> None:
        chosen = [self.requests[row.index] for row in self.rows]
        self.draws = Draws([one.sampling for one in chosen], [one.seed for one in chosen], self.device)

    @property
    def batch(self) -> int:
        return len(self.rows)

    @property
    def unfinished(self) -> bool:
        return any(row.stop is None for row in self.rows)

    @property
    def cached(self) -> list[int]:
        """Valid cache rows of each sequence: everything but the last committed token."""
        return [len(row.ids) - 1 for row in self.rows]

    def begin(self, slots: list[int], first: list[int], tapped: Tensor | None) -> None:
        """Commit the first token of the sequences in `slots`, drawn from the prefill, and keep the prompts' features
        [len(slots), P, F]."""
        if tapped is not None:
            if self.features is None:
                self.features = tapped.new_empty(self.batch, self.capacity, tapped.shape[-1])
            self.features[torch.tensor(slots, device=tapped.device), : tapped.shape[1]] = tapped
        for slot, token in zip(slots, first, strict=True):
            self._extend(self.rows[slot], [token])

    def admit(self) -> list[int]:
        """Give the slots of finished sequences to waiting texts; returns those slots, which are to be prefilled."""
        slots = [b for b, row in enumerate(self.rows) if row.stop is not None][: len(self.waiting)]
        for b in slots:
            self.rows[b] = self._sequence(self.waiting.popleft())
            for memory in self.memory.values():
                memory.renew(b)
        if slots:
            self._draw_for_rows()
        return slots

    def commit(self, verdict: Verdict) -> None:
        """Append what the target committed; keep cache rows and features of the accepted paths only."""
        for b, row in enumerate(self.rows):
            if row.stop is not None:
                continue
            path, start = verdict.paths[b], len(row.ids) - 1
            if not verdict.chain:
                self.cache.compact(b, start, path)
            if self.features is not None and verdict.tapped is not None:
                self._keep_features(b, start, path, verdict)
            self.book(row, verdict.committed[b], verdict.depths[b], verdict.stops[b] == "rejected")
            if row.stop is not None:
                verdict.stops[b] = row.stop

    def book(self, row: Sequence, committed: list[int], depth: int, rejected: bool) -> None:
        """Append to `row` what a round with a draft `depth` deep committed, and count it; `rejected`: the target
        disagreed behind the accepted tokens."""
        kept = self._extend(row, committed)
        accepted = min(len(committed) - 1, kept)
        rejected = rejected and kept > accepted and depth > accepted
        row.count(accepted, accepted + rejected, rejected, depth)

    def _keep_features(self, b: int, start: int, path: list[int], verdict: Verdict) -> None:
        assert self.features is not None and verdict.tapped is not None
        tapped = verdict.tapped[b]
        if verdict.chain:
            self.features[b, start : start + len(path) + 1] = tapped[: len(path) + 1]
        else:
            kept = torch.tensor([0, *(node + 1 for node in path)], device=self.device)
            self.features[b, start : start + len(path) + 1] = tapped[kept]

    def _extend(self, row: Sequence, tokens: list[int]) -> int:
        """Append tokens up to the end-of-sequence token or the limit; returns how many were kept."""
        kept = 0
        for token in tokens:
            row.ids.append(token)
            kept += 1
            if token in self.eos_ids:
                row.stop = "eos"
            elif len(row.ids) >= row.limit:
                row.stop = "length"
            if row.stop is not None:
                self.finished.append(row)
                break
        return kept

    def shrink(self) -> None:
        """Drop finished rows once they are a quarter of the batch: dead rows cost as much as live ones."""
        live = [b for b, row in enumerate(self.rows) if row.stop is None]
        if self.exact_rows or self.waiting or len(live) > 0.75 * self.batch or not live:
            return
        index = torch.tensor(live, device=self.device)
        self.rows = [self.rows[b] for b in live]
        self.cache.select(index)
        self._draw_for_rows()
        if self.features is not None:
            self.features = self.features[index]
        for memory in self.memory.values():
            memory.select(index)

    def take_finished(self) -> list[Sequence]:
        """The sequences that have finished since the last call."""
        finished, self.finished = self.finished, []
        return finished
