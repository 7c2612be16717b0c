"""The rounds of an `lm` drafter on the device: chains of fixed length, padded where a sequence has no room for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specctl import kernels
from specctl.decoding.cache import plan_at
from specctl.decoding.device.resident import Resident
from specctl.decoding.records import PADDING, DraftTree
from specctl.decoding.sampling import DRAFT
from specctl.decoding.state import DecodeState

if TYPE_CHECKING:
    from specctl.drafters.lm_drafter import LMDrafter


class LMRounds:
    """Slot i of the drafter's cache holds token i; `following` [B, V] are the logits behind the last committed one."""

    def __init__(self, drafter: LMDrafter, state: DecodeState, budget: int):
        self.drafter, self.depth = drafter, min(drafter.shape.depth, budget)
        self.reach = self.depth + 2
        self.following = torch.zeros(state.batch, drafter.vocab_size, dtype=state.dtype, device=state.device)
        self.carried = [self.following]

    def load(self, state: DecodeState) -> None:
        self.drafter.advance(state)
        memory = state.memory[self.drafter]
        self.following.copy_(memory.logits)
        self.cache = memory.cache

    def store(self, state: DecodeState) -> None:
        memory = state.memory[self.drafter]
        memory.length, memory.logits = [len(row.ids) for row in state.rows], self.following

    def propose(self, sequences: Resident, span: int) -> DraftTree:
        """As `LMDrafter.propose`."""
        sampled = self.drafter.shape.sampled and not sequences.draws.greedy
        alone = torch.ones(sequences.batch, 1, 1, dtype=torch.bool, device=sequences.device)
        logits, rows = self.following, []
        chosen: list[Tensor] = []
        for step in range(self.depth):
            if step:
                plan = plan_at(sequences.length + step - 1, alone, 0, span=span, dtype=sequences.dtype)
                hidden, _ = self.drafter.model.forward(chosen[-1], self.cache, plan, ())
                logits = self.drafter.logits(hidden[:, 0])
            if sampled:
                row = sequences.draws.rows(logits.unsqueeze(1))
                positions = (sequences.length + step).unsqueeze(1)
                uniforms = sequences.draws.uniform(positions, DRAFT + step).flatten()
                chosen.append(kernels.sample_rows(row, uniforms).unsqueeze(1))
                rows.append(row)
            else:
                chosen.append(kernels.argmax(logits).unsqueeze(1))
        place = torch.arange(self.depth, device=sequences.device)
        parents = torch.where(place < sequences.room.unsqueeze(1), place - 1, PADDING)
        return DraftTree(torch.cat(chosen, 1), parents, stacked(rows) if sampled else None)

    def advance(self, sequences: Resident, before: Tensor, span: int) -> None:
        """Read what was committed: rows for as much as a round can commit, the last repeated as padding.

        Accepted tokens were read when they were drafted; reading them again spares the question of which.
        """
        place = torch.arange(self.depth + 1, device=before.device)
        end = sequences.length - 1
        slots = torch.minimum(before.unsqueeze(1) + place, end.unsqueeze(1))
        causal = (place <= place.unsqueeze(1)).expand(sequences.batch, -1, -1)
        plan = plan_at(before, causal, place, span=span, dtype=sequences.dtype)
        hidden, _ = self.drafter.model.forward(sequences.ids.gather(1, slots), self.cache, plan, ())
        last = (end - before).clamp(min=0).unsqueeze(1)  # a sequence that is finished has nothing new
        self.following.copy_(self.drafter.logits(hidden[sequences.sequences, last][:, 0]))


def stacked(rows: list[kernels.Rows]) -> kernels.Rows:
    """The rows of all depths, sequence-major: row b·n + i is that of token i of sequence b."""
    return kernels.Rows(*(torch.stack(field, 1).flatten(0, 1) for field in zip(*rows, strict=True)))
