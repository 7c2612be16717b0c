"""Attention of training rows over spans of slots, and its gradients."""

import itertools
import warnings
from dataclasses import replace

import pytest
import torch

from specctl import kernels
from specctl.drafters.feature import ttt_attention
from specctl.drafters.feature.ttt_attention import Layout, attention, block_attention, ranges
from specctl.kernels import reference, self_check

CLOSE = dict(rtol=2e-2, atol=2e-2)
CASES = {  # lengths of documents, and the slots of their rows
    "last slots": ([70, 5, 130], [range(40, 70), range(5), range(1, 130)]),
    "some slots": ([300, 64, 1, 90], [range(3, 300, 7), range(63, 64), range(1), range(0, 90, 2)]),
    "documents without rows": ([40, 200, 3, 65], [(), range(120, 200), (), range(64, 65)]),
    "blocks": ([90, 20], [[slot for slot in range(10, 90, 5) for _ in range(7)], [3] * 7]),
    "rows of the last document only": ([200, 200, 30], [(), (), range(29)]),
}
HEADS = [(1, 1, 64), (2, 3, 16), (1, 4, 80)]


def layout(case, window=None):
    lengths, at = CASES[case]
    return Layout(
        ranges(lengths), ranges([len(rows) for rows in at]), [slot for rows in at for slot in rows], "cpu", window
    )


def question(case, heads, dtype, window=None):
    torch.manual_seed(0)
    spans = layout(case, window)
    kv, groups, dim = heads
    rows, slots = len(spans.at), spans.slots[-1][1]
    q, grad = (torch.randn(rows, kv, groups, dim) * scale for scale in (dim**-0.5, 1))
    key, value = torch.randn(2, slots, kv, dim)
    return spans, [x.to(dtype) for x in (q, key, value, grad)]


@pytest.mark.usefixtures("products_of_bf16")
@pytest.mark.parametrize(
    ("case", "window", "heads"),
    [
        pytest.param(*place, heads, marks=() if heads is HEADS[number % len(HEADS)] else pytest.mark.slow)
        for number, place in enumerate(itertools.product(CASES, [None, 33]))
        for heads in HEADS
    ],  # takes seconds in Triton's interpreter, so each case has one kind of heads by default
    ids=str,
)
def test_outputs_and_gradients_equal_fp32_blocks(backend, case, window, heads):
    """The reference computes documents in blocks, which the training tests compare with a mask."""
    dtype = torch.float16 if heads[0] == 2 else torch.bfloat16
    spans, (q, key, value, grad) = question(case, heads, dtype, window)
    wide = [x.float() for x in (q, key, value, grad)]
    out, lse = backend.span_attention(q, key, value, *spans.spans)
    expected = ttt_attention._read(*wide[:3], spans)
    for ours, theirs in zip((out, lse), expected, strict=True):
        torch.testing.assert_close(ours, theirs, **CLOSE)
    more = expected[1] + 0.3  # as if every row also attended to its own keys
    delta = (wide[3] * expected[0]).sum(-1) * 0.7
    ours = backend.span_attention_backward(q, key, value, grad, delta, more, *spans.spans)
    theirs = ttt_attention._read_backward(tuple(wide[:3]), wide[3], delta, more, spans)
    for found, gradient in zip(ours, theirs, strict=True):
        torch.testing.assert_close(found.float(), gradient, rtol=3e-2, atol=3e-2 * gradient.abs().max().item())
    assert ours[0].dtype == dtype and {x.dtype for x in ours[1:]} == {torch.float32}


def test_a_row_with_an_empty_span_gives_zeros(backend):
    q, key = torch.ones(2, 1, 1, 16, dtype=torch.float16), torch.ones(3, 1, 16, dtype=torch.float16)
    low, high = torch.tensor([0, 2], dtype=torch.int32), torch.tensor([-1, 2], dtype=torch.int32)
    out, lse = backend.span_attention(q, key, key, low, high)
    assert out[0].abs().sum() == 0 and lse[0, 0, 0] == -torch.inf and lse[1, 0, 0] == 16
    flat = torch.zeros(2, 1, 1)
    dq, dk, dv = backend.span_attention_backward(q, key, key, q, flat, lse, low, high)
    assert dq[0].abs().sum() == 0 and dk[:2].abs().sum() == dv[:2].abs().sum() == 0 and dv[2, 0].eq(1).all()


def test_no_rows_give_empty_results(backend):
    q, key = torch.ones(0, 1, 2, 16, dtype=torch.float16), torch.ones(3, 1, 16, dtype=torch.float16)
    none, flat = torch.empty(0, dtype=torch.int32), torch.empty(0, 1, 2)
    out, lse = backend.span_attention(q, key, key, none, none)
    gradients = backend.span_attention_backward(q, key, key, q, flat, flat, none, none)
    assert out.shape == q.shape and lse.shape == flat.shape and gradients[0].shape == q.shape
    assert all(x.shape == key.shape and not x.any() for x in gradients[1:])


@pytest.mark.usefixtures("products_of_bf16")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_backend_passes_the_span_check(backend, dtype):
    assert self_check.span_mismatch(backend, torch.device("cpu"), dtype, 1, 2, 16) is None


def test_the_check_disables_autocast(monkeypatch):
    """Training calls kernels under autocast, which would round the reference and refuse right results."""

    def exactly(name):
        def answer(*args):
            with torch.autocast("cpu", enabled=False):
                return getattr(reference, name)(*args)

        return answer

    for name in ("span_attention", "span_attention_backward"):
        monkeypatch.setattr(kernels, name, exactly(name))
    self_check.passes.cache_clear()
    with torch.autocast("cpu", torch.bfloat16), warnings.catch_warnings(action="error"):
        assert self_check.passes("", self_check.span_mismatch, torch.device("cpu"), torch.bfloat16, 3, 3, 64)
    self_check.passes.cache_clear()


@pytest.mark.parametrize("name", ["span_attention", "span_attention_backward"])
def test_a_wrong_result_is_noticed(name):
    class Wrong:
        span_attention = staticmethod(reference.span_attention)
        span_attention_backward = staticmethod(reference.span_attention_backward)

    right = getattr(reference, name)
    setattr(Wrong, name, staticmethod(lambda *args: (right(*args)[0] * 1.2, *right(*args)[1:])))
    assert self_check.span_mismatch(Wrong, torch.device("cpu"), torch.float16, 1, 2, 16).startswith(
        f"{name} gives a different result"
    )


@pytest.mark.usefixtures("products_of_bf16")
@pytest.mark.parametrize(("blocks", "window"), [(False, None), (True, None), (True, 33)])
def test_heads_train_with_each_backend(backend, blocks, window, monkeypatch):
    """Training-time test and blocks in bf16 use the kernel if the backend is Triton, and agree with fp32 without it."""
    name = backend.__name__.rpartition(".")[2].removesuffix("_backend")
    monkeypatch.setenv("SPECCTL_KERNELS", name)
    calls = []
    read = kernels.span_attention
    monkeypatch.setattr(kernels, "span_attention", lambda *args: calls.append(args) or read(*args))
    spans = layout("last slots")
    spans = replace(spans.blockwise(3).within(window, 1), causal=window is not None) if blocks else spans
    rows, slots = len(spans.at), spans.slots[-1][1]
    torch.manual_seed(0)
    shapes = [(rows, 4, 64), (slots, 2, 64), (slots, 2, 64), (rows, 2, 64), (rows, 2, 64)]
    given, weight = [torch.randn(shape).bfloat16() for shape in shapes], torch.randn(rows, 4, 64)

    def trained(dtype):
        leaves = [x.to(dtype).requires_grad_() for x in given]
        query, key, value, *own = leaves
        if blocks:
            own = torch.stack([x.unflatten(0, (-1, 3)) for x in own])
            out = block_attention(query.unflatten(0, (-1, 3)), key, value, own, spans).flatten(0, 1)
        else:
            out = attention(query, key, value, [tuple(own)], spans)
        return [out, *torch.autograd.grad((out * weight).sum(), leaves)]

    low = trained(torch.bfloat16)
    assert bool(calls) == (name == "triton")
    calls.clear()
    for ours, wide in zip(low, trained(torch.float32), strict=True):
        torch.testing.assert_close(ours.float(), wide, rtol=3e-2, atol=2e-2 * wide.abs().max().item())
    assert not calls  # fp32 uses PyTorch
