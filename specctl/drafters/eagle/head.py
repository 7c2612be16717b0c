"""EAGLE-1 head as a trainable module (Li et al. 2024, arXiv 2401.15077, §4).

Slot i holds the target's last hidden state f_i and the token x_{i+1}. The head predicts f_{i+1}, from which the
target's own vocabulary head predicts x_{i+2}. Training adds noise to the target's features, so that the head tolerates
its own errors at inference.
"""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specctl.decoding.target import Target
from specctl.drafters.feature.head import DraftHead, HeadConfig, HeadLayer, SlotBatch, layer_pass, pass_through

NOISE = 0.2  # noise is uniform in ±NOISE/2, scaled by 512 / length (at most 1)
CLASSIFICATION = 0.1  # weight of the distillation loss; the regression loss has weight 1


class EagleHead(DraftHead):
    """EAGLE-1 head. Parameters have the names of the published checkpoints (`fc`, `layers.0.*`); `fc` has no bias."""

    config: HeadConfig

    def __init__(self, config: HeadConfig):
        super().__init__(config, stored=False)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList([HeadLayer(config, config.hidden_size)])

    @property
    def layer(self) -> HeadLayer:
        return cast(HeadLayer, self.layers[0])

    @torch.no_grad()
    def initialise(self, target: Target) -> None:
        """Start by passing the feature through."""
        pass_through(self.fc, slice(-self.config.hidden_size, None))

    def forward(self, batch: SlotBatch, embedding: Tensor, target_head: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Regression and distillation loss over the response slots of a batch."""
        layer = self.layer
        features = batch.features.float()
        if self.training:
            lengths = torch.tensor([stop - start for start, stop in batch.layout.slots], device=features.device)
            scale = (NOISE * 512 / lengths).clamp_max(NOISE).repeat_interleave(lengths)
            features = features + (torch.rand_like(features) - 0.5) * scale.unsqueeze(1)
        x = self.fc(torch.cat((F.embedding(batch.key_tokens, embedding).float(), features), -1)).float()
        pair = layer.key_and_value(x, batch.key_positions)
        x = x[batch.query_rows]
        predicted = layer_pass(layer, (x, x), batch.key_positions[batch.query_rows], pair, [], batch.layout)
        rows = torch.arange(len(predicted), device=predicted.device)
        teacher = self.teacher(batch, target_head)
        # Leave out the logit cap of the target: it would not change the order of the tokens.
        product = predicted * self.squash.scale, target_head, self.squash.shift
        found = self.distill_losses(product, [rows], range(1), batch, teacher)
        regression = F.smooth_l1_loss(predicted, batch.teacher[rows].float(), reduction="none").mean(-1) * found.valid
        total = CLASSIFICATION * found.total + regression.sum()
        each = CLASSIFICATION * found.each + regression.detach()
        return self.aggregate_losses(found._replace(total=total, each=each), [len(rows)])
