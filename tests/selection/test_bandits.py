"""Worked examples of every bandit policy, and the behavior that distinguishes each."""

from math import exp, log, sqrt

import numpy as np
import pytest

from specctl.errors import UsageError
from specctl.recipe.select import GameRecipe, PolicyRecipe
from specctl.selection.game.game import Game
from specctl.selection.game.rewards import Outcome
from specctl.selection.game.rules import rules_for
from specctl.selection.policies.bandits import (
    ExploreThenCommit,
    SequentialHalving,
    halvings,
    importance_weighted,
    survivors,
    ucb_radius,
    ucbspec_radius,
)
from specctl.selection.policies.policy import Arms
from specctl.selection.policies.registry import build


def bandit(name, N=2, K=4, seed=0, **options):
    return build(name, Arms(N, K, seed), PolicyRecipe(**options))


def test_ucbspec_radius_by_hand():
    """N = 2, K = 2, n = 1, t = 3, δ = 0.1: √(2 (1 + 2 ln(2 · 9 · √2 / 0.1)))."""
    wanted = sqrt(2 * (1 + 2 * log(18 * sqrt(2) / 0.1)))
    assert ucbspec_radius(1, 3, N=2, K=2, delta=0.1) == pytest.approx(wanted)
    four = 4 / 2 * sqrt(5 / 16 * (1 + 2 * log(2 * 100 * sqrt(5) / 0.1)))
    assert ucbspec_radius(4, 10, N=2, K=4, delta=0.1) == pytest.approx(four)


def test_ucbspec_plays_every_arm_once_then_the_largest_index():
    policy = bandit("ucbspec", N=3)
    for arm, reward in enumerate([2.0, 4.0, 3.0]):
        assert policy.choose() == arm
        policy.reward(arm, reward)
    assert policy.choose() == 1, "equal radii: the best mean"
    policy.reward(1, 1.0)
    assert policy.choose() == 2, "means 2, 2.5, 3; the radius of arm 1 has shrunk"


def test_a_smaller_radius_scale_makes_ucbspec_commit_sooner():
    """With the paper's radius it plays nearly round-robin for 40 rounds; with a tenth of that radius it prefers the
    better arm."""
    pulls = {}
    for scale in (1.0, 0.1):
        policy = bandit("ucbspec", radius_scale=scale)
        for _ in range(40):
            arm = policy.choose()
            policy.reward(arm, [3.0, 2.0][arm])
        pulls[scale] = policy.n[1]
    assert pulls[1.0] > 10 > pulls[0.1]


def test_metasd_ucb_by_hand():
    """The radius β √(2 ln t / n) equals β for ln t = 2 and n = 4."""
    assert ucb_radius(4, exp(2), 0.01) == pytest.approx(0.01) == 2 * ucb_radius(16, exp(2), 0.01)
    policy = bandit("metasd-ucb", beta=1.0)
    policy.reward(0, 0.6)
    policy.reward(1, 0.5)
    policy.reward(0, 0.6)  # n = (2, 1), t = 3 rounds played: √(ln 3) = 1.05 against √(2 ln 3) = 1.48
    assert policy.choose() == 1
    assert policy.radius() == pytest.approx([sqrt(log(3)), sqrt(2 * log(3))])
    assert bandit("metasd-ucb").weights() == pytest.approx([1, 0]), "unplayed arms are played in order"


def test_exp3spec_by_hand():
    """K = 4, Y = 3: the loss is ½, divided by p = ½ it is 1; then η₂ = √(ln 2 / 4)."""
    policy = bandit("exp3spec")
    policy.reward(0, 3.0)
    assert [*policy.Z] == pytest.approx([1.0, 0.0])
    assert policy.weights()[0] == pytest.approx(1 / (1 + exp(sqrt(log(2) / 4))))


def test_metasd_exp3_by_hand():
    """Reward 0.8 divided by p = ½ is 1.6; w₁ = exp(0.4 · 1.6 / 2); p₁ = 0.6 w₁/(1 + w₁) + 0.2."""
    policy = bandit("metasd-exp3")
    policy.reward(1, 0.8)
    w = exp(0.32)
    assert policy.weights()[1] == pytest.approx(0.6 * w / (1 + w) + 0.2)
    for _ in range(3000):
        policy.reward(1, 1.0)
    assert policy.weights() == pytest.approx([0.2, 0.8]), "uniform exploration stays, and exp does not overflow"


def test_importance_weighting_is_unbiased():
    """The expectation over the drawn arm, Σ p_I Ẑ(I), is the vector of the values of all arms."""
    p, values = [0.5, 0.3, 0.2], [0.9, 0.1, 0.4]
    mean = sum(p[arm] * np.array(importance_weighted(arm, values[arm], p)) for arm in range(3))
    assert mean == pytest.approx(values)


@pytest.mark.parametrize("name", ["exp3spec", "metasd-exp3"])
def test_a_late_reward_counts_with_the_probability_of_its_draw(name):
    """On a device, a round is chosen before the reward of the round before arrives. Its reward was once divided by the
    probability after that reward, so that the estimated losses of rarely played arms were up to a tenth too large."""
    arms = Arms(3, 4, seed=1)
    policy = build(name, arms, PolicyRecipe())
    game = Game(policy, rules_for(name, GameRecipe(reward="tokens"), 4), arms)
    chosen = [game.choose(), game.choose()]
    game.round_finished(chosen[0], Outcome(3, 2))
    first = list(policy.Z if name == "exp3spec" else policy.log_w)
    game.round_finished(chosen[1], Outcome(3, 2))
    second = np.array(policy.Z if name == "exp3spec" else policy.log_w) - first
    told = (4 + 1 - 3) / 4 if name == "exp3spec" else policy._mix / 3 * (3 - 1) / 4
    assert second == pytest.approx(importance_weighted(chosen[1], told, [1 / 3] * 3))


def rounds_of(policy, means, rounds):
    played = []
    for _ in range(rounds):
        arm = policy.choose()
        policy.reward(arm, means[arm])
        played.append(arm)
    return played


MEANS = [0.3, 0.9, 0.1, 0.5, 0.7]


def test_sequential_halving_keeps_the_better_half():
    """Five arms: 5 → 3 → 2 → 1; the best one remains."""
    played = rounds_of(bandit("metasd-sh", N=5), MEANS, 13)
    assert played == [0, 1, 2, 3, 4, 1, 3, 4, 1, 4, 1, 1, 1]
    assert rounds_of(bandit("metasd-sh", N=5, period=2), MEANS, 10) == [0, 1, 2, 3, 4] * 2


def test_literal_halving_keeps_the_worse_half_and_two_arms():
    played = rounds_of(bandit("metasd-sh", N=5, literal=True), MEANS, 12)
    assert played == [0, 1, 2, 3, 4, 0, 2, 3, 0, 2, 0, 2], "the two worst arms alternate forever"
    assert [halvings(N, literal=False) for N in (1, 2, 5, 7, 8)] == [0, 1, 3, 3, 3]
    assert [halvings(N, literal=True) for N in (1, 2, 5, 7, 8)] == [0, 1, 2, 2, 3]


@pytest.mark.parametrize("name", ["metasd-sh", "metasd-petc"])
def test_halving_pulls_all_survivors_equally_often_if_rewards_are_late(name):
    """On a device, a round is chosen before the reward of the round before arrives. The first survivor was once pulled
    twice in a row, and the last one once less: of four arms, the best was kept in 56 instead of 61 % of the games."""
    arms = Arms(4, 4, seed=0)
    policy = build(name, arms, PolicyRecipe(period=3, petc_c=8.0))
    game = Game(policy, rules_for(name, GameRecipe(reward="tokens"), 4), arms)
    pulls, waiting = [], []
    while len(policy.alive) == 4:
        if waiting and game.awaits_reward:
            game.round_finished(waiting.pop(), Outcome(3, 2))
            continue
        pulls.append(game.choose())
        waiting.insert(0, pulls[-1])
        if len(waiting) > 1:
            game.round_finished(waiting.pop(), Outcome(3, 2))
    assert len({pulls.count(arm) for arm in range(4)}) == 1
    assert pulls[:8] == [0, 1, 2, 3, 0, 1, 2, 3]


def test_literal_halving_uses_only_the_pulls_since_the_last_halving():
    """Our default uses all pulls of an arm, because one stage has few."""
    alive = {}
    for literal in (True, False):
        policy = bandit("metasd-sh", N=5, literal=literal)
        for reward in (0.1, 0.9, 0.2, 0.3, 0.8, 0.5, 0.45, 0.1):
            policy.reward(policy.choose(), reward)
        alive[literal] = policy.alive
    assert alive == {True: [2, 3], False: [1, 4]}


def test_docstrings_cite_the_right_algorithms_of_the_paper():
    """The two numbers were once swapped."""
    assert "MetaSD, Algorithm 5" in SequentialHalving.__doc__ and "MetaSD, Algorithm 4" in ExploreThenCommit.__doc__


def test_survivors_break_ties_by_the_lower_arm():
    assert survivors([0, 2, 3], [0.5, 9, 0.5, 0.5], literal=False) == [0, 2]


def test_petc_explores_for_its_budget_then_commits():
    """N = 4, B = 100, c = 2N = 8: B0 = 36.8 and two halvings. Each of 4 arms gets 4 pulls, each of 2 arms gets 9, then
    the best arm plays."""
    played = rounds_of(bandit("metasd-petc", N=4, horizon=100, petc_c=None), [0.1, 0.2, 0.9, 0.5], 60)
    assert [played[:16].count(arm) for arm in range(4)] == [4] * 4
    assert [played[16:34].count(arm) for arm in range(4)] == [0, 0, 9, 9]
    assert set(played[34:]) == {2}
    short = rounds_of(bandit("metasd-petc", N=4, horizon=2, petc_c=0.1), [0.1, 0.2, 0.9, 0.5], 8)
    assert short == [0, 1, 2, 3, 2, 3, 2, 2], "at least one pull per arm"
    seven = rounds_of(bandit("metasd-petc", N=7), [0.1, 0.2, 0.9, 0.5, 0.3, 0.4, 0.6], 40)
    assert set(seven[13:]) == {2}, "the default explores for 7 + 4 + 2 rounds, so it can commit within a query"


def test_discounted_counts_by_hand():
    policy = bandit("metasd-ducb", discount=0.5)
    policy.reward(0, 1.0)
    policy.reward(1, 0.4)
    policy.reward(1, 0.2)
    assert policy.n == pytest.approx([0.25, 1.5])
    assert policy.total == pytest.approx([0.25, 0.4])
    assert policy.radius() == pytest.approx(0.01 * np.sqrt(2 * log(1.75) / np.array(policy.n))), (
        "t is the sum of the counts"
    )


def test_swucb_pulls_an_arm_again_after_it_left_the_window():
    policy = bandit("metasd-swucb", window=3)
    assert rounds_of(policy, [0.9, 0.1], 10) == [0, 1, 0, 0, 0, 1, 0, 0, 0, 1], "arm 1 left after 3 rounds"
    assert sum(policy.n) == 3 == len(policy.past)
    assert policy.radius() == pytest.approx(0.01 * np.sqrt(2 * log(10) / np.array(policy.n))), "t counts all rounds"


@pytest.mark.parametrize(("name", "adapts"), [("metasd-ucb", False), ("metasd-ducb", True), ("metasd-swucb", True)])
def test_only_discounted_and_windowed_ucb_adapt_to_a_switch(name, adapts):
    """Arm 0 is best for 300 rounds, then worst. Plain UCB keeps playing it for 300 more rounds."""
    policy = bandit(name)
    rounds_of(policy, [0.9, 0.5], 300)
    played = rounds_of(policy, [0.1, 0.5], 200)
    assert (played[100:].count(1) > 80) == adapts


def test_fixed_plays_one_arm_and_random_plays_all_equally():
    assert set(rounds_of(bandit("fixed", N=3, arm=2), [0.0] * 3, 20)) == {2}
    counts = np.bincount(rounds_of(bandit("random", N=3), [0.0] * 3, 3000), minlength=3)
    assert np.abs(counts - 1000).max() < 130, "a bound of 5 σ: fails by chance with probability below 1e-5"
    with pytest.raises(UsageError, match="arm 3 does not exist"):
        bandit("fixed", N=3, arm=3)
