"""Training attention, forward and backward: every row attends a span of slots (Dao 2023, FlashAttention-2).

Rows ascend, and so do both ends of their spans. So a tile of rows reads the slots between its lowest and its highest
one, and a tile of slots is attended by consecutive rows. Documents need no padding, and the host needs no table of
documents. Scores and probabilities stay in registers; the backward pass recomputes them from the log-sum-exp. The order
of all sums is fixed.
"""

from math import log
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2E = 1 / log(2)
HALVES = (torch.bfloat16, torch.float16)  # fp32 has no tensor cores, and its tiles do not fit the registers
WIDEST = 128  # head dimension
ROWS, SLOTS = 64, {64: 64, 128: 32}  # per tile, forward and for the queries' gradient; slots by head dimension
BACK_ROWS, BACK_SLOTS = 32, 64  # for the gradients of keys and values, two sums per tile


@triton.jit(do_not_specialize=["count"])
def _span_kernel(
    q, key, value, low, high, out, lse, count, factor,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, R: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * R + tl.arange(0, R)
    head, inside = tl.program_id(1), row < count
    d = tl.arange(0, WIDTH)
    lowest = tl.load(low + row, mask=inside, other=2147483647)
    highest = tl.load(high + row, mask=inside, other=-1)
    places = ((row.to(tl.int64) * (H * G) + head) * D)[:, None] + d[None, :]
    kept = inside[:, None] & (d < D)[None, :]
    x = tl.load(q + places, mask=kept, other=0.0)
    top = tl.full((R,), float("-inf"), tl.float32)
    total = tl.zeros((R,), tl.float32)
    acc = tl.zeros((R, WIDTH), tl.float32)
    end = tl.max(highest, 0) + 1
    for start in range(tl.min(lowest, 0) // S * S, end, S):
        slot = start + tl.arange(0, S)
        there = (slot < end)[:, None] & (d < D)[None, :]
        keys = ((slot.to(tl.int64) * H + head // G) * D)[:, None] + d[None, :]
        k = tl.load(key + keys, mask=there, other=0.0)
        v = tl.load(value + keys, mask=there, other=0.0)
        visible = (slot[None, :] >= lowest[:, None]) & (slot[None, :] <= highest[:, None])
        score = tl.where(visible, tl.dot(x, tl.trans(k)) * factor, float("-inf"))
        best = tl.maximum(top, tl.max(score, 1))
        safe = tl.where(best == float("-inf"), 0.0, best)
        p = tl.exp2(score - safe[:, None])
        shrink = tl.exp2(top - safe)
        total = total * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None])
        top = best
    tl.store(out + places, acc / tl.where(total > 0, total, 1.0)[:, None], mask=kept)
    found = tl.where(total > 0, (top + tl.log2(tl.maximum(total, 1e-30))) / factor, float("-inf"))
    tl.store(lse + row.to(tl.int64) * (H * G) + head, found, mask=inside)


@triton.jit(do_not_specialize=["count"])
def _span_rows_kernel(
    q, key, value, grad, delta, lse, low, high, dq, count, factor,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, R: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * R + tl.arange(0, R)
    head, inside = tl.program_id(1), row < count
    d = tl.arange(0, WIDTH)
    lowest = tl.load(low + row, mask=inside, other=2147483647)
    highest = tl.load(high + row, mask=inside, other=-1)
    single = row.to(tl.int64) * (H * G) + head
    places = (single * D)[:, None] + d[None, :]
    kept = inside[:, None] & (d < D)[None, :]
    x = tl.load(q + places, mask=kept, other=0.0)
    g = tl.load(grad + places, mask=kept, other=0.0)
    shift = tl.load(lse + single, mask=inside, other=0.0) * factor
    offset = tl.load(delta + single, mask=inside, other=0.0)
    acc = tl.zeros((R, WIDTH), tl.float32)
    end = tl.max(highest, 0) + 1
    for start in range(tl.min(lowest, 0) // S * S, end, S):
        slot = start + tl.arange(0, S)
        there = (slot < end)[:, None] & (d < D)[None, :]
        keys = ((slot.to(tl.int64) * H + head // G) * D)[:, None] + d[None, :]
        k = tl.load(key + keys, mask=there, other=0.0)
        v = tl.load(value + keys, mask=there, other=0.0)
        visible = (slot[None, :] >= lowest[:, None]) & (slot[None, :] <= highest[:, None])
        p = tl.where(visible, tl.exp2(tl.dot(x, tl.trans(k)) * factor - shift[:, None]), 0.0)
        ds = p * (tl.dot(g, tl.trans(v)) - offset[:, None])
        acc = tl.dot(ds.to(k.dtype), k, acc)
    tl.store(dq + places, acc.to(dq.dtype.element_ty), mask=kept)


@triton.jit(do_not_specialize=["slots"])
def _span_slots_kernel(
    q, key, value, grad, delta, lse, low, high, first, last, dk, dv, slots, factor,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, R: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0) * S + tl.arange(0, S)
    head, inside = tl.program_id(1), slot < slots
    d = tl.arange(0, WIDTH)
    keys = ((slot.to(tl.int64) * H + head) * D)[:, None] + d[None, :]
    kept = inside[:, None] & (d < D)[None, :]
    k = tl.load(key + keys, mask=kept, other=0.0)
    v = tl.load(value + keys, mask=kept, other=0.0)
    begin, end = tl.load(first + tl.program_id(0)), tl.load(last + tl.program_id(0))
    sum_k = tl.zeros((S, WIDTH), tl.float32)
    sum_v = tl.zeros((S, WIDTH), tl.float32)
    for step in range(begin * G, tl.cdiv(end - begin, R) * R * G + begin * G, R):
        # `step` counts rows, tile by tile: first all rows of a tile for one query head, then for the next head.
        done = step - begin * G
        row = begin + done // (R * G) * R + tl.arange(0, R)
        query = head * G + done // R % G
        there = row < end
        single = row.to(tl.int64) * (H * G) + query
        places = (single * D)[:, None] + d[None, :]
        read = there[:, None] & (d < D)[None, :]
        x = tl.load(q + places, mask=read, other=0.0)
        g = tl.load(grad + places, mask=read, other=0.0)
        shift = tl.load(lse + single, mask=there, other=0.0) * factor
        offset = tl.load(delta + single, mask=there, other=0.0)
        lowest = tl.load(low + row, mask=there, other=2147483647)
        highest = tl.load(high + row, mask=there, other=-1)
        visible = (slot[:, None] >= lowest[None, :]) & (slot[:, None] <= highest[None, :])
        p = tl.where(visible, tl.exp2(tl.dot(k, tl.trans(x)) * factor - shift[None, :]), 0.0)
        sum_v = tl.dot(p.to(g.dtype), g, sum_v)
        ds = p * (tl.dot(v, tl.trans(g)) - offset[None, :])
        sum_k = tl.dot(ds.to(x.dtype), x, sum_k)
    tl.store(dk + keys, sum_k, mask=kept)
    tl.store(dv + keys, sum_v, mask=kept)


def _sizes(q: Tensor) -> tuple[int, int, int, int]:
    """Key heads, query heads per key head, head dimension, and tile width. Raises ValueError if no kernel fits."""
    _, kv, groups, dim = q.shape
    if dim > WIDEST or q.dtype not in HALVES:
        raise ValueError(
            f"training attention with head dimension {dim} in {q.dtype} is not supported: at most {WIDEST}, in "
            "bf16 or fp16"
        )
    return kv, groups, dim, 64 if dim <= 64 else 128


def span_attention(q: Tensor, key: Tensor, value: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    sizes = _sizes(q)
    q, key, value = q.contiguous(), key.contiguous(), value.contiguous()
    out, lse = torch.empty_like(q, dtype=torch.float32), q.new_empty(q.shape[:3], dtype=torch.float32)
    grid: Any = (triton.cdiv(len(q), ROWS), sizes[0] * sizes[1])
    if len(q):
        _span_kernel[grid](q, key, value, low, high, out, lse, len(q), LOG2E, *sizes, ROWS, SLOTS[sizes[-1]])
    return out, lse


def span_attention_backward(
    q: Tensor, key: Tensor, value: Tensor, grad: Tensor, delta: Tensor, lse: Tensor, low: Tensor, high: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    sizes = _sizes(q)
    kv, groups, *_ = sizes
    q, key, value, grad, delta, lse = (x.contiguous() for x in (q, key, value, grad, delta, lse))
    dq = torch.empty_like(q)
    dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (key, value))
    if not len(q):
        return dq, dk, dv
    given = q, key, value, grad, delta, lse, low, high
    rows: Any = (triton.cdiv(len(q), ROWS), kv * groups)
    _span_rows_kernel[rows](*given, dq, len(q), LOG2E, *sizes, ROWS, SLOTS[sizes[-1]])
    slots: Any = (triton.cdiv(len(key), BACK_SLOTS), kv)
    edges = torch.arange(0, slots[0] + 1, device=q.device, dtype=low.dtype) * BACK_SLOTS
    first = torch.searchsorted(high, edges[:-1], out_int32=True)  # the first row that attends a slot of the tile
    last = torch.searchsorted(low, edges[1:], out_int32=True)  # one past the last such row
    _span_slots_kernel[slots](*given, first, last, dk, dv, len(key), LOG2E, *sizes, BACK_ROWS, BACK_SLOTS)
    return dq, dk, dv
