"""Distillation objectives, one program per row: softmax sums in the first pass, then the gradient in place.

Formulas: `kernels.objectives`. The second and third pass over a row read it from the cache.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..objectives import ETA, OBJECTIVES, TINY
from ..rows import to_working_precision
from .device import precision, tile_of


@triton.jit
def _distill_kernel(
    z, z_stride, teacher, t_stride, weight, losses, tiny, eta,
    V, OBJECTIVE: tl.constexpr, TILE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, TILE)
    z += row * z_stride
    teacher += row * t_stride

    # log Σ exp z per lane, and the sums that are linear in p.
    peak = tl.full((TILE,), float("-inf"), ACC)
    total = tl.zeros((TILE,), ACC)
    mass = tl.zeros((TILE,), ACC)
    known = tl.zeros((TILE,), ACC)  # Σ p z for soft_ce, Σ p (z − log p) for kl
    entropy: tl.constexpr = OBJECTIVE == "kl" or OBJECTIVE == "lk_lambda"
    for start in range(0, V, TILE):
        ids = start + lane
        inside = ids < V
        value = tl.load(z + ids, mask=inside, other=float("-inf")).to(ACC)
        higher = tl.maximum(peak, value)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(peak - base) + tl.exp(value - base)
        peak = higher
        if OBJECTIVE == "soft_ce" or entropy:
            p = tl.load(teacher + ids, mask=inside, other=0.0).to(ACC)
            mass += p
            known += tl.where(p > 0, p * value, 0.0)
            if entropy:
                known -= tl.where(p > 0, p * tl.log(tl.where(p > 0, p, 1.0)), 0.0)
    highest = tl.max(peak, 0)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    lse = highest + tl.log(tl.sum(total * tl.exp(peak - base), 0))

    # Further sums that the gradient needs, and the loss.
    scale = tl.load(weight + row).to(ACC)
    inner = tl.full((), 0.0, ACC)
    share = tl.full((), 0.0, ACC)  # λ
    label = tl.full((), -1, tl.int64)
    if OBJECTIVE == "ce":
        label = tl.minimum(tl.maximum(tl.load(teacher), 0), V - 1)
        loss = lse - tl.load(z + label).to(ACC)
    elif OBJECTIVE == "soft_ce" or OBJECTIVE == "kl":
        loss = lse * tl.sum(mass, 0) - tl.sum(known, 0)
    else:
        first = tl.zeros((TILE,), ACC)
        second = tl.zeros((TILE,), ACC)
        for start in range(0, V, TILE):
            ids = start + lane
            inside = ids < V
            log_q = tl.load(z + ids, mask=inside, other=float("-inf")).to(ACC) - lse
            q = tl.exp(log_q)
            p = tl.load(teacher + ids, mask=inside, other=0.0).to(ACC)
            if OBJECTIVE == "reverse_kl":
                first += tl.where(q > 0, q * (log_q - tl.log(tl.maximum(p, tiny))), 0.0)
            else:
                first += tl.abs(q - p)
                second += tl.where(q > p, 0.5 * q, tl.where(q < p, -0.5 * q, 0.0))
        if OBJECTIVE == "reverse_kl":
            loss = tl.sum(first, 0)
            inner = loss
        else:
            loss = 0.5 * tl.sum(first, 0)
            inner = tl.sum(second, 0)
            if OBJECTIVE == "log_tv":
                accepted = tl.maximum(1 - loss, tiny)
                loss = -tl.log(accepted)
                scale = scale / accepted
            if OBJECTIVE == "lk_lambda":
                share = tl.exp(eta * (loss - 1))
                loss += share * (lse * tl.sum(mass, 0) - tl.sum(known, 0) - loss)
    tl.store(losses + row, loss)

    for start in range(0, V, TILE):
        ids = start + lane
        inside = ids < V
        log_q = tl.load(z + ids, mask=inside, other=float("-inf")).to(ACC) - lse
        q = tl.exp(log_q)
        if OBJECTIVE == "ce":
            slope = q - tl.where(ids == label, 1.0, 0.0)
        else:
            p = tl.load(teacher + ids, mask=inside, other=0.0).to(ACC)
            if OBJECTIVE == "soft_ce" or OBJECTIVE == "kl":
                slope = q - p
            elif OBJECTIVE == "reverse_kl":
                slope = tl.where(q > 0, q * (log_q - tl.log(tl.maximum(p, tiny)) - inner), 0.0)
            else:
                slope = q * (tl.where(q > p, 0.5, tl.where(q < p, -0.5, 0.0)) - inner)
                if OBJECTIVE == "lk_lambda":
                    slope += share * (q - p - slope)
        tl.store(z + ids, slope * scale, mask=inside)


def distill_rows(logits: Tensor, teacher: Tensor, weight: Tensor, objective: str) -> Tensor:
    if objective not in OBJECTIVES:
        raise KeyError(objective)
    rows, vocabulary = logits.shape
    dense = logits.detach()
    dense = dense if dense.stride(1) == 1 else dense.contiguous()
    teacher, acc = teacher.contiguous(), precision(logits)
    losses = torch.empty(rows, dtype=to_working_precision(logits[:0]).dtype, device=logits.device)
    _distill_kernel[(rows,)](
        dense, dense.stride(0), teacher, teacher.stride(0), weight.contiguous(), losses, TINY, ETA,
        vocabulary, objective, tile_of(vocabulary), acc, num_warps=16,
    )  # fmt: skip
    if dense.data_ptr() != logits.data_ptr():
        logits.copy_(dense)
    return losses
