"""Every objective against its formula, value and gradient by autograd."""

import pytest
import torch

from specctl.drafters.objectives import CHUNK, OBJECTIVES, distillation_loss

FORMULAS = {
    "soft_ce": lambda p, q: -(p * q.log()).sum(-1),
    "kl": lambda p, q: torch.xlogy(p, p).sum(-1) - (p * q.log()).sum(-1),
    "reverse_kl": lambda p, q: (q * (q / p.clamp_min(1e-9)).log()).sum(-1),
    "tv": lambda p, q: 0.5 * (p - q).abs().sum(-1),
    "log_tv": lambda p, q: -torch.minimum(p, q).sum(-1).log(),
    "ce": lambda p, q: -q.gather(-1, p.unsqueeze(-1)).squeeze(-1).log(),
}


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_objective_is_its_formula(objective):
    """More rows than one chunk, masked rows, one-hot teachers, an upstream gradient that differs row by row."""
    torch.manual_seed(0)
    rows = CHUNK + 37
    logits = torch.randn(rows, 53, dtype=torch.float32, requires_grad=True)
    teacher = torch.randn(rows, 53).mul_(4).softmax(-1)
    teacher[:5] = torch.nn.functional.one_hot(torch.arange(5), 53).float()
    if objective == "ce":
        teacher = teacher.argmax(-1)
    weight = (torch.rand(rows) > 0.3).float()
    scale = torch.rand(rows)
    losses = distillation_loss(objective, logits, teacher, weight)
    (scale * losses).sum().backward()
    ours, logits.grad = logits.grad.clone(), None
    expected = weight * FORMULAS[objective](teacher, logits.softmax(-1))
    (scale * expected).sum().backward()
    torch.testing.assert_close(losses, expected, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(ours, logits.grad, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("objective", [name for name in OBJECTIVES if name not in ("ce", "soft_ce")])
def test_divergences_vanish_where_the_drafter_is_the_target(objective):
    logits = torch.randn(9, 31, generator=torch.Generator().manual_seed(1))
    losses = distillation_loss(objective, logits, logits.softmax(-1), torch.ones(9))
    torch.testing.assert_close(losses, torch.zeros(9), atol=1e-5, rtol=0)
