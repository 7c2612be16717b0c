"""Generic controllers and proposers: one drafter for all sequences, or a separate one per sequence."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specctl.decoding.protocols import Controller, Proposer
from specctl.decoding.records import PADDING, DraftTree, Verdict
from specctl.decoding.state import DecodeState


class Fixed(Controller):
    """Controller with a single drafter."""

    accepts_late_counts = True

    def __init__(self, drafter: Proposer, owner: Controller | None = None):
        """`owner`: the controller under which `KeptCaches` (device/kept_caches.py) keeps these caches. The default is
        the drafter."""
        self.drafter, self.owner = drafter, owner or drafter

    def choose(self, state: DecodeState) -> Proposer:
        return self.drafter

    def observe(self, state: DecodeState, draft: DraftTree, verdict: Verdict) -> None:
        """No-op: there is nothing to learn."""


class PerSequence:
    """Proposer with a drafter per sequence of the batch: `drafters[b]`.

    Every drafter in use drafts for the whole batch. A forward of eight rows costs little more than one row, while
    splitting the batch would cost one forward per sequence.
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
    """Make each drafter of the last round forget its state for these sequences, if it keeps any."""
    for drafter in dict.fromkeys(proposer.drafters if isinstance(proposer, PerSequence) else [proposer]):
        if hasattr(drafter, "invalidate"):
            drafter.invalidate(state)
