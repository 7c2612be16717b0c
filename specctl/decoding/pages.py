"""Pages: the memory that the keys and values of a target's texts are dealt out of, whatever their lengths.

A text is promised as many pages as it may ever need, and gets them as it grows: what has begun never waits for room.
Which memory a text has is a row of a table on the device, so texts come, grow and go without a copy.
"""

from __future__ import annotations

import heapq
import os
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from specctl.errors import DataError, UsageError
from specctl.kernels import PAGE

GIB = 1 << 30
SHARE = 0.5  # of a GPU's free memory; the rest is for activations, drafters' memory, graphs and whoever learns beside
CPU_BYTES = GIB  # of a CPU, which takes only what is written
IDLE = 0  # the page that rows without a text write to; nobody reads it


class Form(NamedTuple):
    """What a pool is made of."""

    layers: int
    heads: int  # of keys
    dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def page_bytes(self) -> int:
        return self.layers * PAGE * 2 * self.heads * self.dim * self.dtype.itemsize


def pages_for(slots: int) -> int:
    """Pages that so many slots take."""
    return -(-slots // PAGE)


def budget(device: torch.device) -> int:
    """Bytes for the pool of one target: half of what is free on a GPU, 1 GiB on a CPU. SPECCTL_KV_GIB overrides.

    UsageError where that is no number of GiB.
    """
    asked = os.environ.get("SPECCTL_KV_GIB")
    if asked:
        try:
            size = float(asked)
        except ValueError:
            size = 0.0
        if not 0 < size < float("inf"):
            raise UsageError(f"SPECCTL_KV_GIB={asked!r} is no size", "GiB for keys and values, such as 20")
        return int(size * GIB)
    if device.type != "cuda":
        return CPU_BYTES
    torch.cuda.empty_cache()  # what nobody uses counts as free
    return int(SHARE * torch.cuda.mem_get_info(device)[0])


class PagePool:
    """Keys and values of a target's texts [L, pages·PAGE, 2·Hkv, D], and which pages are free.

    Attributes:
        store: the memory. Zeros in the beginning: what is hidden from a row is multiplied by zero, and must be finite.
        rows: [S, 2·Hkv, D] of each layer, over the same memory.
        size: pages that texts can have.
        promised: pages that are free, and promised to texts that will grow.
    """

    def __init__(self, form: Form, pages: int):
        """UsageError where that is not even one page."""
        if pages < 1:
            raise UsageError(
                f"no room for keys and values on {form.device}: {PAGE} tokens of a text take {form.page_bytes:,} bytes",
                "free memory, or set SPECCTL_KV_GIB",
            )
        self.form, self.size, self.promised = form, pages, 0
        shape = form.layers, (1 + pages) * PAGE, 2 * form.heads, form.dim
        with torch.inference_mode(False):  # it may live longer than the mode that it was made in
            self.store = torch.zeros(shape, dtype=form.dtype, device=form.device)
        self.rows = list(self.store)
        self._free = list(range(1, 1 + pages))  # a heap: the lowest first, so that a CPU touches few

    @property
    def available(self) -> int:
        """Pages that are neither taken nor promised."""
        return len(self._free) - self.promised

    def lease(self, pages: int) -> Lease:
        """Promise so many pages. DataError where they are not there."""
        if pages > self.available:
            raise DataError(
                f"a text may need {pages} pages of {PAGE} tokens for its keys and values, and {self.available} of "
                f"{self.size} are there",
                "fewer texts at once, shorter ones, or SPECCTL_KV_GIB",
            )
        self.promised += pages
        return Lease(self, pages)

    def take(self) -> int:
        """A page that was promised."""
        self.promised -= 1
        return heapq.heappop(self._free)

    def give_back(self, pages: Iterable[int]) -> None:
        for page in pages:
            heapq.heappush(self._free, page)

    def wipe(self, pages: list[int]) -> None:
        """Make zeros of what a text has left that was not finite."""
        whole = self.store.unflatten(1, (-1, PAGE))
        whole[:, torch.tensor(pages, dtype=torch.long, device=whole.device)] = 0


class Lease:
    """The pages of one text. They go back when it ends, or with the last cache that knows of it."""

    def __init__(self, pool: PagePool, promised: int):
        self.pool, self.promised, self.pages = pool, promised, list[int]()

    def grow(self, pages: int) -> None:
        """Have at least so many, of those that were promised."""
        assert pages <= len(self.pages) + self.promised
        while len(self.pages) < pages:
            self.pages.append(self.pool.take())
            self.promised -= 1

    def end(self) -> None:
        self.pool.give_back(self.pages)
        self.pool.promised -= self.promised
        self.pages, self.promised = [], 0

    def __del__(self) -> None:
        self.end()


def new_table(batch: int, capacity: int, device: torch.device) -> Tensor:
    """The table [B, W] of as many texts without pages. W is even: rows begin at multiples of 16 bytes, and one compiled
    kernel reads them all."""
    width = pages_for(capacity)
    return torch.full((batch, width + width % 2), IDLE, dtype=torch.long, device=device)
