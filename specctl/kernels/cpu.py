"""Kernels for tensors on a CPU. `reference` documents the functions; here they skip unneeded work.

On a CPU, host synchronization is free. So filters that are off cost no time, small integer work is done in Python, and
NumPy replaces PyTorch for operations in which it is several times faster (argmax, sorting). The library of the C++ step
chooses tokens from bf16 logits. Code that passes over rows several times takes a few rows at a time. Its buffers stay
in the CPU cache and outlive the call: at V = 32k, fresh memory from the system costs more than the arithmetic on it.
Softmax is used as PyTorch's fastest exponential.
"""

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from . import native, reference
from .objectives import TINY
from .reference import LOW, DrafterFeedback, philox
from .rows import (
    BLOCK,
    GREEDY_BELOW,
    DraftRows,
    Rows,
    inverse_cdf,
    probabilities,
    search,
    to_working_precision,
    token_probability,
    without_nan,
)

CACHED = 2**18  # number of logits with fp32 work that fits the second-level cache of a core
_IN_HAND = 2**19  # logits per chunk: its buffers fit the last-level cache, and smaller chunks cost more in calls
_LOG_TINY = math.log(TINY)
_CHUNK = 256  # positions with uniforms made together: a step uses a few, and the next step uses their neighbors


attention = reference.attention  # on a CPU, attention uses a mask (decoding/models/layers.py)
add_rms_norm = reference.add_rms_norm  # so do the layers, in the same module
rope_and_cache = reference.rope_and_cache
silu_and_mul = reference.silu_and_mul
span_attention = reference.span_attention  # training has blocks of documents (drafters/feature/ttt_attention.py)
span_attention_backward = reference.span_attention_backward


def uniform(seed: Tensor, position: Tensor, stream: int) -> Tensor:
    values = [
        [_uniform_chunk(key, at // _CHUNK, stream)[at % _CHUNK] for at in row]
        for key, row in zip(seed.tolist(), position.tolist(), strict=True)
    ]
    return torch.tensor(values, dtype=torch.float32).view(position.shape)


@lru_cache(maxsize=4096)
def _uniform_chunk(seed: int, index: int, stream: int) -> list[float]:
    """Uniforms of _CHUNK positions from index·_CHUNK on, bit-equal to the reference."""
    position = np.arange(index * _CHUNK, (index + 1) * _CHUNK, dtype=np.uint64)
    counter = position & LOW, position >> 32, np.full_like(position, stream), np.zeros_like(position)
    word = philox(counter, (seed & LOW, seed >> 32 & LOW))[0]
    folded = np.where(word >> 31, LOW - word, word).astype(np.float32)
    return (folded * np.float32(4.6566127342e-10)).tolist()


class _Scratch(threading.local):
    """Buffers, one set per thread."""

    def __init__(self) -> None:
        self.store = torch.empty(0)

    @torch.inference_mode(False)  # outside inference mode, an inference tensor could not be written to
    def buffers(self, count: int, rows: int, vocabulary: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        size = count * rows * vocabulary
        if self.store.numel() < size or self.store.dtype != dtype:
            self.store = torch.empty(size, dtype=dtype)
        return self.store[:size].view(count, rows, vocabulary).unbind()


_scratch = _Scratch()


def _chunks(logits: Tensor, count: int) -> Iterator[tuple[slice, Tensor, list[Tensor]]]:
    """Split rows into chunks.

    Yields the chunk's slice, its logits, and `count` buffers of its size in working precision.
    """
    rows, vocabulary = logits.shape
    step = max(1, min(rows, _IN_HAND // vocabulary))
    buffers = _scratch.buffers(count, step, vocabulary, to_working_precision(logits[:0]).dtype)
    for start in range(0, max(rows, 1), step):
        part = logits[start : start + step]
        yield slice(start, start + step), part, [buffer[: len(part)] for buffer in buffers]


def row_params(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Rows:
    logits = logits.detach()
    is_greedy = temperature < GREEDY_BELOW
    inv_temp = torch.where(is_greedy, 1.0, 1.0 / temperature).to(to_working_precision(logits[:0]).dtype)
    all_greedy, by_count, by_mass = bool(is_greedy.all()), bool((top_k > 0).any()), bool((top_p < 1).any())
    sums = inv_temp.new_zeros(len(logits), -(-logits.shape[1] // BLOCK))
    chunks = []
    for at, part, (scores, p) in _chunks(logits, 2):
        scale = inv_temp[at, None]
        best, top = _argmax(scores.copy_(part))
        scores.mul_(scale)
        cut = torch.full_like(top, -torch.inf)
        if not all_greedy:
            if by_count:
                cut = _top_k_cut(scores, top_k[at])
                scores.masked_fill_(scores < cut[:, None], -torch.inf)
            torch.softmax(scores, -1, out=p)
            if by_mass:
                cut = torch.maximum(cut, _top_p_cut(scores, p, top_p[at]))
                p.masked_fill_(scores < cut[:, None], 0.0)
            _sum_blocks(p, sums[at])
        chunks.append((best, top, cut, p.gather(1, best[:, None])[:, 0]))
    best, top, cut, largest = (torch.cat(field) for field in zip(*chunks, strict=True))
    total = sums.sum(-1, keepdim=True)
    peak = top * inv_temp
    lse = peak + (total[:, 0] / largest).log()  # softmax returns no lse: compute it from the peak's probability
    return Rows(
        logits=logits,
        inv_temp=inv_temp,
        cut=torch.where(is_greedy, peak, cut),
        lse=torch.where(is_greedy | ~peak.isfinite(), peak, lse),
        greedy=torch.where(is_greedy, best, -1),
        block_mass=sums / total,
    )


def _argmax(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Index and value of each row's maximum, both [R]. Replaces NaN by −inf, in place."""
    best = torch.from_numpy(scores.numpy().argmax(-1))  # if a row has NaN: the first NaN
    top = scores.gather(1, best[:, None])[:, 0]
    if math.isnan(top.sum().item()) and bool(top.isnan().any()):
        return _argmax(scores.masked_fill_(scores.isnan(), -torch.inf))
    return best, top


def _sum_blocks(weight: Tensor, out: Tensor) -> None:
    """Write the sums of every run of BLOCK ids, [R, ceil(V / BLOCK)], to `out`."""
    whole = weight.shape[1] // BLOCK
    if whole:
        torch.sum(weight[:, : whole * BLOCK].unflatten(1, (whole, BLOCK)), -1, out=out[:, :whole])
    if whole < out.shape[1]:
        torch.sum(weight[:, whole * BLOCK :], -1, out=out[:, whole])


def argmax(logits: Tensor) -> Tensor:
    if (found := native.argmax(logits)) is not None:
        return found
    scores = to_working_precision(logits.detach()).numpy()
    best = scores.argmax(-1)
    if np.isnan(np.take_along_axis(scores, best[..., None], -1)).any():  # NumPy takes a NaN for the maximum
        best = np.where(np.isnan(scores), -np.inf, scores).argmax(-1)
    return torch.from_numpy(np.asarray(best))


def finite_rows(logits: Tensor) -> Tensor:
    found = native.finite(logits)
    return reference.finite_rows(logits) if found is None else found


def _top_k_cut(scores: Tensor, top_k: Tensor) -> Tensor:
    """Score of the top_k-th token [R], −inf if the filter is off."""
    most = min(max(1, int(top_k.max())), scores.shape[1])
    kth = scores.topk(most, -1).values.gather(1, (top_k.clamp(1, most) - 1)[:, None])
    return torch.where(top_k > 0, kth[:, 0], -torch.inf)


def _top_p_cut(scores: Tensor, p: Tensor, top_p: Tensor) -> Tensor:
    """Lowest score [R] in the nucleus of `p`, −inf if the filter is off."""
    table = zip(scores.numpy(), p.numpy(), top_p.tolist(), strict=True)
    cut = [_nucleus_cut(row, mass, needed) if needed < 1 else -math.inf for row, mass, needed in table]
    return torch.tensor(cut, dtype=scores.dtype)


def _nucleus_cut(scores: np.ndarray, weight: np.ndarray, top_p: float) -> float:
    """Lowest score of the nucleus in one row, where `weight` is exp(scores) times any factor."""
    total = weight.sum()
    # Tokens below (1 − top_p)/V have less than 1 − top_p together: drop them. The ½ allows for rounding.
    ordered = np.sort(scores[weight >= 0.5 * (1 - top_p) * total / len(weight)])[::-1]
    if not len(ordered):  # the row is not a distribution
        return -math.inf
    reached = np.cumsum(np.exp(ordered - ordered[0]), dtype=np.float64) * weight.max()
    return float(ordered[min(np.searchsorted(reached, top_p * total), len(ordered) - 1)])


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
    return _walk([row.__getitem__ for row in drawn.tolist()], tokens, parents)


def sample_tree(
    logits: Tensor, filters: tuple[Tensor, Tensor, Tensor], u: Tensor, tokens: Tensor, parents: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Like the reference, but samples only from the rows on the accepted path, one after the other."""
    table = zip(logits.detach(), u.tolist(), *(field.tolist() for field in filters), strict=True)
    return _walk([partial(_sample_node, *fields) for fields in table], tokens, parents)


def _walk(choices: Sequence[Callable[[int], int]], tokens: Tensor, parents: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The match rule. `choices` map the row of a node (0 = the root) to the target's token, for every sequence."""
    n = tokens.shape[1]
    paths, counts, bonus = [], [], []
    for choose, token, parent in zip(choices, tokens.tolist(), parents.tolist(), strict=True):
        children = {(parent[i], token[i]): i for i in reversed(range(n))}  # of equal siblings the lowest index stays
        path: list[int] = []
        chosen = choose(0)
        while (child := children.get((path[-1] if path else -1, chosen))) is not None:
            path.append(child)
            chosen = choose(child + 1)
        paths.append(path + [-1] * (n - len(path)))
        counts.append(len(path))
        bonus.append(chosen)
    path_table = torch.tensor(paths, dtype=torch.int64).view(tokens.shape)
    return path_table, torch.tensor(counts, dtype=torch.int64), torch.tensor(bonus, dtype=torch.int64)


def _sample_node(logits: Tensor, u: list[float], temperature: float, top_k: int, top_p: float, row: int) -> int:
    """Sample a token from one row of `logits` [n+1, V] at its uniform in `u`.

    NumPy has less overhead per operation than PyTorch, and the arithmetic on one row is small.
    """
    filtered = top_k > 0 or top_p < 1 or temperature < GREEDY_BELOW
    if not filtered and (found := native.sample(logits[row], temperature, u[row])) is not None:
        return found
    x = to_working_precision(logits[row]).numpy()
    best = int(x.argmax())  # if the row has NaN: the first NaN
    if np.isnan(x[best]):
        x = np.where(np.isnan(x), -np.inf, x)
        best = int(x.argmax())
    if temperature < GREEDY_BELOW or not np.isfinite(x[best]):
        return best
    vocabulary, width = len(x), min(len(x), BLOCK)
    blocks = -(-vocabulary // width)
    padded, scores = (part.numpy() for part in _scratch.buffers(2, 1, blocks * width, torch.from_numpy(x).dtype))
    weight, scores = padded[0, :vocabulary], scores[0, :vocabulary]
    np.subtract(x, x[best], out=scores)
    scores *= 1.0 / temperature
    np.exp(scores, out=weight)
    padded[0, vocabulary:] = 0.0
    if top_k:
        kept = min(top_k, vocabulary)
        weight[scores < np.partition(scores, vocabulary - kept)[vocabulary - kept]] = 0.0
    if top_p < 1:
        weight[scores < _nucleus_cut(scores, weight, top_p)] = 0.0
    table = padded.reshape(blocks, width)
    sums = table.sum(1)
    block, rest = _search(sums, u[row] * float(sums.sum()))
    return block * width + _search(table[block], rest)[0]


def _search(weight: np.ndarray, threshold: float) -> tuple[int, float]:
    """First index at which the cumulative weight exceeds `threshold`, and the threshold minus the sum before it. The
    index is at most the last one with weight."""
    cumulative = weight.cumsum(dtype=np.float64)
    beyond, last = cumulative.searchsorted(threshold, side="right"), cumulative.searchsorted(cumulative[-1])
    index = int(min(beyond, last))
    return index, threshold - float(cumulative[index - 1] if index else 0.0)


def accept_chain(
    p: Rows, q: Rows, tokens: Tensor, count: Tensor, u_accept: Tensor, u_next: Tensor, rule: str = "token"
) -> tuple[Tensor, Tensor]:
    reference.check_rule(rule)
    batch, n = tokens.shape
    row = torch.arange(batch)
    depth = torch.arange(n)
    following = torch.nn.functional.pad(tokens, (0, 1)).view(-1, 1)  # the row after the last draft token is left out
    p_token = token_probability(p, following).view(batch, n + 1)[:, :n]
    q_token = token_probability(q, tokens.reshape(-1, 1)).view(batch, n)
    if rule == "token":
        accept = (u_accept * q_token < p_token) & (depth < count[:, None])
        accepted = accept.long().cumprod(-1).sum(-1)
        share = None
    else:
        share = reference.shares(p_token, q_token)
        accepted = reference.block_accepted(share, _excess(p, q, share), count, u_accept)

    # One row per sequence is needed in full: at the rejected position, or after the whole draft.
    after = p.take(row * (n + 1) + accepted)
    drafted = q.take(row * n + accepted.clamp(max=n - 1)) if n else q
    rejected, u, drawn = accepted < count, u_next.gather(1, accepted[:, None])[:, 0], []
    for at, part, (scores, weight, residual) in _chunks(after.logits, 3):
        _dense(after, at, part, scores, weight)
        if bool(rejected[at].any()):
            _dense(drafted, at, drafted.logits[at], scores, residual)
            scaled = weight if share is None else torch.mul(weight, share.gather(1, accepted[:, None])[at], out=scores)
            torch.sub(scaled, residual, out=residual).relu_()
            left = rejected[at] & (residual.amax(-1) > 0)
            weight = residual if bool(left.all()) else torch.where(left[:, None], residual, weight)
        drawn.append(inverse_cdf(weight, u[at]))
    return accepted, torch.cat(drawn)


def _excess(p: Rows, q: Rows, share: Tensor) -> Tensor:
    """Σ max(share · p − q, 0) after 1 … n − 1 tokens, in a table [B, n+1]. Its first and last columns are unused."""
    batch, n = share.shape[0], share.shape[1] - 1
    excess = torch.zeros_like(share)
    if n > 1:
        places = torch.arange(batch)[:, None], torch.arange(1, n)
        target = probabilities(p.take((places[0] * (n + 1) + places[1]).flatten()))
        drafted = probabilities(q.take((places[0] * n + places[1]).flatten()))
        excess[:, 1:n] = (target * share[:, 1:n].reshape(-1, 1)).sub_(drafted).clamp_(min=0).sum(-1).view(batch, n - 1)
    return excess


def expand_topk(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Like the reference, except that ties come in any order if k > 1."""
    logprob = to_working_precision(logits.detach()).log_softmax(-1)
    best, index = logprob.topk(k, -1)
    if math.isnan(best[:, 0].sum().item()):  # one NaN makes its whole row NaN
        return expand_topk(without_nan(logits), k) if bool(logits.isnan().any()) else (best, index)
    if k == 1:
        index = _argmax(logprob)[0][:, None]
    return best, index


def distill_rows(logits: Tensor, teacher: Tensor, weight: Tensor, objective: str) -> Tensor:
    rows = max(1, CACHED // logits.shape[1])
    parts = zip(logits.split(rows), teacher.split(rows), weight.split(rows), strict=True)
    return torch.cat([reference.distill_rows(*part, objective) for part in parts])


def drafter_feedback(p: Rows, drafts: Sequence[DraftRows], tokens: Tensor) -> DrafterFeedback:
    of_target, of_drafts = [], []
    for at, part, (dense, log_p, *rest) in _chunks(p.logits.detach(), 5):
        x = tokens[at, None]
        best = _target(p, at, part, dense, log_p)
        target = _TargetRows(best, dense.sum(-1), dense, log_p)
        negentropy = torch.mul(dense, log_p, out=rest[0]).sum(-1)
        of_target.append(torch.stack((target.mass, negentropy, dense.gather(1, x)[:, 0])))
        of_drafts.append([_drafted(draft, at, x, target, rest) for draft in drafts])
    totals = torch.cat(of_target, -1)
    each = [torch.cat(sums, -1) for sums in zip(*of_drafts, strict=True)]
    table = torch.stack(each, 1) if each else totals.new_zeros(6, 0, totals.shape[1])
    return DrafterFeedback.of_sums(totals, table, p.valid, ~table[1].isnan())


def _target(rows: Rows, at: slice, logits: Tensor, p: Tensor, log_p: Tensor) -> Tensor:
    """Fill in `p` and `log_p` = log max(p, TINY), [R, V], of rows `at`. Returns their most likely tokens [R]."""
    best = _dense(rows, at, logits, log_p, p)
    log_p.sub_(rows.lse[at, None]).clamp_(min=_LOG_TINY)
    hot = (rows.greedy[at] >= 0).nonzero()[:, 0]
    if len(hot):
        log_p.index_fill_(0, hot, _LOG_TINY)[hot, best[hot]] = 0.0
    return best


def _dense(rows: Rows, at: slice, logits: Tensor, scores: Tensor, p: Tensor) -> Tensor:
    """Fill in `p` [R, V] of rows `at`, and their `scores` if any row is sampled. Returns the most likely tokens [R]."""
    greedy = rows.greedy[at]
    hot = (greedy >= 0).nonzero()[:, 0]
    best = greedy
    if len(hot) < len(greedy):
        best = torch.where(greedy >= 0, greedy, _argmax(scores.copy_(logits))[0])
        scores.mul_(rows.inv_temp[at, None])
        cut = rows.cut[at, None]
        if bool((cut > -torch.inf).any()):
            scores.masked_fill_(scores < cut, -torch.inf)
        torch.softmax(scores, -1, out=p)
    if len(hot):
        p.index_fill_(0, hot, 0.0)[hot, greedy[hot]] = 1.0
    return best


class _TargetRows(NamedTuple):
    """Most likely tokens [R], Σ p [R], p and log max(p, TINY) [R, V]."""

    best: Tensor
    mass: Tensor
    p: Tensor
    log_p: Tensor


def _drafted(draft: DraftRows, at: slice, x: Tensor, target: _TargetRows, buffers: list[Tensor]) -> Tensor:
    """The sums [6, R] of one drafter, for `DrafterFeedback.of_sums`."""
    best, mass, p, log_p = target
    missed = torch.zeros_like(mass)
    if draft.ids is not None:
        p, log_p = p[:, draft.ids], log_p[:, draft.ids]
        missed = (mass - p.sum(-1)).clamp_(min=0)
    logits = draft.logits.detach()[at]
    log_q, q, product = (buffer.view(-1)[: logits.numel()].view(logits.shape) for buffer in buffers)
    log_q.copy_(logits)
    if draft.inv_temp is not None:
        log_q.mul_(draft.inv_temp[at, None])
    likeliest, top = _argmax(log_q)
    torch.softmax(log_q, -1, out=q)
    lse = top - q.gather(1, likeliest[:, None])[:, 0].log()
    log_q.sub_(lse[:, None]).clamp_(min=_LOG_TINY)
    if draft.ids is None:
        q_x = q.gather(1, x)[:, 0]
    else:
        q_x, likeliest = torch.where(draft.ids == x, q, 0.0).sum(-1), draft.ids[likeliest]
    sums = (
        torch.sub(p, q, out=product).relu_().sum(-1) + missed,
        torch.mul(p, log_q, out=product).sum(-1) + missed * _LOG_TINY,
        torch.mul(q, log_q, out=product).sum(-1) - torch.mul(q, log_p, out=product).sum(-1),
        q_x,
        (likeliest == best).to(q.dtype),
        missed,
    )
    return torch.stack(sums)
