"""Medusa heads as a trainable module (Cai et al. 2024, arXiv 2401.10774, "Medusa-1").

Each head predicts one of the next tokens from the target's last state alone.
"""

from typing import cast

import torch
from torch import Tensor, nn

from specctl.decoding.target import Target
from specctl.drafters.depth.head import DepthHeads, HeadsConfig, ResBlock
from specctl.drafters.feature.head import SlotBatch, copy_vocabulary_head


class MedusaHeads(DepthHeads):
    """Medusa module: head k is a `ResBlock` followed by a vocabulary matrix."""

    def __init__(self, config: HeadsConfig, draft_ids: Tensor | None = None):
        super().__init__(config, draft_ids)
        self.blocks = nn.ModuleList([ResBlock(config.hidden_size) for _ in range(config.draft_heads)])
        self.lm_head = nn.ModuleList(
            [nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False) for _ in range(config.draft_heads)]
        )

    @property
    def sight(self) -> int | None:
        return 1

    @torch.no_grad()
    def initialise(self, target: Target) -> None:
        """Start as copies of the target's vocabulary head."""
        for k in range(self.config.draft_heads):
            copy_vocabulary_head(self.vocabulary(k), self.draft_ids, target)

    def states(self, batch: SlotBatch) -> Tensor:
        return batch.features[batch.query_rows].float()

    def hidden(self, k: int, inputs: Tensor) -> Tensor:
        return self.blocks[k](inputs)

    def vocabulary(self, k: int) -> nn.Linear:
        return cast(nn.Linear, self.lm_head[k])

    def inputs(self, k: int, batch: SlotBatch, states: Tensor, row: Tensor, embedding: Tensor) -> Tensor:
        return states
