"""Full-information learners: worked examples, the normalizer's equation, and the regret bounds of their papers."""

from math import e, exp, log, sqrt

import numpy as np
import pytest

from specctl.recipe.select import PolicyRecipe
from specctl.selection.policies.hedge import (
    adanormalhedge_weights,
    exponential_weights,
    hedge_rate,
    normalhedge_weights,
    normalizer,
)
from specctl.selection.policies.policy import Arms
from specctl.selection.policies.registry import build


def learner(name, N=2, **options):
    return build(name, Arms(N, 4, seed=0), PolicyRecipe(**options))


def test_ftl_by_hand():
    policy = learner("ftl", N=3)
    assert policy.weights() == pytest.approx([1 / 3] * 3)
    policy.losses([0.5, 0.2, 0.2])
    assert policy.weights() == pytest.approx([0, 0.5, 0.5]), "equal leaders share"
    policy.losses([0.0, 0.2, 0.9])
    assert policy.weights() == pytest.approx([0, 1, 0])


def test_hedge_by_hand():
    """The learning rate belongs to the coming step, not to the last one: √(8 ln 2 / 2) = 1.665."""
    policy = learner("hedge")
    policy.losses([1.0, 0.0])
    assert policy.weights()[0] == pytest.approx(1 / (1 + exp(sqrt(4 * log(2)))))
    fixed = learner("hedge", eta=0.3)
    fixed.losses([1.0, 0.0])
    assert fixed.weights()[0] == pytest.approx(1 / (1 + exp(0.3)))


def test_normalhedge_by_hand():
    """One positive regret of two: (e^y + 1)/2 = e, and this arm gets all the weight. Without a positive regret:
    uniform."""
    policy = learner("normalhedge")
    policy.losses([0.0, 1.0])  # R = (½, −½)
    assert policy.weights() == pytest.approx([1, 0])
    assert policy.y == pytest.approx(log(2 * e - 1))
    policy.losses([1.0, 0.0])  # the mixture followed arm 0: R = (½, −½) + (0, 1)
    assert [*policy.R] == pytest.approx([0.5, 0.5])
    assert policy.weights() == pytest.approx([0.5, 0.5])
    assert normalhedge_weights([-1.0, 0.0], 1.0)[0] == pytest.approx([0.5, 0.5])


def test_normalhedge_equals_its_formula():
    """p ∝ [R]₊/c exp([R]₊²/2c), with c from a bisection of its equation. Catches a wrong scaling by max R."""
    R = np.array([2.0, 1.0, -0.5, 0.3])
    positive = np.maximum(R, 0)
    low, high = 1e-3, 1e3
    for _ in range(200):
        c = (low + high) / 2
        low, high = (c, high) if np.exp(positive**2 / (2 * c)).mean() > e else (low, c)
    wanted = positive / c * np.exp(positive**2 / (2 * c))
    assert normalhedge_weights(R.tolist(), 1.0)[0] == pytest.approx(wanted / wanted.sum())


def test_the_normalizer_solves_its_equation_from_any_start():
    generator = np.random.default_rng(0)
    for N in (1, 2, 7, 32, 1000):
        for start in (0.0, 1.0, 1e9):
            u = generator.random(N) ** 8
            u[generator.integers(N)] = 1.0
            y = normalizer(u.tolist(), N, start)
            assert np.exp(u * y).mean() == pytest.approx(e, rel=1e-8)
            u[u < 0.5] = 0
            some = normalizer([x for x in u.tolist() if x], N, start)
            assert np.exp(u * some).mean() == pytest.approx(e, rel=1e-8), "zeros left out"


@pytest.mark.parametrize("scale", [1e-200, 1e-9, 1.0, 1e9, 1e150])
def test_normalhedge_does_not_depend_on_the_scale_of_regret(scale):
    """Unscaled, exp(R²) overflows at R = 27, and R² underflows below 1e-162."""
    R = [1.0, 0.5, -3.0]
    assert normalhedge_weights([scale * r for r in R], 1.0)[0] == pytest.approx(normalhedge_weights(R, 1.0)[0])


def test_adanormalhedge_by_hand():
    """r = (½, −½), C = (½, ½): Φ(1.5, 1.5) − Φ(−0.5, 1.5) against Φ(0.5, 1.5) − Φ(−1.5, 1.5)."""
    policy = learner("adanormalhedge")
    policy.losses([0.0, 1.0])
    first, second = exp(1.5**2 / 4.5) - 1, exp(0.5**2 / 4.5) - 1
    assert policy.weights() == pytest.approx([first / (first + second), second / (first + second)])
    assert adanormalhedge_weights([-5.0, -5.0], [9.0, 9.0]) == pytest.approx([0.5, 0.5])
    assert np.isfinite(adanormalhedge_weights([1e5, 0.0], [1e5, 1e5])).all()


def test_exponential_weights_do_not_overflow():
    assert exponential_weights([1e6, 1e6 + 1], 1.0) == pytest.approx(exponential_weights([0.0, 1.0], 1.0))


def against_an_adversary(name, N, T):
    """The mixture's regret if every step punishes the arm of the largest weight, and Σ|r| of the best arm."""
    policy = learner(name, N)
    own, cost, spread = 0.0, np.zeros(N), np.zeros(N)
    for _ in range(T):
        p = np.array(policy.weights())
        losses = np.zeros(N)
        losses[p.argmax()] = 1.0
        own += p @ losses
        cost += losses
        spread += np.abs(p @ losses - losses)
        policy.losses(losses.tolist())
    return own - cost.min(), spread[cost.argmin()]


@pytest.mark.parametrize("N", [2, 7])
def test_regret_stays_below_the_bounds_of_the_papers(N):
    """Hedge: 2√(T/2 ln N) + √(ln N/8). AdaNormalHedge: √(3 C (ln N + ln B + ln(1 + ln N))), B = 5/2 + 3/2 ln(1 + T)."""
    T = 1000
    regret, _ = against_an_adversary("hedge", N, T)
    assert regret <= 2 * sqrt(T / 2 * log(N)) + sqrt(log(N) / 8)
    regret, C = against_an_adversary("adanormalhedge", N, T)
    assert regret <= sqrt(3 * C * (log(N) + log(2.5 + 1.5 * log(1 + T)) + log(1 + log(N))))
    regret, _ = against_an_adversary("normalhedge", N, T)
    assert regret <= 3 * sqrt(T * (1 + log(N))), "NormalHedge: O(√(T ln N)) with a small constant"


def test_the_adversary_beats_ftl():
    """Negative control: follow-the-leader has linear regret, so the bounds above are not vacuous."""
    regret, _ = against_an_adversary("ftl", 2, 1000)
    assert regret > 2 * sqrt(500 * log(2)) + sqrt(log(2) / 8)


def test_the_hedge_rate_falls_with_time():
    assert hedge_rate(4, 7) == pytest.approx(hedge_rate(1, 7) / 2)
