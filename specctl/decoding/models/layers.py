"""Operations of a lean decoder layer, shared by the target step and draft heads.

All of them work on rows: hidden states are [N, H] with N = B·T. The residual stream stays in fp32; matrix products
(`linear.py`) run in the weights' dtype.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from specctl import kernels
from specctl.decoding.attention import served
from specctl.decoding.cache import KVCache
from specctl.decoding.plan import Block, Plan, unskipped
from specctl.environment import switch
from specctl.kernels.self_check import LayerShape, layer_mismatch, passes


class RMSNorm:
    """RMSNorm x / sqrt(mean(x²) + ε) · w, computed in fp32 and rounded once, to the dtype of the next product.

    On a CPU it uses `vector_norm`: torch's rms_norm there is a chain of eight operations (13 µs instead of 7). On a GPU
    rms_norm is one kernel, and the two norms per layer are a third of a step's small kernels.
    """

    def __init__(self, weight: Tensor, eps: float, dtype: torch.dtype):
        size = weight.shape[-1]
        self.dtype, self.eps = dtype, eps
        self.weight = weight.detach().float()
        self.scale = self.weight * math.sqrt(size)
        self.floor = torch.tensor(math.sqrt(size * eps), device=weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        if x.is_cuda:
            return self.fused(x)
        norm = torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True), self.floor)
        y = x / norm
        return torch.mul(y, self.scale, out=torch.empty_like(y, dtype=self.dtype))

    def fused(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps).to(self.dtype)


class RMSNorms(RMSNorm):
    """Several norms of the same width in one call: weights [..., H] broadcast over rows [..., H]."""

    def __init__(self, weight: Tensor, eps: float, dtype: torch.dtype):
        super().__init__(weight, eps, dtype)
        self.shape = weight.shape

    def fused(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.shape[-1:], None, self.eps).mul(self.weight).to(self.dtype)


class Unnormed:
    """Stands where a layer has no norm: rounds x to the dtype of the next product."""

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype

    def __call__(self, x: Tensor) -> Tensor:
        return x.to(self.dtype)


def add_norm(x: Tensor, delta: Tensor, norm: RMSNorm | Unnormed, fuse: bool) -> tuple[Tensor, Tensor]:
    """The residual stream x + δ [N, H] in fp32, and its norm. `fuse`: in one kernel (`fuses`)."""
    if fuse and type(norm) is RMSNorm:  # neither an `RMSNorms` nor an `Unnormed`
        return kernels.add_rms_norm(x, delta, norm.weight, norm.eps)
    x = x + delta
    return x, norm(x)


def gated(x: Tensor, fuse: bool, gelu: bool = False) -> Tensor:
    """silu(gate) · up [N, I]. `x` [N, 2·I] has gate and up side by side. `fuse`: in one kernel. `gelu`: GELU's tanh
    approximation instead of SiLU, never in one kernel."""
    if fuse and not gelu:
        return kernels.silu_and_mul(x)
    gate, up = x.chunk(2, -1)
    return (F.gelu(gate, approximate="tanh") if gelu else F.silu(gate)).mul_(up)


def attend(q: Tensor, cache: KVCache, layer: int, plan: Plan, scale: float) -> Tensor:
    """Attention of q [B, T, Hq, D] over the first `plan.span` slots of a layer. Returns [B·T, Hq·D]."""
    if plan.ancestry is not None:
        if served(q, cache.rows[layer]):
            return kernels.attention(q, cache.rows[layer], plan.ancestry, plan.span, scale, cache.table)
        plan = plan.masked(q.dtype)
    batch, rows, heads, dim = q.shape
    keys, values = cache.read(layer, plan.span)
    groups = heads // cache.heads
    if plan.causal:
        keys, values = keys.narrow(2, 0, plan.span), values.narrow(2, 0, plan.span)
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2), keys, values, is_causal=True, scale=scale, enable_gqa=groups > 1
        )
        return out.transpose(1, 2).reshape(batch * rows, heads * dim)
    # Fold the query heads of each key head into rows: the keys are read once, not once per query head.
    folded = q.unflatten(2, (cache.heads, groups)).permute(0, 2, 3, 1, 4).reshape(batch, cache.heads, -1, dim)
    blocks = plan.blocks(groups)
    if len(blocks) == 1:
        out = _attend(folded, keys, values, blocks[0], scale)
    else:
        parts = zip(folded.split(1), keys.split(1), values.split(1), blocks, strict=True)
        out = torch.cat([_attend(*part, scale) for part in parts])
    return out.unflatten(2, (groups, rows)).permute(0, 3, 1, 2, 4).reshape(batch * rows, heads * dim)


def _attend(q: Tensor, keys: Tensor, values: Tensor, block: Block, scale: float) -> Tensor:
    span, mask, skipped = block
    keys, values = unskipped(keys, 2, span, skipped), unskipped(values, 2, span, skipped)
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=scale)


def fuses(device: torch.device, dtype: torch.dtype, shape: LayerShape) -> bool:
    """Whether layers of this shape run fused: on a GPU with Triton, if a trial with that shape agrees with the
    reference. If it does not, one warning is issued.

    The environment variable SPECCTL_LAYERS=fused|plain overrides the choice, on any device. UsageError for other
    values.
    """
    if chosen := switch("SPECCTL_LAYERS"):
        return chosen == "fused"
    return device.type == "cuda" and passes("layers on {} run unfused", layer_mismatch, device, dtype, shape)
