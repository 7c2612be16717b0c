"""MTP layer of a target as a trainable module (DeepSeek-V3, arXiv 2412.19437, §2.2; FastMTP, arXiv 2509.18362).

Slot i holds the target's last hidden state h_i and the token x_{i+1}:

    r = W [RMSNorm(E x_{i+1}) ; RMSNorm(h_i)],    g_i = RMSNorm(Layer(r)),    logits of x_{i+2} = head(g_i)

The layer is a decoder layer of the target. E and head are the target's and frozen. In FastMTP one layer drafts several
tokens: step k + 1 reads g of step k instead of h, and the true token. The loss of step k has weight 0.6^k. Later
steps attend as in drafting (training-time test): to the keys of step 0, made from the target's states, and to their own
keys.

Some layers read the state before the target's final norm (`normed_features` false, as vLLM feeds MiMo's). Then the
tapped state, which is taken after the norm, is divided by the norm's weight. The remaining scale does not matter,
because RMSNorm(h_i) is invariant to scale.
"""

from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specctl.drafters.blueprint import Flag
from specctl.drafters.feature.head import (
    DraftHead,
    HeadAttention,
    HeadConfig,
    NormedLayer,
    OwnPairs,
    SlotBatch,
    StepRows,
    layer_pass,
)


@dataclass(frozen=True)
class MtpConfig(HeadConfig):
    """Shape of an MTP layer.

    Attributes:
        layout: naming scheme of the tensors in the target's files (`layouts.LAYOUTS`).
        qkv_bias: the projections of queries, keys and values have biases, as in Qwen2.
        qk_norm: queries and keys have norms, as in Qwen3.
        normed_features: h_i is the target's state after its final norm instead of before it.
    """

    layout: Literal["mimo", "qwen"]
    qkv_bias: Flag
    qk_norm: Flag
    normed_features: Flag

    @property
    def ignores_first_token(self) -> bool:
        """Whether the token of slot 0 is ignored: MiMo's layer reads zeros instead of its embedding."""
        return self.layout == "mimo"


class MtpHead(DraftHead):
    """MTP module. Parameters have our own names; `layouts` maps the targets' names. `fc` reads the embedding first."""

    config: MtpConfig
    supports_checkpointing = True
    target_norm: Tensor | None

    def __init__(self, config: MtpConfig):
        super().__init__(config, stored=False)
        size, eps = config.hidden_size, config.rms_norm_eps
        self.token_norm = nn.RMSNorm(size, eps)
        self.hidden_norm = nn.RMSNorm(size, eps)
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.layer = NormedLayer(config, HeadAttention(config, size, bias=config.qkv_bias, normed=config.qk_norm))
        self.norm = nn.RMSNorm(size, eps)
        self.register_buffer("target_norm", None if config.normed_features else torch.ones(size))

    @property
    def inverse_norm_weight(self) -> Tensor | None:
        """Factors [H] that remove the weight of the target's final norm from its states, or None if it stays.

        A channel with weight 0 is lost.
        """
        weight = self.target_norm
        return None if weight is None else torch.where(weight == 0, 0, 1 / weight).float()

    def forward(self, batch: SlotBatch, embedding: Tensor, target_head: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Losses of `steps` recursive steps over the response slots of a batch.

        If only some rows go on (`later_rows`), the later steps weigh accordingly less.
        """
        layer = self.layer
        embedded = self.token_norm(F.embedding(batch.key_tokens, embedding).float())
        if self.config.ignores_first_token:
            embedded = embedded.masked_fill((batch.key_positions == 0)[:, None], 0)
        hidden = batch.features.float()
        if (unnorm := self.inverse_norm_weight) is not None:
            hidden = hidden * unnorm
        entered = self._enter(embedded, hidden)
        pair = layer.key_and_value(layer.input_layernorm(entered), batch.key_positions)
        outputs, asked = self.unroll(batch, entered, partial(self._step, embedded, pair))
        x = torch.cat(outputs) * self.squash.scale  # a logit cap would not change the order of tokens
        product = x, target_head, self.squash.shift
        losses = self.distill_losses(product, asked, range(self.steps), batch, self.teacher(batch, target_head))
        return self.aggregate_losses(losses, [len(part) for part in asked])

    def _enter(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """Residual stream [n, H] fp32 of the layer, from normed embeddings and states, each [n, H]."""
        return self.fc(torch.cat((embedded, self.hidden_norm(hidden)), -1)).float()

    def _step(
        self, embedded: Tensor, pair: tuple[Tensor, Tensor], at: StepRows, x: Tensor, own: OwnPairs
    ) -> tuple[Tensor, OwnPairs]:
        """Run the layer on rows x [n, H]. Returns the output after the norm, which the next step reads."""
        layer = self.layer
        if at.k:
            x = self._enter(at.tokens(embedded), x)
        inputs = layer.input_layernorm(x)
        if at.k:
            own = [*own, layer.key_and_value(inputs, at.positions)]
        return self.norm(layer_pass(layer, (x, inputs), at.positions, pair, own, at.layout)).float(), own
