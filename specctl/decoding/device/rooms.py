"""Rooms: what rounds on the device were made for, kept from one call to the next, so that their graphs serve again.

A graph holds addresses: of the caches, of what the round reads and writes. To capture one takes as long as some tens of
rounds, so texts that are asked for one after the other would spend most of their time on captures if each had caches of
its own.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import torch

from specctl.decoding.device.rounds import DeviceRounds
from specctl.decoding.protocols import Controller, Proposer
from specctl.decoding.state import DecodeState
from specctl.decoding.target import Target

KEPT = 2  # rooms: that of full batches, and that of the last texts of each
SHARE = 1 / 16  # of a GPU's memory that caches may take while nobody decodes


class RoomKey(NamedTuple):
    """The calls that a room is good for: texts at once, what is kept of them, and how a batch shares its rows."""

    batch: int
    taps: tuple[int, ...]
    keeps: bool
    share_rows: bool


class Room(NamedTuple):
    """Caches whose texts have ended, and the rounds that read them."""

    state: DecodeState
    rounds: DeviceRounds


class Rooms:
    """The rooms of one drafter, or of one controller and its drafters, with one target; those of another take their
    place. Whoever decodes with it again and again owns them."""

    def __init__(self) -> None:
        self._of: tuple[Target, Proposer | Controller] | None = None
        self._rooms: OrderedDict[RoomKey, Room] = OrderedDict()

    def take(self, target: Target, who: Proposer | Controller, key: RoomKey) -> Room | None:
        """A room for these texts, which is the caller's from now on; None where there is none."""
        if self._of is None or self._of[0] is not target or self._of[1] is not who:
            self._rooms.clear()
            self._of = target, who
        return self._rooms.pop(key, None)

    def keep(self, key: RoomKey, room: Room) -> None:
        """Keep a room that `take` was asked for, in which all texts have ended; the oldest go where there is no room
        for all."""
        self._rooms[key] = room
        while len(self._rooms) > KEPT or self._nbytes > _limit(room.state.device):
            self._rooms.popitem(last=False)

    @property
    def _nbytes(self) -> int:
        return sum(room.state.nbytes for room in self._rooms.values())


def _limit(device: torch.device) -> float:
    """Bytes of caches that may wait."""
    if device.type != "cuda":
        return float("inf")
    return SHARE * torch.cuda.get_device_properties(device).total_memory
