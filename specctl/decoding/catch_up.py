"""How much of a text a drafter reads that has fallen behind: all that it missed, or attention sinks and a window."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

from specctl.decoding.cache import KVCache


@dataclass(frozen=True)
class CatchUp:
    """A drafter that misses more than `window` positions computes keys and values of the first `sink` and the last
    `window` positions alone and never sees the others: the `streaming` strategy of MetaSD (Kim et al. 2024, F.11) with
    the sinks of StreamingLLM (Xiao et al. 2023). Slots and rotations stay those of the text's positions.
    """

    sink: int
    window: int

    def first(self, cached: int, end: int) -> int:
        """The first of slots `cached` .. end − 1 to read after the sink."""
        first = end - self.window
        return first if first > max(cached, self.sink) else cached

    def count(self, cached: int, end: int) -> int:
        """How many of slots `cached` .. end − 1 are read."""
        first = self.first(cached, end)
        return end - first + (max(self.sink - cached, 0) if first > cached else 0)

    def skip(
        self, cache: KVCache, cached: list[int], ends: list[int], read: Callable[[int, range], object]
    ) -> list[int]:
        """Pass over what lies between sink and window of every sequence that is so far behind.

        `read(b, slots)` is asked for sinks that were never read. Returns the slots from which on each sequence is to be
        read.
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

    def again(self, cache: KVCache, asked: list[int], ends: list[int]) -> int:
        """How many of the last slots to read so that every sequence has those from `asked` on, and a window before
        them; 0 where nothing of that was skipped."""
        places = zip(cache.skipped, asked, ends, strict=True)
        missing = [end - max(first, 0) for skipped, first, end in places if skipped and first < min(skipped.stop, end)]
        return min(max(missing) + self.window, max(ends)) if missing else 0


RECOMPUTE = CatchUp(0, sys.maxsize)
