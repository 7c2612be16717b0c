"""Code that the Triton kernels share: loading logits, the probability of tokens, the search in a running sum."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..rows import Rows

BLOCKS = 16  # runs of `rows.BLOCK` ids per program: 4096 logits
TILE = 4096  # logits per iteration in programs that process a whole row


def precision(logits: Tensor) -> Any:
    """The working precision of `rows.to_working_precision` as a Triton type."""
    return tl.float64 if logits.dtype == torch.float64 else tl.float32


def row_major(logits: Tensor) -> Tensor:
    """Logits [R, V] with contiguous rows; the stride between rows may be any."""
    logits = logits.detach()
    return logits if logits.stride(1) == 1 else logits.contiguous()


def pointers(rows: Rows) -> tuple[Any, ...]:
    """Kernel arguments for rows: (logits, stride, inv_temp, cut, lse, greedy)."""
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
    """p of tokens `ids` with logits `x`, as defined in `Rows`."""
    scores = x * inv_temp
    p = tl.where(scores >= cut, tl.exp(scores - lse), 0.0)
    return tl.where(greedy >= 0, tl.where(ids == greedy, 1.0, 0.0).to(p.dtype), p)


@triton.jit
def search(weight, threshold, SIZE: tl.constexpr):
    """Find the first index at which the running sum of `weight` [SIZE] exceeds `threshold`; also return the rest.

    The index is at most the last index with weight. A parallel running sum may decrease in its last bit, so indices
    without weight are excluded explicitly.
    """
    index = tl.arange(0, SIZE)
    cumulative = tl.cumsum(weight, 0)
    last = tl.max(tl.where(weight > 0, index, 0), 0)
    beyond = tl.min(tl.where((cumulative > threshold) & (weight > 0), index, SIZE), 0)
    position = tl.minimum(beyond, last)
    return position, threshold - tl.sum(tl.where(index == position - 1, cumulative, 0.0), 0)
