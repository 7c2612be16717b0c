"""Device-side rounds (decoding/device/rounds.py) of a drafter that reads the target's features."""

import torch
from torch import Tensor

from specctl.decoding.device.device_batch import DeviceBatch
from specctl.decoding.protocols import DeviceDraft
from specctl.decoding.state import DecodeState
from specctl.drafters.feature.layer import FeatureReader


class ReaderRounds(DeviceDraft):
    """Base class of device-side rounds with a `FeatureReader`: every round adds keys and values to the host's cache.

    Attributes:
        hidden: [B, size] state that the reader carries from one round to the next.
    """

    def __init__(self, reader: FeatureReader, state: DecodeState, depth: int, reach: int):
        """`depth`: longest path of a draft; `reach`: slots after the committed text that drafting needs."""
        self.reader, self.depth, self.reach = reader, depth, max(reach, depth + 1)
        self.hidden = torch.zeros(state.batch, reader.size, device=state.device)
        self.carried = [self.hidden]

    def load(self, state: DecodeState) -> None:
        self.reader.advance(state)
        memory = state.memory[self.reader.key]
        self.hidden.copy_(memory.hidden)
        self.cache, self.keys = memory.cache, memory.cache.captured_tensor

    def fits(self, state: DecodeState) -> bool:
        memory = state.memory.get(self.reader.key)
        return memory is not None and memory.cache.captured_tensor is self.keys

    def store(self, state: DecodeState) -> None:
        memory = state.memory[self.reader.key]
        memory.cached, memory.hidden = list(state.cached), self.hidden

    def advance(self, sequences: DeviceBatch, before: Tensor, span: int) -> None:
        """Fill the slots of the committed tokens."""
        new = sequences.committed_slots(before, sequences.widest)
        self.hidden.copy_(self.reader.read_at(new, self.cache, span))
