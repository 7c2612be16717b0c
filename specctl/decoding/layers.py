"""The few operations a lean decoder layer is made of, shared by the target step and by draft heads.

Everything works on rows: hidden states are [N, H] with N = B·T, the residual stream stays in fp32, matrix products run
in the weights' dtype. On a CPU, weights are packed once for oneDNN, which halves the time of a small bf16 product.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from specctl.decoding.cache import KVCache, Plan


def _can_pack(weight: Tensor) -> bool:
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


class Linear:
    """y = x Wᵀ (+ b) for inference; packs W for oneDNN where that is faster (bf16 on a CPU that has it)."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        self.bias = bias
        self.dtype = weight.dtype
        self.packed = _can_pack(weight)
        weight = weight.detach().contiguous()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight) if self.packed else weight

    def __call__(self, x: Tensor) -> Tensor:
        if self.packed:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return F.linear(x, self.weight, self.bias)


class RMSNorm:
    """x / sqrt(mean(x²) + ε) · w, computed in fp32, rounded once to the dtype of the next product.

    Written with `vector_norm` because torch's rms_norm on a CPU is a chain of eight operations (13 µs against 7).
    """

    def __init__(self, weight: Tensor, eps: float, dtype: torch.dtype):
        size = weight.shape[-1]
        self.dtype = dtype
        self.scale = weight.detach().float() * math.sqrt(size)
        self.floor = torch.tensor(math.sqrt(size * eps), device=weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        norm = torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True), self.floor)
        y = x / norm
        return torch.mul(y, self.scale, out=torch.empty_like(y, dtype=self.dtype))


class Rope:
    """Rotary tables [positions, D] in the model's dtype; sin carries the sign of the rotated half."""

    def __init__(self, cos: Tensor, sin: Tensor):
        half = cos.shape[-1] // 2
        self.cos = cos
        self.sin = torch.cat((-sin[..., :half], sin[..., half:]), -1)
        self.half = half

    def at(self, plan: Plan) -> tuple[Tensor, Tensor]:
        """cos and sin [N, 1, D] for the rows of a plan."""
        if plan.contiguous and len(plan.base) == 1:
            start = plan.base[0]
            stop = start + plan.positions.shape[1]
            return self.cos[start:stop, None], self.sin[start:stop, None]
        rows = plan.positions.reshape(-1)
        return self.cos[rows, None], self.sin[rows, None]

    def rotate(self, x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
        """x: [N, heads, D]."""
        cos, sin = table
        return torch.addcmul(x * cos, x.roll(self.half, -1), sin)


def attend(q: Tensor, cache: KVCache, layer: int, plan: Plan, mask: Tensor | None, scale: float) -> Tensor:
    """Attention of q [B, T, Hq, D] over the first `plan.span` slots of a layer. Returns [B·T, Hq·D].

    Query heads of one key/value head are folded into the row axis, so grouped-query attention copies no keys; `mask` is
    `plan.folded_mask(groups)`.
    """
    batch, rows, heads, dim = q.shape
    keys = cache.keys[layer][:, :, : plan.span]
    values = cache.values[layer][:, :, : plan.span]
    kv_heads = keys.shape[1]
    groups = heads // kv_heads
    if plan.causal:
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2), keys, values, is_causal=True, scale=scale, enable_gqa=groups > 1
        )
        return out.transpose(1, 2).reshape(batch * rows, heads * dim)
    if rows == 1:
        folded = q.view(batch, kv_heads, groups, dim)
        out = F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=scale)
        return out.reshape(batch, heads * dim)
    folded = q.view(batch, rows, kv_heads, groups, dim).permute(0, 2, 3, 1, 4).reshape(batch, kv_heads, -1, dim)
    out = F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=scale)
    return out.view(batch, kv_heads, groups, rows, dim).permute(0, 3, 1, 2, 4).reshape(batch * rows, heads * dim)
