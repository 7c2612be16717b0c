"""Plain decoding: the drafter that drafts nothing."""

import torch
from torch import Tensor

from specctl.decoding.device.device_batch import DeviceBatch
from specctl.decoding.protocols import BaseDrafter, DeviceDraft
from specctl.decoding.records import DraftTree, Score, empty_draft
from specctl.decoding.state import DecodeState
from specctl.recipe import DraftingRecipe


class NoDraft(BaseDrafter):
    """Plain decoding: the empty draft."""

    fixed_shape = True

    def propose(self, state: DecodeState, budget: int) -> DraftTree:
        return empty_draft(state.batch, state.device)

    def score(self, state: DecodeState, spans: list[range], depths: int = 1) -> list[Score]:
        """Scores without any proposal."""
        return [Score(span, tokens=torch.empty(1, len(span), 0, dtype=torch.long)) for span in spans]

    def on_device(self, state: DecodeState, budget: int) -> DeviceDraft:
        return PlainRounds()


class PlainRounds:
    """Plain decoding in rounds on the device."""

    depth, reach = 0, 1
    reads_text, host_seconds = False, 0.0

    def __init__(self) -> None:
        self.carried: list[Tensor] = []

    def load(self, state: DecodeState) -> None:
        """No-op: there is no memory."""

    def fits(self, state: DecodeState) -> bool:
        """Always true: there is no memory."""
        return True

    def propose(self, sequences: DeviceBatch, span: int) -> DraftTree:
        nothing = sequences.ids[:, :0]
        return DraftTree(nothing, nothing)

    def advance(self, sequences: DeviceBatch, before: Tensor, span: int) -> None:
        """No-op: there is no memory."""

    def store(self, state: DecodeState) -> None:
        """No-op: there is no memory."""


PLAIN = NoDraft()


def make_drafter(drafting: DraftingRecipe) -> NoDraft:
    """The drafter `none`."""
    return NoDraft()
