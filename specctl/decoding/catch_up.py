"""Catch-up of a drafter with the text: it reads all missed tokens, or only attention sinks and a recent window."""

import sys
from collections.abc import Callable
from dataclasses import dataclass

from specctl.decoding.cache import KVCache


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
