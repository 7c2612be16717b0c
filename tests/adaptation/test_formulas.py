"""Update rules, checked by hand and against torch's optimizers."""

import math

import pytest
import torch

from specctl.adaptation.updates import formulas


def vector(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_projection_gives_the_nearest_point_of_the_ball():
    """Vectors inside the ball, or without a radius, stay unchanged."""
    origin = vector(1.0, 1.0)
    torch.testing.assert_close(formulas.project(vector(4.0, 5.0), origin, 2.5), vector(2.5, 3.0))
    inside = vector(1.0, 2.0)
    assert formulas.project(inside, origin, 1.0) is inside
    assert formulas.project(vector(9.0, 9.0), origin, None)[0] == 9


def test_heavy_ball_equals_torch_sgd_with_momentum():
    ours = theirs = torch.tensor([1.0, -2.0, 0.5])
    parameter = torch.nn.Parameter(theirs.clone())
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    v = torch.zeros(3)
    for step in range(5):
        g = torch.tensor([0.3 * step, -1.0, math.sin(step)])
        v = formulas.heavy_ball(g, v, 0.9)
        ours = ours - 0.1 * v
        parameter.grad = g.clone()
        optimizer.step()
    torch.testing.assert_close(ours, parameter.data)


def test_adam_equals_torch_adam():
    """Without bias correction, the steps of the first chunks would be far too large."""
    random = torch.Generator().manual_seed(0)
    parameter = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.Adam([parameter], lr=0.01, betas=(0.9, 0.95))
    ours, m, v = torch.ones(4), torch.zeros(4), torch.zeros(4)
    for j in range(1, 6):
        g = torch.randn(4, generator=random)
        direction, m, v = formulas.adam(g, m, v, j, (0.9, 0.95))
        ours = ours - 0.01 * direction
        parameter.grad = g.clone()
        optimizer.step()
    torch.testing.assert_close(ours, parameter.data)


def test_clipping_scales_to_the_limit():
    assert formulas.clipped(vector(3.0, 4.0), 5.0, 0.5).tolist() == pytest.approx([0.3, 0.4])
    assert formulas.clipped(vector(3.0, 4.0), 5.0, 0.0).tolist() == [3.0, 4.0], "0 is no limit"
    assert formulas.clipped(vector(0.0, 0.0), 0.0, 0.5).tolist() == [0.0, 0.0]


def test_each_hint_kind():
    first, second = vector(2.0, 0.0), vector(4.0, -2.0)
    zero = torch.zeros_like(first)
    assert formulas.next_hint("last", first, second, 2).tolist() == [4.0, -2.0]
    assert formulas.next_hint("mean", formulas.next_hint("mean", zero, first, 1), second, 2).tolist() == [3.0, -1.0]
    assert formulas.next_hint("none", first, second, 2).tolist() == [0.0, 0.0]


def test_a_perfect_hint_bounds_the_regret_by_a_constant():
    """On linear losses ⟨g_t, w⟩ with h_t = g_t, regret against u is at most ‖u‖²/2η for any number of steps, because
    the terms η ‖g_t − h_t‖² vanish (Rakhlin and Sridharan 2013). OGD exceeds this bound."""
    random = torch.Generator().manual_seed(0)
    eta, u = 0.1, vector(-1.0, 1.0, 0.5)
    suffered = {"perfect": 0.0, "none": 0.0}
    compared = 0.0
    w_hat = torch.zeros(3, dtype=torch.float64)
    for _ in range(300):
        g = torch.randn(3, generator=random, dtype=torch.float64) + vector(0.1, -0.1, 0.0)
        for kind, h in (("perfect", g), ("none", torch.zeros_like(g))):
            suffered[kind] += float(g @ formulas.descend(w_hat, h, eta))
        compared += float(g @ u)
        w_hat = formulas.descend(w_hat, g, eta)
    bound = float(u @ u) / (2 * eta)
    assert suffered["perfect"] - compared <= bound < suffered["none"] - compared


def test_hedge_weights_by_hand():
    p = formulas.hedge_weights(vector(0.0, math.log(2), math.log(4)), torch.zeros(3, dtype=torch.float64), 1.0)
    assert p.tolist() == pytest.approx([4 / 7, 2 / 7, 1 / 7])
    optimistic = formulas.hedge_weights(vector(0.0, 0.0), vector(0.0, math.log(3) / 10), 10.0)
    assert optimistic.tolist() == pytest.approx([0.75, 0.25])


def test_a_member_without_a_finite_loss_has_no_weight():
    L = formulas.cumulated(vector(1.0, 1.0, 1.0), vector(0.5, math.nan, math.inf), 0.5)
    assert L.tolist() == [1.0, math.inf, math.inf]
    assert formulas.hedge_weights(L, torch.zeros_like(L), 10.0).tolist() == [1.0, 0.0, 0.0]


def test_effective_members():
    assert formulas.effective_members(vector(0.25, 0.25, 0.25, 0.25)) == pytest.approx(4.0)
    assert formulas.effective_members(vector(1.0, 0.0)) == pytest.approx(1.0)


def test_the_mean_with_weight_one_is_that_vector():
    """A lone learner passes through the ensemble's mean and must come back bit for bit."""
    lone = torch.randn(5, generator=torch.Generator().manual_seed(0))
    assert formulas.mean_of(vector(0.0, 1.0), [torch.zeros(5), lone]) is lone


def test_no_rule_changes_its_arguments():
    """States are kept by reference for rollbacks."""
    g, h, m, v, origin = (torch.full((3,), float(i + 1)) for i in range(5))
    copies = [x.clone() for x in (g, h, m, v, origin)]
    formulas.project(g, origin, 0.1)
    formulas.adam(g, m, v, 3, (0.9, 0.95))
    formulas.heavy_ball(g, v, 0.9)
    formulas.next_hint("mean", h, g, 2)
    formulas.mean_of(vector(0.5, 0.5), [g, h])
    formulas.clipped(g, 2.0, 1.0)
    assert all(torch.equal(x, copy) for x, copy in zip((g, h, m, v, origin), copies, strict=True))
