"""Paged KV cache memory: a pool of pages from which the target's sequences of any length get memory for keys and
values.

A sequence is promised as many pages as it may ever need and takes them as it grows, so a sequence that has begun never
waits for memory. A table on the device maps each sequence to its pages. Sequences can come, grow and go without a copy.

Sequences share the full pages of a common prompt prefix; decoding writes only after those pages. The name of a page is
a hash of all tokens up to its end, as in vLLM (Kwon et al. 2023). After its sequences have ended, a page keeps its name
and contents until no other page is free.
"""

from __future__ import annotations

import math
import mmap
import os
from array import array
from collections import Counter, OrderedDict
from hashlib import blake2b
from typing import NamedTuple

import torch
from torch import Tensor

from specctl.errors import DataError, UsageError
from specctl.kernels import PAGE

GIB = 1 << 30
SHARE = 0.5  # fraction of a GPU's free memory; the rest is for activations, drafter memory, graphs and learning
CPU_BYTES = GIB  # on a CPU, which commits only memory that is written
SCRATCH_PAGE = 0  # the page that rows without a sequence write to; it also pads the table after a sequence's pages


class PoolLayout(NamedTuple):
    """Sizes that determine the layout of a pool."""

    layers: int
    heads: int  # key-value heads
    dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def page_bytes(self) -> int:
        return self.layers * PAGE * 2 * self.heads * self.dim * self.dtype.itemsize


def pages_for(slots: int) -> int:
    """Number of pages that hold `slots` slots."""
    return -(-slots // PAGE)


def page_names(ids: list[int]) -> list[bytes]:
    """Names of the full pages of a text. Two names are equal if all ids up to the end of the page are equal."""
    names, name = [], b""
    for end in range(PAGE, len(ids) + 1, PAGE):
        name = blake2b(name + array("q", ids[end - PAGE : end]).tobytes(), digest_size=16).digest()
        names.append(name)
    return names


def budget(device: torch.device) -> int:
    """Bytes for the pool of one target: half of the free memory on a GPU, 1 GiB on a CPU. SPECCTL_KV_GIB overrides.

    UsageError if SPECCTL_KV_GIB is no positive, finite number.
    """
    asked = os.environ.get("SPECCTL_KV_GIB")
    if asked:
        try:
            size = float(asked)
        except ValueError:
            size = 0.0
        if not 0 < size < float("inf"):
            raise UsageError(f"SPECCTL_KV_GIB={asked!r} is not a size", "give the GiB for KV caches, such as 20")
        return int(size * GIB)
    if device.type != "cuda":
        return CPU_BYTES
    torch.cuda.empty_cache()  # memory that torch holds unused counts as free
    return int(SHARE * torch.cuda.mem_get_info(device)[0])


def _zeros(shape: tuple[int, ...], form: PoolLayout) -> Tensor:
    """Zeros of a shape. `torch.zeros` would write, and so commit, all of a CPU's memory: here the system does when it
    is used."""
    if form.device.type != "cpu":
        return torch.zeros(shape, dtype=form.dtype, device=form.device)
    size = math.prod(shape) * form.dtype.itemsize
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=form.dtype).view(shape)


class PagePool:
    """Keys and values [L, pages·PAGE, 2·Hkv, D] of a target's sequences, with the bookkeeping of free pages.

    Attributes:
        store: the memory, zero at first. Attention multiplies the values of masked slots by zero, so they must be
            finite.
        rows: a view [S, 2·Hkv, D] of `store` per layer.
        size: number of pages for sequences (page `SCRATCH_PAGE` not counted).
        promised: number of free pages that are promised to sequences that will grow.
    """

    def __init__(self, form: PoolLayout, pages: int):
        """UsageError if the memory holds not even one page."""
        if pages < 1:
            raise UsageError(
                f"no memory for KV caches on {form.device}: a page of {PAGE} tokens takes {form.page_bytes:,} bytes",
                "free memory, or set SPECCTL_KV_GIB (GiB for KV caches)",
            )
        self.form, self.size, self.promised = form, pages, 0
        shape = form.layers, (1 + pages) * PAGE, 2 * form.heads, form.dim
        with torch.inference_mode(False):  # the pool may outlive the inference mode it was made in
            self.store = _zeros(shape, form)
        self.rows = list(self.store)
        self._free = OrderedDict.fromkeys(range(1, 1 + pages))  # pages without a name
        self._kept: OrderedDict[int, None] = OrderedDict()  # free pages with a name: taken last, oldest first
        self._texts: Counter[int] = Counter()  # page → number of sequences that use it
        self._named: dict[bytes, int] = {}
        self._names: dict[int, bytes] = {}

    @property
    def available(self) -> int:
        """Number of pages that are neither taken nor promised."""
        return len(self._free) + len(self._kept) - self.promised

    def lease(self, pages: int) -> Lease:
        """Promise a sequence this many pages. DataError if fewer are available."""
        if pages > self.available:
            raise DataError(
                f"a sequence may need {pages} KV cache pages of {PAGE} tokens, but only {self.available} of "
                f"{self.size} are free",
                "run fewer or shorter sequences at once, or raise SPECCTL_KV_GIB",
            )
        self.promised += pages
        return Lease(self, pages)

    def take(self) -> int:
        """Take a promised page; a free page without a name goes first."""
        self.promised -= 1
        page, _ = (self._free or self._kept).popitem(last=False)
        self._forget(page)
        self._texts[page] = 1
        return page

    def acquire(self, name: bytes) -> int | None:
        """Return the page with this name and count one more user, or return None if no page has it."""
        page = self._named.get(name)
        if page is not None:
            self._kept.pop(page, None)
            self._texts[page] += 1
        return page

    def publish(self, page: int, name: bytes) -> None:
        """Name a page that is no longer written to, so that others may read it. The first page of a name keeps it."""
        if name not in self._named and page not in self._names:
            self._named[name], self._names[page] = page, name

    def give_back(self, pages: list[int]) -> None:
        for page in reversed(pages):  # so that the first page of a prefix, which the others need, is reused last
            self._texts[page] -= 1
            if not self._texts[page]:
                del self._texts[page]
                (self._kept if page in self._names else self._free)[page] = None

    def wipe(self, pages: list[int]) -> None:
        """Zero the pages of a failed sequence, as their values may not be finite. Page `SCRATCH_PAGE` is zeroed, too:
        padding after its prompt was written there. A page that other sequences use stays: if it is not finite, they
        fail as well, and the last of them zeroes it."""
        for page in pages:
            self._forget(page)
        alone = [page for page in pages if self._texts[page] == 1]
        whole = self.store.unflatten(1, (-1, PAGE))
        whole[:, torch.tensor([SCRATCH_PAGE, *alone], device=whole.device)] = 0

    def _forget(self, page: int) -> None:
        name = self._names.pop(page, None)
        if name is not None:
            del self._named[name]


class Lease:
    """The pages of one sequence. They return to the pool at `end`, or when the lease is garbage-collected."""

    def __init__(self, pool: PagePool, promised: int):
        self.pool, self.promised, self.pages = pool, promised, list[int]()

    def grow(self, pages: int) -> None:
        """Grow to at least `pages` pages out of those promised."""
        assert pages <= len(self.pages) + self.promised
        while len(self.pages) < pages:
            self.pages.append(self.pool.take())
            self.promised -= 1

    def share(self, names: list[bytes]) -> int:
        """Replace the sequence's first pages by the shared pages with these names, up to the first name that no page
        has. Returns the number of shared pages."""
        for place, name in enumerate(names):
            page = self.pool.acquire(name)
            if page is None:
                return place
            if place < len(self.pages):
                self.pool.give_back([self.pages[place]])
                self.pages[place] = page
            else:
                self.pages.append(page)
                self.promised -= 1
                self.pool.promised -= 1
        return len(names)

    def end(self) -> None:
        self.pool.give_back(self.pages)
        self.pool.promised -= self.promised
        self.pages, self.promised = [], 0

    def __del__(self) -> None:
        self.end()


def new_table(batch: int, capacity: int, device: torch.device) -> Tensor:
    """A table [B, W] for `batch` sequences without pages. W is even, so that rows are 16-byte aligned and one compiled
    kernel reads all tables."""
    width = pages_for(capacity)
    return torch.full((batch, width + width % 2), SCRATCH_PAGE, dtype=torch.long, device=device)
