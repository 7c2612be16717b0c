"""EAGLE-3 head as a trainable module, with its training-time test (Li et al. 2025, arXiv 2503.01840, §3).

Slot i of a sequence holds the target's features g_i and the token x_{i+1}. At step 0 it predicts x_{i+2}. At step k the
slot reads the last layer's own output of step k−1 and the token x_{i+1+k}, and predicts x_{i+2+k}. Inference is the
same: beyond the last committed position there are no target features, so the head reads its own outputs.

Only the first layer reads tokens and features. Each further layer is Llama's: it reads the output of the previous one,
and has its own keys and values. vLLM, SGLang and the package `speculators` compute the same.

Only response tokens are trained on, so only response slots are queries of the last layer. For it, prompt slots
contribute keys and values of step 0, which cost one projection per token. The layers before it run on all slots at step
0. Attention output, MLP, vocabulary head, loss and all later steps run on response slots alone. In later steps a slot
attends to step-0 keys and to its own outputs, never to another slot's. Therefore a sample of the slots can go on while
the others stop after step 0.

EAGLE-3.1's norms are options of the head, all off by default (`Eagle3Config`). With `norm_output` the final norm is
part of the recurrence: step k + 1 reads the same normed state that the vocabulary head reads at step k.

With `gradient_checkpointing` long samples fit into memory, at the price of a second forward pass.
"""

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from specctl.drafters.blueprint import Flag
from specctl.drafters.feature.fusion import FusionConfig, FusionHead
from specctl.drafters.feature.head import OwnPairs, SlotBatch, StepRows, layer_pass
from specctl.drafters.lora import as_single_product


@dataclass(frozen=True)
class Eagle3Config(FusionConfig):
    """Shape of an EAGLE-3 head.

    Attributes:
        norm_output: a draft step passes its output to the next step after the final norm instead of before it.
    """

    norm_output: Flag = False


class Eagle3Head(FusionHead):
    """EAGLE-3 head: layers that read their own output (EAGLE-3, Fig. 5)."""

    config: Eagle3Config

    def forward(self, batch: SlotBatch, embedding: Tensor, target_head: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Run the training-time test over a batch.

        If only some rows go on (`later_rows`), the later steps weigh accordingly less.
        """
        x = self.feature(batch.features)
        embedded = self.midlayer.input_layernorm(F.embedding(batch.key_tokens, embedding).float())
        run = partial(checkpoint, layer_pass, use_reentrant=False) if self.gradient_checkpointing else layer_pass
        layers, pairs, layout = self.all_layers, OwnPairs(), batch.layout.within(self.config.sliding_window, 0)
        for place, layer in enumerate(layers):
            entered = self._enter(place, x, embedded)
            pairs.append(layer.key_and_value(entered[1], batch.key_positions))
            if place + 1 < len(layers):
                x = run(layer, entered, batch.key_positions, pairs[place], [], layout.whole)
        outputs, asked = self.unroll(batch, x, partial(self._step, embedded, pairs))
        # The vocabulary head and the loss are not part of the recurrence: compute them in one product for all steps.
        x = torch.cat(outputs)
        if not self.config.norm_output:
            x = self.norm(x)
        losses = self.distill_losses(
            as_single_product(self.lm_head, x), asked, range(self.steps), batch, self.teacher(batch, target_head)
        )
        return self.aggregate_losses(losses, [len(part) for part in asked])

    def _enter(self, place: int, x: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        """Residual stream [n, H] of a layer and the input of its projections, from the rows x [n, H] that it reads.

        Only the first layer reads the tokens, given as their normed embeddings [n, H].
        """
        if place:
            return x, self.upper[place - 1].input_layernorm(x)
        normed = self.midlayer.hidden_norm(x)
        residual = normed.float() if self.config.norm_before_residual else x
        return residual, torch.cat((embedded, normed), -1)

    def _step(
        self, embedded: Tensor, pairs: OwnPairs, at: StepRows, x: Tensor, own: OwnPairs
    ) -> tuple[Tensor, OwnPairs]:
        """Run the layers on the rows x [n, H]. The output is taken after the final norm if `norm_output` is set.

        At step 0 only the last layer is left to run. `pairs` are the keys and values of every layer at step 0, `own`
        the keys and values of the rows at later steps, layer by layer.
        """
        layers = self.all_layers
        layout = at.layout.within(self.config.sliding_window, at.k)
        for place in range(0 if at.k else len(layers) - 1, len(layers)):
            layer = layers[place]
            entered = self._enter(place, x, at.tokens(embedded))
            if at.k:
                own = [*own, layer.key_and_value(entered[1], at.positions)]
            x = layer_pass(layer, entered, at.positions, pairs[place], own[place :: len(layers)], layout)
        return self.norm(x).float() if self.config.norm_output else x, own
