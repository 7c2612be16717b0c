"""Paged KV cache: a `KVCache` with its memory in the target's pool. No sequence is copied when it comes, grows or
goes."""

from __future__ import annotations

import copy
from itertools import accumulate

import torch
from torch import Tensor

from specctl.decoding.cache import KVCache, select_rows
from specctl.decoding.pages import PAGE, SCRATCH_PAGE, Lease, PagePool, new_table, pages_for
from specctl.decoding.plan import Plan
from specctl.kernels import gather_pages, slots_of


class PagedCache(KVCache):
    """Keys and values of a batch, with each sequence in pages of the pool.

    Attributes:
        store: the pool's memory [L, S, 2·Hkv, D]; `rows` are its views [S, 2·Hkv, D] per layer.
        memory: room for the tables of B or more sequences; `table` is its first part. `nbytes` counts only this: the
            pool belongs to the target, like its weights.
        table: [B, W] entry i is the page that holds slots i·PAGE … of a sequence. It is on the device, where graphs
            read it.
        leases: the pages of each sequence. A row without a sequence has no lease and writes to page `SCRATCH_PAGE`.
    """

    table: Tensor

    def __init__(self, pool: PagePool, batch: int, capacity: int):
        self.pool, self.store, self.heads = pool, pool.store, pool.form.heads
        self.rows = pool.rows
        self.leases: list[Lease | None] = [None] * batch
        self.capacity = capacity
        self._over(new_table(batch, capacity, self.store.device), batch)

    def _over(self, memory: Tensor, batch: int) -> None:
        self.memory, self.table, self.batch = memory, memory[:batch], batch

    def count_fitting(self, texts: list[int]) -> int:
        needed = accumulate(pages_for(most) for most in texts)
        return sum(pages <= self.pool.available for pages in needed)

    def could_hold(self, slots: int) -> bool:
        return pages_for(slots) <= self.pool.size

    def admit(self, b: int, most: int, names: list[bytes]) -> None:
        """Promise the sequence its pages, and take the shared ones before another sequence evicts them. DataError if
        too few pages are available."""
        self.release(b)
        lease = self.leases[b] = self.pool.lease(pages_for(most))
        lease.share(names)

    def needs_room(self, b: int, slots: int) -> bool:
        lease = self.leases[b]
        return lease is not None and len(lease.pages) < pages_for(slots)

    def ensure(self, b: int, slots: int) -> None:
        lease = self.leases[b]
        if lease is not None and self.needs_room(b, slots):
            lease.grow(pages_for(slots))
            self.table[b, : len(lease.pages)] = torch.tensor(lease.pages, device=self.table.device)

    def share(self, b: int, names: list[bytes]) -> int:
        lease = self.leases[b]
        count = 0 if lease is None else lease.share(names)
        if lease is not None and count:
            self.table[b, :count] = torch.tensor(lease.pages[:count], device=self.table.device)
        return count * PAGE

    def publish(self, b: int, names: list[bytes]) -> None:
        lease = self.leases[b]
        for page, name in zip([] if lease is None else lease.pages, names, strict=False):
            self.pool.publish(page, name)

    def release(self, b: int, wipe: bool = False) -> None:
        lease = self.leases[b]
        if lease is not None:
            if wipe:
                self.pool.wipe(lease.pages)
            lease.end()
            self.leases[b] = None
            self.table[b] = SCRATCH_PAGE

    def slots(self, plan: Plan, count: int) -> Tensor:
        """[B, count] the slots in the pool where `write` stores the rows of a plan."""
        return slots_of(self.table, super().slots(plan, count).expand(self.batch, -1))

    def write(self, layer: int, pairs: Tensor, plan: Plan) -> None:
        count = pairs.shape[0] // self.batch
        self.rows[layer][self.slots(plan, count)] = pairs.view(self.batch, count, *pairs.shape[1:])

    def read(self, layer: int, span: int) -> tuple[Tensor, Tensor]:
        """Copy keys and values out of the pages, for attention that cannot read pages. Page `SCRATCH_PAGE` is read as
        zeros: it is masked, but attention still multiplies its values by zero, and they may be NaN."""
        rows = gather_pages(self.rows[layer], self.table, span)
        idle = (self.table == SCRATCH_PAGE).repeat_interleave(PAGE, 1)[:, :span]
        rows = rows.masked_fill_(idle[..., None, None], 0).transpose(1, 2)
        return rows[:, : self.heads], rows[:, self.heads :]

    def compact(self, sequence: int, start: int, path: list[int]) -> None:
        moves = [(node, place) for place, node in enumerate(path) if node != place]
        if moves:
            positions = start + 1 + torch.tensor(moves, device=self.store.device).T
            source, goal = slots_of(self.table[sequence].expand(2, -1), positions)
            self.store[:, goal] = self.store[:, source]

    def compact_at(self, base: Tensor, source: Tensor) -> None:
        start = base.unsqueeze(1) + 1
        kept = self.store[:, slots_of(self.table, start + source)]
        goal = start + torch.arange(source.shape[1], device=base.device)
        self.store[:, slots_of(self.table, goal)] = kept

    def sub_batch(self, start: int, stop: int) -> PagedCache:
        some = copy.copy(self)
        some.leases = self.leases[start:stop]
        some._over(self.table[start:stop], stop - start)
        return some

    def first_rows(self, sequence: int, count: int) -> Tensor:
        """A copy [L, count, 2·Hkv, D] of the first rows of a sequence."""
        return self.store[:, self._first(sequence, count)]

    def set_first_rows(self, sequence: int, rows: Tensor) -> None:
        self.store[:, self._first(sequence, rows.shape[1])] = rows

    def _first(self, sequence: int, count: int) -> Tensor:
        positions = torch.arange(count, device=self.store.device).unsqueeze(0)
        return slots_of(self.table[sequence : sequence + 1], positions)[0]

    def moved_to(self, larger: KVCache) -> KVCache:
        """Return `larger`, a cache with a wider table, after handing it this cache's sequences. Their pages stay in
        place."""
        assert isinstance(larger, PagedCache)
        larger.table[:, : self.table.shape[1]] = self.table
        larger.leases = self.leases
        return larger

    def select(self, index: Tensor) -> None:
        """Keep the rows in `index`, in that order; only the table changes. A repeated index keeps its sequence at the
        first occurrence; the others get no sequence."""
        chosen = index.tolist()
        for b in {*range(self.batch)} - {*chosen}:
            self.release(b)
        again = [i for i, b in enumerate(chosen) if b in chosen[:i]]
        self.leases = [None if i in again else self.leases[b] for i, b in enumerate(chosen)]
        self._over(select_rows(self.memory, index), len(index))
        self.table[again] = SCRATCH_PAGE
