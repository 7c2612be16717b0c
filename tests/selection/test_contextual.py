"""CGP-UCB: rewards are expected by likeness of prompts, with as much confidence as the rounds bear."""

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
    """(features, kind) of prompts of three kinds; arm i is best at those of kind i."""
    generator = np.random.default_rng(seed)
    for _ in range(count):
        kind = int(generator.integers(N))
        yield 3 + KINDS[kind] + 0.3 * generator.normal(size=16), kind


def stream(seed, count, rounds=20, remembers=True, trained_on=()):
    """Play texts; returns the share of rounds with the right arm of each text, and the memory."""
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


def test_it_learns_which_arm_prompts_alike_want():
    shares, alone = (np.mean([stream(seed, 80, remembers=each)[0][40:] for seed in range(3)]) for each in (True, False))
    assert shares > 0.85 and shares > alone + 0.2


def test_a_new_kind_of_prompt_is_explored_and_learnt():
    _, memory = stream(0, 40)
    strange = -3 * KINDS.sum(0)
    known = memory.belief(next(prompts(1, 1))[0])
    belief = memory.belief(strange)
    apart = 1 - prompt_memory.SHARE_EVERYWHERE  # of the variance: what an arm is worth at all prompts is known by now
    assert min(belief.v) > max(known.v) and min(belief.v) > 0.9 * apart
    assert max(belief.m) - min(belief.m) < 0.5 * (max(known.m) - min(known.m))


def test_where_one_arm_is_always_best_it_is_played():
    """Choosing costs little: of 60 texts the first ones, and a round here and there."""
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
    """[texts] share of a text's rounds with the best arm; arms are worth `worth(text)` [arms] at all prompts."""
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


def test_an_arm_that_loses_everywhere_is_expected_to_lose_elsewhere():
    """So that not every kind of prompt has to teach it anew."""
    memory, texts = PromptMemory(2), [x for x, _ in prompts(0, 60)]
    for x in texts:
        memory.learn(x, memory.belief(x), [ArmRounds(9, 4.5, 2.3), ArmRounds(9, 3.6, 1.5)])
    known, strange = memory.belief(texts[0]), memory.belief(-3 * KINDS.sum(0))
    assert known.m[0] - known.m[1] == pytest.approx(0.1, rel=0.2)
    assert 0.3 < (strange.m[0] - strange.m[1]) / (known.m[0] - known.m[1]) < 0.9


def test_an_arm_that_was_left_alone_comes_back_when_the_traffic_shifts():
    """The arm that was best becomes the worst of all."""
    before, after = [0.35] * 6 + [0.4, 0.5], [0.35] * 6 + [0.47, 0.25]
    shares = [played(lambda text: before if text < 40 else after, 100, seed) for seed in range(3)]
    assert np.mean([each[30:40] for each in shares]) > 0.85
    assert np.mean([each[70:] for each in shares]) > 0.6


def test_hard_texts_are_not_the_arms_fault():
    """With d the arm that meets a hard text keeps its lead; without, it loses it."""
    belief = Belief(m=[0.5, 0.4, 0.4], v=[0.1] * 3, noise=0.01, signal=0.01, shared=0.01)
    n, r = [10, 0, 0], [0.3, 0.0, 0.0]
    assert np.argmax(indices(belief, n, r, 0.0)) == 0
    blind = Belief(belief.m, belief.v, belief.noise, belief.signal, shared=1e-9)
    assert np.argmax(indices(blind, n, [0.0, 0.0, 0.0], 0.0)) != 0


def test_index_is_the_joint_posterior():
    """Mean and variance of f + μ given the rounds and E[d], against conditioning on the joint Gaussian."""
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
    assert beyond == pytest.approx(2 * math.sqrt(0.5 * 0.03)), "an arm that has not played is as uncertain as before"


def test_regression_is_that_of_a_gaussian_process():
    """Of two arms at once, the second of which has seen less."""
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


def test_before_anything_is_known_every_arm_plays_once():
    policy = ContextualUcb(Arms(N, 4, 0), PolicyRecipe())
    for arm, reward in enumerate((0.2, 0.5, 0.3)):
        assert policy.choose() == arm
        policy.reward(arm, reward)
    assert policy.choose() == 1 and policy.weights() == [0, 1, 0]
    policy.begin_text(None)
    assert policy.choose() == 0, "another text"


def test_pools_that_read_no_states_tell_arms_apart_all_the_same():
    """All prompts are alike then: the arms' own means remain."""
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
def test_rewards_without_spread_break_nothing(reward):
    memory, policy = PromptMemory(N), ContextualUcb(Arms(N, 4, 0), PolicyRecipe())
    for x, _ in prompts(0, 12):
        belief = memory.belief(x)
        policy.begin_text(belief)
        for _ in range(3):
            policy.reward(policy.choose(), reward)
        memory.learn(x, belief, policy.shown())
    assert np.isfinite(indices(memory.belief(x), policy.n, [reward] * N, 1.0)).all()


def test_one_prompt_again_and_again():
    """Equal prompts whose rewards do not vary within a text, and do from text to text."""
    memory = PromptMemory(2)
    for text in range(80):
        reward = 0.3 + 0.4 * (text % 2)
        memory.learn(
            np.ones(8), memory.belief(np.ones(8)), [ArmRounds(4, 4 * reward, 4 * reward**2), ArmRounds(0, 0.0, 0.0)]
        )
    belief = memory.belief(np.ones(8))
    assert np.isfinite([*belief.m, *belief.v]).all() and belief.v[0] < belief.v[1]


def test_what_beliefs_share_is_made_anew_behind_every_text():
    """A belief out of what was known before the last text would learn nothing from it."""
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
    """What an arm was trained on."""
    return PromptClusters.of([(3 + KINDS[kind], 1.0) for kind in of])


def test_what_arms_were_trained_on_is_known_before_anything_was_seen():
    own = [kinds(0), kinds(1), kinds(2)]
    aware, unaware = (np.mean([stream(seed, 6, trained_on=each)[0] for seed in range(6)]) for each in (own, ()))
    assert aware > 0.85 and aware > unaware + 0.1
    policy, memory = ContextualUcb(Arms(N, 4, 0), PolicyRecipe()), PromptMemory(N, trained_on=[kinds(2), kinds(0, 1)])
    for x, kind in prompts(1, 5):
        policy.begin_text(memory.belief(x))
        assert policy.choose() == (0 if kind == 2 else 1), "an arm of two kinds"


def test_rewards_correct_what_training_let_expect():
    """Arms that were trained on something else than they are good at."""
    shares, _ = stream(0, 80, trained_on=[kinds(1), kinds(2), kinds(0)])
    assert np.mean(shares[:3]) < 0.3 and np.mean(shares[60:]) > 0.7


def test_an_arm_of_which_nothing_is_known_is_tried():
    """Of two arms it is the best everywhere; the third is not."""
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


def test_arms_that_were_trained_on_the_same_are_expected_to_be_alike():
    """Means of other prompts of one kind differ by chance, and that tells nothing."""
    generator = np.random.default_rng(0)
    alike = [PromptClusters.of([(3 + KINDS[0] + generator.normal(size=16) / 8, 4.0)]) for _ in range(2)]
    belief = PromptMemory(2, trained_on=alike).belief(3 + KINDS[0] + generator.normal(size=16))
    apart = PromptMemory(2, trained_on=[kinds(0), kinds(1)]).belief(3 + KINDS[0] + 0.3 * generator.normal(size=16))
    assert abs(belief.m[0] - belief.m[1]) < 0.1 * (apart.m[0] - apart.m[1])


def test_what_arms_are_known_for():
    p = torch.tensor([[0.9, 0.1, 0.0], [0.0, 0.0, 0.0], [0.0, 0.2, 0.8]])
    phi = training_advantage(p, [0, 0, 2], torch.tensor([1.0, 1.0, 0.5]).double(), 3)
    assert phi.tolist() == [pytest.approx(row, abs=1e-6) for row in ([0.8, 0, -0.5], [-1, 0, -0.5], [-0.6, 0, 0.3])]


def test_the_trend_is_that_of_the_normal_equations():
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
    assert trend(torch.ones(9).double(), y, variance, 0.3, 0.2).slope == pytest.approx(0.3), "one arm tells no slope"


def test_rewards_are_looked_at_as_if_they_had_been_earned_at_todays_rate():
    """What the time of a round is worth changes along a stream: rewards of early texts, when all were slow, are no
    better for that."""
    memory, x = PromptMemory(2), np.ones(4)
    for text in range(40):  # an arm that is never worth less, the other by the end of a stream that became faster
        lost = 0.01 * text
        good, bad = (ArmRounds(8, 8 * mean, 8 * mean**2 + 0.01) for mean in (0.7 - lost, 0.6 - lost))
        none = ArmRounds(0, 0.0, 0.0)
        memory.learn(x, None, [none, bad] if text < 20 else [good, none], [lost, lost])
    belief = memory.belief(x)
    assert belief.m[0] == pytest.approx(0.7 - lost, abs=0.02) and belief.m[1] == pytest.approx(0.6 - lost, abs=0.02)


def test_forgetting_keeps_what_arms_were_trained_on():
    memory = PromptMemory(N, trained_on=[kinds(0), kinds(1), kinds(2)])
    first = memory.belief(3 + KINDS[1])
    memory.learn(3 + KINDS[1], None, [ArmRounds(5, 1.0, 0.25)] * N)
    memory.forget()
    assert memory.belief(3 + KINDS[1]) == first and first.m[1] > max(first.m[0], first.m[2])


def test_a_text_is_played_for_its_own_rate():
    """Held against the stream's 2 tokens a second, 6 tokens in 1.9 s beat 3.6 in 1.05 s; in a text they are slower."""
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


def test_a_text_that_turns_is_followed():
    """After 40 rounds the best arm becomes the worst. A mean of all rounds would still prefer that arm."""
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


def test_the_memory_gets_all_rounds_of_a_text():
    """Means that have faded are for the text's own choices; a memory of these would forget the prompt's first half."""
    policy, rewards = ContextualUcb(Arms(2, 4, 0), PolicyRecipe()), [0.9] * 10 + [0.1] * 10
    for reward in rewards:
        policy.reward(1, reward)
    assert policy.shown()[0] == (0, 0.0, 0.0) and policy.n == [0, 20]
    assert policy.shown()[1] == pytest.approx((20, sum(rewards), sum(reward**2 for reward in rewards)))
    weights = [(u + contextual.STEADY) for u in range(1, 21)]
    assert policy._recent[1] == pytest.approx(np.average(rewards, weights=weights)) and policy._recent[1] < 0.45
    assert policy.r[1] == pytest.approx(0.5)
