"""Generic controllers and proposers: no drafter, one drafter for all sequences, or a separate one per sequence."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specctl.decoding.device.device_batch import DeviceBatch
from specctl.decoding.protocols import Controller, DeviceDraft, Drafter, Proposer
from specctl.decoding.records import PADDING, DraftTree, RoundResult, Score, empty_draft
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


class Fixed(Controller):
    """Controller with a single drafter."""

    accepts_late_counts = True

    def __init__(self, drafter: Proposer, taps: tuple[int, ...] = ()):
        self.drafter, self.taps = drafter, taps

    @classmethod
    def of(cls, drafter: Drafter | None) -> Fixed:
        """The controller of a drafter, with the hidden states that this drafter reads. None: plain decoding."""
        return cls(PLAIN) if drafter is None else cls(drafter, drafter.taps)

    def choose(self, state: DecodeState) -> Proposer:
        return self.drafter

    def observe(self, state: DecodeState, result: RoundResult) -> None:
        """No-op: there is nothing to learn."""


class PerSequence(Proposer):
    """Proposer with a drafter per sequence of the batch: `drafters[b]`.

    A sampled draft loses its distributions here, so the match rule verifies it: other drafts of the batch have none.
    Every drafter in use drafts for the whole batch. A forward of eight rows costs little more than one row, while
    splitting the batch would cost one forward per sequence.
    """

    def __init__(self, drafters: Sequence[Proposer]):
        self.drafters = drafters

    def invalidate(self, state: DecodeState) -> None:
        for drafter in dict.fromkeys(self.drafters):
            drafter.invalidate(state)

    def propose(self, state: DecodeState, budget: int) -> DraftTree:
        drafts = {drafter: drafter.propose(state, budget) for drafter in dict.fromkeys(self.drafters)}
        chosen = [drafts[drafter] for drafter in self.drafters]
        sizes = [int((draft.parents[b] != PADDING).sum()) for b, draft in enumerate(chosen)]
        width = max(sizes)
        tokens = torch.zeros(state.batch, width, dtype=torch.long, device=state.device)
        parents = torch.full_like(tokens, PADDING)
        for b, (draft, size) in enumerate(zip(chosen, sizes, strict=True)):
            tokens[b, :size], parents[b, :size] = draft.tokens[b, :size], draft.parents[b, :size]
        return DraftTree(tokens, parents, chain=all(draft.chain for draft in chosen))
