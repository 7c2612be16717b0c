"""The specification of the kernels in plain PyTorch, written for clarity and not for speed.

Shapes: B sequences, n draft nodes, R rows (positions of all sequences), V vocabulary. Computation is in fp32, or in
fp64 if the logits are fp64 (the tests use fp64 to check the distribution of the verification rules). No function
synchronizes with the host. A function modifies its arguments only if its docstring says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from .objectives import OBJECTIVES, TINY
from .paging import gather_pages
from .rows import (
    GREEDY_BELOW,
    DraftRows,
    Rows,
    as_rows,
    in_blocks,
    inverse_cdf,
    probabilities,
    to_working_precision,
    without_nan,
)

LOW = 0xFFFFFFFF  # the lower half of 64 bits


class DrafterFeedback(NamedTuple):
    """Statistics that `drafter_feedback` computes for N drafters on R rows, in the precision of the computation."""

    accept: Tensor  # [N, R] Σ min(p, q) = 1 − TV: probability that the ratio rule accepts (Leviathan et al. 2023)
    p_minus_q: Tensor  # [N, R] Σ max(p − q, 0) = TV, summed separately: exact if p is close to q
    kl: Tensor  # [N, R] Σ p log(p / q)
    ce: Tensor  # [N, R] −log q(x)
    reverse_kl: Tensor  # [N, R] Σ q log(q / p)
    p_x: Tensor  # [N, R]
    q_x: Tensor  # [N, R]
    agree: Tensor  # [N, R] 1 if both have the same most likely token, else 0
    support_miss: Tensor  # [N, R] mass that p has outside the draft vocabulary
    entropy: Tensor  # [R] −Σ p log p

    @classmethod
    def of_sums(cls, target: Tensor, drafts: Iterable[Tensor], p_valid: Tensor, q_valid: Tensor) -> Self:
        """From sums over the vocabulary.

        Args:
            target: [3, R] Σ p, Σ p log p and p(x).
            drafts: Σ max(p − q, 0), Σ p log q, Σ q log(q / p), q(x), the agreement, and Σ p outside the draft
                vocabulary, [N, R] each.
            p_valid, q_valid: [R] and [N, R] bool: whether p and q are distributions.
        """
        mass, negentropy, p_x = target
        excess, cross, reverse, q_x, agree, missed = drafts
        ce = -q_x.clamp_min(TINY).log()
        accept, kl = (mass - excess).clamp_min(0), negentropy - cross
        fields = accept, excess, kl, ce, reverse, p_x.expand_as(q_x), q_x, agree, missed
        broken = ~(p_valid & q_valid)
        known = (field.masked_fill(broken, torch.nan) for field in fields)
        return cls._make([*known, (-negentropy).masked_fill(~p_valid, torch.nan)])


class Ancestry(NamedTuple):
    """The cache slots that each of the T rows of a step attends, as numbers on the device instead of a mask.

    Slots before `base` are attended by all rows of a text. The next `draft_slots` slots hold a draft, and the T rows of
    the step are the last of these slots.
    """

    base: Tensor  # [B] int64
    draft_slots: int
    ancestor_bits: Tensor | None = None  # [B, T] int64: bit i = the row attends slot base + i; without: up to its own
    first: Tensor | None = None  # [B, T] int64: lowest slot that a row attends (sliding windows), 0 without
    fixed_order: bool = False  # sums must have the same order at any position of the rows (exact mode)

    def allowed(self, rows: int, span: int) -> Tensor:
        """[B, rows, span] bool: whether each row of a step with `rows` rows attends each of the first `span` slots."""
        slot = torch.arange(span, device=self.base.device)
        behind = slot - self.base[:, None, None]
        if self.ancestor_bits is None:
            own = torch.arange(self.draft_slots - rows, self.draft_slots, device=slot.device)
            allowed = behind <= own[:, None]
        else:
            inside = (behind >= 0) & (behind < min(self.draft_slots, 64))
            allowed = (behind < 0) | inside & (self.ancestor_bits[..., None] >> behind.clamp(0, 63) & 1 > 0)
        return allowed if self.first is None else allowed & (slot >= self.first[..., None])

    def row(self, index: Tensor, rows: int) -> Ancestry:
        """Ancestry of a single row per text: row `index` [B] of the `rows` rows."""
        first = None if self.first is None else self.first.gather(1, index[:, None])
        if self.ancestor_bits is None:
            return self._replace(base=self.base + (self.draft_slots - rows) + index, draft_slots=1, first=first)
        return self._replace(ancestor_bits=self.ancestor_bits.gather(1, index[:, None]), first=first)


def uniform(seed: Tensor, position: Tensor, stream: int) -> Tensor:
    """Uniforms [B, T] fp32 in [0, 1) for `seed` [B] int64 and absolute `position` [B, T] int64 ≥ 0.

    `stream` < 2**32: 0 accept, 1 target/residual/bonus, 2… draft. The generator is Philox4x32-10 (Salmon et al. 2011).
    Its key is the two halves of the seed, its counter (position low, position high, stream, 0), so no two pairs
    (position, stream) share a counter. The first output word is converted as in Triton. So the result equals
    `tl.rand(seed, position)` for stream 0 and positions below 2**32, and always the first word of `tl.philox` with
    these counters.
    """
    seed = seed[:, None]
    counter = (position & LOW, position >> 32 & LOW, torch.full_like(position, stream), torch.zeros_like(position))
    word = philox(counter, (seed & LOW, seed >> 32 & LOW))[0]
    word = torch.where(word >= 1 << 31, LOW - word, word)  # the word read as int32, with x < 0 mapped to −x − 1
    return word.to(torch.float32) * torch.full((), 4.6566127342e-10, device=word.device)


def philox(counter: tuple[Any, ...], key: tuple[Any, Any]) -> tuple[Any, ...]:
    """Philox4x32-10: maps four counter words and two key words to four words. They are 32-bit values in int64 tensors
    or NumPy's uint64 arrays, and are broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # The signed product wraps but keeps its 64 bits; the mask undoes the sign extension of the shift.
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (b >> 32 & LOW) ^ c1 ^ k0, b & LOW, (a >> 32 & LOW) ^ c3 ^ k1, a & LOW
        k0, k1 = k0 + 0x9E3779B9 & LOW, k1 + 0xBB67AE85 & LOW
    return c0, c1, c2, c3


def finite_rows(logits: Tensor) -> Tensor:
    """Whether rows of `logits` [B, V] are distributions, [B]: no NaN, and a finite maximum. −inf excludes a token."""
    return logits.float().amax(-1).isfinite()


def row_params(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Rows:
    """Rows of `logits` [R, V] under `temperature` [R], `top_k` [R] int64 (0 = off) and `top_p` [R] (1 = off).

    Temperatures below GREEDY_BELOW are greedy. Filters apply in the order of `transformers`: temperature, top-k, top-p
    (the smallest set with a mass of top_p or more, at least one token). All ties at a cut are kept. NaN counts as −inf
    (`nan_count` counts them). `Rows.valid` tells which rows are distributions.
    """
    logits = to_working_precision(logits)
    vocabulary = logits.shape[1]
    is_greedy = temperature < GREEDY_BELOW
    inv_temp = torch.where(is_greedy, 1.0, 1.0 / temperature).to(logits.dtype)
    scores = without_nan(logits * inv_temp[:, None])
    peak = scores.amax(-1)
    ordered = scores.sort(-1, descending=True).values

    kth = torch.where(top_k > 0, top_k, vocabulary).clamp(max=vocabulary) - 1
    cut = torch.where(top_k > 0, ordered.gather(1, kth[:, None])[:, 0], -torch.inf)
    mass = torch.where(ordered >= cut[:, None], (ordered - peak[:, None]).exp(), 0.0)
    likelier = mass.cumsum(-1) - mass  # mass of more likely tokens
    needed = likelier < (top_p.to(mass.dtype) * mass.sum(-1))[:, None]
    last = needed.sum(-1, keepdim=True).clamp(min=1) - 1
    cut = torch.where(top_p < 1, torch.maximum(cut, ordered.gather(1, last)[:, 0]), cut)

    sums = in_blocks(torch.where(scores >= cut[:, None], (scores - peak[:, None]).exp(), 0.0)).sum(-1)
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
    """Sample one token per row, [R] int64, with the uniforms `u` [R]. Greedy rows ignore their uniforms.

    Inverse CDF in id order with two-level sums: find the first block with a cumulative mass above u·total, then the
    first id in it with a cumulative mass above the rest. A row uses only its own sums, in an order fixed by V, so on a
    CPU it yields the same token in any batch. (On a GPU PyTorch's reductions depend on the shape: a uniform within
    rounding of a boundary may fall on either side.) If rounding leads past the end, the last kept token is taken: a
    token of p = 0 is never returned.
    """
    return torch.where(rows.greedy >= 0, rows.greedy, inverse_cdf(probabilities(rows), u))


def walk_tree(drawn: Tensor, tokens: Tensor, parents: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The match rule: from the root on, go to the child with the token drawn at the current node, if there is one.

    `drawn` [B, n+1]: the token drawn from the target at the root (column 0) and at node i (column i + 1). `tokens`,
    `parents` [B, n]: the draft tree; parent −1 is the root, −2 marks padding. If siblings have equal tokens, the lowest
    index is taken.

    Returns the path [B, n] (node indices, padded with −1), n_accepted [B], and the bonus token [B] drawn at the last
    node. Every committed token is a sample from p for any tree ("naive sampling" of SpecInfer, Miao et al. 2024).
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


RULES = ("token", "block")


def sample_tree(
    logits: Tensor, filters: tuple[Tensor, Tensor, Tensor], u: Tensor, tokens: Tensor, parents: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The match rule (`walk_tree`) with the tokens sampled from `logits` [B, n+1, V] at the uniforms `u` [B, n+1].

    `filters` are temperature, top-k and top-p [B], as in `row_params`. Only the rows on the accepted path decide, so a
    backend may leave out all others.
    """
    drawn = sample_rows(row_params(*as_rows(logits, filters)), u.flatten())
    return walk_tree(drawn.view(u.shape), tokens, parents)


def accept_chain(
    p: Rows, q: Rows, tokens: Tensor, count: Tensor, u_accept: Tensor, u_next: Tensor, rule: str = "token"
) -> tuple[Tensor, Tensor]:
    """Verify chains of sampled draft tokens. The accepted tokens and the next token together are distributed as p.

    `p`: the target's B·(n+1) rows, sequence-major: row b·(n+1) + i follows i draft tokens. `q`: the B·n rows from which
    `tokens` [B, n] were sampled, over the target's vocabulary. `count` [B]: number of draft tokens without padding.
    Uniforms `u_accept` [B, n] (stream 0) and `u_next` [B, n+1] (stream 1).

    Rule "token": accept one token at a time, until the first rejection (Leviathan et al. 2023; Chen et al. 2023).

        accept x_i    if u < min(1, p_i(x_i) / q_i(x_i)); with q_i(x_i) = 0, if p_i(x_i) > 0
        rejected      next token from norm(max(p_i − q_i, 0)), or from p_i if this is zero everywhere
        all accepted  next token from p_count

    Rule "block": verify the draft as a whole (Sun et al. 2025, arXiv 2403.10444, Algorithm 2), so that a high ratio p/q
    at one token can compensate a low ratio at the next. No rule accepts more tokens on average. On one-hot q it accepts
    as many as "token".

        share_0 = 1, share_i = min(1, share_{i−1} · p(x_i | i − 1 tokens) / q(x_i | i − 1 tokens))
        keep x_1 … x_i    if u_i < h_i, for the largest such i;  h_count = share_count, for i < count
                          h_i = excess_i / (excess_i + 1 − share_i), excess_i = Σ max(share_i · p_i − q_i, 0)
        next token        from norm(max(share_i · p_i − q_i, 0)), or from p_count after the whole draft

    Returns n_accepted [B] and the next token [B], both int64. ValueError if `rule` is neither.
    """
    check_rule(rule)
    batch, n = tokens.shape
    depth = torch.arange(n + 1, device=tokens.device)
    p_dense = probabilities(p).unflatten(0, (batch, n + 1))
    q_dense = torch.zeros_like(p_dense)  # no token is drafted after the last one: max(p − 0, 0) = p
    q_dense[:, :n] = probabilities(q).view_as(q_dense[:, :n])
    q_dense = torch.where((depth < count[:, None])[..., None], q_dense, 0.0)
    p_token, q_token = (dense[:, :n].gather(2, tokens[..., None])[..., 0] for dense in (p_dense, q_dense))

    if rule == "token":
        share = torch.ones_like(p_dense[..., 0])
        accept = (u_accept * q_token < p_token) & (depth[:n] < count[:, None])
        accepted = accept.long().cumprod(-1).sum(-1)
    else:
        share = shares(p_token, q_token)
        excess = (share[..., None] * p_dense - q_dense).clamp(min=0).sum(-1)
        accepted = block_accepted(share, excess, count, u_accept)

    at = torch.arange(batch, device=tokens.device), accepted
    residual = (share[at][:, None] * p_dense[at] - q_dense[at]).clamp(min=0)
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, p_dense[at])
    return accepted, inverse_cdf(residual, u_next[at])


def check_rule(rule: str) -> None:
    if rule not in RULES:
        raise ValueError(f"{rule!r} is not an acceptance rule; valid: {', '.join(RULES)}")


def shares(p_token: Tensor, q_token: Tensor) -> Tensor:
    """share_0 … share_n of the block rule [B, n+1], from the probabilities [B, n] of the drafted tokens."""
    share = [torch.ones_like(p_token.sum(-1))]
    for p, q in zip(p_token.unbind(-1), q_token.unbind(-1), strict=True):
        mass = share[-1] * p
        share.append(torch.where(mass < q, mass / q, (mass > 0).to(mass.dtype)))
    return torch.stack(share, -1)


def block_accepted(share: Tensor, excess: Tensor, count: Tensor, u_accept: Tensor) -> Tensor:
    """The largest i ≤ count with u_i < h_i, else 0, [B]; `share` and `excess` [B, n+1], `u_accept` [B, n]."""
    depth = torch.arange(1, share.shape[1], device=share.device)
    share, excess = share[:, 1:], excess[:, 1:]
    # 0 / 0 occurs if share_i = 1 and p_i = q_i. Then share_{i+1} = 1 too, and more than i tokens are kept: h_i does not
    # matter.
    h = torch.where(depth == count[:, None], share, excess / (excess + 1 - share))
    return torch.where((u_accept < h) & (depth <= count[:, None]), depth, 0).amax(-1) if len(depth) else count * 0


def expand_topk(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k ≤ Vd most likely tokens of each row of `logits` [R, Vd], best first.

    Returns log-probabilities [R, k] and ids [R, k] int64. NaN counts as −inf. Ties are in the order of ids.
    """
    scores = without_nan(to_working_precision(logits))
    logprob, index = scores.log_softmax(-1).sort(stable=True, dim=-1, descending=True)
    return logprob[:, :k], index[:, :k]


def argmax(logits: Tensor) -> Tensor:
    """Greedy token of `logits` [..., V], int64 [...]: the lowest id of the maximum in fp32. NaN counts as −inf."""
    return without_nan(to_working_precision(logits)).argmax(-1)


def drafter_feedback(p: Rows, drafts: Sequence[DraftRows], tokens: Tensor) -> DrafterFeedback:
    """Compare each of N ≥ 0 drafters with the target's R rows `p`, and with the committed `tokens` x [R] int64.

    Logarithms are taken of probabilities clamped to TINY. So p log p is 0 if p = 0, a token that q cannot draw costs
    log(p / TINY), and every statistic is finite. NaN marks rows in which p or that drafter's q is not a distribution
    (see `Rows.valid`). If several tokens are equally likely, `agree` takes the first, for the drafter in the order of
    its draft vocabulary.
    """
    rows, vocabulary = p.logits.shape
    p_dense = probabilities(p)
    log_p = p_dense.clamp_min(TINY).log()
    best = torch.where(p.greedy >= 0, p.greedy, argmax(p.logits))
    x = tokens[:, None]
    entropy = -(p_dense * log_p).sum(-1)

    fields = []
    for draft in drafts:
        scores = without_nan(to_working_precision(draft.logits.detach()))
        if draft.inv_temp is not None:
            scores = scores * draft.inv_temp.to(scores.dtype)[:, None]
        ids = torch.arange(scores.shape[1], device=scores.device) if draft.ids is None else draft.ids
        drafted = scores.softmax(-1).to(p_dense.dtype)
        q = p_dense.new_zeros(rows, vocabulary).index_copy(1, ids, drafted)
        log_q = q.clamp_min(TINY).log()
        outside = torch.ones_like(p_dense).index_fill(1, ids, 0.0)
        statistics = dict(
            accept=torch.minimum(p_dense, q).sum(-1),
            p_minus_q=(p_dense - q).clamp(min=0).sum(-1),
            kl=(p_dense * (log_p - log_q)).sum(-1),
            ce=-log_q.gather(1, x)[:, 0],
            reverse_kl=(q * (log_q - log_p)).sum(-1),
            p_x=p_dense.gather(1, x)[:, 0],
            q_x=q.gather(1, x)[:, 0],
            agree=(ids[scores.argmax(-1)] == best).to(q.dtype),
            support_miss=(p_dense * outside).sum(-1),
        )
        fields.append(torch.stack([*statistics.values()]).masked_fill(drafted.isnan().any(-1), torch.nan))
    table = torch.stack(fields, 1) if fields else p_dense.new_zeros(len(DrafterFeedback._fields) - 1, 0, rows)
    return DrafterFeedback(*(field.masked_fill(~p.valid, torch.nan) for field in (*table, entropy)))


def distill_rows(logits: Tensor, teacher: Tensor, weight: Tensor, objective: str) -> Tensor:
    """Losses [n] of the draft `logits` [n, Vd] against `teacher`. Overwrites the logits with weight · ∂loss/∂logits.

    `teacher`: [n, Vd] probabilities, each row with sum 1; for "ce" the tokens [n] int64. `weight` [n] scales only
    the gradients. Objectives and their gradients: `kernels.objectives`.
    """
    known = teacher if teacher.ndim == 1 else to_working_precision(teacher)
    losses, slope = OBJECTIVES[objective](to_working_precision(logits), known)
    logits.copy_(slope.mul_(weight.to(slope.dtype)[:, None]))
    return losses


def attention(
    q: Tensor, rows: Tensor, ancestry: Ancestry, span: int, scale: float, table: Tensor | None = None
) -> Tensor:
    """softmax(scale · q kᵀ) v, [B·T, Hq·D], of queries [B, T, Hq, D] over cached keys and values.

    The cache is `rows` [B, capacity, 2·Hkv, D], or a pool of pages [S, 2·Hkv, D] with each text's pages in `table` [B,
    W] int64 (`paging`). A row of the cache holds the keys of all heads, then the values. Key head h serves query heads
    h·Hq/Hkv to (h + 1)·Hq/Hkv − 1. `span`: the largest base + reach, or more. Sums are in fp32; a row that attends no
    slot gives 0.
    """
    batch, count, heads, dim = q.shape
    cached = rows[:, :span] if table is None else gather_pages(rows, table, span)
    keys, values = cached.float().chunk(2, 2)
    folded = q.float().view(batch, count, keys.shape[2], -1, dim)
    scores = torch.einsum("bthgd,bshd->bhgts", folded, keys) * scale
    hidden = ~ancestry.allowed(count, span)[:, None, None]
    p = scores.masked_fill(hidden, -torch.inf).softmax(-1).masked_fill(hidden, 0.0)
    return torch.einsum("bhgts,bshd->bthgd", p, values).to(q.dtype).reshape(batch * count, heads * dim)


def span_attention(q: Tensor, key: Tensor, value: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Attention of N rows in training: row n attends slots low[n] … high[n] of M.

    Args:
        q: [N, Hkv, G, D] scaled queries, G for each key head.
        key, value: [M, Hkv, D].
        low, high: [N] int32, both ascending.

    Returns:
        softmax(q kᵀ) v [N, Hkv, G, D] and the log-sum-exp [N, Hkv, G] of the scores, both fp32. A row that attends no
            slot gives 0 and −∞.
    """
    scores = torch.einsum("nhgd,mhd->nhgm", q.float(), key.float())
    hidden = _outside(low, high, len(key))
    lse = scores.masked_fill(hidden, -torch.inf).logsumexp(-1)
    p = (scores - lse.unsqueeze(-1)).exp().masked_fill(hidden, 0.0)
    return torch.einsum("nhgm,mhd->nhgd", p, value.float()), lse


def span_attention_backward(
    q: Tensor, key: Tensor, value: Tensor, grad: Tensor, delta: Tensor, lse: Tensor, low: Tensor, high: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `span_attention` by q (in its dtype), key and value (fp32): dS = P ∘ (dO Vᵀ − δ), P = e^{s − lse}.

    `grad` [N, Hkv, G, D] is the gradient of the result. `lse` [N, Hkv, G] may cover more keys than these. Then `delta`
    [N, Hkv, G] is rowsum(dO ∘ out) of the result over all keys (Liu et al. 2023, Ring Attention).
    """
    wide, grad = q.float(), grad.float()
    scores = torch.einsum("nhgd,mhd->nhgm", wide, key.float())
    p = (scores - lse.unsqueeze(-1)).exp().masked_fill(_outside(low, high, len(key)), 0.0)
    ds = p * (torch.einsum("nhgd,mhd->nhgm", grad, value.float()) - delta.unsqueeze(-1))
    dq = torch.einsum("nhgm,mhd->nhgd", ds, key.float()).to(q.dtype)
    return dq, torch.einsum("nhgm,nhgd->mhd", ds, wide), torch.einsum("nhgm,nhgd->mhd", p, grad)


def _outside(low: Tensor, high: Tensor, slots: int) -> Tensor:
    """[N, 1, 1, slots] bool: the slots outside each row's span."""
    slot = torch.arange(slots, device=low.device)
    return ((slot < low.unsqueeze(1)) | (slot > high.unsqueeze(1)))[:, None, None]


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add a projection's output to the residual stream and normalize the sum.

    `x` [N, H] fp32 is the residual stream, `delta` [N, H] the projection's output δ. Returns x + δ [N, H] fp32, and its
    RMSNorm with `weight` [H] fp32, in the dtype of δ.
    """
    total = x + delta
    return total, F.rms_norm(total, weight.shape, weight, eps).to(delta.dtype)


def silu_and_mul(x: Tensor) -> Tensor:
    """silu(gate) · up [N, I] of `x` [N, 2·I], which holds first the gates, then the up projections."""
    gate, up = x.float().chunk(2, -1)
    return (F.silu(gate) * up).to(x.dtype)


def rope_and_cache(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    rows: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
) -> Tensor:
    """Rotate queries and keys (RoPE), write keys and values into the cache, and return the queries [B, T, Hq, D].

    `qkv` [B·T, Hq + 2·Hkv, D] is the projection. The cache is `rows` [B, capacity, 2·Hkv, D] with `slots` [B, T] of
    each text, or a pool of pages [S, 2·Hkv, D] with `slots` of the pool (`paging.slots_of`). `cos`, `sin` [P, D]: the
    tables of `decoding.rope.Rope`, read at `positions` [B, T]. If there are weights [D] fp32, query and key heads first
    have an RMSNorm (Qwen3).
    """
    keys = rows.shape[-2] // 2
    queries = qkv.shape[1] - 2 * keys
    at = positions.reshape(-1)
    c, s = (table[at].float().unsqueeze(1) for table in (cos, sin))

    def turned(heads: Tensor, weight: Tensor | None) -> Tensor:
        x = heads.float()
        if weight is not None:
            x = F.rms_norm(x, weight.shape, weight, eps)
        return (x * c + x.roll(x.shape[-1] // 2, -1) * s).to(qkv.dtype).unflatten(0, positions.shape)

    q, k, v = qkv.split((queries, keys, keys), 1)
    texts = torch.arange(len(positions), device=positions.device).unsqueeze(1)
    place = (slots,) if rows.ndim == 3 else (texts, slots)
    rows[place] = torch.cat((turned(k, k_weight), v.unflatten(0, positions.shape)), 2)
    return turned(q, q_weight)
