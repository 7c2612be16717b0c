"""Verification rules: the walk down a tree, and the two rules for chains of sampled drafts."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..reference import check_rule
from ..rows import BLOCK, Rows, as_rows
from . import rows
from .device import BLOCKS, load_logits, pointers, precision, probability, search


@triton.jit(do_not_specialize=["n"])
def _walk_kernel(drawn, tokens, parents, path, accepted, bonus, n, LANES: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    token = tl.load(tokens + row * n + lane, mask=lane < n, other=-1)
    parent = tl.load(parents + row * n + lane, mask=lane < n, other=-2)
    node = tl.full((), -1, tl.int32)
    count = tl.full((), 0, tl.int32)
    going = 1
    step = 0
    while step < n:
        choice = tl.load(drawn + row * (n + 1) + node + 1)
        child = tl.min(tl.where((parent == node) & (token == choice) & (lane < n), lane, LANES), 0)
        going = tl.where((going > 0) & (child < LANES), 1, 0)
        node = tl.where(going > 0, child, node)
        count += going
        tl.store(path + row * n + step, tl.where(going > 0, node, -1).to(tl.int64))
        step += 1
    tl.store(accepted + row, count.to(tl.int64))
    tl.store(bonus + row, tl.load(drawn + row * (n + 1) + node + 1))


def walk_tree(drawn: Tensor, tokens: Tensor, parents: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    batch, n = tokens.shape
    if not n:
        return tokens, torch.zeros_like(drawn[:, 0]), drawn[:, 0]
    path = torch.empty(batch, n, dtype=torch.int64, device=tokens.device)
    accepted, bonus = (drawn.new_empty(batch) for _ in range(2))
    table = (field.contiguous() for field in (drawn, tokens, parents))
    _walk_kernel[(batch,)](*table, path, accepted, bonus, n, triton.next_power_of_2(n), num_warps=1)
    return path, accepted, bonus


def sample_tree(
    logits: Tensor, filters: tuple[Tensor, Tensor, Tensor], u: Tensor, tokens: Tensor, parents: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    drawn = rows.sample_rows(rows.row_params(*as_rows(logits, filters)), u.flatten())
    return walk_tree(drawn.view(u.shape), tokens, parents)


@triton.jit
def _token_probability(x, stride, inv_temp, cut, lse, greedy, row, token, mask, ACC: tl.constexpr):
    """p(token) in each of the rows `row`, 0 if masked."""
    value = load_logits(x, row * stride + token, mask, ACC)
    scale = tl.load(inv_temp + row, mask=mask, other=1.0)
    least = tl.load(cut + row, mask=mask, other=float("inf"))
    one_hot = tl.load(greedy + row, mask=mask, other=-1)
    return probability(value, token, scale, least, tl.load(lse + row, mask=mask, other=0.0), one_hot)


@triton.jit(do_not_specialize=["n", "V"])
def _accept_kernel(
    px, p_stride, p_inv_temp, p_cut, p_lse, p_greedy, qx, q_stride, q_inv_temp, q_cut, q_lse, q_greedy,
    tokens, count, u_accept, accepted, share, n,
    V, LANES: tl.constexpr, WHOLE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Token rule: the number of accepted tokens. Block rule (WHOLE): the shares; acceptance is decided later."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    mask = lane < n
    token = tl.load(tokens + row * n + lane, mask=mask, other=0)
    token = tl.minimum(tl.maximum(token, 0), V - 1)
    at = row * (n + 1) + lane
    p = _token_probability(px, p_stride, p_inv_temp, p_cut, p_lse, p_greedy, at, token, mask, ACC)
    q = _token_probability(qx, q_stride, q_inv_temp, q_cut, q_lse, q_greedy, row * n + lane, token, mask, ACC)
    if WHOLE:
        reached = tl.full((), 1.0, ACC)
        tl.store(share + row * (n + 1), reached)
        step = 0
        while step < n:
            mass = reached * tl.sum(tl.where(lane == step, p, 0.0), 0)
            drafted = tl.sum(tl.where(lane == step, q, 0.0), 0)
            reached = tl.where(mass < drafted, mass / drafted, tl.where(mass > 0, 1.0, 0.0).to(ACC))
            step += 1
            tl.store(share + row * (n + 1) + step, reached)
    else:
        u = tl.load(u_accept + row * n + lane, mask=mask, other=1.0).to(ACC)
        accept = (u * q < p) & (lane < tl.load(count + row)) & mask
        tl.store(accepted + row, tl.min(tl.where(accept, LANES, lane), 0).to(tl.int64))


@triton.jit
def _difference(
    px, p_stride, p_inv_temp, p_cut, p_lse, p_greedy, qx, q_stride, q_inv_temp, q_cut, q_lse, q_greedy,
    p_row, q_row, share, ids, V, ACC: tl.constexpr,
):  # fmt: skip
    """max(share · p − q, 0) of tokens `ids`."""
    p = load_logits(px + p_row * p_stride, ids, ids < V, ACC)
    q = load_logits(qx + q_row * q_stride, ids, ids < V, ACC)
    p_scalars = (tl.load(p_inv_temp + p_row), tl.load(p_cut + p_row), tl.load(p_lse + p_row))
    q_scalars = (tl.load(q_inv_temp + q_row), tl.load(q_cut + q_row), tl.load(q_lse + q_row))
    kept = share * probability(p, ids, *p_scalars, tl.load(p_greedy + p_row))
    return tl.maximum(kept - probability(q, ids, *q_scalars, tl.load(q_greedy + q_row)), 0.0)


@triton.jit(do_not_specialize=["n", "slots", "NB"])
def _excess_kernel(
    px, p_stride, p_inv_temp, p_cut, p_lse, p_greedy, qx, q_stride, q_inv_temp, q_cut, q_lse, q_greedy,
    count, accepted, share, excess, n, slots,
    V, NB, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """Σ max(share · p − q, 0) per run of BLOCK ids: after 0 … n − 1 tokens (WHOLE), or after the accepted tokens."""
    slot = tl.program_id(0).to(tl.int64)
    row = slot // slots
    depth = slot % slots
    reached = tl.full((), 1.0, ACC)
    if WHOLE:
        reached = tl.load(share + row * (n + 1) + depth)
    else:
        depth = tl.load(accepted + row)
    if depth < tl.load(count + row):
        block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
        ids = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        over = _difference(
            px, p_stride, p_inv_temp, p_cut, p_lse, p_greedy, qx, q_stride, q_inv_temp, q_cut, q_lse, q_greedy,
            row * (n + 1) + depth, row * n + depth, reached, ids, V, ACC,
        )  # fmt: skip
        tl.store(excess + slot * NB + block, tl.sum(over, 1), mask=block < NB)


@triton.jit(do_not_specialize=["n", "slots", "NB"])
def _next_kernel(
    px, p_stride, p_inv_temp, p_cut, p_lse, p_greedy, qx, q_stride, q_inv_temp, q_cut, q_lse, q_greedy, p_mass,
    count, u_accept, u_next, accepted, share, excess, out, n, slots,
    V, NB, LANES: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """Sample the next token. With the block rule (WHOLE), first determine the number of accepted tokens."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    length = tl.load(count + row)
    depth = tl.full((), 0, tl.int64)
    reached = tl.full((), 1.0, ACC)
    slot = row * slots
    if WHOLE:
        step = tl.full((), 1, tl.int64)
        while step <= length:
            h = tl.load(share + row * (n + 1) + step)
            if step < length:
                over = tl.sum(tl.load(excess + (slot + step) * NB + lane, mask=lane < NB, other=0.0), 0)
                h = over / (over + 1 - h)
            depth = tl.where(tl.load(u_accept + row * n + step - 1).to(ACC) < h, step, depth)
            step += 1
        tl.store(accepted + row, depth)
        reached = tl.load(share + row * (n + 1) + depth)
        slot += depth
    else:
        depth = tl.load(accepted + row)
    p_row = row * (n + 1) + depth
    token = tl.load(p_greedy + p_row)
    if token < 0:
        u = tl.load(u_next + p_row).to(ACC)
        made = tl.where(depth < length, NB, 0)  # no token is drafted after the last one
        sums = tl.load(excess + slot * NB + lane, mask=lane < made, other=0.0)
        residual = tl.sum(sums, 0) > 0
        if residual == 0:
            sums = tl.load(p_mass + p_row * NB + lane, mask=lane < NB, other=0.0)
        block, rest = search(sums, u * tl.sum(sums, 0), LANES)
        ids = block * BLOCK + tl.arange(0, BLOCK)
        if residual:
            weight = _difference(
                px, p_stride, p_inv_temp, p_cut, p_lse, p_greedy, qx, q_stride, q_inv_temp, q_cut, q_lse, q_greedy,
                p_row, row * n + depth, reached, ids, V, ACC,
            )  # fmt: skip
        else:
            value = load_logits(px + p_row * p_stride, ids, ids < V, ACC)
            scalars = (tl.load(p_inv_temp + p_row), tl.load(p_cut + p_row), tl.load(p_lse + p_row))
            weight = probability(value, ids, *scalars, token)
        index, _ = search(weight, rest, BLOCK)
        token = (block * BLOCK + index).to(tl.int64)
    tl.store(out + row, token)


def accept_chain(
    p: Rows, q: Rows, tokens: Tensor, count: Tensor, u_accept: Tensor, u_next: Tensor, rule: str = "token"
) -> tuple[Tensor, Tensor]:
    check_rule(rule)
    batch, n = tokens.shape
    whole, slots = rule == "block", n if rule == "block" and n else 1
    vocabulary, blocks, acc = p.logits.shape[1], p.block_mass.shape[1], precision(p.logits)
    accepted, following = (tokens.new_empty(batch) for _ in range(2))
    share, excess = p.lse.new_empty(batch, n + 1), p.lse.new_empty(batch * slots, blocks)
    tokens, u_accept, u_next = tokens.contiguous(), u_accept.contiguous(), u_next.contiguous()
    both = *pointers(p), *pointers(q)
    lanes = triton.next_power_of_2(n + 1)
    _accept_kernel[(batch,)](
        *both, tokens, count, u_accept, accepted, share, n, vocabulary, lanes, whole, acc, num_warps=1
    )
    several = min(BLOCKS, triton.next_power_of_2(blocks))
    grid = batch * slots, triton.cdiv(blocks, several)
    _excess_kernel[grid](
        *both, count, accepted, share, excess, n, slots, vocabulary, blocks, several, BLOCK, whole, acc
    )
    lanes = triton.next_power_of_2(blocks)
    work = p.block_mass.contiguous(), count, u_accept, u_next, accepted, share, excess, following
    _next_kernel[(batch,)](*both, *work, n, slots, vocabulary, blocks, lanes, BLOCK, whole, acc)
    return accepted, following
