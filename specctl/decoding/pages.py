"""Pages: the memory that the keys and values of a target's texts are dealt out of, whatever their lengths.

A text is promised as many pages as it may ever need, and gets them as it grows: what has begun never waits for room.
Which memory a text has is a row of a table on the device, so texts come, grow and go without a copy.

Texts share the full pages that their prompts begin with alike: whoever decodes writes behind those. A page is found by
a name that stands for all tokens up to its end, as in vLLM (Kwon et al. 2023), and keeps it, when its texts have ended,
until no other page is free.
"""

from __future__ import annotations

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
SHARE = 0.5  # of a GPU's free memory; the rest is for activations, drafters' memory, graphs and whoever learns beside
CPU_BYTES = GIB  # of a CPU, which takes only what is written
IDLE = 0  # the page that rows without a text write to, and padding behind the pages of a text; nobody needs it


class Form(NamedTuple):
    """The sizes that a pool is made of."""

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


def beginnings(ids: list[int]) -> list[bytes]:
    """The names of the full pages of a text: equal where all ids up to the page's end are."""
    names, name = [], b""
    for end in range(PAGE, len(ids) + 1, PAGE):
        name = blake2b(name + array("q", ids[end - PAGE : end]).tobytes(), digest_size=16).digest()
        names.append(name)
    return names


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
        self._free = OrderedDict.fromkeys(range(1, 1 + pages))  # without a name
        self._kept: OrderedDict[int, None] = OrderedDict()  # free, too, but taken last, those of the oldest texts first
        self._texts: Counter[int] = Counter()  # that have a page
        self._named: dict[bytes, int] = {}
        self._names: dict[int, bytes] = {}

    @property
    def available(self) -> int:
        """Pages that are neither taken nor promised."""
        return len(self._free) + len(self._kept) - self.promised

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
        page, _ = (self._free or self._kept).popitem(last=False)
        self._forget(page)
        self._texts[page] = 1
        return page

    def named(self, name: bytes) -> int | None:
        """The page of that name, for one text more; None where there is none."""
        page = self._named.get(name)
        if page is not None:
            self._kept.pop(page, None)
            self._texts[page] += 1
        return page

    def publish(self, page: int, name: bytes) -> None:
        """Others may read the page, which nobody writes to any more; the first of a name has it."""
        if name not in self._named and page not in self._names:
            self._named[name], self._names[page] = page, name

    def give_back(self, pages: list[int]) -> None:
        for page in reversed(pages):  # without its first page a beginning is none: that goes last
            self._texts[page] -= 1
            if not self._texts[page]:
                del self._texts[page]
                (self._kept if page in self._names else self._free)[page] = None

    def wipe(self, pages: list[int]) -> None:
        """Make zeros of what a failed text has left: it may not be finite. Padding behind its prompt has written to
        page `IDLE`. What another one reads, which would have failed then as well, is left to the last of them."""
        for page in pages:
            self._forget(page)
        alone = [page for page in pages if self._texts[page] == 1]
        whole = self.store.unflatten(1, (-1, PAGE))
        whole[:, torch.tensor([IDLE, *alone], device=whole.device)] = 0

    def _forget(self, page: int) -> None:
        name = self._names.pop(page, None)
        if name is not None:
            del self._named[name]


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

    def share(self, names: list[bytes]) -> int:
        """Have the pages of these names in the place of the own ones, up to the first that is nowhere; how many."""
        for place, name in enumerate(names):
            page = self.pool.named(name)
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
    """The table [B, W] of as many texts without pages. W is even: rows begin at multiples of 16 bytes, and one compiled
    kernel reads them all."""
    width = pages_for(capacity)
    return torch.full((batch, width + width % 2), IDLE, dtype=torch.long, device=device)
