"""Modules with one head per draft depth, the base of `hydra` and `medusa`, and their distillation loss.

Slot i of a sequence holds the target's state h_i after its final norm and the token x_{i+1}. Head k = 0, 1, … predicts
x_{i+2+k}. Every head has a separate vocabulary matrix, as in the published files.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specctl.drafters.blueprint import Count
from specctl.drafters.feature.head import DraftConfig, DraftHead, Losses, SlotBatch
from specctl.drafters.lora import as_single_product


@dataclass(frozen=True)
class HeadsConfig(DraftConfig):
    """Shape of `draft_heads` heads of `num_layers` layers each."""

    draft_heads: Count
    num_layers: Count


class ResBlock(nn.Module):
    """Residual block skip(x) + silu(linear(x)); skip is the identity, or a projection of several states.

    The linear part starts at zero, so the block starts as skip(x).
    """

    def __init__(self, size: int, states: int = 1):
        super().__init__()
        self.linear = nn.Linear(states * size, size)
        self.res_connection = nn.Linear(states * size, size) if states > 1 else nn.Identity()
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.res_connection(x) + F.silu(self.linear(x))


class DepthHeads(DraftHead):
    """Base class of modules with one head per draft depth."""

    config: HeadsConfig

    def __init__(self, config: HeadsConfig, draft_ids: Tensor | None = None):
        # The published files have no draft vocabulary, so it is stored only if it differs from the target's.
        super().__init__(config, draft_ids, stored=config.draft_vocab_size < config.vocab_size)
        self.steps = config.draft_heads

    def states(self, batch: SlotBatch) -> Tensor:
        """Text representation [N, H] that the heads read at each response slot."""
        raise NotImplementedError

    def hidden(self, k: int, inputs: Tensor) -> Tensor:
        """Input [n, H] of head k's vocabulary matrix, from the head's inputs [n, ·]."""
        raise NotImplementedError

    def vocabulary(self, k: int) -> nn.Linear:
        """Vocabulary matrix of head k."""
        raise NotImplementedError

    def inputs(self, k: int, batch: SlotBatch, states: Tensor, row: Tensor, embedding: Tensor) -> Tensor:
        """Input [n, ·] of head k at the response slots `row` [n] with the `states` [n, H]."""
        raise NotImplementedError

    def forward(self, batch: SlotBatch, embedding: Tensor, target_head: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Loss of all heads over a batch, one head after another, with teacher-forced tokens.

        Head 0 learns from all response slots, the other heads from `later_rows`.
        """
        states, teacher = self.states(batch), self.teacher(batch, target_head)
        found = []
        for k in range(self.steps):
            row = batch.later_rows if k else torch.arange(len(states), device=states.device)
            x = self.hidden(k, self.inputs(k, batch, states[row] if k else states, row, embedding))
            found.append(
                self.distill_losses(as_single_product(self.vocabulary(k), x), [row], range(k, k + 1), batch, teacher)
            )
        total, each, valid, share = zip(*found, strict=True)
        losses = Losses(torch.stack(total).sum(), torch.cat(each), torch.cat(valid), torch.cat(share))
        return self.aggregate_losses(losses, [len(part) for part in each])
