"""Layers with fused operations compared with layers that run one operation after another. Here the kernels are the
reference; tests/kernels/test_triton.py runs this file again with Triton's kernels, interpreted."""

import os
import sys
import warnings
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from specctl import kernels
from specctl.decoding.device import rounds as device_round
from specctl.decoding.models import layers
from specctl.decoding.plan import plan_rows
from specctl.decoding.sampling import GREEDY, Sampling
from specctl.decoding.target import load_target
from specctl.errors import UsageError
from specctl.kernels import reference, self_check
from specctl.kernels.self_check import LayerShape
from tests.toys.decoding import decode

CPU = torch.device("cpu")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
PROMPTS = [[5, 9, 300, 12, 7, 7, 41], [88, 4]]


@pytest.fixture(params=["triton" if INTERPRETED else "reference"])
def fuse(request, monkeypatch):
    """`fuse()`: from this call on layers are fused, with these kernels."""

    def start():
        monkeypatch.setenv("SPECCTL_KERNELS", request.param)
        monkeypatch.setenv("SPECCTL_LAYERS", "fused")

    return start


@pytest.mark.parametrize("name", ["llama", "llama-bias-tied", "llama3-rope", "qwen2", "qwen3", "olmo2"])
def test_fused_steps_equal_unfused_ones(tiny_directory, fuse, name):
    """A prompt, a ragged chain and a tree with slots that differ from positions, one after another in one cache."""
    target = load_target(tiny_directory(name), device="cpu", dtype="fp32")
    taps = (0, 1, target.num_layers)
    tree = torch.tensor([[True, False, False], [True, True, False], [True, False, True]]).expand(2, -1, -1)
    answers = []
    for fused_layers in (False, True):
        if fused_layers:
            fuse()
        cache = target.model.new_cache(2, 24)
        found = list(target.prefill([PROMPTS[0]], cache.sequence(0), taps)[:2])
        for base, rows, more in (
            ([7, 0], 2, {}),
            ([9, 2], 3, dict(visible=tree, depth=torch.tensor([[0, 1, 1]]).expand(2, -1))),
        ):
            plan = plan_rows(base, rows, device=CPU, dtype=torch.float32, **more)
            found += target.step(torch.arange(2 * rows).view(2, rows) + 30, cache, plan, taps)
        alone = plan_rows([12], 3, device=CPU, dtype=torch.float32, visible=tree[:1], depth=torch.tensor([[0, 1, 1]]))
        found += target.step(torch.tensor([[3, 4, 5]]), cache.sequence(0), alone, taps)
        answers.append([*found, cache.store])
    for plain, ours in zip(*answers, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)


def test_fused_layers_keep_the_text(tiny_directory, fuse, monkeypatch):
    """In host rounds and in device rounds."""
    target = load_target(tiny_directory("qwen3"), device="cpu", dtype="fp32")
    how = dict(sampling=[GREEDY, Sampling(0.8, 40, 0.9)], max_new_tokens=[6, 4], seeds=[1, 2])
    expected = [one.output_ids for one in decode(target, PROMPTS, **how)]
    fuse()
    assert [one.output_ids for one in decode(target, PROMPTS, **how)] == expected
    monkeypatch.setenv("SPECCTL_GRAPHS", "eager")
    assert [one.output_ids for one in decode(target, PROMPTS, **how)] == expected


class Launches(TorchDispatchMode):
    """Count the PyTorch operations that would launch a kernel on a GPU. Views and mere allocations launch none."""

    FREE = ("empty", "detach", "_unsafe_view", "is_pinned", "lift_fresh")

    def __init__(self):
        super().__init__()
        self.count = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if not function.is_view and not any(word in str(function) for word in self.FREE):
            self.count[str(function)] += 1
        return function(*args, **(kwargs or {}))


LAYERS = 32  # number of layers of an 8B target


@pytest.mark.skipif(not INTERPRETED, reason="run by test_triton")
@pytest.mark.parametrize(("name", "splits"), [("llama", 1), ("qwen3", 1), ("llama", 4)])
def test_a_plain_round_launches_few_kernels(tiny_directory, fuse, monkeypatch, name, splits):
    """Counted in the interpreter for two and for three layers: the difference is one layer. Attention that is split
    over the keys has a second launch, which adds the parts."""
    from triton.runtime.interpreter import GridExecutor

    from specctl.kernels import triton_backend  # noqa: F401

    tiled = sys.modules["specctl.kernels.triton_backend.attention"]
    deal = tiled.tiling
    monkeypatch.setattr(tiled, "tiling", lambda *shape: deal(*shape)._replace(splits=splits))
    target = load_target(tiny_directory(name), device="cpu", dtype="fp32")
    monkeypatch.setenv("SPECCTL_GRAPHS", "eager")
    monkeypatch.setenv("SPECCTL_ATTENTION", "kernel")
    fuse()
    counts = []
    launch, whole = GridExecutor.__call__, device_round.DeviceRounds.round

    def counted(self, *args, **kwargs):
        counts[-1][self.fn.__name__] += 1
        # The interpreter runs a program with NumPy operations and copies, which would be counted as launches.
        with _disable_current_modes():
            return launch(self, *args, **kwargs)

    def watched(self, span):
        with Launches() as mode, monkeypatch.context() as patch:
            counts.append(mode.count)
            patch.setattr(GridExecutor, "__call__", counted)
            return whole(self, span)

    monkeypatch.setattr(device_round.DeviceRounds, "round", watched)
    totals = []
    for count in (2, 3):
        monkeypatch.setattr(target.model, "layers", (target.model.layers * 2)[:count])
        decode(target, PROMPTS[:1], sampling=GREEDY, max_new_tokens=3, seeds=[0])
        totals.append(counts[-1].total())
    layer, rest = totals[1] - totals[0], totals[0] - 2 * (totals[1] - totals[0])
    assert layer == 9 + (splits > 1), counts[-1]
    assert rest + LAYERS * layer <= (320 if splits == 1 else 350), counts[-1]


def test_a_wrong_kernel_is_refused_for_its_layer_shape(monkeypatch):
    """With one warning; a correct kernel is checked only once."""
    tried = []

    def gate_of(wrong):
        def op(x):
            tried.append(x)
            return reference.silu_and_mul(x) + wrong

        return op

    def accepted():
        return self_check.passes("layers on {} run unfused", self_check.layer_mismatch, CPU, torch.float32, shape)

    shape = LayerShape(16, 24, 4, 2, 8, True)
    self_check.passes.cache_clear()
    try:
        monkeypatch.setattr(kernels, "silu_and_mul", gate_of(0.0))
        assert accepted() and accepted()
        assert len(tried) == 1
        self_check.passes.cache_clear()
        monkeypatch.setattr(kernels, "silu_and_mul", gate_of(0.1))
        with pytest.warns(UserWarning, match="layers on cpu run unfused: silu_and_mul gives a different result"):
            assert not accepted()
        with warnings.catch_warnings(action="error"):
            assert not accepted()
    finally:
        self_check.passes.cache_clear()


def test_fusion_is_chosen_by_device_and_environment(monkeypatch):
    monkeypatch.delenv("SPECCTL_LAYERS", raising=False)
    monkeypatch.delenv("SPECCTL_KERNELS", raising=False)
    gpu, shape = torch.device("cuda", 0), LayerShape(16, 24, 4, 2, 8, False)
    monkeypatch.setattr(layers, "passes", lambda *args: kernels.backend("cuda") == "triton")
    assert not layers.fuses(CPU, torch.float32, shape)
    assert layers.fuses(gpu, torch.float32, shape) == kernels.TRITON
    monkeypatch.setenv("SPECCTL_KERNELS", "reference")
    assert not layers.fuses(gpu, torch.float32, shape)
    for chosen in ("fused", "plain"):
        monkeypatch.setenv("SPECCTL_LAYERS", chosen)
        assert layers.fuses(gpu, torch.float32, shape) == layers.fuses(CPU, torch.float32, shape) == (chosen == "fused")
    monkeypatch.setenv("SPECCTL_LAYERS", "flash")
    with pytest.raises(UsageError, match="SPECCTL_LAYERS='flash'"):
        layers.fuses(CPU, torch.float32, shape)
