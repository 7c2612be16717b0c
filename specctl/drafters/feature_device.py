"""The rounds of a feature drafter on the device: the chain or tree of feature.py, grown in tensors of fixed shapes.

All levels are always expanded: a `stop_below` would have to be read back. Candidates deeper than a sequence has room
for are padding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specctl import kernels
from specctl.decoding.cache import plan_at
from specctl.decoding.device.resident import Resident
from specctl.decoding.records import PADDING, DraftTree
from specctl.decoding.state import DecodeState

if TYPE_CHECKING:
    from specctl.drafters.feature import FeatureDrafter


class FeatureRounds:
    """Levels of `width` expanded nodes with `children` candidates each; the `nodes` best candidates are the draft."""

    def __init__(self, drafter: FeatureDrafter, state: DecodeState, budget: int):
        shape = drafter.shape.within(budget)
        self.drafter, self.levels, self.width = drafter, min(shape.depth, budget), shape.width
        self.children = min(shape.children, len(drafter.ids))
        candidates = self.children * (1 + (self.levels - 1) * self.width)
        self.nodes, self.chain = min(shape.nodes, candidates), shape.chain
        if self.chain:
            self.nodes = self.levels
        self.depth = min(self.levels, self.nodes)
        self.reach = max(1 + self.nodes, (self.levels - 1) * self.width, self.depth + 1)
        self.hidden = torch.zeros(state.batch, drafter.size, device=state.device)
        self.carried = [self.hidden]

    def load(self, state: DecodeState) -> None:
        self.drafter.advance(state)
        memory = state.memory[self.drafter.key]
        self.hidden.copy_(memory.hidden)
        self.cache = memory.cache

    def store(self, state: DecodeState) -> None:
        memory = state.memory[self.drafter.key]
        memory.cached, memory.hidden = list(state.cached), self.hidden

    def propose(self, sequences: Resident, span: int) -> DraftTree:
        """As `FeatureDrafter._chain` and `_tree`; joint probabilities in fp64, as Python adds them."""
        batch, width, children = sequences.batch, self.width, self.children
        gains, index = kernels.expand_topk(self.drafter.logits(self.hidden), children)
        joint = [gains.double()]  # of every level, [B, candidates]
        tokens = [self.drafter.ids[index]]
        parents = [torch.full_like(index, -1)]
        hidden = self.hidden[:, None].expand(-1, width, -1)  # every child of the root continues the last slot
        seen = torch.ones(batch, width, 0, dtype=torch.bool, device=sequences.device)
        own = torch.eye(width, dtype=torch.bool, device=seen.device).expand(batch, -1, -1)
        found = 0  # candidates of earlier levels
        for step in range(self.levels - 1):
            best = joint[-1].sort(dim=-1, descending=True, stable=True).indices[:, :width]
            best = torch.cat((best, best[:, -1:].expand(-1, width - best.shape[1])), 1)
            if step:
                source = (best // children).unsqueeze(-1)  # its parent's row among those of the step before
                hidden = hidden.gather(1, source.expand(-1, -1, hidden.shape[-1]))
                seen = seen.gather(1, source.expand(-1, -1, seen.shape[-1]))
            seen = torch.cat((seen, own), -1)
            plan = plan_at(sequences.length - 1, seen, step, span=span, dtype=sequences.dtype)
            rows = self.drafter.rows_at(tokens[-1].gather(1, best), hidden.flatten(0, 1), self.cache, plan)
            hidden = rows.view(batch, width, -1)
            gains, index = kernels.expand_topk(self.drafter.logits(rows), children)
            level = (joint[-1].gather(1, best).unsqueeze(-1) + gains.view(batch, width, -1).double()).flatten(1)
            parents.append((best + found).repeat_interleave(children, 1))
            found += joint[-1].shape[1]
            joint.append(level)
            tokens.append(self.drafter.ids[index].view(batch, -1))
        return self._best(sequences, joint, torch.cat(tokens, 1), torch.cat(parents, 1))

    def _best(self, sequences: Resident, joint: list[Tensor], tokens: Tensor, parents: Tensor) -> DraftTree:
        """The candidates of highest joint probability that there is room for, in the order they were found."""
        room = sequences.room.unsqueeze(1)
        fits = torch.cat([(room > level).expand(-1, part.shape[1]) for level, part in enumerate(joint)], 1)
        order = torch.cat(joint, 1).masked_fill(~fits, -torch.inf).sort(dim=-1, descending=True, stable=True).indices
        kept = order[:, : self.nodes].sort(-1).values
        place = torch.zeros_like(tokens).scatter(1, kept, torch.arange(self.nodes, device=kept.device).expand_as(kept))
        above = parents.gather(1, kept)
        links = torch.where(above < 0, -1, place.gather(1, above.clamp(min=0)))
        return DraftTree(tokens.gather(1, kept), torch.where(fits.gather(1, kept), links, PADDING), chain=self.chain)

    def advance(self, sequences: Resident, before: Tensor, span: int) -> None:
        """Fill the slots of what was committed: rows for as much as a round can commit, padded with the last."""
        assert sequences.features is not None
        place = torch.arange(self.depth + 1, device=before.device)
        base, end = before - 1, sequences.length - 2  # the first slot to fill, and the last
        slots = torch.minimum(base.unsqueeze(1) + place, end.unsqueeze(1))
        features = self.drafter.feature(sequences.features[sequences.sequences, slots].flatten(0, 1))
        causal = (place <= place.unsqueeze(1)).expand(sequences.batch, -1, -1)
        plan = plan_at(base, causal, place, span=span, dtype=sequences.dtype)
        last = (end - base).clamp(min=0)  # a sequence that is finished has nothing new
        tokens = sequences.ids.gather(1, slots + 1)
        self.hidden.copy_(self.drafter.rows_at(tokens, features, self.cache, plan, last))
