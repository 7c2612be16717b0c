"""The specification of the kernels in plain PyTorch: obvious first, fast never.

Shapes: B sequences, n draft nodes, R rows (positions of all sequences), V vocabulary. Work is done in fp32, or in fp64
when the logits are fp64 (in which the tests check the law of the verification rules). No function modifies its
arguments or synchronises with the host.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .objectives import OBJECTIVES

BLOCK = 256  # vocabulary entries summed together: level one of the two-level inverse CDF
_LOW = 0xFFFFFFFF


class Rows(NamedTuple):
    """R distributions over V tokens: each is its logits and a few scalars; no probability tensor exists.

    p(v) = exp(x_v·inv_temp − lse) where x_v·inv_temp ≥ cut, else 0. A NaN logit fails the comparison and has p = 0.
    A greedy row (temperature 0) is one-hot at `greedy`, the lowest id of the maximum, whatever ties with it; its
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
        """[R] bool: False where no distribution exists (all logits −inf or NaN, or one +inf).

        Sampling there gives some id in [0, V): whoever decodes looks at this when it talks to the host anyway.
        """
        return self.lse.isfinite()

    def take(self, index: Tensor) -> Rows:
        """The rows at `index` [M] int64, in that order."""
        return Rows(*(field[index] for field in self))


def uniform(seed: Tensor, position: Tensor, stream: int) -> Tensor:
    """Uniforms [B, T] fp32 in [0, 1) for `seed` [B] int64 and absolute `position` [B, T] int64 ≥ 0.

    `stream` < 2**32: 0 accept, 1 target/residual/bonus, 2… draft. Philox4x32-10 (Salmon et al. 2011) with the two
    halves of the seed as key and (position low, position high, stream, 0) as counter: no two (position, stream) share
    a counter. The first output word is converted as Triton does, so this equals `tl.rand(seed, position)` for stream 0
    and positions below 2**32, and the first word of `tl.philox` with these counters everywhere.
    """
    seed = seed[:, None]
    counter = (position & _LOW, position >> 32 & _LOW, torch.full_like(position, stream), torch.zeros_like(position))
    word = philox(counter, (seed & _LOW, seed >> 32 & _LOW))[0]
    word = torch.where(word >= 1 << 31, _LOW - word, word)  # the word read as int32, with x < 0 mapped to −x − 1
    return word.to(torch.float32) * torch.tensor(4.6566127342e-10, dtype=torch.float32, device=word.device)


def philox(counter: tuple[Tensor, ...], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Philox4x32-10: four counter words and two key words (32-bit values in int64, broadcast) to four such words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # The signed product wraps but keeps its 64 bits; the mask undoes the sign extension of the shift.
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (b >> 32 & _LOW) ^ c1 ^ k0, b & _LOW, (a >> 32 & _LOW) ^ c3 ^ k1, a & _LOW
        k0, k1 = k0 + 0x9E3779B9 & _LOW, k1 + 0xBB67AE85 & _LOW
    return c0, c1, c2, c3


def row_params(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Rows:
    """Rows of `logits` [R, V] under `temperature` [R] (0 = greedy), `top_k` [R] int64 (0 = off), `top_p` [R] (1 = off).

    Filters in the order of `transformers`: temperature, top-k, top-p (the smallest set whose mass reaches top_p, at
    least one token). All ties at a cut are kept. NaN counts as −inf (`nan_count` counts them); `Rows.valid` tells
    which rows are distributions.
    """
    logits = working(logits)
    vocabulary = logits.shape[1]
    is_greedy = temperature <= 0
    inv_temp = torch.where(is_greedy, 1.0, 1.0 / temperature).to(logits.dtype)
    scores = without_nan(logits * inv_temp[:, None])
    peak = scores.amax(-1)
    ordered = scores.sort(-1, descending=True).values

    kth = torch.where(top_k > 0, top_k, vocabulary).clamp(max=vocabulary) - 1
    cut = torch.where(top_k > 0, ordered.gather(1, kth[:, None])[:, 0], -torch.inf)
    mass = torch.where(ordered >= cut[:, None], (ordered - peak[:, None]).exp(), 0.0)
    likelier = mass.cumsum(-1) - mass  # mass of the tokens before this one
    needed = likelier < (top_p.to(mass.dtype) * mass.sum(-1))[:, None]
    last = needed.sum(-1, keepdim=True).clamp(min=1) - 1
    cut = torch.where(top_p < 1, torch.maximum(cut, ordered.gather(1, last)[:, 0]), cut)

    sums = blocked(torch.where(scores >= cut[:, None], (scores - peak[:, None]).exp(), 0.0)).sum(-1)
    total = sums.sum(-1, keepdim=True)
    return Rows(
        logits=logits,
        inv_temp=inv_temp,
        cut=torch.where(is_greedy, peak, cut),
        lse=torch.where(is_greedy | ~peak.isfinite(), peak, peak + total[:, 0].log()),
        greedy=torch.where(is_greedy, scores.argmax(-1), -1),
        block_mass=sums / total,
    )


def sample_rows(rows: Rows, u: Tensor) -> Tensor:
    """One token per row, [R] int64, from the uniforms `u` [R]; greedy rows ignore theirs.

    Inverse CDF in id order with two-level sums: the first block whose cumulative mass exceeds u·total, then the first
    id in it whose cumulative mass exceeds the rest. A row uses its own sums only, in an order fixed by V, so on a CPU
    it yields the same token in whatever batch it stands. (On a GPU PyTorch's reductions depend on the shape: a uniform
    within rounding of a boundary may fall on either side.) Past the end through rounding is the last kept token: a
    token of p = 0 is never returned.
    """
    return torch.where(rows.greedy >= 0, rows.greedy, inverse_cdf(probabilities(rows), u))


def walk_tree(drawn: Tensor, tokens: Tensor, parents: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The match rule: from the root on, go to the child that holds the token drawn at the current node, if any.

    `drawn` [B, n+1]: the token drawn from the target at the root (column 0) and at node i (column i + 1). `tokens`,
    `parents` [B, n]: the draft tree; parent −1 is the root, −2 marks padding. Of siblings with equal tokens the lowest
    index is taken. Returns the path [B, n] (node indices, padded with −1), n_accepted [B] and the bonus token [B], the
    one drawn at the last node. Every committed token is a draw from p, whatever the tree holds ("naive sampling" of
    SpecInfer, Miao et al. 2024).
    """
    batch, n = tokens.shape
    node = tokens.new_full((batch, 1), -1)
    path = tokens.new_full((batch, n), -1)
    going = torch.ones_like(node, dtype=torch.bool)
    for step in range(n):
        child = going & (parents == node) & (tokens == drawn.gather(1, node + 1))
        going = child.any(-1, keepdim=True)
        node = torch.where(going, child.int().argmax(-1, keepdim=True), node)
        path[:, step] = torch.where(going, node, -1)[:, 0]
    return path, (path >= 0).sum(-1), drawn.gather(1, node + 1)[:, 0]


def accept_chain(
    p: Rows, q: Rows, tokens: Tensor, count: Tensor, u_accept: Tensor, u_next: Tensor
) -> tuple[Tensor, Tensor]:
    """The ratio rule, token by token, for chains of sampled drafts (Leviathan et al. 2023; Chen et al. 2023).

    `p`: the target's B·(n+1) rows, sequence-major: row b·(n+1) + i follows i draft tokens. `q`: the B·n rows that
    `tokens` [B, n] were sampled from, over the target's vocabulary. `count` [B]: draft tokens that are not padding.
    Uniforms `u_accept` [B, n] (stream 0) and `u_next` [B, n+1] (stream 1).

        accept x_i    if u < min(1, p_i(x_i) / q_i(x_i)); where q_i(x_i) = 0, if p_i(x_i) > 0
        rejected      next token from norm(max(p_i − q_i, 0)), or from p_i where that is zero everywhere
        all accepted  next token from p_count

    Returns n_accepted [B] and the next token [B], both int64.
    """
    batch, n = tokens.shape
    depth = torch.arange(n + 1, device=tokens.device)
    p_dense = probabilities(p).unflatten(0, (batch, n + 1))
    q_dense = torch.zeros_like(p_dense)  # nothing is drafted behind the last token: max(p − 0, 0) = p
    q_dense[:, :n] = probabilities(q).view_as(q_dense[:, :n])
    q_dense = torch.where((depth < count[:, None])[..., None], q_dense, 0.0)

    p_token, q_token = (dense[:, :n].gather(2, tokens[..., None])[..., 0] for dense in (p_dense, q_dense))
    accept = (u_accept * q_token < p_token) & (depth[:n] < count[:, None])
    accepted = accept.long().cumprod(-1).sum(-1)

    at = torch.arange(batch, device=tokens.device), accepted
    residual = (p_dense[at] - q_dense[at]).clamp(min=0)
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, p_dense[at])
    return accepted, inverse_cdf(residual, u_next[at])


def expand_topk(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k ≤ Vd likeliest tokens of each row of `logits` [R, Vd], best first: log-probability [R, k], id [R, k] int64.

    NaN counts as −inf. Ties come lowest id first.
    """
    scores = without_nan(working(logits))
    logprob, index = scores.log_softmax(-1).sort(stable=True, dim=-1, descending=True)
    return logprob[:, :k], index[:, :k]


def argmax(logits: Tensor) -> Tensor:
    """[..., V] to int64 [...]: the lowest id of the maximum in fp32; NaN counts as −inf. What a greedy row draws."""
    return without_nan(working(logits)).argmax(-1)


def nan_count(logits: Tensor) -> Tensor:
    """[R] int64: how many of a row's `logits` [R, V] are NaN; the kernels treat those as −inf without a word."""
    return logits.isnan().sum(-1)


def working(logits: Tensor) -> Tensor:
    """In the precision of the computation: fp64 stays, all else becomes fp32 (an fp32 tensor is returned itself)."""
    return logits if logits.dtype == torch.float64 else logits.float()


def without_nan(scores: Tensor) -> Tensor:
    """NaN replaced by −inf."""
    return scores.masked_fill(scores.isnan(), -torch.inf)


def probabilities(rows: Rows) -> Tensor:
    """p of every token, [R, V]: for tests and few rows."""
    scores = rows.logits * rows.inv_temp[:, None]
    greedy = rows.greedy[:, None]
    kept = (scores >= rows.cut[:, None]) & (greedy < 0)
    p = (scores - rows.lse[:, None]).exp().masked_fill(~kept, 0.0)
    token = greedy.clamp(min=0)
    return p.scatter(1, token, torch.where(greedy >= 0, 1.0, p.gather(1, token)))


def blocked(weight: Tensor) -> Tensor:
    """`weight` [R, V] as [R, ceil(V / BLOCK), min(V, BLOCK)], filled up with zeros."""
    width = min(weight.shape[1], BLOCK)
    if missing := -weight.shape[1] % width:
        weight = torch.nn.functional.pad(weight, (0, missing))
    return weight.unflatten(1, (-1, width))


def inverse_cdf(weight: Tensor, u: Tensor) -> Tensor:
    """Index [R] of the draw from unnormalised `weight` [R, V] ≥ 0 at the uniforms `u` [R], by two-level sums."""
    blocks = blocked(weight)
    cumulative = blocks.sum(-1).cumsum(-1)
    block, rest = search(cumulative, u.to(cumulative.dtype) * cumulative[:, -1])
    chosen = blocks[torch.arange(len(block), device=block.device), block]
    return block * blocks.shape[2] + search(chosen.cumsum(-1), rest)[0]


def search(cumulative: Tensor, threshold: Tensor) -> tuple[Tensor, Tensor]:
    """First index [R] where the non-decreasing `cumulative` [R, N] exceeds `threshold` [R], and the rest [R].

    The index never goes beyond the last one that has mass. The rest is the threshold less the sum before the index.
    """
    beyond = torch.searchsorted(cumulative, threshold[:, None], right=True)
    last = torch.searchsorted(cumulative, cumulative[:, -1:].contiguous())
    index = torch.minimum(beyond, last).clamp(max=cumulative.shape[1] - 1)
    before = torch.where(index > 0, cumulative.gather(1, (index - 1).clamp(min=0)), 0.0)
    return index[:, 0], threshold - before[:, 0]


def distill_rows(logits: Tensor, teacher: Tensor, weight: Tensor, objective: str) -> Tensor:
    """Losses [n] of the draft `logits` [n, Vd] against `teacher`; the logits become weight · ∂loss/∂logits, in place.

    `teacher`: [n, Vd] probabilities, rows that sum to one; for "ce" the tokens [n] int64. `weight` [n] scales the
    gradients alone. Objectives and their gradients: `kernels.objectives`.
    """
    known = teacher if teacher.ndim == 1 else working(teacher)
    losses, slope = OBJECTIVES[objective](working(logits), known)
    logits.copy_(slope * weight.to(slope.dtype)[:, None])
    return losses
