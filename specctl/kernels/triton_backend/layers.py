"""Small operations of a decoder layer, fused into one launch each, which reads and writes every row once.

Arithmetic is fp32, with one rounding at the end. A row's sums have one order, independent of the other rows.
"""

import triton
import triton.language as tl
from torch import Tensor

WIDEST = 2**16  # hidden size: a program holds a whole row in registers
GATED = 512  # products per program
TURNED = 512  # elements of half heads per program
EACH = 8  # elements per thread: 16 bytes of bf16


@triton.jit
def _add_norm_kernel(x, delta, weight, total, out, H, eps, WIDTH: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * H
    at = tl.arange(0, WIDTH)
    inside = at < H
    value = tl.load(x + start + at, mask=inside, other=0.0)
    value += tl.load(delta + start + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(total + start + at, value, mask=inside)
    scale = tl.rsqrt(tl.sum(value * value, 0) / H + eps)
    y = value * scale * tl.load(weight + at, mask=inside, other=0.0)
    tl.store(out + start + at, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gate_kernel(x, out, size, blocks, BLOCK: tl.constexpr):
    row = (tl.program_id(0) // blocks).to(tl.int64)
    at = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    gate = tl.load(x + 2 * row * size + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + 2 * row * size + size + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * size + at, (gate / (1 + tl.exp(-gate)) * up).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["T"])
def _rope_kernel(
    qkv, cos, sin, position, slot, q, rows, q_weight, k_weight, T, stride_row, stride_text, stride_slot, eps,
    Q: tl.constexpr, K: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, WIDTH: tl.constexpr, HEADS: tl.constexpr,
    NORMED: tl.constexpr,
):  # fmt: skip
    """Process some heads of a row, with both halves. A row has Q heads for queries, K for keys and K for values."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    d = tl.arange(0, WIDTH)
    inside = (head < Q + 2 * K)[:, None] & (d < HALF)[None, :]
    at = head[:, None] * D + d[None, :]
    low = tl.load(qkv + row * stride_row + at, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(qkv + row * stride_row + HALF + at, mask=inside, other=0.0).to(tl.float32)
    x, y = low, high
    there = d < HALF
    if NORMED:
        query = (head < Q)[:, None]
        scale = tl.rsqrt(tl.sum(low * low + high * high, 1) / D + eps)[:, None]
        of_q = tl.load(q_weight + d, mask=there, other=0.0)[None, :]
        of_k = tl.load(k_weight + d, mask=there, other=0.0)[None, :]
        x = low * scale * tl.where(query, of_q, of_k)
        of_q = tl.load(q_weight + HALF + d, mask=there, other=0.0)[None, :]
        of_k = tl.load(k_weight + HALF + d, mask=there, other=0.0)[None, :]
        y = high * scale * tl.where(query, of_q, of_k)
    angle = tl.load(position + row) * D + d
    turned = (head < Q + K)[:, None]  # values are not rotated
    c = tl.load(cos + angle, mask=there, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + angle, mask=there, other=0.0).to(tl.float32)[None, :]
    low = tl.where(turned, x * c + y * s, low)
    c = tl.load(cos + angle + HALF, mask=there, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + angle + HALF, mask=there, other=0.0).to(tl.float32)[None, :]
    high = tl.where(turned, y * c + x * s, high)
    low, high = low.to(q.dtype.element_ty), high.to(q.dtype.element_ty)
    asks = inside & (head < Q)[:, None]
    tl.store(q + row * Q * D + at, low, mask=asks)
    tl.store(q + row * Q * D + HALF + at, high, mask=asks)
    kept = inside & (head >= Q)[:, None]
    place = rows + row // T * stride_text + tl.load(slot + row) * stride_slot + at - Q * D
    tl.store(place, low, mask=kept)
    tl.store(place + HALF, high, mask=kept)


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    count, size = x.shape
    if size > WIDEST:
        raise ValueError(f"rows of {size} elements are not supported: at most {WIDEST}")
    x, delta = x.contiguous(), delta.contiguous()
    total, out = x.new_empty(x.shape), delta.new_empty(x.shape)
    width = triton.next_power_of_2(size)
    warps = min(max(width // 512, 1), 16)
    _add_norm_kernel[(count,)](x, delta, weight, total, out, size, eps, width, num_warps=warps)
    return total, out


def silu_and_mul(x: Tensor) -> Tensor:
    count, size = x.shape[0], x.shape[1] // 2
    out = x.new_empty(count, size)
    blocks = triton.cdiv(size, GATED)
    _gate_kernel[(count * blocks,)](x.contiguous(), out, size, blocks, GATED, num_warps=2)
    return out


def rope_and_cache(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    rows: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
) -> Tensor:
    count, heads, dim = qkv.shape
    kv = rows.shape[-2] // 2
    queries = heads - 2 * kv
    stride_text, stride_slot = rows.stride()[:2] if rows.ndim == 4 else (0, rows.stride(0))  # all texts share a pool
    q = qkv.new_empty(*positions.shape, queries, dim)
    width = triton.next_power_of_2(dim // 2)
    each = min(max(TURNED // width, 1), triton.next_power_of_2(heads))
    _rope_kernel[(count, triton.cdiv(heads, each))](
        qkv.contiguous(), cos, sin, positions.contiguous(), slots.contiguous(), q, rows,
        cos if q_weight is None else q_weight, cos if k_weight is None else k_weight,  # an absent weight is not read
        positions.shape[1], heads * dim, stride_text, stride_slot, eps,
        queries, kv, dim, dim // 2, width, each, q_weight is not None, num_warps=max(each * width // (32 * EACH), 1),
    )  # fmt: skip
    return q
