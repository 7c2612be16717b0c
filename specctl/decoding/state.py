"""Decoding state of a batch: sequences, the target's KV cache, kept features, drafter memory, round counters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from specctl.decoding.cache import RECOMPUTE, CatchUp, KVCache, select_rows
from specctl.decoding.pages import page_names
from specctl.decoding.records import Counts, Request, Sequence, Verdict
from specctl.decoding.sampling import Draws
from specctl.decoding.target import Target
from specctl.errors import DataError

T = TypeVar("T")
READ_ALONE_ROWS = 16  # missed rows; a round commits fewer
GROWTH = 512  # new tokens for which a sequence gets memory at once


def lagging_sequences(missing: list[int], device: torch.device) -> list[int]:
    """Sequences that should be read alone because they miss many rows: padding all others to their length would cost
    more. On a GPU, if most of the batch lags this far, as at its start, the batch is read at once."""
    far = [b for b, count in enumerate(missing) if count > READ_ALONE_ROWS]
    return far if len(missing) > 1 and (device.type == "cpu" or 2 * len(far) <= len(missing)) else []


def no_room(text: Sequence) -> DataError:
    """The error of a sequence that must wait for memory which this process does not free."""
    return DataError(
        f"no room for the KV cache of a sequence of {text.limit} tokens: other sequences hold the memory",
        "run fewer or shorter sequences at once, or raise SPECCTL_KV_GIB",
    )


class PerText(Generic[T]):
    """Memory of a drafter that keeps one `T` per sequence."""

    nbytes = 0  # it has no tensors

    def __init__(self, new: Callable[[], T], batch: int):
        self.new = new
        self.rows = [new() for _ in range(batch)]

    def select(self, index: Tensor) -> None:
        self.rows = [self.rows[b] for b in index.tolist()]

    def renew(self, b: int) -> None:
        self.rows[b] = self.new()


def per_text(state: DecodeState, owner: object, new: Callable[[], T]) -> list[T]:
    """The memory of an owner that keeps one `T` per sequence, in batch order; `new` makes it for a new text."""
    if owner not in state.memory:
        state.memory[owner] = PerText(new, state.batch)
    rows: list[T] = state.memory[owner].rows
    return rows


class DecodeState:
    """A batch of B sequences with all state that decoding keeps for them. The batch and its caches grow and shrink.

    With pages, B is a power of two, filled up with idle rows. Device rounds and their graphs are made for one B, so
    they stay valid while sequences come and go within this size.

    Attributes:
        rows: the sequences, in batch order. Finished ones may stay for a while as idle rows.
        cache: the target's keys and values; rows 0 .. len(ids)−2 of each sequence are valid.
        features: [B or more, capacity, F] tapped target states of the cached positions (None without taps).
        hidden: with `keeps_hidden`, [B or more, capacity, H] the target's last hidden states at the positions from the
            first new token on, for the labels of online learners; otherwise None.
        memory: each drafter's memory of these sequences, by drafter. `select(index)` keeps the sequences in `index`, in
            that order (a repeated index is kept as a copy), `renew(b)` resets slot b for a new sequence, and `nbytes`
            is the size of its tensors. A drafter enlarges its memory when `capacity` has grown.
        draws: sampling parameters and seeds.
        any_sampled: at least one request, decoded or waiting, is not greedy.
        rounds, ahead, replays: counts of rounds: all; rounds run on the device, ahead of the host; replays of a CUDA
            graph.
        pending: number of rounds on the device that the host has not read yet.
        at_rest: no round is pending, and the host has all memory of the drafters. The batch may change, and drafters
            may read the texts.
        spare: cache rows beyond the longest text, for draft nodes.
        capacity: cache rows per sequence; it grows if a text needs more.
        exact_rows: > 0 fixes the rows of every step, the cache span and B, so that all kernels see one shape.
        catch_up: how much of these texts a lagging drafter reads.
    """

    draws: Draws

    def __init__(
        self,
        target: Target,
        *,
        taps: tuple[int, ...] = (),
        spare: int,
        exact_rows: int = 0,
        catch_up: CatchUp = RECOMPUTE,
        keeps_hidden: bool = False,
    ):
        self.target, self.device, self.dtype = target, target.device, target.dtype
        self.taps, self.spare, self.exact_rows, self.catch_up = taps, spare, exact_rows, catch_up
        self.capacity = 0
        self.keeps_hidden = keeps_hidden
        # exact mode needs contiguous rows: `discard` overwrites a failed row with a copy of a sound one
        self.pool = None if exact_rows else target.pool()
        self.any_sampled = False
        self.rounds = self.ahead = self.replays = 0
        self.pending, self.at_rest = 0, True
        self.clear()

    def clear(self) -> None:
        """Remove all sequences, with their cache rows, features and drafter memory."""
        self.rows: list[Sequence] = []
        self.cache: KVCache = self._new_cache(0)
        self.features: Tensor | None = None
        self.hidden: Tensor | None = None
        self.memory: dict[Any, Any] = {}

    def _new_cache(self, batch: int) -> KVCache:
        return self.target.new_cache(batch, self.capacity, self.pool)

    @property
    def batch(self) -> int:
        return len(self.rows)

    @property
    def live(self) -> list[int]:
        """Slots of the unfinished sequences."""
        return [b for b, row in enumerate(self.rows) if row.stop is None]

    @property
    def unfinished(self) -> bool:
        return any(row.stop is None for row in self.rows)

    @property
    def needs_host(self) -> bool:
        """Whether some unfinished sequence edits or reports logits (see `Request`), which only the host can do."""
        asked = (row.request for row in self.rows if row.stop is None)
        return any(request.edits_logits or request.reports_logits for request in asked)

    @property
    def cached(self) -> list[int]:
        """Number of valid cache rows per sequence: all committed tokens except the last."""
        return [len(row.ids) - 1 for row in self.rows]

    def sequence(self, request: Request, index: int = 0) -> Sequence:
        """The initial sequence of a request. Raises DataError if there can be no memory for it, or, in exact mode,
        longer rows would be needed than the batch has."""
        sequence = Sequence.of(request, self.target.context_length, self.target.eos_ids, index)
        if self.exact_rows and self.batch and sequence.limit + self.spare >= self.capacity:
            raise DataError(
                f"in exact mode a sequence of up to {sequence.limit} tokens must be added before the first step"
            )
        if not self.cache.could_hold(self._slots(sequence)):
            raise DataError(
                f"the KV cache of a sequence of up to {sequence.limit} tokens does not fit in memory",
                "ask for fewer new tokens, shorten the prompt, or raise SPECCTL_KV_GIB",
            )
        return sequence

    def assign_slots(self, sequences: list[Sequence], share: bool = False) -> list[int]:
        """Give each sequence a slot, new or taken from a finished one. Returns the slots, which must be prefilled next;
        `share`: with `prefill_shared`."""
        before = self.batch
        slots = [b for b, row in enumerate(self.rows) if row.stop is not None][: len(sequences)]
        for b, sequence in zip(slots, sequences, strict=False):
            self.rows[b] = sequence
        self.rows += sequences[len(slots) :]
        slots += range(before, self.batch)
        idle = range(self.batch, self.width(self.batch))
        self.rows += [Sequence.idle(self.target.eos_ids) for _ in idle]
        self.any_sampled = self.any_sampled or any(row.request.sampling.temperature > 0 for row in sequences)
        if self._needed(GROWTH) > self.capacity:
            self._make_room(GROWTH)
        if not before:
            self.cache = self._new_cache(self.batch)
        elif self.batch > before:  # a new slot starts as a copy of slot 0, until its prompt is prefilled
            self._select([*range(before), *[0] * (self.batch - before)])
        for b in slots:
            names = page_names(self.rows[b].ids[:-1]) if share else []
            self.cache.admit(b, self._slots(self.rows[b]), names)
            self.cache.ensure(b, self._slots(self.rows[b], GROWTH))
        for memory in self.memory.values():
            for b in (*slots, *idle):
                memory.renew(b)
        self._draw_for_rows()
        return slots

    def needs_room(self, ahead: int) -> bool:
        """Whether some sequence lacks memory for `ahead` more tokens (or fewer, up to its limit)."""
        if self._needed(ahead) > self.capacity:
            return True
        return any(self.cache.needs_room(b, self._slots(self.rows[b], ahead)) for b in self.live)

    def _needed(self, ahead: int) -> int:
        return max((self._slots(row, ahead) for row in self.rows), default=1 + self.spare)

    def _slots(self, row: Sequence, ahead: int | None = None) -> int:
        """Cache slots that a sequence needs for `ahead` more tokens, up to its limit; without `ahead`, for all it may
        have."""
        return 1 + self.spare + (row.limit if ahead is None else min(len(row.ids) + ahead, row.limit))

    def count_fitting(self, texts: list[Sequence]) -> int:
        """Number of these sequences, from the first on, that fit into memory."""
        return self.cache.count_fitting([self._slots(text) for text in texts])

    def release(self, slots: list[int]) -> None:
        """Free the cache memory of sequences that have ended, and remove the rows of failed ones."""
        failed = [b for b in slots if self.rows[b].stop == "failed"]
        for b in slots:
            self.cache.release(b, wipe=b in failed)
        if failed:
            self._discard(failed)

    def reserve(self, ahead: int) -> None:
        """Make room for `ahead` more tokens of every sequence, up to its limit."""
        if self._needed(ahead) > self.capacity:
            self._make_room(ahead)
        for b in self.live:
            self.cache.ensure(b, min(self._slots(self.rows[b], GROWTH), self.capacity))

    def _make_room(self, ahead: int) -> None:
        longest = 1 + self.spare + max(row.limit for row in self.rows)
        wanted = max(self._needed(ahead), min(2 * self.capacity, longest))
        # On a GPU graphs are made for one capacity; rounding up lets slightly longer texts reuse them.
        grain = GROWTH if self.device.type == "cuda" else 1
        self.capacity = -(-wanted // grain) * grain
        if self.cache.batch:
            self.cache = self.cache.moved_to(self._new_cache(self.cache.batch))
        for name, kept in self._by_position.items():
            room = kept.new_zeros(len(kept), self.capacity - kept.shape[1], *kept.shape[2:])
            setattr(self, name, torch.cat((kept, room), 1))

    @property
    def mostly_idle(self) -> bool:
        """Whether at least a quarter of the rows are finished; they cost as much as live ones. With pages: whether the
        live sequences fit into a smaller power of two."""
        if self.pool is not None:
            return len(self.live) > 0 and self.width(len(self.live)) < self.batch
        return not self.exact_rows and 0 < len(self.live) <= 0.75 * self.batch

    def shrink(self) -> None:
        """Drop finished rows, except idle rows that fill up the batch."""
        if live := self.live:
            idle = [b for b in range(self.batch) if b not in live]
            self._keep(sorted([*live, *idle[: self.width(len(live)) - len(live)]]))

    def start(self, count: int, waiting: list[Sequence]) -> None:
        """Prepare for the first `count` of the sequences `waiting`: in the memory of a batch with all its sequences
        ended, or in exact mode with room for the longest one."""
        if self.exact_rows and not self.batch:
            self.capacity = max(text.limit for text in waiting) + self.spare + 1
        if self.exact_rows or not self.batch:
            return
        self.any_sampled = any(text.request.sampling.temperature > 0 for text in waiting)
        size, before = self.width(count), self.batch
        self.rows = [Sequence.idle(self.target.eos_ids) for _ in range(size)]
        if size != before:
            self._select([*range(min(size, before)), *[0] * (size - before)])
        for memory in self.memory.values():
            for b in range(size):
                memory.renew(b)

    def width(self, count: int) -> int:
        """Batch size B for `count` sequences."""
        return count if self.pool is None else 1 << (count - 1).bit_length()

    def _discard(self, slots: list[int]) -> None:
        """Remove the rows of failed sequences. A NaN among keys would spread through attention, masked or not."""
        sound = [b for b in range(self.batch) if b not in slots]
        if not sound:
            self.clear()
        elif self.exact_rows:
            self._select([b if b in sound else sound[0] for b in range(self.batch)])
            for memory in self.memory.values():  # a copy belongs to another text than the failed row
                for b in slots:
                    memory.renew(b)
        else:
            self._keep(sound)

    def _keep(self, slots: list[int]) -> None:
        self.rows = [self.rows[b] for b in slots]
        self._select(slots)
        self._draw_for_rows()

    def _select(self, slots: list[int]) -> None:
        """Keep the cached data of the sequences in `slots`, in that order."""
        index = torch.tensor(slots, device=self.device)
        self.cache.select(index)
        for name, kept in self._by_position.items():
            setattr(self, name, select_rows(kept, index))
        for memory in self.memory.values():
            memory.select(index)

    @property
    def _by_position(self) -> dict[str, Tensor]:
        """Tensors [B or more, capacity, …] with one entry per position, by attribute name."""
        names = ("features", "hidden")
        return {name: kept for name in names if (kept := getattr(self, name)) is not None}

    @property
    def nbytes(self) -> int:
        """Bytes of the target's cache, of the drafters' memory, and of the tensors kept per position."""
        tensors = sum(kept.nbytes for kept in self._by_position.values())
        return self.cache.nbytes + tensors + sum(memory.nbytes for memory in self.memory.values())

    def _draw_for_rows(self) -> None:
        requests = [row.request for row in self.rows]
        self.draws = Draws([one.sampling for one in requests], [one.seed for one in requests], self.device)

    def single(self, b: int) -> DecodeState:
        """A state of sequence b only, over the same memory, in which drafters have no memory yet."""
        alone = copy.copy(self)
        alone.rows, alone.memory = [self.rows[b]], {}
        alone.cache = self.cache.sequence(b)
        for name, kept in self._by_position.items():
            setattr(alone, name, kept[b : b + 1])
        alone._draw_for_rows()
        return alone

    def begin(self, slots: list[int], first: list[int], tapped: Tensor | None) -> None:
        """Commit the first token, drawn from the prefill, of each sequence in `slots`, and keep the prompts' features
        [len(slots), P, F]."""
        if tapped is not None:
            if self.features is None:
                self.features = tapped.new_empty(self.batch, self.capacity, tapped.shape[-1])
                if self.pool is not None:
                    self.features.zero_()  # drafters also read the features of idle rows
            self.features[torch.tensor(slots, device=tapped.device), : tapped.shape[1]] = tapped
        if self.keeps_hidden and self.hidden is None:
            shape = self.batch, self.capacity, self.target.hidden_size
            self.hidden = torch.empty(shape, dtype=self.dtype, device=self.device)
        for slot, token in zip(slots, first, strict=True):
            self._extend(self.rows[slot], [token])

    def commit(self, verdict: Verdict) -> dict[int, Counts]:
        """Append the committed tokens; keep only the cache rows and features of the accepted paths. Returns the counts
        of every slot that took part."""
        counts = {}
        if self.hidden is not None:
            self._keep_hidden(verdict)
        for b, row in enumerate(self.rows):
            if row.stop is not None:
                continue
            if b in verdict.failed:
                row.fail(verdict.failed[b])
                counts[b] = Counts(0, 0, verdict.depths[b], False)
                continue
            path, start = verdict.paths[b], len(row.ids) - 1
            if not verdict.chain:
                self.cache.compact(b, start, path)
            if self.features is not None and verdict.tapped is not None:
                self._keep_features(b, start, path, verdict)
            counts[b] = self.book(row, verdict.committed[b], verdict.depths[b], verdict.stops[b] == "rejected")
            if row.stop is not None:
                verdict.stops[b] = row.stop
        return counts

    def book(self, row: Sequence, committed: list[int], depth: int, rejected: bool) -> Counts:
        """Append the committed tokens of a round to `row` and count the round. `depth` is the depth of its draft;
        `rejected` says that the target disagreed with the draft after the accepted tokens."""
        kept = self._extend(row, committed)
        accepted = min(len(committed) - 1, kept)
        rejected = rejected and kept > accepted and depth > accepted
        row.count(accepted, accepted + rejected, rejected, depth)
        return Counts(kept, accepted, depth, kept == len(committed))

    def _keep_features(self, b: int, start: int, path: list[int], verdict: Verdict) -> None:
        assert self.features is not None and verdict.tapped is not None
        tapped = verdict.tapped[b]
        if verdict.chain or path == list(range(len(path))):
            self.features[b, start : start + len(path) + 1] = tapped[: len(path) + 1]
        else:
            kept = torch.tensor([0, *(node + 1 for node in path)], device=self.device)
            self.features[b, start : start + len(path) + 1] = tapped[kept]

    def _keep_hidden(self, verdict: Verdict) -> None:
        """Keep the target's hidden states along the accepted paths."""
        assert self.hidden is not None
        kept = [b for b in self.live if b not in verdict.failed]
        counts = [len(path) + 1 if b in kept else 0 for b, path in enumerate(verdict.paths)]
        hidden = verdict.predicting(verdict.hidden, counts)
        for b in kept:
            start = len(self.rows[b].ids) - 1
            self.hidden[b, start : start + counts[b]] = hidden[b]

    @staticmethod
    def _extend(row: Sequence, tokens: list[int]) -> int:
        """Append tokens up to an end-of-sequence token or the limit. Returns the number of tokens appended."""
        kept = 0
        for token in tokens:
            row.ids.append(token)
            kept += 1
            if token in row.eos_ids:
                row.stop = "eos"
            elif len(row.ids) >= row.limit:
                row.stop = "length"
            if row.stop is not None:
                break
        return kept
