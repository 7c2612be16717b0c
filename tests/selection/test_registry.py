"""Properties of every policy: weights stay finite, and arms are drawn with the reported weights."""

import numpy as np
import pytest

from specctl.errors import UsageError
from specctl.recipe.select import PolicyRecipe
from specctl.selection.policies.policy import Arms
from specctl.selection.policies.registry import NAMES, build

N, K = 5, 4


def made(name, seed=0, **options):
    return build(name, Arms(N, K, seed), PolicyRecipe(window=10, **options))


def play(policy, losses):
    """Play rounds in which arm i costs losses[t, i]; return the arms and the weights they were drawn from."""
    played, weights = [], []
    for vector in losses.tolist():
        weights.append(policy.weights())
        arm = policy.choose()
        if policy.learns == "reward":
            policy.reward(arm, 1 - vector[arm] if policy.scale == "unit" else K + 1 - K * vector[arm])
        elif policy.learns == "losses":
            policy.losses(vector)
        played.append(arm)
    return played, np.array(weights)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("play_rule", ["sample", "argmax"])
@pytest.mark.parametrize("kind", ["zero", "one", "gap", "switch"])
def test_weights_stay_finite_and_sum_to_one(name, play_rule, kind):
    """Over 1500 extreme rounds the exponential of a cumulative loss overflows unless it is shifted."""
    losses = {"zero": np.zeros((1, N)), "one": np.ones((1, N)), "gap": np.eye(1, N), "switch": np.eye(1, N)}[kind]
    losses = np.repeat(losses, 1500, axis=0)
    if kind == "switch":
        losses[750:] = 1 - losses[750:]
    with np.errstate(divide="raise", invalid="raise", over="raise"):
        _, weights = play(made(name, play=play_rule), losses)
    assert np.isfinite(weights).all() and (weights >= 0).all()
    assert weights.sum(axis=1) == pytest.approx(1)


@pytest.mark.parametrize("name", NAMES)
def test_every_policy_plays_a_pool_of_one_arm(name):
    policy = build(name, Arms(1, K, 0), PolicyRecipe())
    assert set(play(policy, np.random.default_rng(0).random((10, 1)))[0]) == {0}


@pytest.mark.parametrize("name", ["hedge", "exp3spec", "random"])
def test_arms_are_drawn_with_the_reported_weights(name):
    """χ² of 4000 draws, 4 degrees of freedom: above 35 with probability 5e-7."""
    policy = made(name, eta=0.5)
    play(policy, np.random.default_rng(2).random((5, N)))
    weights = np.array(policy.weights())
    counts = np.bincount([policy.choose() for _ in range(4000)], minlength=N)
    assert ((counts - 4000 * weights) ** 2 / (4000 * weights)).sum() < 35


def test_an_arm_without_weight_is_never_drawn():
    policy = made("ftl")
    policy.losses([1.0, 0.0, 1.0, 0.0, 1.0])
    assert {policy.choose() for _ in range(200)} == {1, 3}


def test_argmax_always_plays_the_arm_with_the_largest_weight():
    policy = made("hedge", play="argmax")
    policy.losses([1.0, 1.0, 0.5, 0.6, 1.0])
    assert {policy.choose() for _ in range(20)} == {2}


def test_the_error_for_an_unknown_policy_lists_the_policies():
    with pytest.raises(UsageError, match="no policy") as caught:
        made("ucb")
    assert "metasd-ucb" in caught.value.hint


@pytest.mark.parametrize("name", ["ftl", "hedge", "normalhedge", "adanormalhedge"])
def test_a_learner_that_forgets_equals_a_new_one(name):
    policy, fresh = made(name), made(name)
    losses = np.random.default_rng(3).random((30, N))
    for vector in losses.tolist():
        policy.losses(vector)
    assert policy.weights() != fresh.weights()
    policy.forget()
    assert policy.weights() == fresh.weights()
    for vector in losses.tolist():
        policy.losses(vector)
        fresh.losses(vector)
        assert policy.weights() == fresh.weights()
