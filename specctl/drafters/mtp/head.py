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
from typing import Annotated, Literal, cast

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from specctl.drafters.feature.head import DraftHead, HeadAttention, HeadConfig, HeadLayer, OwnPairs, SlotBatch, StepRows
from specctl.drafters.feature.ttt_attention import attention as ttt_attention

Flag = Annotated[bool, Field(strict=True)]


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


class MtpAttention(HeadAttention):
    q_norm: nn.RMSNorm | None
    k_norm: nn.RMSNorm | None

    def __init__(self, config: MtpConfig):
        super().__init__(config, config.hidden_size, config.qkv_bias)
        dim, eps = config.head_dim, config.rms_norm_eps
        self.q_norm = nn.RMSNorm(dim, eps) if config.qk_norm else None
        self.k_norm = nn.RMSNorm(dim, eps) if config.qk_norm else None


class MtpLayer(HeadLayer):
    def __init__(self, config: MtpConfig):
        super().__init__(config, config.hidden_size, MtpAttention(config))
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def heads(self, x: Tensor, positions: Tensor, projection: nn.Module, norm: nn.RMSNorm | None) -> Tensor:
        """Normed and rotated queries or keys [n, heads, D] for layer inputs [n, H]."""
        split = projection(x).view(len(x), -1, self.config.head_dim)
        return self.rope(split if norm is None else norm(split.float()), positions)

    def key_and_value(self, inputs: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        attention = cast(MtpAttention, self.self_attn)
        value = attention.v_proj(inputs).view(len(inputs), -1, self.config.head_dim)
        return self.heads(inputs, positions, attention.k_proj, attention.k_norm).to(value.dtype), value

    def query(self, inputs: Tensor, positions: Tensor) -> Tensor:
        attention = cast(MtpAttention, self.self_attn)
        return self.heads(inputs, positions, attention.q_proj, attention.q_norm)


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
        self.layer = MtpLayer(config)
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
        key, value = layer.key_and_value(layer.input_layernorm(entered), batch.key_positions)
        outputs, asked = self.unroll(batch, entered, partial(self._step, embedded, key, value))
        x = torch.cat(outputs) * self.squash.scale  # a logit cap would not change the order of tokens
        product = x, target_head, self.squash.shift
        losses = self.distill_losses(product, asked, range(self.steps), batch, self.teacher(batch, target_head))
        return self.aggregate_losses(losses, [len(part) for part in asked])

    def _enter(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """Residual stream [n, H] fp32 of the layer, from normed embeddings and states, each [n, H]."""
        return self.fc(torch.cat((embedded, self.hidden_norm(hidden)), -1)).float()

    def _step(
        self, embedded: Tensor, key: Tensor, value: Tensor, at: StepRows, x: Tensor, own: OwnPairs
    ) -> tuple[Tensor, OwnPairs]:
        """Run the layer on rows x [n, H]. Returns the output after the norm, which the next step reads."""
        layer = self.layer
        if at.k:
            x = self._enter(at.tokens(embedded), x)
        inputs = layer.input_layernorm(x)
        if at.k:
            own = [*own, layer.key_and_value(inputs, at.positions)]
        query = layer.query(inputs, at.positions).to(value.dtype)
        out = ttt_attention(query, key, value, [pair[0] for pair in own], [pair[1] for pair in own], at.layout)
        return self.norm(layer.layer_output(x, out)).float(), own
