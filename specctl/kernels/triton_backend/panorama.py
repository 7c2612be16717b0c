"""Feedback on N drafters: the target's logits are read once for all of them.

The drafters' addresses stand in a table, so that one program sees all N and none of them has to be copied.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..objectives import TINY
from ..reference import Panorama
from ..rows import DraftRows, Rows
from .device import load_logits, pointers, precision, probability, row_major

WIDTH = 1024  # ids at a time
PROGRAMS = 264  # enough to keep a large GPU busy: with few rows several programs share one


@triton.jit
def _normalise_kernel(
    addresses, strides, sizes, inv_temp, lse, best, R, TILE: tl.constexpr, LOGITS: tl.constexpr, ACC: tl.constexpr
):
    """log Σ exp and argmax of every drafter's rows, in the drafter's own ids."""
    row = tl.program_id(0).to(tl.int64)
    draft = tl.program_id(1).to(tl.int64)
    x = tl.load(addresses + draft).to(tl.pointer_type(LOGITS)) + row * tl.load(strides + draft)
    size = tl.load(sizes + draft)
    scale = tl.load(inv_temp + draft * R + row)
    lane = tl.arange(0, TILE)
    peak = tl.full((TILE,), float("-inf"), ACC)
    total = tl.zeros((TILE,), ACC)
    index = lane.to(tl.int64)
    start = size * 0
    while start < size:
        ids = start + lane
        score = load_logits(x, ids, ids < size, ACC) * scale
        index = tl.where(score > peak, ids, index)
        higher = tl.maximum(peak, score)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(peak - base) + tl.exp(score - base)
        peak = higher
        start += TILE
    highest = tl.max(peak, 0)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    tl.store(lse + draft * R + row, highest + tl.log(tl.sum(total * tl.exp(peak - base), 0)))
    tl.store(best + draft * R + row, tl.min(tl.where((peak == highest) & (lane < size), index, size), 0))


@triton.jit
def _panorama_kernel(
    x, stride, inv_temp, cut, lse, greedy, tokens, addresses, maps, strides, q_inv_temp, q_lse, drafts, target, best,
    floor, R, N, SPLIT: tl.constexpr, LANES: tl.constexpr, V: tl.constexpr, WIDTH: tl.constexpr,
    LOGITS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Sums over every SPLIT-th tile: of drafters into `drafts` [6, SPLIT, N, R], of p into `target` [3, SPLIT, R]."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    p_scalars = (tl.load(inv_temp + row), tl.load(cut + row), tl.load(lse + row), tl.load(greedy + row))
    token = tl.load(tokens + row)

    draft = tl.arange(0, LANES)
    active = draft < N
    at = draft.to(tl.int64) * R + row
    q_offset = row * tl.load(strides + draft, mask=active, other=0)
    q_base = tl.load(addresses + draft, mask=active, other=0).to(tl.pointer_type(LOGITS)) + q_offset
    map_address = tl.load(maps + draft, mask=active, other=0)
    has_map = map_address != 0
    map_base = map_address.to(tl.pointer_type(tl.int32))
    q_scale = tl.load(q_inv_temp + at, mask=active, other=1.0)
    q_norm = tl.load(q_lse + at, mask=active, other=0.0)

    accept = tl.zeros((LANES,), ACC)
    excess = tl.zeros((LANES,), ACC)
    cross = tl.zeros((LANES,), ACC)
    reverse = tl.zeros((LANES,), ACC)
    q_x = tl.zeros((LANES,), ACC)
    missed = tl.zeros((LANES,), ACC)
    negentropy = tl.full((), 0.0, ACC)
    p_x = tl.full((), 0.0, ACC)
    highest = tl.full((), float("-inf"), ACC)
    first = tl.full((), V, tl.int32)
    for begin in range(0, V, WIDTH * SPLIT):
        ids = begin + split * WIDTH + tl.arange(0, WIDTH)
        inside = ids < V
        value = load_logits(x + row * stride, ids, inside, ACC)
        top = tl.max(value, 0)
        lowest = tl.min(tl.where((value == top) & inside, ids, V), 0)
        first = tl.where((top > highest) | ((top == highest) & (lowest < first)), lowest, first)
        highest = tl.maximum(highest, top)
        p = tl.where(inside, probability(value, ids, *p_scalars), 0.0)
        log_p = tl.maximum(tl.log(p), floor)
        negentropy += tl.sum(p * log_p, 0)
        p_x += tl.sum(tl.where(ids == token, p, 0.0), 0)

        everywhere = active[:, None] & inside[None, :]
        mapped = tl.load(map_base[:, None] + ids[None, :], mask=everywhere & has_map[:, None], other=-1)
        there = tl.where(has_map[:, None], mapped, ids[None, :])
        known = everywhere & (there >= 0)
        z = load_logits(q_base[:, None], there, known, ACC)
        q = tl.where(known, tl.exp(z * q_scale[:, None] - q_norm[:, None]), 0.0)
        log_q = tl.maximum(tl.log(q), floor)
        target_p = p[None, :]
        accept += tl.sum(tl.minimum(target_p, q), 1)
        excess += tl.sum(tl.maximum(target_p - q, 0.0), 1)
        cross += tl.sum(target_p * log_q, 1)
        reverse += tl.sum(q * (log_q - log_p[None, :]), 1)
        q_x += tl.sum(tl.where(ids[None, :] == token, q, 0.0), 1)
        missed += tl.sum(tl.where(known, 0.0, target_p), 1)

    out = drafts + (split * N + draft.to(tl.int64)) * R + row
    field = tl.full((), SPLIT, tl.int64) * N * R
    tl.store(out, accept, mask=active)
    tl.store(out + field, excess, mask=active)
    tl.store(out + 2 * field, cross, mask=active)
    tl.store(out + 3 * field, reverse, mask=active)
    tl.store(out + 4 * field, q_x, mask=active)
    tl.store(out + 5 * field, missed, mask=active)
    place = target + split * R + row
    tl.store(place, negentropy)
    tl.store(place + SPLIT * R, p_x)
    tl.store(place + 2 * SPLIT * R, highest)
    tl.store(best + split * R + row, first)


def panorama(p: Rows, drafts: Sequence[DraftRows], tokens: Tensor) -> Panorama:
    rows, vocabulary = p.logits.shape
    n, device, acc = len(drafts), p.logits.device, precision(p.logits)
    logits = [row_major(draft.logits) for draft in drafts]
    if len({x.dtype for x in logits}) > 1:
        logits = [x.float() for x in logits]
    kind = getattr(tl, str(logits[0].dtype).removeprefix("torch.") if logits else "float32")
    maps = [None if draft.ids is None else _inverse(draft.ids, vocabulary) for draft in drafts]

    def table(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    addresses, strides = table([x.data_ptr() for x in logits]), table([x.stride(0) for x in logits])
    q_inv_temp, q_lse = p.lse.new_ones(n, rows), p.lse.new_empty(n, rows)
    for row, draft in zip(q_inv_temp, drafts, strict=True):
        if draft.inv_temp is not None:
            row.copy_(draft.inv_temp)
    likeliest = tokens.new_empty(n, rows)
    _normalise_kernel[(rows, n)](
        addresses, strides, table([x.shape[1] for x in logits]), q_inv_temp, q_lse, likeliest, rows, 4096, kind, acc
    )

    tiles = triton.cdiv(vocabulary, WIDTH)
    split = triton.next_power_of_2(min(tiles, triton.cdiv(PROGRAMS, max(rows, 1))))  # few values: each is compiled
    sums, of_p = p.lse.new_empty(6, split, n, rows), p.lse.new_empty(3, split, rows)
    firsts = torch.empty(split, rows, dtype=torch.int32, device=device)
    _panorama_kernel[(rows, split)](
        *pointers(p), tokens.contiguous(), addresses, table([0 if m is None else m.data_ptr() for m in maps]), strides,
        q_inv_temp, q_lse, sums, of_p, firsts, math.log(TINY), rows, n, split, triton.next_power_of_2(max(n, 1)),
        vocabulary, WIDTH, kind, acc, num_warps=8,
    )  # fmt: skip

    accept, excess, cross, reverse, q_x, missed = sums.sum(1)
    negentropy, p_x = of_p[:2].sum(1)
    best = torch.where(of_p[2] == of_p[2].amax(0), firsts, vocabulary).amin(0)
    best = torch.where(p.greedy >= 0, p.greedy, best)
    proposed = [best_id if d.ids is None else d.ids[best_id] for best_id, d in zip(likeliest, drafts, strict=True)]
    agree = torch.stack(proposed) == best if drafts else likeliest
    fields = (
        accept, excess, negentropy - cross, -q_x.clamp_min(TINY).log(), reverse, p_x.expand(n, rows), q_x,
        agree.to(accept.dtype), missed,
    )  # fmt: skip
    known = q_lse.isfinite() & p.valid
    entropy = torch.where(p.valid, -negentropy, torch.nan)
    return Panorama(*(*(torch.where(known, field, torch.nan) for field in fields), entropy))


def _inverse(ids: Tensor, vocabulary: int) -> Tensor:
    """[V] int32: the draft token of every target token, −1 = none."""
    table = torch.full((vocabulary,), -1, dtype=torch.int32, device=ids.device)
    table[ids] = torch.arange(len(ids), dtype=torch.int32, device=ids.device)
    return table
