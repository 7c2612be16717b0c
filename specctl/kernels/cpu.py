"""Kernels for tensors on a CPU: the functions of `reference`, which documents them, less the work that is not needed.

Talking to the host is free here: filters that are off cost nothing, small integer work is done in Python, and NumPy
does what it does much faster than PyTorch (argmax and sorting several times).
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from . import reference
from .reference import BLOCK, Rows, blocked, inverse_cdf, probabilities, search, without_nan, working

_CACHED = 2**18  # logits whose fp32 work fits the second-level cache of a core
_CHUNK = 256  # positions whose uniforms are made together: a step uses a few of them, the next step their neighbours


def uniform(seed: Tensor, position: Tensor, stream: int) -> Tensor:
    values = [
        [_uniform_chunk(key, at // _CHUNK, stream)[at % _CHUNK] for at in row]
        for key, row in zip(seed.tolist(), position.tolist(), strict=True)
    ]
    return torch.tensor(values, dtype=torch.float32).view(position.shape)


@lru_cache(maxsize=4096)
def _uniform_chunk(seed: int, index: int, stream: int) -> list[float]:
    """Uniforms of the _CHUNK positions from index·_CHUNK on: Philox on NumPy's uint64, bit-equal to the reference."""
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    position = np.arange(index * _CHUNK, (index + 1) * _CHUNK, dtype=np.uint64)
    c0, c1, c2, c3 = position & low, position >> half, np.full_like(position, stream), np.zeros_like(position)
    k0, k1 = seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF
    for _ in range(10):
        a, b = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (b >> half) ^ c1 ^ np.uint64(k0), b & low, (a >> half) ^ c3 ^ np.uint64(k1), a & low
        k0, k1 = k0 + 0x9E3779B9 & 0xFFFFFFFF, k1 + 0xBB67AE85 & 0xFFFFFFFF
    folded = np.where(c0 >> np.uint64(31), low - c0, c0).astype(np.float32)
    return (folded * np.float32(4.6566127342e-10)).tolist()


def row_params(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Rows:
    logits, top = _sanitised(logits)
    is_greedy = temperature <= 0
    greedy = torch.full_like(is_greedy, -1, dtype=torch.int64)
    if bool(is_greedy.any()):
        greedy = torch.where(is_greedy, _argmax(logits), -1)
    inv_temp = torch.where(is_greedy, 1.0, 1.0 / temperature).to(logits.dtype)
    if bool(is_greedy.all()):
        return Rows(logits, inv_temp, top, top, greedy, top.new_zeros(len(top), -(-logits.shape[1] // BLOCK)))

    scores = logits if bool((inv_temp == 1).all()) else logits * inv_temp[:, None]
    peak = top * inv_temp
    cut = torch.full_like(peak, -torch.inf)
    if bool((top_k > 0).any()):
        cut = _top_k_cut(scores, top_k)
        p = scores.masked_fill(scores < cut[:, None], -torch.inf).softmax(-1)
    else:
        p = scores.softmax(-1)
    if bool((top_p < 1).any()):
        cut = torch.maximum(cut, _top_p_cut(scores, p, top_p))
        p.masked_fill_(scores < cut[:, None], 0.0)

    sums = blocked(p).sum(-1)
    total = sums.sum(-1, keepdim=True)
    lse = peak + (total[:, 0] / p.amax(-1)).log()  # the softmax keeps no lse, but the peak's probability tells it
    return Rows(
        logits=logits,
        inv_temp=inv_temp,
        cut=torch.where(is_greedy, peak, cut),
        lse=torch.where(is_greedy | ~peak.isfinite(), peak, lse),
        greedy=greedy,
        block_mass=sums / total,
    )


def _sanitised(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Logits in working precision without NaN, and the row maxima. The cast comes first: bf16 reductions are slow."""
    logits = working(logits.detach())
    top = logits.amax(-1)
    if bool(top.isnan().any()):  # amax passes a NaN on, so rows without one need no second look
        logits = without_nan(logits)
        top = logits.amax(-1)
    return logits, top


def argmax(logits: Tensor) -> Tensor:
    scores = working(logits.detach()).numpy()
    best = scores.argmax(-1)
    if np.isnan(np.take_along_axis(scores, best[..., None], -1)).any():  # NumPy takes a NaN for the maximum
        best = np.where(np.isnan(scores), -np.inf, scores).argmax(-1)
    return torch.from_numpy(np.asarray(best))


def _argmax(logits: Tensor) -> Tensor:
    return torch.from_numpy(logits.numpy().argmax(-1))


def _top_k_cut(scores: Tensor, top_k: Tensor) -> Tensor:
    """Score of the top_k-th token [R], −inf where the filter is off."""
    most = min(int(top_k.max()), scores.shape[1])
    kth = scores.topk(most, -1).values.gather(1, (top_k.clamp(1, most) - 1)[:, None])
    return torch.where(top_k > 0, kth[:, 0], -torch.inf)


def _top_p_cut(scores: Tensor, p: Tensor, top_p: Tensor) -> Tensor:
    """Lowest score [R] in the nucleus of `p`, −inf where the filter is off."""
    cut = torch.full_like(scores[:, 0], -torch.inf)
    for row, needed in enumerate(top_p.tolist()):
        if needed < 1:
            mass = p[row].numpy()
            # Tokens below (1 − top_p)/V hold less than 1 − top_p together: none is needed. The ½ is for rounding.
            ordered = np.sort(scores[row].numpy()[mass >= 0.5 * (1 - needed) / len(mass)])[::-1]
            if len(ordered):  # empty only where there is no distribution
                reached = np.cumsum(np.exp(ordered - ordered[0]), dtype=np.float64) * mass.max()
                cut[row] = float(ordered[min(np.searchsorted(reached, needed), len(ordered) - 1)])
    return cut


def sample_rows(rows: Rows, u: Tensor) -> Tensor:
    if bool((rows.greedy >= 0).all()):
        return rows.greedy
    vocabulary = rows.logits.shape[1]
    width = min(vocabulary, BLOCK)
    cumulative = rows.block_mass.cumsum(-1)
    block, rest = search(cumulative, u.to(cumulative.dtype) * cumulative[:, -1])
    ids = block[:, None] * width + torch.arange(width)
    scores = rows.logits.gather(1, ids.clamp(max=vocabulary - 1)) * rows.inv_temp[:, None]
    kept = (scores >= rows.cut[:, None]) & (ids < vocabulary)
    weight = (scores - rows.lse[:, None]).exp().masked_fill_(~kept, 0.0)
    drawn = block * width + search(weight.cumsum(-1), rest)[0]
    return torch.where(rows.greedy >= 0, rows.greedy, drawn)


def walk_tree(drawn: Tensor, tokens: Tensor, parents: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    n = tokens.shape[1]
    paths, counts, bonus = [], [], []
    for choice, token, parent in zip(drawn.tolist(), tokens.tolist(), parents.tolist(), strict=True):
        children = {(parent[i], token[i]): i for i in reversed(range(n))}  # of equal siblings the lowest index stays
        path: list[int] = []
        node = -1
        while (child := children.get((node, choice[node + 1]))) is not None:
            path.append(node := child)
        paths.append(path + [-1] * (n - len(path)))
        counts.append(len(path))
        bonus.append(choice[node + 1])
    path_table = torch.tensor(paths, dtype=torch.int64).view(tokens.shape)
    return path_table, torch.tensor(counts, dtype=torch.int64), torch.tensor(bonus, dtype=torch.int64)


def accept_chain(
    p: Rows, q: Rows, tokens: Tensor, count: Tensor, u_accept: Tensor, u_next: Tensor
) -> tuple[Tensor, Tensor]:
    batch, n = tokens.shape
    row = torch.arange(batch)[:, None]
    depth = torch.arange(n)
    p_token = _probability(p, row * (n + 1) + depth, tokens)
    q_token = _probability(q, row * n + depth, tokens)
    accept = (u_accept * q_token < p_token) & (depth < count[:, None])
    accepted = accept.long().cumprod(-1).sum(-1)

    # One row per sequence is needed in full: the rejected position's, or the one behind the whole draft.
    weight = probabilities(p.take(row[:, 0] * (n + 1) + accepted))
    rejected = (accepted < count).nonzero()[:, 0]
    if len(rejected):
        proposal = probabilities(q.take(rejected * n + accepted[rejected]))
        residual = (weight[rejected] - proposal).clamp_(min=0)
        weight[rejected] = torch.where(residual.amax(-1, keepdim=True) > 0, residual, weight[rejected])
    return accepted, inverse_cdf(weight, u_next.gather(1, accepted[:, None])[:, 0])


def _probability(rows: Rows, index: Tensor, token: Tensor) -> Tensor:
    """p(token) in the row at `index`, both of one shape."""
    scores = rows.logits[index, token] * rows.inv_temp[index]
    p = (scores - rows.lse[index]).exp().masked_fill_(scores < rows.cut[index], 0.0)
    greedy = rows.greedy[index]
    return torch.where(greedy >= 0, (greedy == token).to(p.dtype), p)


def expand_topk(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """As the reference, except that ties come in any order when k > 1."""
    logprob = working(logits.detach()).log_softmax(-1)
    best, index = logprob.topk(k, -1)
    if math.isnan(best[:, 0].sum().item()):  # one NaN makes all of its row NaN
        return expand_topk(without_nan(logits), k) if bool(logits.isnan().any()) else (best, index)
    if k == 1:
        index = _argmax(logprob)[:, None]
    return best, index


def distill_rows(logits: Tensor, teacher: Tensor, weight: Tensor, objective: str) -> Tensor:
    rows = max(1, _CACHED // logits.shape[1])
    parts = zip(logits.split(rows), teacher.split(rows), weight.split(rows), strict=True)
    return torch.cat([reference.distill_rows(*part, objective) for part in parts])
