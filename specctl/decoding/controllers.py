"""The controllers and proposers that know no drafter: one for all texts, and another one for each."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specctl.decoding.protocols import Controller, Proposer
from specctl.decoding.records import PADDING, DraftTree, Verdict
from specctl.decoding.state import DecodeState


class Fixed(Controller):
    """The controller that always plays one drafter."""

    late = True

    def __init__(self, drafter: Proposer, owner: Controller | None = None):
        """`owner`: the controller whose rooms this one decodes in (device/rooms.py); None = those of the drafter."""
        self.drafter, self.owner = drafter, owner or drafter

    def choose(self, state: DecodeState) -> Proposer:
        return self.drafter

    def observe(self, state: DecodeState, draft: DraftTree, verdict: Verdict) -> None:
        """Nothing to learn."""


class PerSequence:
    """Another drafter for each sequence of the batch: `drafters[b]`.

    Every drafter that is wanted somewhere drafts for the whole batch: a forward of eight rows costs little more than
    that of one, and taking batches apart would cost a forward a sequence.
    """

    def __init__(self, drafters: Sequence[Proposer]):
        self.drafters = drafters

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


def invalidate(proposer: Proposer, state: DecodeState) -> None:
    """Make whoever has drafted forget what it keeps of the texts, if it keeps anything."""
    for drafter in dict.fromkeys(proposer.drafters if isinstance(proposer, PerSequence) else [proposer]):
        if hasattr(drafter, "invalidate"):
            drafter.invalidate(state)
