"""The fused operations of a layer agree with separate operations."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from specctl.decoding.cache import KVCache
from specctl.decoding.models.layers import RMSNorm
from specctl.decoding.plan import plan_at, plan_rows
from specctl.decoding.rope import Rope
from specctl.kernels import self_check
from specctl.kernels.self_check import LayerShape

CPU = torch.device("cpu")
CLOSE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}
DTYPES = pytest.mark.parametrize("dtype", CLOSE, ids=str)


@DTYPES
@pytest.mark.parametrize("size", [1, 33, 48, 576, 1000, 4096, 5120])
def test_add_rms_norm_equals_addition_and_norm(backend, size, dtype):
    """Covers sizes that are not powers of two, and a row of zeros."""
    torch.manual_seed(0)
    x, delta, norm = torch.randn(3, size), torch.randn(3, size).to(dtype), RMSNorm(torch.rand(size) + 0.5, 1e-5, dtype)
    x[1], delta[1] = 0, 0
    before = x.clone(), delta.clone()
    total, y = backend.add_rms_norm(x, delta, norm.weight, norm.eps)
    assert torch.equal(total, x + delta) and total.dtype == torch.float32 and y.dtype == dtype
    torch.testing.assert_close(y, norm(x + delta), rtol=CLOSE[dtype], atol=CLOSE[dtype])
    assert torch.equal(x, before[0]) and torch.equal(delta, before[1])  # taps keep the inputs


@DTYPES
@pytest.mark.parametrize("size", [1, 33, 512, 1500])
def test_silu_and_mul_equals_silu_times_up(backend, size, dtype):
    torch.manual_seed(0)
    x = (4 * torch.randn(3, 2 * size)).to(dtype)
    x[0, 0], x[1, 0] = -200, 200  # exponentials overflow or vanish
    gate, up = x.float().chunk(2, -1)
    found = backend.silu_and_mul(x)
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), F.silu(gate) * up, rtol=CLOSE[dtype], atol=CLOSE[dtype])


def tree_plan(base, rows, span):
    """A plan with different slots and positions, known only on the device."""
    visible = torch.eye(rows, dtype=torch.bool).expand(len(base), -1, -1)
    return plan_at(torch.tensor(base), visible, torch.arange(rows) // 2, span=span, dtype=torch.float32)


CASES = {  # query heads, key heads, head size, cached rows per text, rows
    "one row": (4, 4, 64, [30], 1),
    "ragged": (6, 2, 64, [0, 19, 5], 3),
    "odd heads": (14, 2, 80, [3, 11], 2),
    "one key head of eight": (8, 1, 128, [7], 5),
    "wide": (32, 8, 128, [2, 9], 2),
    "small": (3, 1, 12, [8], 4),
}
FULL = 33  # slots per cache; the last step of "one row" and of "to the end" fills them


@DTYPES
@pytest.mark.parametrize("normed", [False, True], ids=["", "normed"])
@pytest.mark.parametrize(("name", "where"), [*itertools.product(CASES, ("host", "device")), ("ragged", "to the end")])
def test_rope_and_cache_equals_separate_operations(backend, name, where, normed, dtype):
    """Compare with norms, `Rope.rotate` and `KVCache.write`; other slots stay unchanged."""
    torch.manual_seed(0)
    heads, kv, dim, base, rows = CASES[name]
    if where == "to the end":
        base = [FULL - rows] * len(base)
    plan = tree_plan(base, rows, FULL)
    if where == "host":
        plan = plan_rows(base, rows, device=CPU, dtype=torch.float32)
    qkv = torch.randn(len(base) * rows, heads + 2 * kv, dim).to(dtype)
    rope = Rope.of(1.0 / 100 ** torch.linspace(0, 1, dim // 2), torch.arange(FULL), dtype)
    norms = [RMSNorm(torch.rand(dim) + 0.5, 1e-6, torch.float32) for _ in range(2)]
    expected, cache = (KVCache(2, len(base), kv, FULL, dim, dtype=dtype, device=CPU) for _ in range(2))
    cache.store.fill_(7.0)
    expected.store.copy_(cache.store)

    wide = qkv.float()
    if normed:
        q, k, v = wide.split((heads, kv, kv), 1)
        wide = torch.cat((norms[0](q), norms[1](k), v), 1)
    table = tuple(part.float() for part in rope.at(plan, heads + kv, kv))
    turned = Rope.rotate(wide, table).to(dtype)
    expected.write(1, turned[:, heads:], plan)

    weights = [norm.weight if normed else None for norm in norms]
    slots, before = cache.slots(plan, rows), qkv.clone()
    q = backend.rope_and_cache(qkv, rope.cos, rope.sin, plan.positions, slots, cache.rows[1], *weights, 1e-6)
    how = dict(rtol=CLOSE[dtype], atol=CLOSE[dtype])
    torch.testing.assert_close(q, turned[:, :heads].unflatten(0, (len(base), rows)), **how)
    torch.testing.assert_close(cache.store, expected.store, **how)
    assert torch.equal(cache.rows[1][:, :, kv:], expected.rows[1][:, :, kv:])  # values are copied
    assert torch.equal(qkv, before)


def test_a_row_does_not_depend_on_other_rows(backend):
    """Bit for bit, because plain decoding runs a row alone and verification runs it in a batch."""
    torch.manual_seed(0)
    x, delta, weight = torch.randn(5, 100), torch.randn(5, 100), torch.rand(100)
    whole = backend.add_rms_norm(x, delta, weight, 1e-5)[1]
    assert torch.equal(backend.add_rms_norm(x[3:4], delta[3:4], weight, 1e-5)[1], whole[3:4])


@pytest.mark.parametrize("normed", [False, True])
def test_the_self_check_accepts_right_layers_and_refuses_wrong_ones(backend, normed):
    """Wrong layers write keys to other slots, or swap the gate with its factor."""
    shape = (CPU, torch.bfloat16, LayerShape(48, 64, 4, 2, 16, normed))
    assert self_check.layer_mismatch(backend, *shape) is None

    class Wrong:
        add_rms_norm, silu_and_mul = staticmethod(backend.add_rms_norm), staticmethod(backend.silu_and_mul)

        @staticmethod
        def rope_and_cache(qkv, cos, sin, positions, slots, *rest):
            return backend.rope_and_cache(qkv, cos, sin, positions, slots.clamp(max=5), *rest)

    assert "rope_and_cache gives a different result" in self_check.layer_mismatch(Wrong, *shape)
    Wrong.rope_and_cache = backend.rope_and_cache
    Wrong.silu_and_mul = staticmethod(lambda x: backend.silu_and_mul(x.roll(x.shape[1] // 2, 1)))
    assert "silu_and_mul gives a different result" in self_check.layer_mismatch(Wrong, *shape)
