"""A decoder layer of a block-parallel head at inference."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from specctl.decoding.models.layers import RMSNorm
from specctl.decoding.rope import Rope
from specctl.decoding.target import Target
from specctl.drafters.dflash.head import BlockHead, BlockLayer
from specctl.drafters.feature.layer import HeadWeights


class HeadNorms(RMSNorm):
    """RMSNorms of several heads [N, heads, D], with a weight [heads, D]."""

    def fused(self, x: Tensor) -> Tensor:
        return (F.rms_norm(x.float(), x.shape[-1:], None, self.eps) * self.weight).to(self.dtype)


class BlockPass(HeadWeights):
    """A decoder layer over the rows of a block."""

    def __init__(self, head: BlockHead, layer: BlockLayer, target: Target):
        super().__init__(head, target)
        config, attention, mlp = layer.config, layer.self_attn, layer.mlp
        self.normed = config.num_heads + config.num_kv_heads  # heads
        self.qkv = self.linear(attention.q_proj, attention.k_proj, attention.v_proj)
        self.o = self.linear(attention.o_proj)
        self.gate_up = self.linear(mlp.gate_proj, mlp.up_proj)
        self.down = self.linear(mlp.down_proj)
        self.input_norm = self.rms_norm(layer.input_layernorm)
        self.post_norm = self.rms_norm(layer.post_attention_layernorm)
        query = attention.q_norm.weight.expand(config.num_heads, -1)
        key = attention.k_norm.weight.expand(config.num_kv_heads, -1)
        self.norms = HeadNorms(torch.cat((query, key)).to(self.device), config.rms_norm_eps, self.dtype)
        self.key_norms = HeadNorms(key.to(self.device), config.rms_norm_eps, self.dtype)

    def project(self, x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
        """Queries, keys and values [N, Hq + 2·Hkv, D] of rows [N, H], normed and rotated."""
        heads = table[0].shape[1]
        qkv = self.qkv(self.input_norm(x)).view(len(x), heads, -1)
        return Rope.rotate(torch.cat((self.norms(qkv[:, : self.normed]), qkv[:, self.normed :]), 1), table)

    def leave(self, x: Tensor, attended: Tensor) -> Tensor:
        """The layer's output [N, H] fp32 from its residual stream and what its heads saw [N, Hq·D]."""
        x = x + self.o(attended)
        gate, up = self.gate_up(self.post_norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate).mul_(up))
