"""Contiguous KV cache with preallocated memory for every sequence (see `paged` for the paged cache).

Row t of a step is written at slot `base + t`. The number of *committed* rows is kept elsewhere (`DecodeState.cached`),
so a rollback costs nothing: the next step overwrites the rows past the committed length.

A batch that shrinks moves to the front of the memory that it has, and may grow again in it. So CUDA graphs made for one
batch size stay valid when the batch has that size again.

A drafter's cache may leave out slots of the text: `CatchUp` says which.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from specctl.decoding.plan import EMPTY_RANGE, Plan
from specctl.decoding.rope import Rope


def select_rows(memory: Tensor, index: Tensor, dim: int = 0) -> Tensor:
    """Copy the rows in `index` to the front of `memory`, in that order, and return it. If it has too few rows, return
    new memory."""
    chosen = memory.index_select(dim, index)
    if len(index) > memory.shape[dim]:
        return chosen
    memory.narrow(dim, 0, len(index)).copy_(chosen)
    return memory


class KVCache:
    """Keys and values of every layer in one tensor [L, B, capacity, 2·Hkv, D]: keys first, then values.

    A layer's projection gives them side by side, so one copy stores both. `rope` is the model's rotary table for these
    positions. A graph over this cache keeps reading that table, even if the model has made a longer one since.
    `skipped` are the slots that each sequence leaves out (`CatchUp`); `Plan.without_slots` masks them. `memory` has
    room for B or more sequences, and `store` is its first part.
    """

    rope: Rope | None = None
    table: Tensor | None = None  # page table (paged.py)

    def __init__(self, layers: int, batch: int, heads: int, capacity: int, head_dim: int, *, dtype, device):
        self.heads = heads
        self.skipped = [EMPTY_RANGE] * batch
        self._over(torch.zeros(layers, batch, capacity, 2 * heads, head_dim, dtype=dtype, device=device), batch)

    def _over(self, memory: Tensor, batch: int) -> None:
        """Use the first `batch` sequences of some memory."""
        if memory is not getattr(self, "memory", None):
            self.memory, self._places = memory, torch.arange(memory.shape[1], device=memory.device).unsqueeze(1)
        self.store, self._sequences = memory[:, :batch], self._places[:batch]
        self._views()

    def _views(self) -> None:
        self.rows = list(self.store)  # [B, capacity, 2·Hkv, D] per layer
        self.keys = [rows[:, :, : self.heads].transpose(1, 2) for rows in self.rows]  # [B, Hkv, capacity, D]
        self.values = [rows[:, :, self.heads :].transpose(1, 2) for rows in self.rows]
        self.batch, self.capacity = self.store.shape[1:3]

    @property
    def captured_tensor(self) -> Tensor:
        """The tensor that a graph over this cache has captured. If it is the same object, the cache has not moved."""
        return self.memory

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes

    def count_fitting(self, texts: list[int]) -> int:
        """Number of sequences, from the first on, that can be admitted; `texts` are their largest numbers of slots.
        Here all of them: this cache can grow."""
        return len(texts)

    def could_hold(self, slots: int) -> bool:
        """Whether a sequence with this many slots could be admitted at all."""
        return True

    def admit(self, b: int, most: int, names: list[bytes]) -> None:
        """Assign row b to a new sequence with at most `most` slots. `names` are the pages that `share` will ask for."""

    def needs_room(self, b: int, slots: int) -> bool:
        """Whether sequence b lacks memory for this many slots, within the `most` of `admit`."""
        return False

    def ensure(self, b: int, slots: int) -> None:
        """Make room for this many slots of sequence b, within the `most` of `admit`."""

    def share(self, b: int, names: list[bytes]) -> int:
        """Take over pages with these `names` (`pages.page_names`) that other sequences have filled. Returns the number
        of slots, from the first on, that sequence b gets this way."""
        return 0

    def publish(self, b: int, names: list[bytes]) -> None:
        """Let other sequences read the first, filled pages of sequence b under these `names`."""

    def release(self, b: int, wipe: bool = False) -> None:
        """Free row b. With `wipe`, its keys and values are not finite and must be erased."""

    def write(self, layer: int, pairs: Tensor, plan: Plan) -> None:
        """Store keys and values [B·T, 2·Hkv, D] at slots base .. base+T−1 of each sequence or the plan's `slots`."""
        count = pairs.shape[0] // self.batch
        if self.batch == 1 and plan.slots is None:
            self.rows[layer].select(0, 0).narrow(0, plan.base[0], count).copy_(pairs)
        else:
            self.rows[layer][self._sequences, self.slots(plan, count)] = pairs.view(self.batch, count, *pairs.shape[1:])

    def slots(self, plan: Plan, count: int) -> Tensor:
        """[B, count] slots where `write` stores the rows of a plan."""
        if plan.slots is not None:
            return plan.slots
        if plan.contiguous:
            return plan.positions
        if self.batch == 1:
            return torch.arange(plan.base[0], plan.base[0] + count, device=self.store.device).unsqueeze(0)
        starts = torch.tensor(plan.base, device=self.store.device).unsqueeze(1)
        return starts + torch.arange(count, device=self.store.device)

    def read(self, layer: int, span: int) -> tuple[Tensor, Tensor]:
        """Keys and values [B, Hkv, span or more, D] of at least the first `span` slots."""
        return self.keys[layer], self.values[layer]

    def first_rows(self, sequence: int, count: int) -> Tensor:
        """The first `count` rows of a sequence [L, count, 2·Hkv, D]."""
        return self.store[:, sequence, :count]

    def set_first_rows(self, sequence: int, rows: Tensor) -> None:
        """Overwrite the first n rows of a sequence with `rows` [L, n, 2·Hkv, D]."""
        self.store[:, sequence, : rows.shape[1]] = rows

    def compact(self, sequence: int, start: int, path: list[int]) -> None:
        """Move rows `start + 1 + path[i]` to `start + 1 + i`: keep the accepted path of a draft tree.

        `path` holds draft node indices (row 0 of a step is the root, so node m sits in row m + 1).
        """
        if path == list(range(len(path))):
            return
        source = torch.tensor([start + 1 + node for node in path], device=self.store.device)
        kept = self.store[:, sequence].index_select(1, source)
        self.store[:, sequence, start + 1 : start + 1 + len(path)] = kept

    def compact_at(self, base: Tensor, source: Tensor) -> None:
        """Move rows base + 1 + source[b, i] to base + 1 + i, for `base` [B] and `source` [B, n] on the device."""
        start = base.unsqueeze(1) + 1
        kept = self.store[:, self._sequences, start + source]
        slots = start + torch.arange(source.shape[1], device=base.device)
        self.store[:, self._sequences, slots] = kept

    def sequence(self, index: int) -> KVCache:
        """The cache of one sequence, over the same memory."""
        return self.sub_batch(index, index + 1)

    def sub_batch(self, start: int, stop: int) -> KVCache:
        """The cache of the sequences `start` to `stop` − 1, over the same memory."""
        some = copy.copy(self)
        some.skipped = self.skipped[start:stop]
        some._over(self.store[:, start:stop], stop - start)
        return some

    def moved_to(self, larger: KVCache) -> KVCache:
        """Copy everything to `larger`, a cache of the same sequences with more slots, and return it."""
        larger.store[:, :, : self.capacity] = self.store
        larger.skipped = self.skipped
        return larger

    def select(self, index: Tensor) -> None:
        """Keep the sequences in `index`, in that order. A repeated index is kept as a copy."""
        # If no slots are skipped, avoid reading `index` back from the device.
        some = any(self.skipped)
        self.skipped = [self.skipped[b] for b in index.tolist()] if some else [EMPTY_RANGE] * len(index)
        self._over(select_rows(self.memory, index, 1), len(index))

    def mark_written(self, starts: list[int]) -> None:
        """Mark the slots from `starts` on to the end of each sequence as written, or about to be."""
        self.skipped = [range(s.start, min(s.stop, start)) for s, start in zip(self.skipped, starts, strict=True)]


@dataclass(frozen=True)
class CatchUp:
    """Catch-up policy for a drafter that misses more than `window` positions. It computes keys and values of the first
    `sink` and the last `window` positions only and never sees the others. This is the `streaming` strategy of MetaSD
    (Kim et al. 2024, F.11) with the sinks of StreamingLLM (Xiao et al. 2023). Slots and rotary positions still follow
    the positions in the text."""

    sink: int
    window: int

    def first(self, cached: int, end: int) -> int:
        """First slot of `cached` .. end − 1 to read, sinks aside."""
        first = end - self.window
        return first if first > max(cached, self.sink) else cached

    def count(self, cached: int, end: int) -> int:
        """Number of slots in `cached` .. end − 1 that are read, sinks included."""
        first = self.first(cached, end)
        return end - first + (max(self.sink - cached, 0) if first > cached else 0)

    def skip(
        self, cache: KVCache, cached: list[int], ends: list[int], read: Callable[[int, range], object]
    ) -> list[int]:
        """Skip the slots between sink and window in every sequence that misses too much.

        `read(b, slots)` is called for sink slots that are not cached yet. Returns, for each sequence, the first slot
        still to be read.
        """
        found = []
        for b, (start, end) in enumerate(zip(cached, ends, strict=True)):
            first = self.first(start, end)
            if first > start:
                if start < self.sink:
                    read(b, range(start, self.sink))
                cache.skipped[b] = range(self.sink, first)
            found.append(first)
        return found

    def slots_to_reread(self, cache: KVCache, asked: list[int], ends: list[int]) -> int:
        """Number of trailing slots to read again so that every sequence has its slots from `asked` on, and a window
        before them; 0 if none of these slots was skipped."""
        places = zip(cache.skipped, asked, ends, strict=True)
        missing = [end - max(first, 0) for skipped, first, end in places if skipped and first < min(skipped.stop, end)]
        return min(max(missing) + self.window, max(ends)) if missing else 0


RECOMPUTE = CatchUp(0, sys.maxsize)
