"""Rows: distributions over the vocabulary, stored as logits and a few scalars, with their operations in PyTorch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 256  # vocabulary entries per partial sum: level one of the two-level inverse CDF


GREEDY_BELOW = 2.0**-17
"""Lower temperatures are greedy, as in vLLM (1e-5).

They could sample differently only between exact ties, and fp32 gets these wrong: for two equal logits of 80 at 1e-6,
log Σ exp rounds to one of them, and both have p = 1. Below 1e-38, logits divided by the temperature overflow.
"""


class Rows(NamedTuple):
    """R distributions over V tokens, each stored as logits and a few scalars. No probability tensor exists.

    p(v) = exp(x_v·inv_temp − lse) if x_v·inv_temp ≥ cut, else 0. A NaN logit fails the comparison and has p = 0. A
    greedy row (temperature 0) is one-hot at `greedy`, the lowest id of the maximum, even if other tokens tie; its
    scalars are inv_temp = 1 and cut = lse = the maximum.
    """

    logits: Tensor  # [R, V]
    inv_temp: Tensor  # [R]
    cut: Tensor  # [R] lowest x·inv_temp that is kept; −inf keeps all
    lse: Tensor  # [R] log Σ exp(x·inv_temp) over the kept tokens
    greedy: Tensor  # [R] int64: the token of a greedy row, −1 in a sampled row
    block_mass: Tensor  # [R, ceil(V / BLOCK)] probability of each run of BLOCK consecutive ids; unused in greedy rows

    @property
    def device(self) -> torch.device:
        return self.logits.device

    @property
    def valid(self) -> Tensor:
        """[R] bool: False if the row is not a distribution (all logits −inf or NaN, or one +inf).

        Sampling from such a row returns some id in [0, V). Decoding checks `valid` when it synchronizes with the host
        anyway.
        """
        return self.lse.isfinite()

    def take(self, index: Tensor) -> Rows:
        """The rows at `index` [M] int64, in that order."""
        return Rows(*(field[index] for field in self))


class DraftRows(NamedTuple):
    """A drafter's rows for R rows of the target: q = softmax(logits · inv_temp), zero outside the draft vocabulary."""

    logits: Tensor  # [R, Vd]; NaN counts as −inf
    ids: Tensor | None = None  # [Vd] int64, the target id of every draft token, all distinct; without: Vd = V
    inv_temp: Tensor | None = None  # [R]; without: 1


def as_rows(logits: Tensor, filters: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Arguments of `row_params` for the B·T rows of `logits` [B, T, V], with the filters [B] of their sequences."""
    temperature, top_k, top_p = (field.repeat_interleave(logits.shape[1]) for field in filters)
    return logits.flatten(0, 1), temperature, top_k, top_p


def nan_count(logits: Tensor) -> Tensor:
    """[R] int64: number of NaN in each row of `logits` [R, V]. The kernels silently treat NaN as −inf."""
    return logits.isnan().sum(-1)


def to_working_precision(logits: Tensor) -> Tensor:
    """Convert to the precision of the computation: fp64 stays, all else becomes fp32 (fp32 tensors are not copied)."""
    return logits if logits.dtype == torch.float64 else logits.float()


def without_nan(scores: Tensor) -> Tensor:
    """Replace NaN by −inf."""
    return scores.masked_fill(scores.isnan(), -torch.inf)


def probabilities(rows: Rows) -> Tensor:
    """p of every token, [R, V]: for tests and few rows."""
    scores = rows.logits * rows.inv_temp[:, None]
    greedy = rows.greedy[:, None]
    kept = (scores >= rows.cut[:, None]) & (greedy < 0)
    p = (scores - rows.lse[:, None]).exp().masked_fill(~kept, 0.0)
    token = greedy.clamp(min=0)
    return p.scatter(1, token, torch.where(greedy >= 0, 1.0, p.gather(1, token)))


def token_probability(rows: Rows, tokens: Tensor) -> Tensor:
    """p of some tokens of every row, in the shape of `tokens` [R, …]."""
    shape = (-1, *[1] * (tokens.ndim - 1))
    inv_temp, cut, lse, greedy = (field.view(shape) for field in (rows.inv_temp, rows.cut, rows.lse, rows.greedy))
    scores = rows.logits.gather(1, tokens.flatten(1)).view_as(tokens) * inv_temp
    p = (scores - lse).exp().masked_fill_(~(scores >= cut), 0.0)
    return torch.where(greedy >= 0, (greedy == tokens).to(p.dtype), p)


def in_blocks(weight: Tensor) -> Tensor:
    """`weight` [R, V] as [R, ceil(V / BLOCK), min(V, BLOCK)], padded with zeros."""
    width = min(weight.shape[1], BLOCK)
    if missing := -weight.shape[1] % width:
        weight = torch.nn.functional.pad(weight, (0, missing))
    return weight.unflatten(1, (-1, width))


def inverse_cdf(weight: Tensor, u: Tensor) -> Tensor:
    """Sample an index [R] from unnormalized `weight` [R, V] ≥ 0 at the uniforms `u` [R], by two-level sums."""
    blocks = in_blocks(weight)
    cumulative = blocks.sum(-1).cumsum(-1)
    block, rest = search(cumulative, u.to(cumulative.dtype) * cumulative[:, -1])
    chosen = blocks[torch.arange(len(block), device=block.device), block]
    return block * blocks.shape[2] + search(chosen.cumsum(-1), rest)[0]


def search(cumulative: Tensor, threshold: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first index [R] at which non-decreasing `cumulative` [R, N] exceeds `threshold` [R], and the rest.

    The index is at most the last index with mass. The rest [R] is the threshold minus the sum before the index.
    """
    beyond = torch.searchsorted(cumulative, threshold[:, None], right=True)
    last = torch.searchsorted(cumulative, cumulative[:, -1:].contiguous())
    index = torch.minimum(beyond, last).clamp(max=cumulative.shape[1] - 1)
    before = torch.where(index > 0, cumulative.gather(1, (index - 1).clamp(min=0)), 0.0)
    return index[:, 0], threshold - before[:, 0]
