"""CGP-UCB: rewards are predicted from similar prompts, with a confidence that matches the number of rounds."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from specctl.decoding.prompt_features import PromptClusters
from specctl.recipe import PolicyRecipe
from specctl.recipe.select import GameRecipe
from specctl.selection import prompt_memory
from specctl.selection.game.clock import ArmClock
from specctl.selection.game.game import Game
from specctl.selection.game.rewards import Outcome
from specctl.selection.game.rules import rules_for
from specctl.selection.policies import contextual, registry
from specctl.selection.policies.contextual import ArmRounds, Belief, ContextualUcb, ease, indices
from specctl.selection.policies.policy import Arms
from specctl.selection.prompt_memory import PromptMemory, Regression, training_advantage, trend

N, KINDS = 3, np.random.default_rng(7).normal(size=(3, 16))


def prompts(seed, count):
    """(features, kind) of prompts of three kinds; arm i is best for kind i."""
    generator = np.random.default_rng(seed)
    for _ in range(count):
        kind = int(generator.integers(N))
        yield 3 + KINDS[kind] + 0.3 * generator.normal(size=16), kind


def stream(seed, count, rounds=20, remembers=True, trained_on=()):
    """Play texts. Return each text's share of rounds with the right arm, and the memory."""
    generator = np.random.default_rng(seed)
    policy, memory, shares = ContextualUcb(Arms(N, 4, 0), PolicyRecipe()), PromptMemory(N, trained_on=trained_on), []
    for x, kind in prompts(seed, count):
        hard = 0.1 * generator.normal()
        belief = memory.belief(x)
        policy.begin_text(belief)
        played = []
        for _ in range(rounds):
            arm = policy.choose()
            policy.reward(arm, 0.4 + 0.15 * (arm == kind) + hard + 0.3 * generator.normal())
            played.append(arm)
        if remembers:
            memory.learn(x, belief, policy.shown())
        shares.append(played.count(kind) / rounds)
    return shares, memory


def test_it_learns_the_best_arm_of_similar_prompts():
    shares, alone = (np.mean([stream(seed, 80, remembers=each)[0][40:] for seed in range(3)]) for each in (True, False))
    assert shares > 0.85 and shares > alone + 0.2


def test_beliefs_about_a_new_kind_of_prompt_are_uncertain():
    _, memory = stream(0, 40)
    strange = -3 * KINDS.sum(0)
    known = memory.belief(next(prompts(1, 1))[0])
    belief = memory.belief(strange)
    apart = 1 - prompt_memory.SHARE_EVERYWHERE  # the share of the variance that is not common to all prompts
    assert min(belief.v) > max(known.v) and min(belief.v) > 0.9 * apart
    assert max(belief.m) - min(belief.m) < 0.5 * (max(known.m) - min(known.m))


def test_one_arm_that_is_always_best_is_played_nearly_always():
    """Exploration is limited to the first of 60 texts and to single later rounds."""
    generator, memory = np.random.default_rng(0), PromptMemory(N)
    policy, wrong = ContextualUcb(Arms(N, 4, 0), PolicyRecipe()), []
    for x, _ in prompts(0, 60):
        belief = memory.belief(x)
        policy.begin_text(belief)
        for _ in range(20):
            arm = policy.choose()
            policy.reward(arm, 0.4 + 0.15 * (arm == 1) + 0.1 * generator.normal())
            wrong.append(arm != 1)
        memory.learn(x, belief, policy.shown())
    assert np.mean(wrong) < 0.12 and np.mean(wrong[-400:]) < 0.05


def played(worth, texts, seed, arms=8, rounds=20):
    """[texts] share of each text's rounds with the best arm; the mean rewards `worth(text)` [arms] do not depend on the
    prompt."""
    generator, memory = np.random.default_rng(seed), PromptMemory(arms)
    policy, shares = ContextualUcb(Arms(arms, 12, 0), PolicyRecipe()), []
    for text, (x, _) in enumerate(prompts(seed, texts)):
        belief = memory.belief(x)
        policy.begin_text(belief)
        policy.switch_cost = [0.03] * arms
        means, right = worth(text), 0
        for _ in range(rounds):
            arm = policy.choose()
            policy.reward(arm, means[arm] + 0.12 * generator.normal())
            right += arm == np.argmax(means)
        memory.learn(x, belief, policy.shown())
        shares.append(right / rounds)
    return shares


def test_an_arms_overall_reward_carries_over_to_new_kinds_of_prompts():
    """So that each new kind of prompt need not learn it again."""
    memory, texts = PromptMemory(2), [x for x, _ in prompts(0, 60)]
    for x in texts:
        memory.learn(x, memory.belief(x), [ArmRounds(9, 4.5, 2.3), ArmRounds(9, 3.6, 1.5)])
    known, strange = memory.belief(texts[0]), memory.belief(-3 * KINDS.sum(0))
    assert known.m[0] - known.m[1] == pytest.approx(0.1, rel=0.2)
    assert 0.3 < (strange.m[0] - strange.m[1]) / (known.m[0] - known.m[1]) < 0.9


def test_an_unplayed_arm_is_played_again_after_a_shift():
    """The best arm becomes the worst, and the second best the best."""
    before, after = [0.35] * 6 + [0.4, 0.5], [0.35] * 6 + [0.47, 0.25]
    shares = [played(lambda text: before if text < 40 else after, 100, seed) for seed in range(3)]
    assert np.mean([each[30:40] for each in shares]) > 0.85
    assert np.mean([each[70:] for each in shares]) > 0.6


def test_a_hard_text_does_not_demote_the_arm_that_plays_it():
    """With the text's difficulty d in the model, the arm that meets a hard text keeps its lead; without d it loses the
    lead."""
    belief = Belief(m=[0.5, 0.4, 0.4], v=[0.1] * 3, noise=0.01, signal=0.01, shared=0.01)
    n, r = [10, 0, 0], [0.3, 0.0, 0.0]
    assert np.argmax(indices(belief, n, r, 0.0)) == 0
    blind = Belief(belief.m, belief.v, belief.noise, belief.signal, shared=1e-9)
    assert np.argmax(indices(blind, n, [0.0, 0.0, 0.0], 0.0)) != 0


def test_the_index_is_the_joint_gaussian_posterior():
    """Mean and variance of f + μ, given the rounds and E[d], equal the result of conditioning the joint Gaussian."""
    belief = Belief(m=[0.5, 0.3, 0.4], v=[0.2, 0.9, 0.5], noise=0.02, signal=0.03, shared=0.05)
    n, r = [4, 1, 0], [0.7, 0.2, 0.0]
    played = [0, 1]
    S = np.diag([belief.v[i] * belief.signal + belief.noise / n[i] for i in played]) + belief.shared
    off = np.array([r[i] - belief.m[i] for i in played])
    ones = np.ones(2)
    d = belief.shared * ones @ np.linalg.solve(S, off)
    variance = belief.shared - belief.shared**2 * ones @ np.linalg.solve(S, ones)
    assert ease(belief, n, r) == pytest.approx((d, variance))
    for arm in range(3):
        prior = belief.v[arm] * belief.signal
        cross = np.array([prior if i == arm else 0.0 for i in played])
        mean = belief.m[arm] + cross @ np.linalg.solve(S, off)
        assert indices(belief, n, r, 0.0)[arm] == pytest.approx(mean)
    beyond = indices(belief, n, r, 2.0)[2] - indices(belief, n, r, 0.0)[2]
    assert beyond == pytest.approx(2 * math.sqrt(0.5 * 0.03)), "an unplayed arm keeps its prior uncertainty"


def test_regression_equals_gaussian_process_regression():
    """For two arms at once; the second has fewer observations."""
    generator = np.random.default_rng(3)
    x, y = generator.normal(size=(2, 12, 4)), generator.normal(size=(2, 12))
    noise, at = generator.uniform(0.1, 0.5, (2, 12)), generator.normal(size=4)
    noise[1, 5:] = prompt_memory.EMPTY_VARIANCE
    prompts, rewards, doubts, prompt = map(torch.from_numpy, (x, y, noise, at))
    means, variances = Regression.of(prompts, rewards, doubts).at(prompt)
    for arm, seen in enumerate((12, 5)):
        points = [*x[arm, :seen], at]
        k = [[math.exp(-(math.dist(a, b) ** 2) / (2 * prompt_memory.WIDTH**2)) for a in points] for b in points]
        k = prompt_memory.SHARE_EVERYWHERE + (1 - prompt_memory.SHARE_EVERYWHERE) * np.array(k)
        K, cross = k[:-1, :-1] + np.diag(noise[arm, :seen]), k[-1, :-1]
        assert float(means[arm]) == pytest.approx(cross @ np.linalg.inv(K) @ y[arm, :seen], abs=1e-6)
        assert float(variances[arm]) == pytest.approx(1 - cross @ np.linalg.inv(K) @ cross, abs=1e-6)


def test_without_a_belief_every_arm_plays_once_per_text():
    policy = ContextualUcb(Arms(N, 4, 0), PolicyRecipe())
    for arm, reward in enumerate((0.2, 0.5, 0.3)):
        assert policy.choose() == arm
        policy.reward(arm, reward)
    assert policy.choose() == 1 and policy.weights() == [0, 1, 0]
    policy.begin_text(None)
    assert policy.choose() == 0, "a new text begins again"


def test_without_prompt_features_arms_are_told_apart_by_their_means():
    """All prompts then have the same features."""
    memory = PromptMemory(2)
    for _ in range(6):
        memory.learn(np.zeros(1), None, [ArmRounds(5, 1.0, 0.25), ArmRounds(5, 2.5, 1.3)])
    belief = memory.belief(np.zeros(1))
    assert belief.m[1] > belief.m[0] + 0.1 and max(belief.v) < 0.5


def test_memory_is_bounded_and_forgets():
    _, memory = stream(0, 3 * prompt_memory.WINDOW, rounds=2)
    assert max(memory.texts) == prompt_memory.WINDOW
    memory.forget()
    assert memory.belief(KINDS[0]) is None


@pytest.mark.parametrize("reward", [0.0, 0.4, 1.0])
def test_rewards_without_variance_give_finite_indices(reward):
    memory, policy = PromptMemory(N), ContextualUcb(Arms(N, 4, 0), PolicyRecipe())
    for x, _ in prompts(0, 12):
        belief = memory.belief(x)
        policy.begin_text(belief)
        for _ in range(3):
            policy.reward(policy.choose(), reward)
        memory.learn(x, belief, policy.shown())
    assert np.isfinite(indices(memory.belief(x), policy.n, [reward] * N, 1.0)).all()


def test_a_repeated_prompt_gives_a_finite_belief():
    """Rewards are constant within a text and vary between texts."""
    memory = PromptMemory(2)
    for text in range(80):
        reward = 0.3 + 0.4 * (text % 2)
        memory.learn(
            np.ones(8), memory.belief(np.ones(8)), [ArmRounds(4, 4 * reward, 4 * reward**2), ArmRounds(0, 0.0, 0.0)]
        )
    belief = memory.belief(np.ones(8))
    assert np.isfinite([*belief.m, *belief.v]).all() and belief.v[0] < belief.v[1]


def test_the_fit_is_renewed_after_every_text():
    """A cached fit from before the last text would ignore that text."""
    generator = np.random.default_rng(5)
    asked, other = PromptMemory(2), PromptMemory(2)
    for number in range(12):
        x, at = generator.normal(size=4), generator.normal(size=4)
        mean = float(generator.uniform(1, 4))
        shown = [ArmRounds(10, 10 * mean, 10 * mean**2 + 1), ArmRounds(0, 0.0, 0.0)]
        for memory in (asked, other):
            memory.learn(x, None, shown[:: 1 if number % 2 else -1])
        asked.fit()
    assert asked.belief(at) == other.belief(at) is not None
    asked.forget()
    assert asked.belief(at) is None


def kinds(*of):
    """The prompt clusters of a training set with these kinds."""
    return PromptClusters.of([(3 + KINDS[kind], 1.0) for kind in of])


def test_training_clusters_predict_the_best_arm_of_the_first_texts():
    own = [kinds(0), kinds(1), kinds(2)]
    aware, unaware = (np.mean([stream(seed, 6, trained_on=each)[0] for seed in range(6)]) for each in (own, ()))
    assert aware > 0.85 and aware > unaware + 0.1
    policy, memory = ContextualUcb(Arms(N, 4, 0), PolicyRecipe()), PromptMemory(N, trained_on=[kinds(2), kinds(0, 1)])
    for x, kind in prompts(1, 5):
        policy.begin_text(memory.belief(x))
        assert policy.choose() == (0 if kind == 2 else 1), "arm 1 was trained on kinds 0 and 1"


def test_rewards_override_wrong_predictions_from_training_clusters():
    """No arm is best for the kind of prompts in its training data."""
    shares, _ = stream(0, 80, trained_on=[kinds(1), kinds(2), kinds(0)])
    assert np.mean(shares[:3]) < 0.3 and np.mean(shares[60:]) > 0.7


def test_an_arm_without_training_clusters_is_tried():
    """It is the best arm for all prompts; the other two are not."""
    memory = PromptMemory(3, trained_on=[kinds(0), kinds(1), kinds()])
    policy = ContextualUcb(Arms(3, 4, 0), PolicyRecipe())
    played = []
    for x, _ in prompts(0, 30):
        belief = memory.belief(x)
        policy.begin_text(belief)
        for _ in range(20):
            played.append(policy.choose())
            policy.reward(played[-1], 0.8 if played[-1] == 2 else 0.4)
        memory.learn(x, belief, policy.shown())
    assert played[-200:].count(2) > 190


def test_arms_trained_on_the_same_kind_get_nearly_equal_beliefs():
    """The mean features of two samples of one kind differ by chance, which must not count as a preference."""
    generator = np.random.default_rng(0)
    alike = [PromptClusters.of([(3 + KINDS[0] + generator.normal(size=16) / 8, 4.0)]) for _ in range(2)]
    belief = PromptMemory(2, trained_on=alike).belief(3 + KINDS[0] + generator.normal(size=16))
    apart = PromptMemory(2, trained_on=[kinds(0), kinds(1)]).belief(3 + KINDS[0] + 0.3 * generator.normal(size=16))
    assert abs(belief.m[0] - belief.m[1]) < 0.1 * (apart.m[0] - apart.m[1])


def test_training_advantage_by_hand():
    p = torch.tensor([[0.9, 0.1, 0.0], [0.0, 0.0, 0.0], [0.0, 0.2, 0.8]])
    phi = training_advantage(p, [0, 0, 2], torch.tensor([1.0, 1.0, 0.5]).double(), 3)
    assert phi.tolist() == [pytest.approx(row, abs=1e-6) for row in ([0.8, 0, -0.5], [-1, 0, -0.5], [-0.6, 0, 0.3])]


def test_the_trend_solves_the_normal_equations():
    generator = torch.Generator().manual_seed(0)
    phi, y = (torch.randn(9, generator=generator).double() for _ in range(2))
    variance = torch.rand(9, generator=generator).double() + 0.1
    found = trend(phi, y, variance, 0.3, 0.2)
    X, w = torch.stack([torch.ones(9).double(), phi], 1), torch.diag(1 / variance)
    precision = X.T @ w @ X + torch.diag(torch.tensor([0, 1 / 0.2]).double())
    best = torch.linalg.solve(precision, X.T @ w @ y + torch.tensor([0, 0.3 / 0.2]).double())
    assert (found.mean, found.slope) == pytest.approx(best.tolist())
    assert found.doubt == pytest.approx(float(torch.linalg.inv(precision)[1, 1]))
    assert trend(phi[:0], y[:0], variance[:0], 0.3, 0.2) == (0.0, 0.3, 0.2)
    assert trend(torch.ones(9).double(), y, variance, 0.3, 0.2).slope == pytest.approx(0.3), (
        "equal φ leave the prior slope"
    )


def test_old_rewards_are_converted_to_the_current_rate():
    """The value of a round's seconds changes along a stream. Rewards of early texts, when the stream was slow, must not
    look better for that reason."""
    memory, x = PromptMemory(2), np.ones(4)
    for text in range(40):  # the good arm plays only in the second half, when the stream is faster
        lost = 0.01 * text
        good, bad = (ArmRounds(8, 8 * mean, 8 * mean**2 + 0.01) for mean in (0.7 - lost, 0.6 - lost))
        none = ArmRounds(0, 0.0, 0.0)
        memory.learn(x, None, [none, bad] if text < 20 else [good, none], [lost, lost])
    belief = memory.belief(x)
    assert belief.m[0] == pytest.approx(0.7 - lost, abs=0.02) and belief.m[1] == pytest.approx(0.6 - lost, abs=0.02)


def test_forgetting_keeps_the_training_clusters():
    memory = PromptMemory(N, trained_on=[kinds(0), kinds(1), kinds(2)])
    first = memory.belief(3 + KINDS[1])
    memory.learn(3 + KINDS[1], None, [ArmRounds(5, 1.0, 0.25)] * N)
    memory.forget()
    assert memory.belief(3 + KINDS[1]) == first and first.m[1] > max(first.m[0], first.m[2])


def test_rewards_use_the_rate_of_the_text():
    """At the stream's rate of 2 tokens/s, 6 tokens in 1.9 s beat 3.6 in 1.05 s. At the higher rate of this text they
    lose."""
    arms = Arms(2, 8, 0)
    clock = ArmClock.of(2)
    for _ in range(200):
        clock.record(0, 1.9, 3.8)
        clock.record(1, 1.05, 2.1)
    game = Game(
        registry.build("cgp-ucb", arms, PolicyRecipe()),
        replace(rules_for("cgp-ucb", GameRecipe(), 8), step=1.0),
        arms,
        clock,
    )
    expected = [0.5 + (Y - 2 * s) / 18 for Y, s in ((6, 1.9), (3.6, 1.05))]
    game.policy.begin_text(Belief(expected, [1e-3] * 2, 0.005, 0.005, 0.005))
    chosen = []
    for _ in range(80):
        chosen.append(game.choose())
        Y, s = ((6, 1.9), (3.6, 1.05))[chosen[-1]]
        game.round_finished(chosen[-1], Outcome(Y, Y - 1, seconds=s))
    assert chosen[0] == 0 and chosen[-20:].count(1) >= 15


def test_a_change_within_a_text_is_followed():
    """After 40 rounds the best arm becomes the worst. A mean over all rounds would still prefer it."""
    belief = Belief([0.5, 0.45, 0.4], [0.2] * 3, noise=0.01, signal=0.01, shared=0.005)

    def late(steady, monkey, turns):
        monkey.setattr(contextual, "STEADY", steady)
        policy, generator, chosen = ContextualUcb(Arms(3, 4, 0), PolicyRecipe()), np.random.default_rng(0), []
        policy.begin_text(belief)
        for number in range(140):
            rewards = [0.3, 0.6, 0.35] if turns and number >= 40 else [0.7, 0.5, 0.4]
            chosen.append(policy.choose())
            policy.reward(chosen[-1], rewards[chosen[-1]] + 0.1 * generator.normal())
        return chosen[40:].count(1 if turns else 0) / 100

    with pytest.MonkeyPatch.context() as monkey:
        assert late(contextual.STEADY, monkey, turns=True) > late(1e9, monkey, turns=True) + 0.2
        assert late(20.0, monkey, turns=False) > 0.9


def test_the_memory_weighs_all_rounds_of_a_text_equally():
    """Discounted means are for choices within the text. A memory of these would ignore the first half of the text."""
    policy, rewards = ContextualUcb(Arms(2, 4, 0), PolicyRecipe()), [0.9] * 10 + [0.1] * 10
    for reward in rewards:
        policy.reward(1, reward)
    assert policy.shown()[0] == (0, 0.0, 0.0) and policy.n == [0, 20]
    assert policy.shown()[1] == pytest.approx((20, sum(rewards), sum(reward**2 for reward in rewards)))
    weights = [(u + contextual.STEADY) for u in range(1, 21)]
    assert policy._recent[1] == pytest.approx(np.average(rewards, weights=weights)) and policy._recent[1] < 0.45
    assert policy.r[1] == pytest.approx(0.5)
