"""Kernels for tensors on a CPU: the functions of `reference`, which documents them, less the work that is not needed.

Talking to the host is free here: filters that are off cost nothing, small integer work is done in Python, and NumPy
does what it does much faster than PyTorch (argmax and sorting several times).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from . import reference
from .objectives import TINY
from .reference import Panorama
from .rows import BLOCK, DraftRows, Rows, blocked, inverse_cdf, probabilities, search, without_nan, working

_CACHED = 2**18  # logits whose fp32 work fits the second-level cache of a core
_LOG_TINY = math.log(TINY)
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
    p: Rows, q: Rows, tokens: Tensor, count: Tensor, u_accept: Tensor, u_next: Tensor, rule: str = "token"
) -> tuple[Tensor, Tensor]:
    reference.check_rule(rule)
    batch, n = tokens.shape
    row = torch.arange(batch)[:, None]
    depth = torch.arange(n)
    p_token = _probability(p, row * (n + 1) + depth, tokens)
    q_token = _probability(q, row * n + depth, tokens)
    if rule == "token":
        accept = (u_accept * q_token < p_token) & (depth < count[:, None])
        accepted = accept.long().cumprod(-1).sum(-1)
        share = None
    else:
        share = reference.shares(p_token, q_token)
        accepted = reference.block_accepted(share, _excess(p, q, share), count, u_accept)

    # One row per sequence is needed in full: the rejected position's, or the one behind the whole draft.
    weight = probabilities(p.take(row[:, 0] * (n + 1) + accepted))
    rejected = (accepted < count).nonzero()[:, 0]
    if len(rejected):
        kept = weight[rejected]
        scaled = kept if share is None else kept * share[rejected, accepted[rejected]][:, None]
        residual = (scaled - probabilities(q.take(rejected * n + accepted[rejected]))).clamp_(min=0)
        weight[rejected] = torch.where(residual.amax(-1, keepdim=True) > 0, residual, kept)
    return accepted, inverse_cdf(weight, u_next.gather(1, accepted[:, None])[:, 0])


def _excess(p: Rows, q: Rows, share: Tensor) -> Tensor:
    """Σ max(share · p − q, 0) behind 1 … n − 1 tokens, in a table [B, n+1] whose ends are not needed."""
    batch, n = share.shape[0], share.shape[1] - 1
    excess = torch.zeros_like(share)
    if n > 1:
        behind = torch.arange(batch)[:, None], torch.arange(1, n)
        target = probabilities(p.take((behind[0] * (n + 1) + behind[1]).flatten()))
        drafted = probabilities(q.take((behind[0] * n + behind[1]).flatten()))
        excess[:, 1:n] = (target * share[:, 1:n].reshape(-1, 1)).sub_(drafted).clamp_(min=0).sum(-1).view(batch, n - 1)
    return excess


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


def panorama(p: Rows, drafts: Sequence[DraftRows], tokens: Tensor) -> Panorama:
    step = max(1, _CACHED // p.logits.shape[1])
    parts = []
    for start in range(0, max(1, len(tokens)), step):
        at = slice(start, start + step)
        some = [
            d._replace(logits=d.logits[at], inv_temp=None if d.inv_temp is None else d.inv_temp[at]) for d in drafts
        ]
        parts.append(_panorama(Rows(*(field[at] for field in p)), some, tokens[at]))
    return Panorama(*(torch.cat(field, -1) for field in zip(*parts, strict=True)))


def _panorama(p: Rows, drafts: Sequence[DraftRows], tokens: Tensor) -> Panorama:
    at = tokens[:, None]
    target, log_p, best = _target(p)
    mass, negentropy = target.sum(-1), torch.linalg.vecdot(target, log_p)
    p_x = target.gather(1, at)[:, 0]
    fields = []
    for draft in drafts:
        q, log_q, likeliest = _drafted(draft, target.dtype)
        if (ids := draft.ids) is None:
            known, log_known, missed, q_x = target, log_p, torch.zeros_like(p_x), q.gather(1, at)[:, 0]
        else:
            known, log_known, likeliest = target[:, ids], log_p[:, ids], ids[likeliest]
            missed = (mass - known.sum(-1)).clamp_(min=0)
            q_x = torch.where(ids == at, q, 0.0).sum(-1)
        cross = torch.linalg.vecdot(known, log_q) + missed * _LOG_TINY
        excess = (known - q).clamp_(min=0).sum(-1) + missed
        statistics = [
            (mass - excess).clamp_(min=0),
            excess,
            negentropy - cross,
            -q_x.clamp_min(TINY).log(),
            torch.linalg.vecdot(q, log_q) - torch.linalg.vecdot(q, log_known),
            p_x,
            q_x,
            (likeliest == best).to(q.dtype),
            missed,
        ]
        fields.append(torch.stack(statistics).masked_fill_(cross.isnan(), torch.nan))
    table = torch.stack(fields, 1) if fields else target.new_zeros(9, 0, len(target))
    fields = [*table, -negentropy]
    return Panorama(*(field.masked_fill(~p.valid, torch.nan) for field in fields))


def _target(p: Rows) -> tuple[Tensor, Tensor, Tensor]:
    """p and log max(p, TINY), [R, V], and the likeliest token [R]."""
    logits, _ = _sanitised(p.logits)
    is_greedy = p.greedy >= 0
    if bool(is_greedy.all()):
        one_hot = torch.zeros_like(logits).scatter_(1, p.greedy[:, None], 1.0)
        return one_hot, (one_hot - 1).mul_(-_LOG_TINY), p.greedy
    scores = logits * p.inv_temp[:, None]
    if bool((p.cut > -torch.inf).any()):
        scores.masked_fill_(scores < p.cut[:, None], -torch.inf)
    dense, log_p = scores.softmax(-1), scores.sub_(p.lse[:, None]).clamp_(min=_LOG_TINY)
    if bool(is_greedy.any()):
        dense[is_greedy], log_p[is_greedy], _ = _target(p.take(is_greedy.nonzero()[:, 0]))
    return dense, log_p, torch.where(is_greedy, p.greedy, _argmax(logits))


def _drafted(draft: DraftRows, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """q and log max(q, TINY), [R, Vd], and the likeliest draft token [R]."""
    scores, top = _sanitised(draft.logits)
    if draft.inv_temp is not None:
        inv_temp = draft.inv_temp.to(scores.dtype)
        scores, top = scores * inv_temp[:, None], top * inv_temp
    q = scores.softmax(-1)
    lse = top - q.amax(-1).log()
    return q.to(dtype), (scores - lse[:, None]).clamp_(min=_LOG_TINY).to(dtype), _argmax(scores)
