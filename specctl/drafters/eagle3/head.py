"""EAGLE-3 head as a trainable module, with its training-time test (Li et al. 2025, arXiv 2503.01840, §3).

Slot i of a sequence holds the target's features g_i and the token x_{i+1}. At step 0 it predicts x_{i+2}. At step k the
slot reads the layer's own output of step k−1 and the token x_{i+1+k}, and predicts x_{i+2+k}. Inference is the same:
beyond the last committed position there are no target features, so the head reads its own outputs.

Only response tokens are trained on, so only response slots are queries. Prompt slots contribute keys and values of step
0, which cost one projection per token. Attention output, MLP, vocabulary head, loss and all later steps run on response
slots alone. In later steps a slot attends to step-0 keys and to its own outputs, never to another slot's. Therefore a
sample of the slots can go on while the others stop after step 0.

EAGLE-3.1's norms are options of the head, all off by default (`Eagle3Config`). With `norm_output` the final norm is
part of the recurrence: step k + 1 reads the same normed state that the vocabulary head reads at step k.

With `gradient_checkpointing` long samples fit into memory, at the price of a second forward pass.
"""

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from specctl.drafters.feature.fusion import Flag, FusionConfig, FusionHead
from specctl.drafters.feature.head import OwnPairs, SlotBatch, StepRows
from specctl.drafters.feature.ttt_attention import attention as ttt_attention
from specctl.drafters.lora import as_single_product


@dataclass(frozen=True)
class Eagle3Config(FusionConfig):
    """Shape of an EAGLE-3 head.

    Attributes:
        norm_output: a draft step passes its output to the next step after the final norm instead of before it.
    """

    norm_output: Flag = False


class Eagle3Head(FusionHead):
    """EAGLE-3 head: one layer that reads its own output (EAGLE-3, Fig. 5)."""

    config: Eagle3Config

    @property
    def sight(self) -> int | None:
        return self.config.sliding_window

    def forward(self, batch: SlotBatch, embedding: Tensor, target_head: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Run the training-time test over a batch.

        If only some rows go on (`later_rows`), the later steps weigh accordingly less.
        """
        layer = self.midlayer
        hidden = self.feature(batch.features)
        embedded = layer.input_layernorm(F.embedding(batch.key_tokens, embedding).float())
        inputs = torch.cat((embedded, layer.hidden_norm(hidden)), -1)
        key, value = layer.key_and_value(inputs, batch.key_positions)
        outputs, asked = self.unroll(batch, hidden, partial(self._step, embedded, key, value))
        # The vocabulary head and the loss are not part of the recurrence: compute them in one product for all steps.
        x = torch.cat(outputs)
        if not self.config.norm_output:
            x = self.norm(x)
        losses = self.distill_losses(
            as_single_product(self.lm_head, x), asked, range(self.steps), batch, self.teacher(batch, target_head)
        )
        return self.aggregate_losses(losses, [len(part) for part in asked])

    def _step(
        self, embedded: Tensor, key: Tensor, value: Tensor, at: StepRows, x: Tensor, own: OwnPairs
    ) -> tuple[Tensor, OwnPairs]:
        """Run the layer on the rows x [n, H]. The output is taken after the final norm if `norm_output` is set."""
        layer = self.midlayer
        normed = layer.hidden_norm(x)
        inputs = torch.cat((at.tokens(embedded), normed), -1)
        if at.k:
            own = [*own, layer.key_and_value(inputs, at.positions)]
        query, layout = layer.query(inputs, at.positions), self.within_window(at.layout, at.k)
        out = ttt_attention(query, key, value, [pair[0] for pair in own], [pair[1] for pair in own], layout)
        x = layer.layer_output(normed.float() if self.config.norm_before_residual else x, out)
        return self.norm(x).float() if self.config.norm_output else x, own
