"""Shared parts of Triton kernels: loading logits, the probability of a row's tokens, the search in a running sum."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..rows import Rows

BLOCKS = 16  # runs of `rows.BLOCK` ids that one program takes: 4096 logits
TILE = 4096  # logits at a time of a program that takes a whole row


def precision(logits: Tensor) -> Any:
    """The working precision of `rows.working` as a Triton type."""
    return tl.float64 if logits.dtype == torch.float64 else tl.float32


def row_major(logits: Tensor) -> Tensor:
    """Logits [R, V] whose rows are contiguous; between rows any stride will do."""
    logits = logits.detach()
    return logits if logits.stride(1) == 1 else logits.contiguous()


def pointers(rows: Rows) -> tuple[Any, ...]:
    """Arguments of a kernel for its rows: (logits, stride, inv_temp, cut, lse, greedy)."""
    logits = row_major(rows.logits)
    return logits, logits.stride(0), *(field.contiguous() for field in rows[1:5])


def tile_of(vocabulary: int) -> int:
    return min(TILE, triton.next_power_of_2(vocabulary))


@triton.jit
def load_logits(x, ids, mask, ACC: tl.constexpr):
    """Logits in working precision; NaN and masked lanes are −inf."""
    value = tl.load(x + ids, mask=mask, other=float("-inf")).to(ACC)
    return tl.where(value == value, value, float("-inf"))


@triton.jit
def probability(x, ids, inv_temp, cut, lse, greedy):
    """p of tokens `ids` with logits `x`: see `Rows`."""
    scores = x * inv_temp
    p = tl.where(scores >= cut, tl.exp(scores - lse), 0.0)
    return tl.where(greedy >= 0, tl.where(ids == greedy, 1.0, 0.0).to(p.dtype), p)


@triton.jit
def search(weight, threshold, SIZE: tl.constexpr):
    """First index whose running sum of `weight` [SIZE] exceeds `threshold`, at most the last that has weight; the rest.

    A parallel running sum need not be monotone in its last bit, so an index without weight is refused explicitly.
    """
    index = tl.arange(0, SIZE)
    cumulative = tl.cumsum(weight, 0)
    last = tl.max(tl.where(weight > 0, index, 0), 0)
    beyond = tl.min(tl.where((cumulative > threshold) & (weight > 0), index, SIZE), 0)
    position = tl.minimum(beyond, last)
    return position, threshold - tl.sum(tl.where(index == position - 1, cumulative, 0.0), 0)
