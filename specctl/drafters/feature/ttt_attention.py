"""Attention of drafters in training: a row attends keys of its document up to its slot, then keys of its own draft.

In the training-time test (`attention`) those are step-0 keys of the whole document, then one key of its own per later
step. Where a block is drafted at once (`block_attention`), they are keys of the target's features, then of the block.

A query row at slot s of its document attends step-0 slots 0 .. s (with a window, the last of them) and, at step k, its
own rows of steps 1 .. k (EAGLE-3, Fig. 6). The two parts are computed apart and merged by their normalisers, so no
later step widens the attention matrix:

    out = (e^{lse₀} out₀ + Σ_j e^{s_j} v_j) / e^m,   m = log(e^{lse₀} + Σ_j e^{s_j})

The gradient of the first part needs no more than `out` and `m`: with P = e^{s − m}, it is dS = P ∘ (dO Vᵀ − δ) with
δ = rowsum(dO ∘ out), as in ring attention (Liu et al. 2023). P is recomputed in the backward pass, block by block:
documents of similar length share a block of padded matrix products, and a long document is cut into blocks of rows,
so memory stays linear in its length. On a GPU both are kernels that need no padding (`kernels.span_attention`).
"""

from __future__ import annotations

import warnings
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from specctl import kernels
from specctl.kernels import trial

# Scores of one head in a block. On a CPU eight heads of fp32 are 4 MB; a GPU is filled by 32 heads of 128 MB.
BLOCK = {"cpu": 2**17, "cuda": 2**20}
# Rows of a block of a document too long for that: every block reads all the document's keys, so it must not be thin.
ROWS = 64
# Masks are kept for layouts of so many blocks at most, and made anew for each use beyond: no quadratic memory.
KEPT = 16


@dataclass(frozen=True)
class Layout:
    """The slots that every query row attends.

    Attributes:
        slots: of each document, its range among the M slots.
        rows: of each document, its range among the N query rows.
        at: [N] slot of each query row within its document, ascending in every document.
        device: where the queries and keys are.
        window: how many positions a row attends, its own included; None = all up to its own.
        ahead: how far every row stands behind its slot in the text, which moves its window on.
    """

    slots: list[tuple[int, int]]
    rows: list[tuple[int, int]]
    at: list[int]
    device: torch.device | str = "cpu"
    window: int | None = None
    ahead: int = 0

    @property
    def reach(self) -> int | None:
        """How far before its own slot the last slot lies that a row does not attend; None without a window."""
        return None if self.window is None else self.window - self.ahead

    def blockwise(self, height: int) -> Layout:
        """The layout of blocks of `height` rows in the places of single ones: all of a block look at the same slots."""
        rows = [(height * first, height * end) for first, end in self.rows]
        return Layout(self.slots, rows, [slot for slot in self.at for _ in range(height)], self.device)

    def of_rows(self, kept: list[int]) -> Layout:
        """The layout of some of the query rows, by their places, ascending."""
        sizes = [bisect_left(kept, end) - bisect_left(kept, first) for first, end in self.rows]
        return replace(self, rows=ranges(sizes), at=[self.at[row] for row in kept])

    @cached_property
    def blocks(self) -> list[_Block]:
        """Made (and moved to the device) once, used by every step forward and backward."""
        parts = list(self._parts())
        return [_Block(self, part, keep=len(parts) <= KEPT) for part in parts]

    @cached_property
    def spans(self) -> tuple[Tensor, Tensor]:
        """low, high [N] int32: the first and the last of the M slots that each query row attends. Both ascend."""
        counts = torch.tensor([end - first for first, end in self.rows])
        document = torch.tensor([first for first, _ in self.slots]).repeat_interleave(counts)
        high = document + torch.tensor(self.at, dtype=torch.long)
        low = document if self.reach is None else torch.maximum(document, high - self.reach + 1)
        return low.to(self.device, torch.int32), high.to(self.device, torch.int32)

    def _parts(self) -> Iterator[list[tuple[int, int, int]]]:
        """Groups of (document, first row, last row + 1), each of BLOCK padded scores per head or ROWS rows at most."""
        limit = BLOCK["cpu" if torch.device(self.device).type == "cpu" else "cuda"]
        group: list[tuple[int, int, int]] = []
        height = width = 0
        for document, ((s0, s1), (r0, r1)) in enumerate(zip(self.slots, self.rows, strict=True)):
            most = max(ROWS, limit // (s1 - s0))
            for start in range(r0, r1, most) or [r0]:  # a document without rows stays in its place
                piece = (document, start, min(start + most, r1))
                height, width = max(height, piece[2] - start), max(width, s1 - s0)
                if group and height * width * (len(group) + 1) > limit:
                    yield group
                    group, height, width = [], piece[2] - start, s1 - s0
                group.append(piece)
        if group:
            yield group


class _Block:
    """B pieces of documents, padded to R rows and S slots; no document is in it twice.

    Attributes:
        rows, slots: the block's range among the N query rows and the M slots.
        row_places, slot_places: places of those among the B·R and B·S padded ones.
        at: [B, R, 1] slot of every row within its document.
    """

    def __init__(self, layout: Layout, part: list[tuple[int, int, int]], keep: bool):
        self.count, device, self._reach = len(part), layout.device, layout.reach
        slots = [layout.slots[document] for document, _, _ in part]
        _, first, last = part[-1]
        if last > first:  # where a long document is cut, half of its scores lie behind the diagonal
            slots[-1] = (slots[-1][0], slots[-1][0] + layout.at[last - 1] + 1)
        self.height = max(1, *(stop - start for _, start, stop in part))
        self.width = max(stop - start for start, stop in slots)
        self.rows = slice(part[0][1], part[-1][2])
        self.slots = slice(slots[0][0], slots[-1][1])
        row_places = _places([stop - start for _, start, stop in part], self.height)
        at = torch.zeros(self.count * self.height, dtype=torch.long)
        at[row_places] = torch.tensor(layout.at[self.rows], dtype=torch.long)
        self.at = at.view(self.count, self.height, 1).to(device)
        self.row_places = row_places.to(device)
        self.slot_places = _places([stop - start for start, stop in slots], self.width).to(device)
        self._bias = self._make_bias() if keep else None

    @property
    def bias(self) -> Tensor:
        """[B, 1, 1, R, S] added to scores: −inf where a row may not look (much faster than masked_fill_)."""
        return self._make_bias() if self._bias is None else self._bias

    def _make_bias(self) -> Tensor:
        hidden = _hidden(self.at, self.width, self._reach)
        return torch.zeros_like(hidden, dtype=torch.float32).masked_fill_(hidden, float("-inf"))[:, None, None]


def _hidden(at: Tensor, width: int, reach: int | None) -> Tensor:
    """[…, width] bool: which of a document's first slots rows at slots `at` [..., 1] may not look at."""
    slots = torch.arange(width, device=at.device)
    return slots > at if reach is None else (slots > at) | (slots <= at - reach)


def ranges(sizes: list[int]) -> list[tuple[int, int]]:
    """Consecutive row ranges of the given sizes."""
    ends = list(accumulate(sizes))
    return [(end - size, end) for size, end in zip(sizes, ends, strict=True)]


def _places(sizes: list[int], width: int) -> Tensor:
    """Consecutive runs of `sizes`, each padded to `width`: where each element lies."""
    return (torch.arange(width) < torch.tensor(sizes).unsqueeze(1)).view(-1).nonzero().squeeze(1)


def attention(
    query: Tensor, key: Tensor, value: Tensor, own_keys: list[Tensor], own_values: list[Tensor], layout: Layout
) -> Tensor:
    """query [N, H, D], key and value of step 0 [M, Hkv, D], own keys and values of steps 1 … k, each [N, Hkv, D].

    Returns [N, H, D] in the dtype of `query`.
    """
    own = torch.stack([*own_keys, *own_values]) if own_keys else query.new_zeros(0, query.shape[0], *key.shape[1:])
    return _Merged.apply(query, key, value, own, layout)[0]


def reference(
    query: Tensor, key: Tensor, value: Tensor, own_keys: list[Tensor], own_values: list[Tensor], layout: Layout
) -> Tensor:
    """The specification, for tests: scaled_dot_product_attention over [step-0 keys | own keys] with a mask, a document
    at a time, in quadratic memory."""
    outputs = []
    for (k0, k1), (q0, q1) in zip(layout.slots, layout.rows, strict=True):
        at = torch.tensor(layout.at[q0:q1], device=query.device)
        distance = at.unsqueeze(1) + layout.ahead - torch.arange(k1 - k0, device=query.device)
        visible = (distance >= layout.ahead) & (distance < (layout.window or k1 + layout.ahead + 1))
        own = torch.eye(q1 - q0, dtype=torch.bool, device=query.device)
        keys = torch.cat((key[k0:k1], *(own[q0:q1] for own in own_keys))).transpose(0, 1)
        values = torch.cat((value[k0:k1], *(own[q0:q1] for own in own_values))).transpose(0, 1)
        out = torch.nn.functional.scaled_dot_product_attention(
            query[q0:q1].transpose(0, 1).unsqueeze(0),
            keys.unsqueeze(0),
            values.unsqueeze(0),
            attn_mask=torch.cat((visible, *[own] * len(own_keys)), -1),
            enable_gqa=query.shape[1] != key.shape[1],
        )
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs)


def block_attention(query: Tensor, key: Tensor, value: Tensor, own: Tensor, layout: Layout) -> Tensor:
    """Blocks of R rows each: a row attends slots 0 … `at` of its document, and all rows of its block.

    Args:
        query: [n, R, H, D].
        key, value: [M, Hkv, D] of the documents' slots.
        own: [2, n, R, Hkv, D] keys and values of the blocks' rows.
        layout: of the n·R rows, block by block.

    Returns:
        [n, R, H, D] in the dtype of `query`.
    """
    return _Blocks.apply(query, key, value, own, layout)[0]


def _by_kernel(q: Tensor) -> bool:
    """Whether a kernel of ours reads documents: for queries [N, Hkv, G, D] in bf16 or fp16 on a GPU with Triton, once
    its answers for such heads have agreed with the reference."""
    if q.dtype.itemsize != 2 or kernels.chosen(q.device) != "triton":
        return False
    return _tried(q.device, q.dtype, *q.shape[1:])


@cache
def _tried(device: torch.device, dtype: torch.dtype, kv_heads: int, groups: int, dim: int) -> bool:
    reason = trial.span_shortcoming(kernels, device, dtype, kv_heads, groups, dim)
    if reason is not None:
        warnings.warn(f"attention of training on {device} is PyTorch's: {reason}", stacklevel=2)
    return reason is None


def _read(q: Tensor, key: Tensor, value: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """Scaled queries q [N, Hkv, G, D] over their documents: (`out` [N, Hkv, G, D], `lse` [N, Hkv, G]) in fp32."""
    if _by_kernel(q):
        return kernels.span_attention(q, key, value, *layout.spans)
    out, lse = torch.empty_like(q, dtype=torch.float32), q.new_empty(q.shape[:3], dtype=torch.float32)
    for block in layout.blocks:
        scores = _scores(_fold(q, block), _pad(key, block), block)
        top = scores.amax(-1, keepdim=True)
        share = scores.sub_(top).exp_()
        total = share.sum(-1, keepdim=True)
        mixed = torch.bmm(share.to(value.dtype), _pad(value, block)).float().div_(total)
        out[block.rows] = _unfold(mixed, block)
        lse[block.rows] = _unfold(total.log_().add_(top), block).squeeze(-1)
    return out, lse


def _read_backward(
    q: Tensor, key: Tensor, value: Tensor, grad: Tensor, delta: Tensor, lse: Tensor, layout: Layout
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients by scaled queries, keys and values, given those of the result [N, Hkv, G, D] and its `m` as `lse`."""
    if _by_kernel(q):
        return kernels.span_attention_backward(q, key, value, grad, delta, lse, *layout.spans)
    dq = torch.empty_like(q)
    # A long document's keys collect from hundreds of blocks: in bf16 the late ones would be rounded away.
    dk, dv = torch.zeros_like(key, dtype=torch.float32), torch.zeros_like(value, dtype=torch.float32)
    for block in layout.blocks:
        folded, keys, folded_grad = _fold(q, block), _pad(key, block), _fold(grad, block)
        share = _scores(folded, keys, block).sub_(_fold(lse.unsqueeze(-1), block)).exp_()
        low = share.to(value.dtype)
        dv[block.slots] += _unpad(torch.bmm(low.transpose(1, 2), folded_grad), block)
        dp = torch.bmm(folded_grad, _pad(value, block).transpose(1, 2)).float()
        ds = dp.sub_(_fold(delta.unsqueeze(-1), block)).mul_(share).to(key.dtype)
        dq[block.rows] = _unfold(torch.bmm(ds, keys), block)
        dk[block.slots] += _unpad(torch.bmm(ds.transpose(1, 2), folded), block)
    return dq, dk, dv


class _Merged(torch.autograd.Function):
    """Scores in fp32 (rounded to bf16 they would be off by per cents), the other products in the input's dtype."""

    @staticmethod
    def forward(query: Tensor, key: Tensor, value: Tensor, own: Tensor, layout: Layout) -> tuple[Tensor, ...]:
        """The result, and what the backward pass needs besides it and the inputs: scaled queries, `out` and `m`."""
        rows, heads, dim = query.shape
        kv_heads = key.shape[1]
        q = query.view(rows, kv_heads, heads // kv_heads, dim) * dim**-0.5  # no −1: there may be no rows
        out, lse = _read(q, key, value, layout)
        if own.shape[0]:
            own_keys, own_values = own.unsqueeze(3).chunk(2)  # each [k, N, Hkv, 1, D]
            scores = torch.linalg.vecdot(q.float(), own_keys.float())
            merged = torch.logsumexp(torch.cat((lse.unsqueeze(0), scores)), 0)
            out = out.mul_((lse - merged).exp_().unsqueeze(-1))
            out = out.add_(((scores - merged).exp_().unsqueeze(-1) * own_values).sum(0))
            lse = merged
        return out.view(rows, heads, dim).to(query.dtype), q, out, lse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _, key, value, own, ctx.layout = inputs
        kept = output[1:]
        ctx.mark_non_differentiable(*kept)
        ctx.save_for_backward(kept[0], key, value, own, *kept[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        q, key, value, own, out, lse = ctx.saved_tensors
        grad = grads[0].view_as(q)
        delta = torch.linalg.vecdot(grad.float(), out)  # rowsum(dO ∘ out)
        dq, dk, dv = _read_backward(q, key, value, grad, delta, lse, ctx.layout)
        down = None
        if own.shape[0]:
            own_keys, own_values = own.unsqueeze(3).chunk(2)
            share = (torch.linalg.vecdot(q.float(), own_keys.float()) - lse).exp_()  # [k, N, Hkv, G]
            ds = torch.linalg.vecdot(grad.float(), own_values.float()).sub_(delta).mul_(share)
            ds, share = ds.to(q.dtype).unsqueeze(-1), share.to(q.dtype).unsqueeze(-1)
            dq += (ds * own_keys).sum(0)
            down = torch.cat(((ds * q).sum(3), (share * grad).sum(3)))
        dim = q.shape[-1]
        return (dq * dim**-0.5).flatten(1, 2), dk.to(key.dtype), dv.to(value.dtype), down, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        return _side_by_side(_Merged, 1, info, in_dims, *inputs)


class _Blocks(torch.autograd.Function):
    """As `_Merged`, with the keys of whole blocks instead of those of earlier steps."""

    @staticmethod
    def forward(query: Tensor, key: Tensor, value: Tensor, own: Tensor, layout: Layout) -> tuple[Tensor, ...]:
        """The result, and what the backward pass needs besides it and the inputs: scaled queries, `out` and `m`."""
        count, height, heads, dim = query.shape
        kv_heads = key.shape[1]
        q = query.view(count * height, kv_heads, heads // kv_heads, dim) * dim**-0.5
        out, lse = _read(q, key, value, layout)
        own_keys, own_values = _of_blocks(own)
        scores = torch.matmul(_by_blocks(q, count).float(), own_keys.float().mT)
        merged = torch.logaddexp(_by_blocks(lse.unsqueeze(-1), count), scores.logsumexp(-1, keepdim=True))
        mixed = torch.matmul((scores - merged).exp_().to(own.dtype), own_values).float()
        groups = q.shape[2]
        m = _by_rows(merged, groups).squeeze(-1)
        out = out.mul_((lse - m).exp_().unsqueeze(-1)).add_(_by_rows(mixed, groups))
        return out.view(query.shape).to(query.dtype), q, out, m

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _Merged.setup_context(ctx, inputs, output)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        q, key, value, own, out, lse = ctx.saved_tensors
        count, (_, kv_heads, groups, dim) = own.shape[1], q.shape
        grad = grads[0].reshape(q.shape)
        delta = torch.linalg.vecdot(grad.float(), out)
        dq, dk, dv = _read_backward(q, key, value, grad, delta, lse, ctx.layout)
        own_keys, own_values = _of_blocks(own)
        folded, folded_grad = _by_blocks(q, count), _by_blocks(grad, count)
        scores = torch.matmul(folded.float(), own_keys.float().mT)
        share = scores.sub_(_by_blocks(lse.unsqueeze(-1), count)).exp_()
        dp = torch.matmul(folded_grad, own_values.mT).float()
        ds = dp.sub_(_by_blocks(delta.unsqueeze(-1), count)).mul_(share).to(own.dtype)
        dq += _by_rows(torch.matmul(ds, own_keys), groups)
        down = torch.stack((torch.matmul(ds.mT, folded), torch.matmul(share.to(own.dtype).mT, folded_grad)))
        dq = (dq * dim**-0.5).view(count, -1, kv_heads * groups, dim)
        return dq, dk.to(key.dtype), dv.to(value.dtype), down.transpose(2, 3), None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        return _side_by_side(_Blocks, 2, info, in_dims, *inputs)


def _of_blocks(own: Tensor) -> tuple[Tensor, Tensor]:
    """[2, n, R, Hkv, D] → keys and values, each [n, Hkv, R, D]."""
    keys, values = own.transpose(2, 3)
    return keys, values


def _by_blocks(x: Tensor, count: int) -> Tensor:
    """Rows [n·R, Hkv, G, ·] → [n, Hkv, G·R, ·]."""
    return x.unflatten(0, (count, x.shape[0] // count)).permute(0, 2, 3, 1, 4).flatten(2, 3)


def _by_rows(x: Tensor, groups: int) -> Tensor:
    """[n, Hkv, G·R, ·] → rows [n·R, Hkv, G, ·]: the inverse of `_by_blocks`."""
    return x.unflatten(2, (groups, x.shape[2] // groups)).permute(0, 3, 1, 2, 4).flatten(0, 1)


def _side_by_side(
    function: type[torch.autograd.Function], heads: int, info: Any, in_dims: tuple[int | None, ...], *inputs: Any
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """Several attentions over one layout as one with as many times the heads, which are dimension `heads` of it."""
    *tensors, layout = inputs
    merged = [_together(x, dim, info.batch_size) for x, dim in zip(tensors, in_dims, strict=False)]
    out, *_ = function.apply(*merged, layout)
    return (out.unflatten(heads, (info.batch_size, -1)),), (heads,)


def _together(x: Tensor, dim: int | None, count: int) -> Tensor:
    """`count` tensors [..., H, D], stacked along `dim` or (None) all the same, as one [..., count · H, D]."""
    x = x.unsqueeze(-3).expand(*x.shape[:-2], count, *x.shape[-2:]) if dim is None else x.movedim(dim, -3)
    return x.flatten(-3, -2)


def _fold(x: Tensor, block: _Block) -> Tensor:
    """[N, Hkv, G, D] → [B·Hkv, G·R, D]: grouped queries as rows of their key head, padding zero."""
    kv_heads, groups, dim = x.shape[1:]
    padded = x.new_zeros(block.count * block.height, kv_heads, groups, dim)
    padded[block.row_places] = x[block.rows]
    padded = padded.view(block.count, block.height, kv_heads, groups, dim).permute(0, 2, 3, 1, 4)
    return padded.reshape(block.count * kv_heads, groups * block.height, dim)


def _unfold(x: Tensor, block: _Block) -> Tensor:
    """[B·Hkv, G·R, D] → the block's rows [n, Hkv, G, D]."""
    kv_heads = x.shape[0] // block.count
    x = x.view(block.count, kv_heads, -1, block.height, x.shape[-1]).permute(0, 3, 1, 2, 4)
    return x.reshape(block.count * block.height, *x.shape[2:])[block.row_places]


def _pad(x: Tensor, block: _Block) -> Tensor:
    """[M, Hkv, D] → [B·Hkv, S, D], padding zero."""
    padded = x.new_zeros(block.count * block.width, *x.shape[1:])
    padded[block.slot_places] = x[block.slots]
    padded = padded.view(block.count, block.width, *x.shape[1:]).transpose(1, 2)
    return padded.reshape(-1, block.width, x.shape[-1])


def _unpad(x: Tensor, block: _Block) -> Tensor:
    """[B·Hkv, S, D] → the block's slots [m, Hkv, D]."""
    x = x.view(block.count, -1, *x.shape[1:]).transpose(1, 2)
    return x.reshape(block.count * block.width, *x.shape[2:])[block.slot_places]


def _scores(folded: Tensor, keys: Tensor, block: _Block) -> Tensor:
    """Masked scores [B·Hkv, G·R, S] of scaled queries."""
    scores = torch.bmm(folded.float(), keys.float().transpose(1, 2))
    shaped = scores.view(block.count, -1, folded.shape[1] // block.height, block.height, block.width)
    shaped.add_(block.bias)
    return scores
