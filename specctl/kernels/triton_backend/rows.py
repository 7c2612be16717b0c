"""Random numbers, the scalars of a row, and draws from it. A row is read once, by many programs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..rows import BLOCK, Rows, working
from .device import BLOCKS, load_logits, pointers, precision, probability, row_major, search, tile_of


@triton.jit
def _uniform_kernel(seed, position, out, length, size, stream, LANES: tl.constexpr):
    at = tl.program_id(0) * LANES + tl.arange(0, LANES)
    mask = at < size
    key = tl.load(seed + at // length, mask=mask, other=0)
    where = tl.load(position + at, mask=mask, other=0)
    low, high = (where & 0xFFFFFFFF).to(tl.uint32), ((where >> 32) & 0xFFFFFFFF).to(tl.uint32)
    word, _, _, _ = tl.philox(key, low, high, low * 0 + stream, low * 0)
    tl.store(out + at, tl.uint_to_uniform_float(word), mask=mask)


def uniform(seed: Tensor, position: Tensor, stream: int) -> Tensor:
    position = position.contiguous()
    out = torch.empty(position.shape, dtype=torch.float32, device=position.device)
    size, lanes = position.numel(), 128
    _uniform_kernel[(triton.cdiv(size, lanes),)](seed, position, out, max(1, position.shape[1]), size, stream, lanes)
    return out


@triton.jit
def _argmax_kernel(x, stride, out, V: tl.constexpr, TILE: tl.constexpr, ACC: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, TILE)
    best = load_logits(x + row * stride, lane, lane < V, ACC)
    index = lane
    for start in range(TILE, V, TILE):
        ids = start + lane
        value = load_logits(x + row * stride, ids, ids < V, ACC)
        index = tl.where(value > best, ids, index)
        best = tl.maximum(best, value)
    lowest = tl.where((best == tl.max(best, 0)) & (lane < V), index, V)
    tl.store(out + row, tl.min(lowest, 0).to(tl.int64))


def argmax(logits: Tensor) -> Tensor:
    rows = row_major(logits.reshape(-1, logits.shape[-1]))
    out = torch.empty(len(rows), dtype=torch.int64, device=rows.device)
    vocabulary = rows.shape[1]
    _argmax_kernel[(len(rows),)](rows, rows.stride(0), out, vocabulary, tile_of(vocabulary), precision(rows))
    return out.view(logits.shape[:-1])


@triton.jit
def _order(value, INT: tl.constexpr, BITS: tl.constexpr):
    """Integers in the order of the floats, from their bits; the same function leads back (with the bits as `value`)."""
    bits = value.to(INT, bitcast=True)
    return bits ^ ((bits >> (BITS - 1)) & ((1 << (BITS - 1)) - 1))


@triton.jit
def _mass_from(
    x, inv_temp, least, cut, peak, COUNT: tl.constexpr, INT: tl.constexpr, BITS: tl.constexpr,
    V: tl.constexpr, TILE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """For each of `least` [16]: the number of scores from there on, or their mass by exp(peak), none below `cut`."""
    lane = tl.arange(0, TILE)
    total = tl.zeros((16,), ACC)
    for start in range(0, V, TILE):
        ids = start + lane
        scores = load_logits(x, ids, ids < V, ACC) * inv_temp
        weight = tl.where(scores >= cut, tl.exp(scores - peak), 0.0)
        if COUNT:
            weight = tl.where(ids < V, 1.0, 0.0).to(ACC)
        above = _order(scores, INT, BITS)[:, None] >= least[None, :]
        total += tl.sum(tl.where(above, weight[:, None], 0.0), 0)
    return total


@triton.jit
def _highest(
    x, inv_temp, cut, peak, needed, COUNT: tl.constexpr, INT: tl.constexpr, BITS: tl.constexpr,
    V: tl.constexpr, TILE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Highest score at or above which lies `needed` or more; its bits are found four at a time."""
    sign = tl.full((), 1, INT) << (BITS - 1)
    digit = tl.arange(0, 16).to(INT)
    prefix = tl.full((), 0, INT)
    for step in range(BITS // 4):
        shift = BITS - 4 - 4 * step
        least = (prefix | (digit << shift)) ^ sign
        total = _mass_from(x, inv_temp, least, cut, peak, COUNT, INT, BITS, V, TILE, ACC)
        best = tl.max(tl.where((total >= needed) & (total > 0), digit, 0), 0)
        prefix = prefix | (best << shift)
    return _order(prefix ^ sign, INT, BITS).to(ACC, bitcast=True)


@triton.jit
def _cut_kernel(
    x, stride, inv_temp, top_k, top_p, out, INT: tl.constexpr, BITS: tl.constexpr,
    V: tl.constexpr, TILE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Lowest score that the filters keep. No sort: rows without filters cost nothing, and the host need not know."""
    row = tl.program_id(0).to(tl.int64)
    x += row * stride
    scale = tl.load(inv_temp + row)
    k = tl.load(top_k + row)
    p = tl.load(top_p + row)
    cut = tl.full((), float("-inf"), ACC)
    peak = tl.full((), 0.0, ACC)
    if k > 0:
        cut = _highest(x, scale, cut, peak, tl.minimum(k, V).to(ACC), True, INT, BITS, V, TILE, ACC)
    if p < 1:
        lane = tl.arange(0, TILE)
        best = tl.full((TILE,), float("-inf"), ACC)
        for start in range(0, V, TILE):
            ids = start + lane
            best = tl.maximum(best, load_logits(x, ids, ids < V, ACC) * scale)
        peak = tl.max(best, 0)
        lowest = _order(tl.full((16,), float("-inf"), ACC), INT, BITS)
        whole = tl.max(_mass_from(x, scale, lowest, cut, peak, False, INT, BITS, V, TILE, ACC), 0)
        nucleus = _highest(x, scale, cut, peak, p.to(ACC) * whole, False, INT, BITS, V, TILE, ACC)
        cut = tl.where(nucleus > cut, nucleus, cut)  # NaN where the row is no distribution
    tl.store(out + row, cut)


@triton.jit
def _blocks_kernel(
    x, stride, inv_temp, cut, peak, total, best,
    V: tl.constexpr, NB: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Maximum, its lowest id, and Σ exp(score − maximum) over the kept tokens, of every run of BLOCK ids."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    ids = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    scores = load_logits(x + row * stride, ids, ids < V, ACC) * tl.load(inv_temp + row)
    top = tl.max(scores, 1)
    base = tl.where(top == float("-inf"), 0.0, top)
    mass = tl.where(scores >= tl.load(cut + row), tl.exp(scores - base[:, None]), 0.0)
    at, mask = row * NB + block, block < NB
    tl.store(peak + at, top, mask=mask)
    tl.store(total + at, tl.sum(mass, 1), mask=mask)
    tl.store(best + at, block * BLOCK + tl.argmax(scores, 1), mask=mask)


@triton.jit
def _combine_kernel(
    temperature, cut, peak, total, best, lse, greedy, mass, NB: tl.constexpr, LANES: tl.constexpr, ACC: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, LANES)
    at, mask = row * NB + block, block < NB
    top = tl.load(peak + at, mask=mask, other=float("-inf"))
    highest = tl.max(top, 0)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    sums = tl.load(total + at, mask=mask, other=0.0) * tl.exp(top - base)
    whole = tl.sum(sums, 0)
    tl.store(mass + at, sums / whole, mask=mask)
    is_greedy = tl.load(temperature + row) <= 0
    token = tl.load(best + row * NB + tl.argmax(top, 0)).to(tl.int64)
    tl.store(greedy + row, tl.where(is_greedy, token, -1))
    tl.store(cut + row, tl.where(is_greedy, highest, tl.load(cut + row)))
    bare = is_greedy | (highest == float("inf")) | (highest == float("-inf"))
    tl.store(lse + row, tl.where(bare, highest, highest + tl.log(whole)))


def row_params(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Rows:
    """As the reference; the logits keep their dtype."""
    logits = row_major(logits)
    count, vocabulary = logits.shape
    blocks, acc = triton.cdiv(vocabulary, BLOCK), precision(logits)
    inv_temp = torch.where(temperature <= 0, 1.0, 1.0 / temperature).to(working(logits[:0]).dtype)
    cut, lse, greedy = torch.empty_like(inv_temp), torch.empty_like(inv_temp), torch.empty_like(top_k)
    peak, total, mass = (inv_temp.new_empty(count, blocks) for _ in range(3))
    best = top_k.new_empty(count, blocks, dtype=torch.int32)
    x, tile = (logits, logits.stride(0), inv_temp), min(tile_of(vocabulary), 2048)
    kind = (tl.int64, 64) if acc == tl.float64 else (tl.int32, 32)
    _cut_kernel[(count,)](*x, top_k, top_p, cut, *kind, vocabulary, tile, acc, num_warps=16)
    several = min(BLOCKS, triton.next_power_of_2(blocks))
    grid = (count, triton.cdiv(blocks, several))
    _blocks_kernel[grid](*x, cut, peak, total, best, vocabulary, blocks, several, BLOCK, acc)
    lanes = triton.next_power_of_2(blocks)
    _combine_kernel[(count,)](temperature, cut, peak, total, best, lse, greedy, mass, blocks, lanes, acc)
    return Rows(logits, inv_temp, cut, lse, greedy, mass)


@triton.jit
def _sample_kernel(
    x, stride, inv_temp, cut, lse, greedy, mass, u, out,
    V: tl.constexpr, NB: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(greedy + row)
    if token < 0:
        lane = tl.arange(0, LANES)
        sums = tl.load(mass + row * NB + lane, mask=lane < NB, other=0.0)
        block, rest = search(sums, tl.load(u + row).to(ACC) * tl.sum(sums, 0), LANES)
        ids = block * BLOCK + tl.arange(0, BLOCK)
        scalars = (tl.load(inv_temp + row), tl.load(cut + row), tl.load(lse + row))
        weight = probability(load_logits(x + row * stride, ids, ids < V, ACC), ids, *scalars, token)
        index, _ = search(weight, rest, BLOCK)
        token = (block * BLOCK + index).to(tl.int64)
    tl.store(out + row, token)


def sample_rows(rows: Rows, u: Tensor) -> Tensor:
    vocabulary, blocks = rows.logits.shape[1], rows.block_mass.shape[1]
    out = torch.empty_like(rows.greedy)
    sizes = vocabulary, blocks, triton.next_power_of_2(blocks), BLOCK, precision(rows.logits)
    _sample_kernel[(len(out),)](*pointers(rows), rows.block_mass.contiguous(), u.contiguous(), out, *sizes)
    return out
