"""Hydra heads as a trainable module (Ankner et al. 2024, arXiv 2402.05109, §3 and 4.3: "Hydra++").

Head k reads cat(p_i, emb(x_{i+1}), …, emb(x_{i+k+1})) and predicts x_{i+2+k}: unlike Medusa's it knows the tokens
drafted before its own. p_i is the output of one decoder layer over the target's last states h_0 … h_i, the prefix
attention.

In the published files layers 2 … n of a head are one and the same: their `Sequential` repeats a module. So they are
here, where that module is stored once (`hydra_mlp.K.3`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from specctl.decoding.layers import Rope
from specctl.drafters.depth_heads import DepthHeads, HeadsConfig, ResBlock
from specctl.drafters.eagle3_head import SlotBatch
from specctl.drafters.ttt_attention import Layout, attention


@dataclass(frozen=True)
class HydraConfig(HeadsConfig):
    """The heads, and the decoder layer of the prefix attention."""

    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int


class Prefix(nn.Module):
    """A decoder layer and a norm over the target's last states; `transformers`' modules hold the parameters."""

    inv_freq: Tensor

    def __init__(self, config: HydraConfig):
        super().__init__()
        self.config = config
        shape = LlamaConfig(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            rms_norm_eps=config.rms_norm_eps,
            max_position_embeddings=config.max_position_embeddings,
        )
        shape._attn_implementation = "eager"
        self.layers = nn.ModuleList([LlamaDecoderLayer(shape, 0)])
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        half = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        self.register_buffer("inv_freq", config.rope_theta**-half, persistent=False)

    def forward(self, states: Tensor, positions: Tensor, rows: Tensor, layout: Layout) -> Tensor:
        """p [N, H] of the slots `rows` [N] among the states [M, H] of all; the others are keys and values only."""
        layer: Any = self.layers[0]
        part, dim = layer.self_attn, self.config.head_dim
        x = states.float()
        normed = layer.input_layernorm(x)
        key = part.k_proj(normed).unflatten(-1, (-1, dim))
        value = part.v_proj(normed).unflatten(-1, (-1, dim))
        query = part.q_proj(normed[rows]).unflatten(-1, (-1, dim))
        rope = Rope.of(self.inv_freq, positions, key.dtype)
        cos, sin = rope.cos.unsqueeze(1), rope.sin.unsqueeze(1)
        query, key = Rope.rotate(query, (cos[rows], sin[rows])), Rope.rotate(key, (cos, sin))
        x = x[rows] + part.o_proj(attention(query, key, value, [], [], layout).flatten(1))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.norm(x)


class HydraHeads(DepthHeads):
    """Parameters carry the names of the published `hydra_lm_head` ("prefix-mlp", grounded)."""

    config: HydraConfig

    def __init__(self, config: HydraConfig, draft_ids: Tensor | None = None, decay: float = 1.0, dropout: float = 0.0):
        super().__init__(config, draft_ids, decay)
        size = config.hidden_size
        self.prefix_embeding_layer = Prefix(config)  # the published spelling
        self.hydra_mlp = nn.ModuleList()
        for k in range(config.draft_heads):
            again = [nn.Dropout(dropout), ResBlock(size)] if config.num_layers > 1 else []
            self.hydra_mlp.append(nn.Sequential(nn.Dropout(dropout), ResBlock(size, k + 2), *again))
        self.hydra_lm_head = nn.ModuleList(
            [
                nn.Sequential(nn.Dropout(dropout), nn.Linear(size, config.draft_vocab_size))
                for _ in range(config.draft_heads)
            ]
        )

    def head(self, k: int, inputs: Tensor) -> Tensor:
        """Logits [N, Vd] of head k from its inputs [N, (k + 2)·H]."""
        mlp: Any = self.hydra_mlp[k]
        x = mlp[:2](inputs)
        for _ in range(self.config.num_layers - 1):
            x = mlp[2:](x)
        return self.hydra_lm_head[k](x)

    def forward(self, batch: SlotBatch, embedding: Tensor, target_head: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Loss of all heads over a batch, tokens teacher-forced; see `DepthHeads.distil`.

        Args:
            embedding: [V, H] the target's (frozen) token embedding.
            target_head: [Vd, H] the rows of the target's vocabulary head that belong to the draft vocabulary.
        """
        slots = batch.query_rows
        inputs = [self.prefix_embeding_layer(batch.features, batch.key_positions, slots, batch.layout)]
        for k in range(self.config.draft_heads):
            # Slot s + k holds token x_{s+k+1}; past the end of a document the row is no longer valid.
            tokens = batch.key_tokens[(slots + k).clamp_max(len(batch.key_tokens) - 1)]
            inputs.append(F.embedding(tokens, embedding).float())
        logits = (self.head(k, torch.cat(inputs[: k + 2], -1)) for k in range(self.config.draft_heads))
        return self.distil(logits, batch, target_head)
