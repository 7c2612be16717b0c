"""Attention of a step's rows over cached keys and values, split over the keys, with a tree's ancestors as bits.

The split follows Flash-Decoding (Dao et al. 2023). The query heads of a key head are packed with the rows, so that a
program reads its keys once for all these heads. Every program processes a piece of a text's slots. A second kernel
combines the pieces by their log-sum-exp. The order of all sums is fixed: no atomics.
"""

from functools import cache, lru_cache
from math import log
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..paging import PAGE
from ..reference import Ancestry

LOG2E = 1 / log(2)
PROCESSORS = 132  # of an H100, used without a GPU
WIDEST = 128  # head dimension: queries and sums of larger heads would not fit the registers
MIN_PIECE, MAX_PIECE = 128, 2048  # slots per piece: less is not worth a program, more lets one long text delay a batch
MAX_PIECES = 64  # per text, at most
MAX_PARTIAL_ROWS = 2**16  # rows of partial sums, 32 MB: more would not fit the L2 cache
KEYS = 32  # slots per iteration
MAX_TIME_RATIO = 1.05  # prefer fewer pieces if their time is at most this multiple of the best time


class Tiling(NamedTuple):
    """Division of a call into programs."""

    rows: int  # rows × query heads that share keys, per program
    warps: int
    stages: int
    tiles: int  # tiles of rows, for each key head of each text
    splits: int  # pieces of the longest text


@lru_cache(4096)  # all layers of a step ask the same question, which takes 35 to 114 µs; `span` grows
def tiling(batch: int, rows: int, heads: int, itemsize: int, span: int, processors: int) -> Tiling:
    """The tiling for `rows` queries of each of `heads` key heads, and texts of at most `span` slots.

    Programs should fill the GPU in whole waves. Each of its `processors` runs two programs at once if they are small.
    """
    half = itemsize < 4  # fp32 has no tensor cores, and takes twice the bytes
    size = min(max(16, triton.next_power_of_2(rows)), 128) if half else 16
    tiles = triton.cdiv(rows, size)
    programs, places = batch * heads * tiles, processors * (2 if size <= 64 else 1)
    most = max(min(triton.cdiv(span, MIN_PIECE), MAX_PIECES, MAX_PARTIAL_ROWS // (batch * heads * rows)), 1)
    least = min(triton.cdiv(span, MAX_PIECE), most)
    times = {splits: triton.cdiv(programs * splits, places) / splits for splits in range(least, most + 1)}
    best = min(times.values())
    splits = min(splits for splits, time in times.items() if time <= MAX_TIME_RATIO * best)
    return Tiling(size, 8 if size > 64 else 4, (4 if size == 16 else 3) if half else 2, tiles, splits)


@triton.jit
def _slots(rows, table, text, start, stride_text, stride_slot, stride_table, N: tl.constexpr, PAGE: tl.constexpr):
    """Addresses of the N slots start .. start + N − 1 of a text. Only this function knows the memory layout.

    With pages of PAGE slots, all N slots lie in one page: PAGE and `start` are multiples of N.
    """
    if PAGE == 0:
        return rows + text * stride_text + tl.cast(start, tl.int64) * stride_slot + tl.arange(0, N) * stride_slot
    else:
        page = tl.load(table + text * stride_table + start // PAGE)
        return rows + (page * PAGE + start % PAGE) * stride_slot + tl.arange(0, N) * stride_slot


@triton.jit(do_not_specialize=["stride_table", "T", "reach", "splits", "fixed", "tree", "windowed", "tiles"])
def _attend_kernel(
    q, rows, table, base, bits, first, part, lse, out, stride_q, stride_row, stride_text, stride_slot, stride_table,
    T, reach, splits, fixed, tree, windowed, tiles, scale,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    LEAST: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    tile, head = tl.program_id(0) % tiles, tl.program_id(0) // tiles  # tiles that read the same keys are adjacent
    split = tl.program_id(1)
    text = tl.program_id(2).to(tl.int64)
    lane = tile * M + tl.arange(0, M)
    t = lane // G
    inside = lane < T * G
    d = tl.arange(0, WIDTH)
    edge = tl.load(base + text).to(tl.int32)  # all rows attend the slots before it
    end = edge + reach
    # In a chain, no row of this tile attends slots past its last row. There is no branch here: Triton 3.9 would lose
    # the alignment of addresses.
    own = end - T + tl.max(tl.where(inside, t, 0), 0) + 1
    end = tl.where(tree > 0, end, own)
    seen = tl.load(bits + text * T + t, mask=lane < tree * T * G, other=0)
    lowest = tl.load(first + text * T + t, mask=lane < windowed * T * G, other=0).to(tl.int32)
    lowest = tl.maximum(tl.where(inside, lowest, 0), 0)
    begin = tl.min(tl.where(inside, lowest, end), 0) // N * N
    begin = tl.where(fixed > 0, 0, begin)
    piece = tl.cdiv(tl.cdiv(tl.maximum(fixed, end) - begin, splits), N) * N
    piece = tl.maximum(piece, LEAST)
    start = begin + split * piece
    stop = tl.minimum(end, start + piece)
    narrow = tl.max(lowest, 0)  # slots before it are hidden from some row

    query = q + text * stride_q + t.to(tl.int64) * stride_row + (head * G + lane % G) * D
    x = tl.load(query[:, None] + d[None, :], mask=inside[:, None] & (d < D)[None, :], other=0.0)
    top = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    acc = tl.zeros((M, WIDTH), tl.float32)
    for at in range(start, stop, N):
        slot = at + tl.arange(0, N)
        there = (slot < stop)[:, None] & (d < D)[None, :]
        first_head = _slots(rows, table, text, at, stride_text, stride_slot, stride_table, N, PAGE)
        pointer = first_head[:, None] + (head * D + d)[None, :]
        key = tl.load(pointer, mask=there, other=0.0)
        value = tl.load(pointer + H * D, mask=there, other=0.0)
        score = tl.dot(x, tl.trans(key), input_precision="ieee") * scale
        if (at + N > edge) | (at < narrow):
            node = slot - edge
            place = tl.minimum(tl.maximum(node, 0), 63).to(tl.int64)
            ancestor = ((seen[:, None] >> place[None, :]) & 1) > 0
            earlier = node[None, :] <= (reach - T + t)[:, None]
            behind = tl.where(tree > 0, ancestor, earlier)
            visible = ((node < 0)[None, :] | behind) & (slot < stop)[None, :] & (slot[None, :] >= lowest[:, None])
            score = tl.where(visible, score, float("-inf"))
        high = tl.maximum(top, tl.max(score, 1))
        safe = tl.where(high == float("-inf"), 0.0, high)
        p = tl.exp2(score - safe[:, None])
        shrink = tl.exp2(top - safe)
        total = total * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(value.dtype), value, acc * shrink[:, None], input_precision="ieee")
        top = high
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    kept = inside[:, None] & (d < D)[None, :]
    if splits == 1:
        at_row = ((text * T + t) * H * G + head * G + lane % G) * D
        tl.store(out + at_row[:, None] + d[None, :], acc.to(out.dtype.element_ty), mask=kept)
    else:
        place = ((text * H + head) * T * G + lane) * splits + split
        tl.store(lse + place, tl.where(total > 0, top + tl.log2(tl.maximum(total, 1e-30)), float("-inf")), mask=inside)
        if start < stop:
            tl.store(part + place[:, None] * D + d[None, :], acc, mask=kept)


@triton.jit(do_not_specialize=["count", "T", "splits"])
def _combine_kernel(
    part, lse, out, count, T, splits,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Combine the pieces. Rows are in the order of the parts: text, key head, row, query head."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    split = tl.arange(0, LANES)
    d = tl.arange(0, WIDTH)
    place = row.to(tl.int64)[:, None] * splits + split[None, :]
    weight = tl.load(lse + place, mask=(row < count)[:, None] & (split < splits)[None, :], other=float("-inf"))
    high = tl.max(weight, 1)
    weight = tl.exp2(weight - tl.where(high == float("-inf"), 0.0, high)[:, None])
    total = tl.sum(weight, 1)
    weight = weight / tl.where(total > 0, total, 1.0)[:, None]
    found = (weight > 0)[:, :, None] & (d < D)[None, None, :]  # a short text has fewer pieces: the others are unwritten
    acc = tl.load(part + place[:, :, None] * D + d[None, None, :], mask=found, other=0.0)
    mean = tl.sum(acc * weight[:, :, None], 1)
    query, rest = row % G, row // G
    t, rest = rest % T, rest // T
    head, text = rest % H, rest // H
    at = ((text * T + t) * H * G + head * G + query).to(tl.int64) * D
    tl.store(
        out + at[:, None] + d[None, :], mean.to(out.dtype.element_ty), mask=(row < count)[:, None] & (d < D)[None, :]
    )


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else PROCESSORS


def attention(
    q: Tensor, rows: Tensor, ancestry: Ancestry, span: int, scale: float, table: Tensor | None = None
) -> Tensor:
    batch, count, heads, dim = q.shape
    if dim > WIDEST or q.dtype == torch.float64:
        raise ValueError(
            f"attention with head dimension {dim} in {q.dtype} is not supported: at most {WIDEST}, and not fp64"
        )
    kv = rows.shape[-2] // 2
    groups = heads // kv
    if q.stride(3) != 1 or q.stride(2) != dim:
        q = q.contiguous()
    base, reach, bits, first, fixed = ancestry
    tree, windowed = int(bits is not None), int(first is not None)
    bits = base if bits is None else bits.contiguous()  # an absent tensor is not read
    first = base if first is None else first.contiguous()
    stride_text, stride_slot = rows.stride()[:2] if table is None else (0, rows.stride(0))
    where, stride_table, page = (base, 0, 0) if table is None else (table, table.stride(0), PAGE)
    how = tiling(batch, count * groups, kv, rows.element_size(), span, _processors(q.device))
    # With pages, the page number is loaded before the keys. These stages then keep as many keys in flight as without
    # pages.
    stages = 2 * how.stages - 1 if page and how.stages > 2 else how.stages
    splits = how.splits
    out = q.new_empty(batch * count, heads * dim)
    pieces = (batch * heads * count, splits) if splits > 1 else (0, 0)
    part = torch.empty(*pieces, dim, dtype=torch.float32, device=q.device)
    lse = torch.empty(pieces, dtype=torch.float32, device=q.device)
    width = max(16, triton.next_power_of_2(dim))
    _attend_kernel[(kv * how.tiles, splits, batch)](
        q, rows, where, base, bits, first, part, lse, out,
        q.stride(0), q.stride(1), stride_text, stride_slot, stride_table,
        count, reach, splits, span if fixed else 0, tree, windowed, how.tiles,
        scale * LOG2E, kv, groups, dim, width, how.rows, KEYS, MIN_PIECE, page, num_warps=how.warps, num_stages=stages,
    )  # fmt: skip
    if splits > 1:
        lanes, each = (8, 2) if splits <= 8 else (MAX_PIECES, 1)
        _combine_kernel[(triton.cdiv(len(part), each),)](
            part, lse, out, len(part), count, splits, kv, groups, dim, width, each, lanes
        )
    return out
