"""Run-time form of a P-EAGLE head's upper decoder layers."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from specctl.decoding.rope import Rope
from specctl.decoding.target import Target
from specctl.drafters.feature.layer import HeadWeights
from specctl.drafters.peagle.head import PEagleHead, UpperLayer


class UpperPass(HeadWeights):
    """Decoder layer over the output rows of the previous layer."""

    def __init__(self, head: PEagleHead, layer: UpperLayer, target: Target):
        super().__init__(head, target)
        attention, mlp = layer.self_attn, layer.mlp
        self.heads, self.kv_heads, self.dim = layer.config.num_heads, layer.config.num_kv_heads, layer.config.head_dim
        self.qkv = self.linear(attention.q_proj, attention.k_proj, attention.v_proj)
        self.o = self.linear(attention.o_proj)
        self.gate_up = self.linear(mlp.gate_proj, mlp.up_proj)
        self.down = self.linear(mlp.down_proj)
        self.input_norm = self.rms_norm(layer.input_layernorm)
        self.post_norm = self.rms_norm(layer.post_attention_layernorm)

    def project(self, x: Tensor, table: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Keys concatenated with values [N, 2·Hkv, D], and queries [N, Hq, D], rotated, for rows [N, H]."""
        qkv = self.qkv(self.input_norm(x)).view(len(x), self.heads + 2 * self.kv_heads, self.dim)
        qkv = Rope.rotate(qkv, table)
        return qkv[:, self.heads :], qkv[:, : self.heads]

    def layer_output(self, x: Tensor, attended: Tensor) -> Tensor:
        """Output [N, H] fp32 of the layer, from its residual stream and the attention output [N, Hq·D]."""
        x = x + self.o(attended)
        gate, up = self.gate_up(self.post_norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate).mul_(up))
