"""Attention of the training-time test: step-0 keys of the whole document, then one key of its own per later step.

Query row r of a document stands at slot own(r) and attends step-0 slots 0 .. own(r) and, at step k, its own rows of
steps 1 .. k (EAGLE-3, Fig. 6). The two parts are computed apart and merged by their log-sum-exp, so nothing is padded
and no later step widens the attention matrix.

    out = (e^{lse₀} out₀ + Σ_j e^{s_j} v_j) / e^m,   m = log(e^{lse₀} + Σ_j e^{s_j})

The gradient of the first part needs no more than `out` and `m`: with P = e^{s − m}, dS = P ∘ (dO Vᵀ − rowsum(dO ∘ out))
is flash attention's own backward pass given the merged output and normaliser (as in ring attention, Liu et al. 2023).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True)
class Documents:
    """Row ranges of each document: `keys` among the M slots, `queries` among the N response slots.

    The queries of a document are its last rows but none: query r of R stands at slot S − R + r of S.
    """

    keys: list[tuple[int, int]]
    queries: list[tuple[int, int]]


def attention(
    query: Tensor, key: Tensor, value: Tensor, own_keys: list[Tensor], own_values: list[Tensor], documents: Documents
) -> Tensor:
    """query [N, H, D], key and value of step 0 [M, Hkv, D], own keys and values of steps 1 … k, each [N, Hkv, D].

    Returns [N, H, D] in the dtype of `query`.
    """
    if query.device.type == "cpu":
        own = torch.stack([*own_keys, *own_values]) if own_keys else query.new_zeros(0, query.shape[0], *key.shape[1:])
        return _Merged.apply(query, key, value, own, documents)
    return reference(query, key, value, own_keys, own_values, documents)


def reference(
    query: Tensor, key: Tensor, value: Tensor, own_keys: list[Tensor], own_values: list[Tensor], documents: Documents
) -> Tensor:
    """The same by scaled_dot_product_attention over [step-0 keys | own keys] with a mask, one document at a time."""
    outputs = []
    for (k0, k1), (q0, q1) in zip(documents.keys, documents.queries, strict=True):
        rows = q1 - q0
        mask = torch.cat(
            (
                _staircase(rows, k1 - k0, torch.bool, query.device),
                *[torch.eye(rows, dtype=torch.bool, device=query.device)] * len(own_keys),
            ),
            -1,
        )
        keys = torch.cat((key[k0:k1], *(own[q0:q1] for own in own_keys))).transpose(0, 1)
        values = torch.cat((value[k0:k1], *(own[q0:q1] for own in own_values))).transpose(0, 1)
        out = torch.nn.functional.scaled_dot_product_attention(
            query[q0:q1].transpose(0, 1).unsqueeze(0),
            keys.unsqueeze(0),
            values.unsqueeze(0),
            attn_mask=mask,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs)


def _staircase(rows: int, slots: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[rows, slots] bottom-right aligned causal mask: bool (True = visible) or additive."""
    visible = torch.ones(rows, slots, dtype=torch.bool, device=device).tril_(slots - rows)
    if dtype == torch.bool:
        return visible
    return torch.zeros(rows, slots, dtype=dtype, device=device).masked_fill_(~visible, float("-inf"))


def _fold(x: Tensor, kv_heads: int) -> Tensor:
    """[R, H, D] → [1, Hkv, G·R, D]: grouped queries as rows of their key/value head."""
    rows, heads, dim = x.shape
    return x.view(rows, kv_heads, heads // kv_heads, dim).permute(1, 2, 0, 3).reshape(1, kv_heads, -1, dim)


def _unfold(x: Tensor, rows: int) -> Tensor:
    """[1, Hkv, G·R, …] → [R, H, …]."""
    kv_heads = x.shape[1]
    x = x.reshape(kv_heads, -1, rows, *x.shape[3:]).transpose(1, 2).transpose(0, 1)
    return x.reshape(rows, -1, *x.shape[3:])


class _Merged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, own: Tensor, documents: Documents) -> Tensor:
        rows, heads, dim = query.shape
        kv_heads = key.shape[1]
        scale = dim**-0.5
        first, lse = torch.empty_like(query), query.new_empty(rows, heads, dtype=torch.float32)
        longest = max(q1 - q0 for q0, q1 in documents.queries)
        widest = max(k1 - k0 for k0, k1 in documents.keys)
        # Bottom-right aligned staircases of every size are windows of one.
        stairs = _staircase(longest, widest + longest, query.dtype, query.device)
        masks = []
        for (k0, k1), (q0, q1) in zip(documents.keys, documents.queries, strict=True):
            count, slots = q1 - q0, k1 - k0
            start = widest + longest - slots - (longest - count)
            mask = stairs[:count, start : start + slots].repeat(heads // kv_heads, 1)
            masks.append(mask)
            out, norm = _FORWARD(
                _fold(query[q0:q1], kv_heads), key[k0:k1].transpose(0, 1).unsqueeze(0),
                value[k0:k1].transpose(0, 1).unsqueeze(0), attn_mask=mask, scale=scale,
            )  # fmt: skip
            first[q0:q1], lse[q0:q1] = _unfold(out, count), _unfold(norm, count)
        own_keys, own_values = own.chunk(2)
        if own.shape[0]:
            groups = heads // kv_heads
            q = query.view(rows, kv_heads, groups, dim)
            scores = torch.einsum("nhgd,jnhd->jnhg", q, own_keys).float().reshape(-1, rows, heads) * scale
            merged = torch.logsumexp(torch.cat((lse.unsqueeze(0), scores)), 0)
            share = (scores - merged).exp_()
            out = (lse - merged).exp_().unsqueeze(-1) * first
            weights = share.view(-1, rows, kv_heads, groups)
            out = out + torch.einsum("jnhg,jnhd->nhgd", weights.to(query.dtype), own_values).reshape(rows, heads, dim)
            first, lse = out.to(query.dtype), merged
            ctx.share = share
        ctx.documents, ctx.masks = documents, masks
        ctx.save_for_backward(query, key, value, own, first, lse)
        return first

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        query, key, value, own, out, lse = ctx.saved_tensors
        grad = grads[0].contiguous()
        rows, heads, dim = query.shape
        kv_heads, groups, scale = key.shape[1], heads // key.shape[1], dim**-0.5
        dq, dk, dv = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        for (k0, k1), (q0, q1), mask in zip(ctx.documents.keys, ctx.documents.queries, ctx.masks, strict=True):
            count = q1 - q0
            norm = lse[q0:q1].view(count, kv_heads, groups).permute(1, 2, 0).reshape(1, kv_heads, -1)
            part_q, part_k, part_v = _BACKWARD(
                _fold(grad[q0:q1], kv_heads), _fold(query[q0:q1], kv_heads), key[k0:k1].transpose(0, 1).unsqueeze(0),
                value[k0:k1].transpose(0, 1).unsqueeze(0), _fold(out[q0:q1], kv_heads), norm, 0.0, False,
                attn_mask=mask, scale=scale,
            )  # fmt: skip
            dq[q0:q1] = _unfold(part_q, count)
            dk[k0:k1], dv[k0:k1] = part_k[0].transpose(0, 1), part_v[0].transpose(0, 1)
        down = None
        if own.shape[0]:
            own_keys, own_values = own.chunk(2)
            grouped = grad.view(rows, kv_heads, groups, dim)
            delta = torch.linalg.vecdot(grad.float(), out.float())  # rowsum(dO ∘ out)
            dp = torch.einsum("nhgd,jnhd->jnhg", grouped, own_values).float().reshape(-1, rows, heads)
            ds = (ctx.share * (dp - delta) * scale).to(query.dtype).view(-1, rows, kv_heads, groups)
            share = ctx.share.to(query.dtype).view(-1, rows, kv_heads, groups)
            dq += torch.einsum("jnhg,jnhd->nhgd", ds, own_keys).reshape(rows, heads, dim)
            down = torch.cat(
                (
                    torch.einsum("jnhg,nhgd->jnhd", ds, query.view(rows, kv_heads, groups, dim)),
                    torch.einsum("jnhg,nhgd->jnhd", share, grouped),
                )
            )
        return dq, dk, dv, down, None
