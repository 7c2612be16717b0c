"""Reuse of caches and CUDA graphs by later batches of an engine.

A graph holds addresses: of the caches and of every tensor that its round reads and writes. Capturing one takes as long
as some tens of rounds. If requests come one after the other and each gets new caches, most of the time goes into
captures.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import torch

from specctl.decoding.device.rounds import DeviceRounds
from specctl.decoding.state import DecodeState

KEPT = 2  # batches: one for full batches, one for the last sequences of a call
SHARE = 1 / 16  # largest fraction of a GPU's memory for caches that are not in use


class KeptBatch(NamedTuple):
    """Caches of a batch with all its sequences ended, and the device rounds over them."""

    state: DecodeState
    rounds: DeviceRounds


class KeptBatches:
    """Batches of one engine that wait for the next sequences, by batch size."""

    def __init__(self) -> None:
        self._batches: OrderedDict[int, KeptBatch] = OrderedDict()

    def take(self, size: int) -> KeptBatch | None:
        """Take out a batch of this size, or return None."""
        return self._batches.pop(size, None)

    def keep(self, state: DecodeState, rounds: DeviceRounds) -> None:
        """Keep a batch. The oldest batches are dropped if there are too many or they take too much memory."""
        self._batches[state.batch] = KeptBatch(state, rounds)
        while len(self._batches) > KEPT or self._nbytes > _limit(state.device):
            self._batches.popitem(last=False)

    @property
    def _nbytes(self) -> int:
        return sum(kept.state.nbytes for kept in self._batches.values())


def _limit(device: torch.device) -> float:
    """Byte limit of all kept batches together."""
    if device.type != "cuda":
        return float("inf")
    return SHARE * torch.cuda.get_device_properties(device).total_memory
