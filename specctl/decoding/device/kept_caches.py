"""Reuse of caches and CUDA graphs from one call to the next.

A graph holds addresses: of the caches and of every tensor that its round reads and writes. Capturing one takes as long
as some tens of rounds. If requests come one after the other and each gets new caches, most of the time goes into
captures.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import torch

from specctl.decoding.device.rounds import DeviceRounds
from specctl.decoding.protocols import Controller, Proposer
from specctl.decoding.state import DecodeState
from specctl.decoding.target import Target

KEPT = 2  # caches: one for full batches, one for the last sequences of a call
SHARE = 1 / 16  # largest fraction of a GPU's memory for caches that are not in use


class CacheKey(NamedTuple):
    """Properties that a call must share with a kept cache to use it: batch size, kept states, and how a batch shares
    its rows."""

    batch: int
    taps: tuple[int, ...]
    keeps_hidden: bool
    share_rows: bool


class KeptCache(NamedTuple):
    """Caches of a call with all its sequences ended, and the device rounds over them."""

    state: DecodeState
    rounds: DeviceRounds


class KeptCaches:
    """Kept caches of one drafter, or of one controller and its drafters, with one target. A call with another drafter
    or target clears them. The object is owned by code that decodes with one drafter again and again."""

    def __init__(self) -> None:
        self._of: tuple[Target, Proposer | Controller] | None = None
        self._caches: OrderedDict[CacheKey, KeptCache] = OrderedDict()

    def take(self, target: Target, owner: Proposer | Controller, key: CacheKey) -> KeptCache | None:
        """Take out a cache that fits these sequences, or return None."""
        if self._of is None or self._of[0] is not target or self._of[1] is not owner:
            self._caches.clear()
            self._of = target, owner
        return self._caches.pop(key, None)

    def keep(self, key: CacheKey, cache: KeptCache) -> None:
        """Keep a cache for later calls with the drafter that `take` was last called for. All its sequences have ended.
        The oldest caches are dropped if there are too many or they take too much memory."""
        self._caches[key] = cache
        while len(self._caches) > KEPT or self._nbytes > _limit(cache.state.device):
            self._caches.popitem(last=False)

    @property
    def _nbytes(self) -> int:
        return sum(cache.state.nbytes for cache in self._caches.values())


def _limit(device: torch.device) -> float:
    """Byte limit of all kept caches together."""
    if device.type != "cuda":
        return float("inf")
    return SHARE * torch.cuda.get_device_properties(device).total_memory
