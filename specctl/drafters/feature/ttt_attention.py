"""Attention of draft heads in training: a row attends to its document up to its slot, then to keys of its own draft.

A query row at slot s attends to the document's step-0 slots 0 .. s (with a window, only to the last ones). In the
training-time test (`attention`) it also attends, at step k, to its own rows of steps 1 .. k (EAGLE-3, Fig. 6). If a
block is drafted at once (`block_attention`), it also attends to all rows of its block, or to the rows up to itself.

The two parts are computed separately and merged by their normalizers, so later steps do not widen the attention matrix:

    out = (e^{lse₀} out₀ + Σ_j e^{s_j} v_j) / e^m,   m = log(e^{lse₀} + Σ_j e^{s_j})

The gradient of the first part needs only `out` and `m`: with P = e^{s − m}, it is dS = P ∘ (dO Vᵀ − δ) with δ =
rowsum(dO ∘ out), as in ring attention (Liu et al. 2023). The backward pass recomputes P block by block. Documents of
similar length share a block of padded matrix products, and a long document is cut into blocks of rows, so memory stays
linear in its length. On a GPU both passes are kernels that need no padding (`kernels.span_attention`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specctl import kernels
from specctl.kernels.self_check import passes, span_mismatch

# Maximal scores per head in a block. On a CPU eight heads in fp32 take 4 MB; on a GPU 32 heads take 128 MB and fill it.
BLOCK = {"cpu": 2**17, "cuda": 2**20}
# Minimal rows per block of a long document: every block reads all the document's keys, so it must not be too small.
ROWS = 64
# Layouts with at most KEPT blocks cache their masks. Others rebuild them on each use, to avoid quadratic memory.
KEPT = 16


@dataclass(frozen=True)
class Layout:
    """Slots that every query row attends to.

    Attributes:
        slots: for each document, its range among the M slots.
        rows: for each document, its range among the N query rows.
        at: [N] slot of each query row within its document, ascending in every document.
        device: device of the queries and keys.
        window: number of positions that a row attends to, including its own (None = all up to its own).
        ahead: number of positions between a row's slot and the row's position in the text, which shifts its window.
        height: number of rows of a block. They follow each other in the text, from `ahead` positions after their slot.
        causal: the rows of a block attend only to the rows of the block up to themselves.
    """

    slots: list[tuple[int, int]]
    rows: list[tuple[int, int]]
    at: list[int]
    device: torch.device | str = "cpu"
    window: int | None = None
    ahead: int = 0
    height: int = 1
    causal: bool = False

    @cached_property
    def reach(self) -> Tensor | None:
        """[N] number of document slots, up to its own, that each row attends to, or None without a window."""
        if self.window is None:
            return None
        return self.window - self.ahead - torch.arange(len(self.at)) % self.height

    def blockwise(self, height: int) -> Layout:
        """Replace each row by a block of `height` rows of the same slot, the first of them one position after it."""
        rows = [(height * first, height * end) for first, end in self.rows]
        at = [slot for slot in self.at for _ in range(height)]
        return Layout(self.slots, rows, at, self.device, ahead=1, height=height)

    def within(self, window: int | None, ahead: int) -> Layout:
        """This layout with a sliding window, or the layout itself if no document is longer than the window."""
        longest = ahead + self.height - 1
        if window is None or all(stop - start + longest <= window for start, stop in self.slots):
            return self
        return replace(self, window=window, ahead=ahead)

    def of_rows(self, kept: list[int]) -> Layout:
        """Layout of a subset of the query rows, given by ascending indices."""
        sizes = [bisect_left(kept, end) - bisect_left(kept, first) for first, end in self.rows]
        return replace(self, rows=ranges(sizes), at=[self.at[row] for row in kept])

    @cached_property
    def whole(self) -> Layout:
        """This layout with every slot as a query row."""
        at = [at for start, stop in self.slots for at in range(stop - start)]
        return replace(self, rows=self.slots, at=at)

    @cached_property
    def blocks(self) -> list[_Block]:
        """Blocks of the layout, built (and moved to the device) once and used by every step, forward and backward."""
        parts = list(self._parts())
        return [_Block(self, part, keep=len(parts) <= KEPT) for part in parts]

    @cached_property
    def spans(self) -> tuple[Tensor, Tensor]:
        """Return low and high [N] int32: first and last of the M slots that each query row attends to."""
        counts = torch.tensor([end - first for first, end in self.rows])
        document = torch.tensor([first for first, _ in self.slots]).repeat_interleave(counts)
        high = document + torch.tensor(self.at, dtype=torch.long)
        low = document if self.reach is None else torch.maximum(document, high - self.reach + 1)
        return low.to(self.device, torch.int32), high.to(self.device, torch.int32)

    @cached_property
    def ascending(self) -> list[tuple[slice, Tensor, Tensor]]:
        """Parts of the rows in which both ends of the spans ascend: their rows, low and high.

        Within a window, the later rows of a block begin at later slots than the first rows of the next block. So a part
        has one row of every block.
        """
        low, high = self.spans
        step = self.height if self.window is not None else 1
        parts = [slice(first, None, step) for first in range(step)]
        return [(part, low[part].contiguous(), high[part].contiguous()) for part in parts]

    def _parts(self) -> Iterator[list[RowRange]]:
        """Yield groups of pieces.

        Each group has at most BLOCK padded scores per head, or consists of one piece of at most ROWS rows.
        """
        limit = BLOCK["cpu" if torch.device(self.device).type == "cpu" else "cuda"]
        group: list[RowRange] = []
        height = width = 0
        for document, ((s0, s1), (r0, r1)) in enumerate(zip(self.slots, self.rows, strict=True)):
            most = max(ROWS, limit // (s1 - s0))
            for start in range(r0, r1, most) or [r0]:  # a document without rows keeps its place
                piece = RowRange(document, start, min(start + most, r1))
                height, width = max(height, piece.rows), max(width, s1 - s0)
                if group and height * width * (len(group) + 1) > limit:
                    yield group
                    group, height, width = [], piece.rows, s1 - s0
                group.append(piece)
        if group:
            yield group


class RowRange(NamedTuple):
    """Query rows `start` to `stop` − 1 of a document."""

    document: int
    start: int
    stop: int

    @property
    def rows(self) -> int:
        return self.stop - self.start


class _Block:
    """B pieces of different documents, padded to R rows and S slots.

    Attributes:
        rows, slots: range of the block among the N query rows and among the M slots.
        row_places, slot_places: indices of its rows and slots among the B·R and B·S padded ones.
        at: [B, R, 1] slot of every row within its document.
    """

    def __init__(self, layout: Layout, part: list[RowRange], keep: bool):
        self.count, device = len(part), layout.device
        slots = [layout.slots[piece.document] for piece in part]
        last = part[-1]
        if last.rows:  # half of the scores of a cut document lie beyond the diagonal
            slots[-1] = (slots[-1][0], slots[-1][0] + layout.at[last.stop - 1] + 1)
        counts = [piece.rows for piece in part]
        self.height = max(1, *counts)
        self.width = max(stop - start for start, stop in slots)
        self.rows = slice(part[0].start, last.stop)
        self.slots = slice(slots[0][0], slots[-1][1])
        row_places = _places(counts, self.height)
        at = self._padded(row_places, torch.tensor(layout.at[self.rows], dtype=torch.long))
        self.at = at.to(device)
        reach = layout.reach
        self._reach = None if reach is None else self._padded(row_places, reach[self.rows]).to(device)
        self.row_places = row_places.to(device)
        self.slot_places = _places([stop - start for start, stop in slots], self.width).to(device)
        self._bias = self._make_bias() if keep else None

    def _padded(self, places: Tensor, values: Tensor) -> Tensor:
        """Place the rows' `values` [n] among the padded rows: [B, R, 1], with zeros for padding."""
        padded = torch.zeros(self.count * self.height, dtype=torch.long)
        padded[places] = values
        return padded.view(self.count, self.height, 1)

    @property
    def bias(self) -> Tensor:
        """Bias [B, 1, 1, R, S] added to scores: −inf at masked slots (much faster than masked_fill_)."""
        return self._make_bias() if self._bias is None else self._bias

    def _make_bias(self) -> Tensor:
        slots = torch.arange(self.width, device=self.at.device)
        hidden = slots > self.at
        if self._reach is not None:
            hidden |= slots <= self.at - self._reach
        return torch.zeros_like(hidden, dtype=torch.float32).masked_fill_(hidden, float("-inf"))[:, None, None]


def ranges(sizes: list[int]) -> list[tuple[int, int]]:
    """Return consecutive row ranges of the given sizes."""
    ends = list(accumulate(sizes))
    return [(end - size, end) for size, end in zip(sizes, ends, strict=True)]


def _places(sizes: list[int], width: int) -> Tensor:
    """Index of every element of consecutive runs of `sizes`, after padding each run to `width`."""
    return (torch.arange(width) < torch.tensor(sizes).unsqueeze(1)).view(-1).nonzero().squeeze(1)


def attention(query: Tensor, key: Tensor, value: Tensor, own: list[tuple[Tensor, Tensor]], layout: Layout) -> Tensor:
    """Attention of the training-time test at step k.

    Args:
        query: [N, H, D].
        key, value: [M, Hkv, D] keys and values of step 0.
        own: the rows' keys and values of steps 1 … k, [N, Hkv, D] each.

    Returns:
        [N, H, D] in the dtype of `query`.
    """
    steps = [key for key, _ in own] + [value for _, value in own]
    pairs = torch.stack(steps) if own else query.new_zeros(0, query.shape[0], *key.shape[1:])
    return _Merged.apply(query, key, value, pairs, layout)


def block_attention(query: Tensor, key: Tensor, value: Tensor, own: Tensor, layout: Layout) -> Tensor:
    """Attention of blocks of R rows: a row attends to slots of its document up to `at`, and to rows of its block.

    Args:
        query: [n, R, H, D].
        key, value: [M, Hkv, D] of the documents' slots.
        own: [2, n, R, Hkv, D] keys and values of the blocks' rows.
        layout: layout of the n·R rows, block by block; its `causal` decides which rows of its block a row attends to.

    Returns:
        [n, R, H, D] in the dtype of `query`.
    """
    return _Blocks.apply(query, key, value, own, layout)


def _by_kernel(q: Tensor) -> bool:
    """Whether our own kernel computes the document part for queries [N, Hkv, G, D].

    It does so in bf16 or fp16 on a GPU with Triton, once its results for such heads have agreed with the reference.
    """
    if q.dtype.itemsize != 2 or kernels.select_backend(q.device) != "triton":
        return False
    return passes("training attention on {} runs in PyTorch", span_mismatch, q.device, q.dtype, *q.shape[1:])


def _read(q: Tensor, key: Tensor, value: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """Attend from scaled queries q [N, Hkv, G, D] to documents: (`out` [N, Hkv, G, D], `lse` [N, Hkv, G]) in fp32."""
    if _by_kernel(q):
        if len(layout.ascending) == 1:
            return kernels.span_attention(q, key, value, *layout.spans)
        out, lse = torch.empty_like(q, dtype=torch.float32), q.new_empty(q.shape[:3], dtype=torch.float32)
        for part, *span in layout.ascending:
            out[part], lse[part] = kernels.span_attention(q[part], key, value, *span)
        return out, lse
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
    inputs: tuple[Tensor, Tensor, Tensor], grad: Tensor, delta: Tensor, lse: Tensor, layout: Layout
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the `inputs`: scaled queries, keys and values.

    Args:
        grad: [N, Hkv, G, D] gradient of the result.
        delta: [N, Hkv, G] δ, the row sums of `grad` ∘ `out`.
        lse: [N, Hkv, G] m, the normalizer of the merged attention.
    """
    q, key, value = inputs
    if _by_kernel(q) and len(layout.ascending) == 1:
        return kernels.span_attention_backward(q, key, value, grad, delta, lse, *layout.spans)
    dq = torch.empty_like(q)
    # A long document's keys sum over hundreds of blocks; in bf16 the late terms would be rounded away.
    dk, dv = torch.zeros_like(key, dtype=torch.float32), torch.zeros_like(value, dtype=torch.float32)
    if _by_kernel(q):
        for part, *span in layout.ascending:
            given = q[part], key, value, grad[part], delta[part], lse[part]
            dq[part], more_keys, more_values = kernels.span_attention_backward(*given, *span)
            dk, dv = dk.add_(more_keys), dv.add_(more_values)
        return dq, dk, dv
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
    """Merged attention of the training-time test.

    Scores are in fp32, because in bf16 they would be off by per cents. Other products are in the input's dtype.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, own: Tensor, layout: Layout) -> Tensor:
        rows, heads, dim = query.shape
        kv_heads = key.shape[1]
        q = query.view(rows, kv_heads, heads // kv_heads, dim) * dim**-0.5  # no −1 in view: there may be no rows
        out, lse = _read(q, key, value, layout)
        if own.shape[0]:
            own_keys, own_values = own.unsqueeze(3).chunk(2)  # each [k, N, Hkv, 1, D]
            scores = torch.linalg.vecdot(q.float(), own_keys.float())
            merged = torch.logsumexp(torch.cat((lse.unsqueeze(0), scores)), 0)
            out = out.mul_((lse - merged).exp_().unsqueeze(-1))
            out = out.add_(((scores - merged).exp_().unsqueeze(-1) * own_values).sum(0))
            lse = merged
        ctx.layout = layout
        ctx.save_for_backward(q, key, value, own, out, lse)
        return out.view(rows, heads, dim).to(query.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, key, value, own, out, lse = ctx.saved_tensors
        grad = grad.view_as(q)
        delta = torch.linalg.vecdot(grad.float(), out)  # rowsum(dO ∘ out)
        dq, dk, dv = _read_backward((q, key, value), grad, delta, lse, ctx.layout)
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


class _Blocks(torch.autograd.Function):
    """Merged attention like `_Merged`, with the keys of whole blocks instead of the keys of earlier steps."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, own: Tensor, layout: Layout) -> Tensor:
        count, height, heads, dim = query.shape
        kv_heads = key.shape[1]
        q = query.view(count * height, kv_heads, heads // kv_heads, dim) * dim**-0.5
        out, lse = _read(q, key, value, layout)
        own_keys, own_values = _of_blocks(own)
        scores = _of_block(torch.matmul(_by_blocks(q, count).float(), own_keys.float().mT), layout)
        merged = torch.logaddexp(_by_blocks(lse.unsqueeze(-1), count), scores.logsumexp(-1, keepdim=True))
        mixed = torch.matmul((scores - merged).exp_().to(own.dtype), own_values).float()
        groups = q.shape[2]
        m = _by_rows(merged, groups).squeeze(-1)
        out = out.mul_((lse - m).exp_().unsqueeze(-1)).add_(_by_rows(mixed, groups))
        ctx.layout = layout
        ctx.save_for_backward(q, key, value, own, out, m)
        return out.view(query.shape).to(query.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, key, value, own, out, lse = ctx.saved_tensors
        count, (_, _, groups, dim) = own.shape[1], q.shape
        shape, grad = grad.shape, grad.reshape(q.shape)
        delta = torch.linalg.vecdot(grad.float(), out)
        dq, dk, dv = _read_backward((q, key, value), grad, delta, lse, ctx.layout)
        own_keys, own_values = _of_blocks(own)
        folded, folded_grad = _by_blocks(q, count), _by_blocks(grad, count)
        scores = _of_block(torch.matmul(folded.float(), own_keys.float().mT), ctx.layout)
        share = scores.sub_(_by_blocks(lse.unsqueeze(-1), count)).exp_()
        dp = torch.matmul(folded_grad, own_values.mT).float()
        ds = dp.sub_(_by_blocks(delta.unsqueeze(-1), count)).mul_(share).to(own.dtype)
        dq += _by_rows(torch.matmul(ds, own_keys), groups)
        down = torch.stack((torch.matmul(ds.mT, folded), torch.matmul(share.to(own.dtype).mT, folded_grad)))
        dq = (dq * dim**-0.5).view(shape)
        return dq, dk.to(key.dtype), dv.to(value.dtype), down.transpose(2, 3), None


def _of_block(scores: Tensor, layout: Layout) -> Tensor:
    """Scores [n, Hkv, G·R, R] of a block's rows for its own rows; in a causal layout later rows get −∞."""
    if not layout.causal:
        return scores
    later = torch.ones(scores.shape[-1], scores.shape[-1], dtype=torch.bool, device=scores.device).triu(1)
    return scores.masked_fill_(later.repeat(scores.shape[-2] // scores.shape[-1], 1), float("-inf"))


def _of_blocks(own: Tensor) -> tuple[Tensor, Tensor]:
    """Split [2, n, R, Hkv, D] into keys and values, each [n, Hkv, R, D]."""
    keys, values = own.transpose(2, 3)
    return keys, values


def _by_blocks(x: Tensor, count: int) -> Tensor:
    """Reshape rows [n·R, Hkv, G, ·] to [n, Hkv, G·R, ·]."""
    height = x.shape[0] // max(count, 1)  # short responses may have no blocks
    return x.unflatten(0, (count, height)).permute(0, 2, 3, 1, 4).flatten(2, 3)


def _by_rows(x: Tensor, groups: int) -> Tensor:
    """Reshape [n, Hkv, G·R, ·] to rows [n·R, Hkv, G, ·]: the inverse of `_by_blocks`."""
    return x.unflatten(2, (groups, x.shape[2] // groups)).permute(0, 3, 1, 2, 4).flatten(0, 1)


def _fold(x: Tensor, block: _Block) -> Tensor:
    """Reshape [N, Hkv, G, D] to [B·Hkv, G·R, D]: grouped queries become rows of their key head, padded with zeros."""
    kv_heads, groups, dim = x.shape[1:]
    padded = x.new_zeros(block.count * block.height, kv_heads, groups, dim)
    padded[block.row_places] = x[block.rows]
    padded = padded.view(block.count, block.height, kv_heads, groups, dim).permute(0, 2, 3, 1, 4)
    return padded.reshape(block.count * kv_heads, groups * block.height, dim)


def _unfold(x: Tensor, block: _Block) -> Tensor:
    """Reshape [B·Hkv, G·R, D] to the block's rows [n, Hkv, G, D], dropping the padding."""
    kv_heads = x.shape[0] // block.count
    x = x.view(block.count, kv_heads, -1, block.height, x.shape[-1]).permute(0, 3, 1, 2, 4)
    return x.reshape(block.count * block.height, *x.shape[2:])[block.row_places]


def _pad(x: Tensor, block: _Block) -> Tensor:
    """Reshape [M, Hkv, D] to [B·Hkv, S, D], padded with zeros."""
    padded = x.new_zeros(block.count * block.width, *x.shape[1:])
    padded[block.slot_places] = x[block.slots]
    padded = padded.view(block.count, block.width, *x.shape[1:]).transpose(1, 2)
    return padded.reshape(-1, block.width, x.shape[-1])


def _unpad(x: Tensor, block: _Block) -> Tensor:
    """Reshape [B·Hkv, S, D] to the block's slots [m, Hkv, D], dropping the padding."""
    x = x.view(block.count, -1, *x.shape[1:]).transpose(1, 2)
    return x.reshape(block.count * block.width, *x.shape[2:])[block.slot_places]


def _scores(folded: Tensor, keys: Tensor, block: _Block) -> Tensor:
    """Masked scores [B·Hkv, G·R, S] of scaled queries."""
    scores = torch.bmm(folded.float(), keys.float().transpose(1, 2))
    shaped = scores.view(block.count, -1, folded.shape[1] // block.height, block.height, block.width)
    shaped.add_(block.bias)
    return scores
