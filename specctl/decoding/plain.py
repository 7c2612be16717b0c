"""Plain decoding: the drafter that drafts nothing."""

import torch

from specctl.decoding.device.device_batch import DeviceBatch
from specctl.decoding.protocols import DeviceDraft, Drafter
from specctl.decoding.records import DraftTree, Score, empty_draft
from specctl.decoding.state import DecodeState
from specctl.recipe import DraftingRecipe


class NoDraft(Drafter):
    """Plain decoding: the empty draft."""

    fixed_shape = True

    def propose(self, state: DecodeState, budget: int) -> DraftTree:
        return empty_draft(state.batch, state.device)

    def score(self, state: DecodeState, spans: list[range], depths: int = 1) -> list[Score]:
        """Scores without any proposal."""
        return [Score(span, tokens=torch.empty(1, len(span), 0, dtype=torch.long)) for span in spans]

    def on_device(self, state: DecodeState, budget: int) -> DeviceDraft:
        return PlainRounds()


class PlainRounds(DeviceDraft):
    """Plain decoding in rounds on the device."""

    def propose(self, sequences: DeviceBatch, span: int) -> DraftTree:
        nothing = sequences.ids[:, :0]
        return DraftTree(nothing, nothing)


PLAIN = NoDraft()


def make_drafter(drafting: DraftingRecipe) -> NoDraft:
    """The drafter `none`."""
    return NoDraft()
