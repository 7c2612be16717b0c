"""Muon uses the precision that is fast on the device, and AdamW is fused."""

import pytest
import torch
from torch import nn

from specctl.recipe import OptimizerRecipe
from specctl.training import optimizers
from specctl.training.optimizers import Muon, adamw, make_optimizer, orthogonal


def twins(
    kind: type[torch.optim.Optimizer], shapes=((24, 40), (40, 24))
) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    generator = torch.Generator().manual_seed(1)
    weights = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    return weights, kind(weights, lr=0.01, adjust_lr_fn="match_rms_adamw")


def stepped(kind: type[torch.optim.Optimizer]) -> list[nn.Parameter]:
    weights, optimizer = twins(kind)
    generator = torch.Generator().manual_seed(2)
    for _ in range(3):
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=generator)
        optimizer.step()
    return weights


def test_muon_equals_torch_where_bf16_is_native(monkeypatch):
    """Catches a different scale, momentum or decay."""
    monkeypatch.setattr(optimizers, "pick_dtype", lambda *_: torch.bfloat16)
    assert all(map(torch.equal, stepped(Muon), stepped(torch.optim.Muon)))


def test_muon_computes_in_fp32_where_bf16_is_emulated(monkeypatch):
    """torch always iterates in bf16, which trained 25 times slower on a CPU without bf16 instructions."""
    monkeypatch.setattr("specctl.decoding.models.loading.cpu_has_bf16", lambda: False)
    ours, theirs = stepped(Muon), stepped(torch.optim.Muon)
    assert not any(map(torch.equal, ours, theirs))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, atol=5e-4, rtol=0)


@pytest.mark.parametrize("shape", [(16, 64), (64, 16), (32, 32)])
def test_orthogonalization_keeps_directions_and_equalizes_lengths(shape):
    """Catches a transposition in the wrong place."""
    u, _, v = torch.linalg.svd(torch.randn(shape, generator=torch.Generator().manual_seed(3)), full_matrices=False)
    lengths = torch.linspace(1, 10, min(shape))
    made = u.mT @ orthogonal(u * lengths @ v, torch.float32) @ v.mT
    assert made.diagonal().min() > 0.5 and made.diagonal().max() < 1.5
    assert (made - made.diagonal().diag()).abs().max() < 1e-3


@pytest.mark.parametrize("shape", [(48, 70), (48, 72), (128, 48), (5, 400)])
def test_the_iteration_on_the_gram_matrix_gives_the_same_matrix(shape):
    """Singular values over four decades; fp64 iterates on the matrix itself, as fp32 does if it is not wide."""
    generator = torch.Generator().manual_seed(5)
    u, _, v = torch.linalg.svd(torch.randn(shape, generator=generator), full_matrices=False)
    update = u * torch.logspace(0, -4, min(shape)) @ v
    exact = orthogonal(update.double(), torch.float64)
    torch.testing.assert_close(orthogonal(update, torch.float32).double(), exact, atol=1e-3, rtol=0)
    assert torch.linalg.svdvals(exact).max() < 1.3


SHAPES = (24, 40), (40,), (7, 3), (1,)  # some are not multiples of the vector width
OPTIONS = OptimizerRecipe(weight_decay=0.1, betas=[0.8, 0.9])


def fused(weights):
    return adamw(weights, OPTIONS, 0.01)


def as_written(weights):
    """torch's own AdamW, one operation at a time, with the same options."""
    return torch.optim.AdamW(weights, lr=0.01, betas=(0.8, 0.9), weight_decay=0.1, foreach=False)


def walked(make, steps, halfway=None):
    """Return the weights after `steps` steps; `halfway` replaces the optimizer in the middle."""
    generator = torch.Generator().manual_seed(4)
    weights = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    optimizer = make(weights)
    for step in range(steps):
        if halfway is not None and step == steps // 2:
            optimizer = halfway(optimizer, weights)
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=generator)
        optimizer.step()
    return weights


def test_the_fused_adamw_equals_the_plain_one():
    """Catches a different decay, bias correction or beta."""
    assert all(group["fused"] for group in fused([nn.Parameter(torch.zeros(2))]).param_groups)
    for mine, theirs in zip(walked(fused, 30), walked(as_written, 30), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    assert not all(map(torch.allclose, walked(fused, 30), walked(fused, 31)))


def test_the_fused_adamw_resumes_exactly():
    def again(optimizer, weights):
        other = fused(weights)
        other.load_state_dict(optimizer.state_dict())
        return other

    assert all(map(torch.equal, walked(fused, 10, halfway=again), walked(fused, 10)))


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_both_optimizers_use_the_fused_adamw(kind):
    """Muon uses it for norms and vocabulary matrices."""
    module = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    optimizer = make_optimizer(module, kind, OPTIONS, 0.01)
    assert [group.get("fused") for group in optimizer.param_groups] == ([True] if kind == "adamw" else [None, True])
