"""Test once whether a backend computes the same on a device as the reference, before it is used.

This is for backends that compile their kernels. A machine may lack a C compiler, or have a Triton that generates wrong
code for its GPU.
"""

import warnings
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specctl import kernels

from . import reference
from .paging import PAGE
from .reference import Ancestry
from .rows import Rows

ROWS, VOCABULARY, DRAFTED = 6, 1000, 2
Question = tuple[str, tuple[Any, ...]]  # name of a kernel, and its arguments


class LayerShape(NamedTuple):
    """Sizes that the kernels are compiled for."""

    hidden: int
    inner: int  # width of the MLP
    heads: int
    kv_heads: int
    dim: int
    normed: bool  # queries and keys have norms


@cache
def passes(consequence: str, mismatch: Callable[..., str | None], device: torch.device, *facts: Any) -> bool:
    """Whether the kernels for `device` agree with the reference, by a `mismatch` of this module for these `facts`.

    They are tried once for each set of facts. If they disagree, one warning names the `consequence`. A trial disables
    autocast, under which training runs: it would round the reference to bf16, and every kernel would appear wrong.
    """
    if device.type == "cuda" and kernels.select_backend(device) != "triton":  # which has warned already
        return False
    with torch.autocast(device.type, enabled=False):
        reason = mismatch(kernels, device, *facts)
    if reason is not None:
        warnings.warn(f"{consequence.format(device)}: {reason}", stacklevel=2)
    return reason is None


def mismatch(backend: ModuleType, device: torch.device) -> str | None:
    """Reason not to use `backend` on `device`, or None if every kernel agrees with the reference."""
    return _difference(backend, _questions(device), rtol=1e-3, atol=1e-4)


def layer_mismatch(backend: ModuleType, device: torch.device, dtype: torch.dtype, shape: LayerShape) -> str | None:
    """Reason not to use the fused operations of `backend` for layers of this shape, or None if they agree."""
    hidden, inner, heads, kv_heads, dim, normed = shape
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int, of: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, of)

    wide = torch.float32
    weights = [normal(dim, of=wide) if normed else None for _ in range(2)]
    positions = torch.tensor([[3, 4, 5], [0, 1, 1]], device=device)
    slots = torch.tensor([[3, 4, 5], [6, 0, 2]], device=device)
    pooled = torch.tensor([[3, 4, 5], [6, 0, 2]], device=device)  # slots of two texts in one pool
    qkv, cache = normal(6, heads + 2 * kv_heads, dim), normal(2, 7, 2 * kv_heads, dim)
    questions: list[Question] = [
        ("add_rms_norm", (normal(3, hidden, of=wide), normal(3, hidden), normal(hidden, of=wide), 1e-5)),
        ("silu_and_mul", (normal(3, 2 * inner),)),
        ("rope_and_cache", (qkv, normal(6, dim), normal(6, dim), positions, slots, cache, *weights, 1e-5)),
        ("rope_and_cache", (qkv, normal(6, dim), normal(6, dim), positions, pooled, cache[0], *weights, 1e-5)),
    ]
    close = 1e-3 if dtype == wide else 2e-2
    return _difference(backend, questions, rtol=close, atol=close)


def span_mismatch(
    backend: ModuleType, device: torch.device, dtype: torch.dtype, kv_heads: int, groups: int, dim: int
) -> str | None:
    """Reason not to use the training attention of `backend` for such heads, or None if it agrees with the reference.

    Covers documents of one slot and of several tiles, rows that skip slots, and windows.
    """
    generator = torch.Generator().manual_seed(0)
    first = torch.tensor([0, 1, 40, 290]).repeat_interleave(torch.tensor([1, 3, 120, 2]))
    high = torch.cat([torch.tensor([0]), torch.arange(1, 4), torch.arange(45, 285, 2), torch.tensor([290, 299])])

    def normal(*shape: int, scale: float = 1.0, of: torch.dtype = dtype) -> Tensor:
        return (scale * torch.randn(shape, generator=generator)).to(device, of)

    q, grad = (normal(len(high), kv_heads, groups, dim, scale=scale) for scale in (dim**-0.5, 1.0))
    key, value = normal(300, kv_heads, dim), normal(300, kv_heads, dim)
    questions: list[Question] = []
    for low in (first, torch.maximum(first, high - 100)):
        span = low.to(device, torch.int32), high.to(device, torch.int32)
        out, lse = reference.span_attention(q, key, value, *span)
        delta = (grad.float() * out).sum(-1)
        questions.append(("span_attention", (q, key, value, *span)))
        questions.append(("span_attention_backward", (q, key, value, grad, delta, lse, *span)))
    return _difference(backend, questions, rtol=2e-2, atol=5e-2)


def _difference(backend: ModuleType, questions: list[Question], *, rtol: float, atol: float) -> str | None:
    for name, arguments in questions:
        try:
            answer = _answer(backend, name, arguments)
        except Exception as error:  # compilers and drivers may raise anything
            lines = [type(error).__name__, *str(error).strip().splitlines()]
            return f"{name} fails: {lines[-1]}"
        expected = _answer(reference, name, arguments)
        for ours, theirs in zip(answer, expected, strict=True):
            if not torch.allclose(ours.double(), theirs.double(), rtol=rtol, atol=atol, equal_nan=True):
                return f"{name} gives a different result from the reference"
    return None


def attention_mismatch(
    backend: ModuleType, device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int], paged: bool
) -> str | None:
    """Reason not to use the attention of `backend` for a model with such heads, or None if it agrees with the
    reference.

    `shape`: number of query heads and of KV heads, and their dimension. `paged`: whether texts are in pages. Covers few
    slots, so that one slot too many would show, and many slots in several pieces; numbers of rows cover every tiling.
    """
    heads, kv_heads, dim = shape
    generator = torch.Generator().manual_seed(0)
    base = torch.tensor([0, 5, 300])
    questions: list[Question] = []
    for rows in sorted({1, *(min(max(1, size * kv_heads // heads), 64) for size in (32, 64, 128))}):
        slots = -(-(300 + rows) // PAGE) * PAGE
        store = torch.randn(len(base), slots, 2 * kv_heads, dim, generator=generator).to(device, dtype)
        q = torch.randn(len(base), rows, heads, dim, generator=generator).to(device, dtype)
        own = torch.ones(rows, dtype=torch.int64) << torch.arange(rows)
        table = []
        if paged:  # the pages of a text are apart, and in reverse order
            width = slots // PAGE
            pages = torch.arange(len(base) * width - 1, -1, -1, device=device).view(width, len(base)).T
            store, table = store.flatten(0, 1), [pages.contiguous()]
        for bits in (None, (own | 1).expand(len(base), -1).to(device)):
            ancestry = Ancestry(base.to(device), rows, bits)
            questions.append(("attention", (q, store, ancestry, 300 + rows, dim**-0.5, *table)))
    close = 1e-3 if dtype == torch.float32 else 2e-2
    reason = _difference(backend, questions, rtol=close, atol=close)
    return reason and f"{heads} query and {kv_heads} KV heads of dimension {dim} in {dtype}: {reason}"


def _questions(device: torch.device) -> list[Question]:
    """Small inputs for the kernels that determine text, and for the training kernel.

    They cover sampled and greedy rows, a chain, a tree and a gradient.
    """
    generator = torch.Generator().manual_seed(0)
    scores = 3 * torch.randn(ROWS, VOCABULARY, generator=generator).to(device)  # without ties
    logits = scores.bfloat16()
    uniforms = torch.rand(ROWS, generator=generator).to(device)
    temperature = torch.tensor([1.0, 0.7, 1.0, 0.8, 1.0, 0.0], device=device)
    top_k = torch.tensor([0, 50, 0, 0, 7, 0], device=device)
    top_p = torch.tensor([1.0, 1.0, 0.9, 1.0, 0.8, 1.0], device=device)
    filters = temperature, top_k, top_p
    p = reference.row_params(logits, *filters)
    batch = ROWS // (DRAFTED + 1)
    q = p.take(torch.tensor([0, 1, 3, 4], device=device))
    tokens = reference.sample_rows(q, uniforms[:4]).view(batch, DRAFTED)
    drawn = reference.sample_rows(p, uniforms).view(batch, DRAFTED + 1)
    parents = torch.tensor([[-1, 0]], device=device).expand(batch, -1).contiguous()
    count = torch.full((batch,), DRAFTED, device=device)
    grid = uniforms.view(batch, DRAFTED + 1)
    seeds = torch.tensor([0, -(2**40) - 5], device=device)
    return [
        ("uniform", (seeds, torch.arange(2 * DRAFTED, device=device).view(2, DRAFTED), 1)),
        ("argmax", (logits,)),
        ("row_params", (logits, *filters)),
        ("sample_rows", (p, uniforms)),
        ("walk_tree", (drawn, tokens, parents)),
        (
            "sample_tree",
            (logits.view(*grid.shape, -1), tuple(f[:: DRAFTED + 1] for f in filters), grid, tokens, parents),
        ),
        ("accept_chain", (p, q, tokens, count, grid[:, :DRAFTED].contiguous(), grid)),
        ("expand_topk", (scores, 4)),
        ("distill_rows", (scores, scores.flip(0).softmax(-1), uniforms, "soft_ce")),
    ]


def _answer(backend: ModuleType, name: str, arguments: tuple[Any, ...]) -> list[Tensor]:
    """Tensors of an answer, and the arguments, which the kernel may have changed in place. Rows come without logits."""
    given = [argument.clone() if isinstance(argument, Tensor) else argument for argument in arguments]
    answer = getattr(backend, name)(*given)
    parts = (answer,) if isinstance(answer, Tensor) else answer[1:-1] if isinstance(answer, Rows) else answer
    return [part for part in (*parts, *given) if isinstance(part, Tensor)]
