"""Feedback on N drafters, with one pass over the target's logits for all drafters.

The drafters' addresses are in a table, so that one program sees all N drafters without copying their logits.
"""

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..objectives import TINY
from ..reference import DrafterFeedback
from ..rows import DraftRows, Rows
from .device import load_logits, pointers, precision, probability, row_major, tile_of

TOGETHER = 2048  # pairs of drafter and id per iteration: one accumulator per pair and statistic
PROGRAMS = 264  # enough to keep a large GPU busy: if rows are few, several programs share one row


@triton.jit
def _row_of(address, offset, LOGITS: tl.constexpr, ALIGNED: tl.constexpr):
    """Pointer to a row, from an address in a table. ALIGNED declares it a multiple of 16 bytes to the compiler."""
    x = address.to(tl.pointer_type(LOGITS)) + offset
    return tl.multiple_of(x, 16) if ALIGNED else x


@triton.jit(do_not_specialize=["R"])
def _normalise_kernel(
    addresses, strides, sizes, inv_temp, lse, best, R, TILE: tl.constexpr, LOGITS: tl.constexpr,
    ALIGNED: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """log Σ exp and argmax of every drafter's rows, in the drafter's own ids. Grid: rows × drafters; one pass."""
    row = tl.program_id(0).to(tl.int64)
    draft = tl.program_id(1).to(tl.int64)
    x = _row_of(tl.load(addresses + draft), row * tl.load(strides + draft), LOGITS, ALIGNED)
    size = tl.load(sizes + draft).to(tl.int32)
    if ALIGNED:
        size = tl.multiple_of(size, 16)
    scale = tl.load(inv_temp + draft * R + row)
    lane = tl.arange(0, TILE)
    peak = tl.full((TILE,), float("-inf"), ACC)
    total = tl.zeros((TILE,), ACC)
    index = lane
    for start in range(0, size, TILE):
        ids = start + lane
        score = load_logits(x, ids, ids < size, ACC) * scale
        index = tl.where(score > peak, ids, index)
        higher = tl.maximum(peak, score)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(peak - base) + tl.exp(score - base)
        peak = higher
    highest = tl.max(peak, 0)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    tl.store(lse + draft * R + row, highest + tl.log(tl.sum(total * tl.exp(peak - base), 0)))
    lowest = tl.min(tl.where((peak == highest) & (lane < size), index, size), 0)
    tl.store(best + draft * R + row, lowest.to(tl.int64))


@triton.jit(do_not_specialize=["R", "N"])
def _drafter_feedback_kernel(
    x, stride, inv_temp, cut, lse, greedy, tokens, addresses, strides, maps, q_inv_temp, q_lse, drafts, target, best,
    floor, V, R, N, SPLIT: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr, MAPPED: tl.constexpr,
    LOGITS: tl.constexpr, ALIGNED: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Sum over every SPLIT-th tile: of drafters into `drafts` [5, SPLIT, N, R], of p into `target` [4, SPLIT, R].

    Grid: rows × SPLIT; one pass over the logits of target and drafters. Every lane accumulates separately, and all
    lanes are reduced once at the end: reductions in the loop would take more time than the logits.
    """
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    p_scalars = (tl.load(inv_temp + row), tl.load(cut + row), tl.load(lse + row), tl.load(greedy + row))
    token = tl.load(tokens + row)
    x += row * stride

    draft = tl.arange(0, LANES)
    active = draft < N
    at = draft.to(tl.int64) * R + row
    q_address = tl.load(addresses + draft, mask=active, other=0)
    q_base = _row_of(q_address, row * tl.load(strides + draft, mask=active, other=0), LOGITS, ALIGNED)
    map_address = tl.load(maps + draft, mask=active, other=0)
    has_map = map_address != 0
    map_base = map_address.to(tl.pointer_type(tl.int32))
    q_scale = tl.load(q_inv_temp + at, mask=active, other=1.0)
    q_norm = tl.load(q_lse + at, mask=active, other=0.0)

    lane = tl.arange(0, WIDTH)
    excess = tl.zeros((LANES, WIDTH), ACC)
    cross = tl.zeros((LANES, WIDTH), ACC)
    reverse = tl.zeros((LANES, WIDTH), ACC)
    missed = tl.zeros((LANES, WIDTH), ACC)
    mass = tl.zeros((WIDTH,), ACC)
    negentropy = tl.zeros((WIDTH,), ACC)
    peak = tl.full((WIDTH,), float("-inf"), ACC)
    index = split * WIDTH + lane
    for begin in range(split * WIDTH, V, WIDTH * SPLIT):
        ids = begin + lane
        inside = ids < V
        value = load_logits(x, ids, inside, ACC)
        index = tl.where(value > peak, ids, index)
        peak = tl.maximum(peak, value)
        p = tl.where(inside, probability(value, ids, *p_scalars), 0.0)
        log_p = tl.maximum(tl.log(p), floor)
        mass += p
        negentropy += p * log_p

        known = active[:, None] & inside[None, :]
        there = tl.broadcast_to(ids[None, :], (LANES, WIDTH))
        if MAPPED:
            mapped = tl.load(map_base[:, None] + there, mask=known & has_map[:, None], other=-1)
            there = tl.where(has_map[:, None], mapped, there)
            known = known & (there >= 0)
            missed += tl.where(known, 0.0, p[None, :])
        log_q = load_logits(q_base[:, None], there, known, ACC) * q_scale[:, None] - q_norm[:, None]
        q = tl.where(known, tl.exp(log_q), 0.0)
        log_q = tl.where(known, tl.maximum(log_q, floor), floor)
        excess += tl.maximum(p[None, :] - q, 0.0)
        cross += p[None, :] * log_q
        reverse += q * (log_q - log_p[None, :])

    there = draft * 0 + token
    if MAPPED:
        mapped = tl.load(map_base + token, mask=active & has_map, other=-1)
        there = tl.where(has_map, mapped, there)
    known = active & (there >= 0)
    q_x = tl.where(known, tl.exp(load_logits(q_base, there, known, ACC) * q_scale - q_norm), 0.0)
    p_x = probability(load_logits(x, token, token >= 0, ACC), token, *p_scalars)

    out = drafts + (split * N + draft.to(tl.int64)) * R + row
    field = tl.full((), SPLIT, tl.int64) * N * R
    tl.store(out, tl.sum(excess, 1), mask=active)
    tl.store(out + field, tl.sum(cross, 1), mask=active)
    tl.store(out + 2 * field, tl.sum(reverse, 1), mask=active)
    tl.store(out + 3 * field, tl.where(split == 0, q_x, 0.0), mask=active)
    tl.store(out + 4 * field, tl.sum(missed, 1), mask=active)
    place = target + split * R + row
    highest = tl.max(peak, 0)
    tl.store(place, tl.sum(mass, 0))
    tl.store(place + SPLIT * R, tl.sum(negentropy, 0))
    tl.store(place + 2 * SPLIT * R, tl.where(split == 0, p_x, 0.0))
    tl.store(place + 3 * SPLIT * R, highest)
    tl.store(best + split * R + row, tl.min(tl.where((peak == highest) & (index < V), index, V), 0))


def drafter_feedback(p: Rows, drafts: Sequence[DraftRows], tokens: Tensor) -> DrafterFeedback:
    rows, vocabulary = p.logits.shape
    n, device, acc = len(drafts), p.logits.device, precision(p.logits)
    logits = [row_major(draft.logits) for draft in drafts]
    if len({x.dtype for x in logits}) > 1:
        logits = [x.float() for x in logits]
    kind = getattr(tl, str(logits[0].dtype).removeprefix("torch.") if logits else "float32")
    aligned = all(x.data_ptr() % 16 == 0 and x.stride(0) % 16 == 0 and x.shape[1] % 16 == 0 for x in logits)
    maps = [None if draft.ids is None else _inverse(draft.ids, vocabulary) for draft in drafts]

    # One copy to the device, from pinned memory: the host does not wait.
    places = [0 if known is None else known.data_ptr() for known in maps]
    table = [[x.data_ptr() for x in logits], [x.stride(0) for x in logits], [x.shape[1] for x in logits], places]
    pinned = torch.tensor(table, dtype=torch.int64, pin_memory=device.type == "cuda")
    addresses, strides, sizes, map_addresses = pinned.to(device, non_blocking=True)
    q_inv_temp, q_lse = p.lse.new_ones(n, rows), p.lse.new_empty(n, rows)
    for row, draft in zip(q_inv_temp, drafts, strict=True):
        if draft.inv_temp is not None:
            row.copy_(draft.inv_temp)
    likeliest = tokens.new_empty(n, rows)
    tile = tile_of(max((x.shape[1] for x in logits), default=1))
    _normalise_kernel[(rows, n)](
        addresses, strides, sizes, q_inv_temp, q_lse, likeliest, rows, tile, kind, aligned, acc, num_warps=8
    )

    lanes = triton.next_power_of_2(max(n, 1))
    width = max(64, TOGETHER // lanes)
    tiles = triton.cdiv(vocabulary, width)
    split = triton.next_power_of_2(min(tiles, triton.cdiv(PROGRAMS, max(rows, 1))))  # few values: each is compiled
    sums, of_p = p.lse.new_empty(5, split, n, rows), p.lse.new_empty(4, split, rows)
    firsts = torch.empty(split, rows, dtype=torch.int32, device=device)
    _drafter_feedback_kernel[(rows, split)](
        *pointers(p), tokens.contiguous(), addresses, strides, map_addresses, q_inv_temp, q_lse, sums, of_p, firsts,
        math.log(TINY), vocabulary, rows, n, split, lanes, width, any(m is not None for m in maps), kind, aligned, acc,
        num_warps=8,
    )  # fmt: skip

    excess, cross, reverse, q_x, missed = sums.sum(1)
    best = torch.where(of_p[3] == of_p[3].amax(0), firsts, vocabulary).amin(0)
    best = torch.where(p.greedy >= 0, p.greedy, best)
    proposed = [best_id if d.ids is None else d.ids[best_id] for best_id, d in zip(likeliest, drafts, strict=True)]
    agree = (torch.stack(proposed) == best if drafts else likeliest).to(excess.dtype)
    of_drafts = excess, cross, reverse, q_x, agree, missed
    return DrafterFeedback.of_sums(of_p[:3].sum(1), of_drafts, p.valid, q_lse.isfinite())


def _inverse(ids: Tensor, vocabulary: int) -> Tensor:
    """[V] int32: the draft token of every target token, −1 = none."""
    table = torch.full((vocabulary,), -1, dtype=torch.int32, device=ids.device)
    table[ids] = torch.arange(len(ids), dtype=torch.int32, device=ids.device)
    return table
