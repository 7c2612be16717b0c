"""Hydra heads as a trainable module (Ankner et al. 2024, arXiv 2402.05109, §3 and 4.3: "Hydra++").

Head k reads cat(p_i, emb(x_{i+1}), …, emb(x_{i+k+1})) and predicts x_{i+2+k}: unlike Medusa's it knows the tokens
drafted before its own. p_i is the output of one decoder layer over the target's last states h_0 … h_i, the prefix
attention.

In the published files layers 2 … n of a head are one and the same: their `Sequential` repeats a module. So they are
here, where that module is stored once (`hydra_mlp.K.3`).
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specctl.drafters.depth_heads import DepthConfig, DepthHeads, ResBlock
from specctl.drafters.head import HeadLayer, SlotBatch
from specctl.drafters.ttt_attention import attention as ttt_attention


class PrefixLayer(HeadLayer):
    """A Llama decoder layer."""

    def __init__(self, config: DepthConfig):
        super().__init__(config, config.hidden_size)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)


class Prefix(nn.Module):
    """The layer, and the norm behind it."""

    def __init__(self, config: DepthConfig):
        super().__init__()
        self.layers = nn.ModuleList([PrefixLayer(config)])
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    @property
    def layer(self) -> PrefixLayer:
        return cast(PrefixLayer, self.layers[0])


class HydraHeads(DepthHeads):
    """Parameters carry the names of the published `hydra_lm_head` ("prefix-mlp", grounded)."""

    def __init__(self, config: DepthConfig, draft_ids: Tensor | None = None):
        super().__init__(config, draft_ids)
        size = config.hidden_size
        self.prefix_embeding_layer = Prefix(config)  # the published spelling
        self.hydra_mlp, self.hydra_lm_head = nn.ModuleList(), nn.ModuleList()
        for k in range(config.draft_heads):
            again = [nn.Dropout(0.0), ResBlock(size)] if config.num_layers > 1 else []
            self.hydra_mlp.append(nn.Sequential(nn.Dropout(0.0), ResBlock(size, k + 2), *again))
            self.hydra_lm_head.append(nn.Sequential(nn.Dropout(0.0), nn.Linear(size, config.draft_vocab_size)))

    def prefix(self, batch: SlotBatch) -> Tensor:
        """p [N, H] of the response slots; the others are keys and values only."""
        layer, dim = self.prefix_embeding_layer.layer, self.config.head_dim
        part, rows = layer.self_attn, batch.query_rows
        x = batch.features.float()
        inputs = layer.input_layernorm(x)
        key = self.rope(part.k_proj(inputs).unflatten(-1, (-1, dim)), batch.key_positions)
        value = part.v_proj(inputs).unflatten(-1, (-1, dim))
        query = self.rope(part.q_proj(inputs[rows]).unflatten(-1, (-1, dim)), batch.key_positions[rows])
        out = layer.leave(x[rows], ttt_attention(query, key, value, [], [], batch.layout))
        return self.prefix_embeding_layer.norm(out)

    def head(self, k: int, inputs: Tensor) -> Tensor:
        """Logits [n, Vd] of head k from its inputs [n, (k + 2)·H]."""
        mlp: Any = self.hydra_mlp[k]
        x = mlp[:2](inputs)
        for _ in range(self.config.num_layers - 1):
            x = mlp[2:](x)
        return self.hydra_lm_head[k](x)

    def forward(self, batch: SlotBatch, embedding: Tensor, target_head: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Loss of all heads over a batch, tokens teacher-forced; returns as `DraftHead.sums`.

        Args:
            embedding: [V, H] the target's (frozen) token embedding.
            target_head: [Vd, H] the rows of the target's vocabulary head that belong to the draft vocabulary.
        """
        prefix, slots = self.prefix(batch), batch.query_rows

        def inputs(k: int) -> Tensor:
            rows = batch.later_rows if k else slice(None)
            # Slot s + j holds token x_{s+j+1}; past the end of a document the row is no longer valid.
            ahead = slots[rows].unsqueeze(1) + torch.arange(k + 1, device=slots.device)
            tokens = batch.key_tokens[ahead.clamp_max(len(batch.key_tokens) - 1)]
            return torch.cat((prefix[rows], F.embedding(tokens, embedding).float().flatten(1)), -1)

        return self.distil((self.head(k, inputs(k)) for k in range(self.config.draft_heads)), batch, target_head)
