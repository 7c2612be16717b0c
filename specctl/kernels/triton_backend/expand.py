"""Most likely tokens of a row: the k maxima of every tile, then the k best candidates; log Σ exp in the same passes."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..rows import to_working_precision
from .device import load_logits, precision, row_major, tile_of


@triton.jit
def _best(values, ids, free, NONE):
    """Maximum over the `free` lanes and its lowest id; NONE if no lane is free."""
    top = tl.max(tl.where(free, values, float("-inf")), 0)
    return top, tl.min(tl.where(free & (values == top), ids, NONE), 0)


@triton.jit(do_not_specialize=["TILES"])
def _tiles_kernel(
    x, stride, peak, total, values, indices, V, TILES, K: tl.constexpr, TILE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    ids = tile * TILE + tl.arange(0, TILE)
    scores = load_logits(x + row * stride, ids, ids < V, ACC)
    top = tl.max(scores, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    tl.store(peak + row * TILES + tile, top)
    tl.store(total + row * TILES + tile, tl.sum(tl.exp(scores - base), 0))
    free = ids < V
    for rank in range(K):
        value, index = _best(scores, ids, free, V)
        at = (row * TILES + tile) * K + rank
        tl.store(values + at, value)
        tl.store(indices + at, index)
        free = free & (ids != index)


@triton.jit(do_not_specialize=["V", "TILES"])
def _merge_kernel(
    peak, total, values, indices, logprob, out, V, TILES, K: tl.constexpr,
    LANES: tl.constexpr, WIDTH: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, LANES)
    top = tl.load(peak + row * TILES + tile, mask=tile < TILES, other=float("-inf"))
    highest = tl.max(top, 0)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    mass = tl.load(total + row * TILES + tile, mask=tile < TILES, other=0.0) * tl.exp(top - base)
    lse = highest + tl.log(tl.sum(mass, 0))
    lane = tl.arange(0, WIDTH)
    mask = lane < TILES * K
    candidates = tl.load(values + row * TILES * K + lane, mask=mask, other=float("-inf"))
    ids = tl.load(indices + row * TILES * K + lane, mask=mask, other=V)
    free = ids < V
    for rank in range(K):
        value, index = _best(candidates, ids, free, V)
        tl.store(logprob + row * K + rank, value - lse)
        tl.store(out + row * K + rank, index.to(tl.int64))
        free = free & (ids != index)


def expand_topk(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    logits = row_major(logits)
    rows, vocabulary = logits.shape
    tile, acc = tile_of(vocabulary), precision(logits)
    tiles = triton.cdiv(vocabulary, tile)
    like = to_working_precision(logits[:0])
    peak, total = (like.new_empty(rows, tiles) for _ in range(2))
    values, logprob = like.new_empty(rows, tiles, k), like.new_empty(rows, k)
    indices = torch.empty(rows, tiles, k, dtype=torch.int32, device=logits.device)
    index = torch.empty(rows, k, dtype=torch.int64, device=logits.device)
    _tiles_kernel[(rows, tiles)](
        logits, logits.stride(0), peak, total, values, indices, vocabulary, tiles, k, tile, acc
    )
    lanes, width = triton.next_power_of_2(tiles), triton.next_power_of_2(tiles * k)
    _merge_kernel[(rows,)](peak, total, values, indices, logprob, index, vocabulary, tiles, k, lanes, width, acc)
    return logprob, index
