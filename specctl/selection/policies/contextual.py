"""Contextual bandit that reads prompts: an arm is expected to earn as much as at earlier prompts like this one.

CGP-UCB (Krause and Ong 2011, Contextual Gaussian Process Bandit Optimization). The context is the target's own state of
the prompt, which the prefill has computed anyway. It needs no classifier, no labels and no scoring of idle drafters.
The reward of a round is

    μ + θ φ_i(x) + d + f_i(x) + ε,   d ~ N(0, τ²),   f_i ~ GP(0, s² k),   ε ~ N(0, σ²).

μ is the mean of all rewards. θ φ_i is the worth of being trained for such prompts; φ_i goes from −1 to 1, and is 0 if
that is not known. d is the ease of the text for all arms alike (our addition: an arm is not blamed for a hard text).
f_i is the remaining advantage of arm i at prompts like x, part of it equal at all prompts. ε is chance. Rewards are
surpluses over the rate of the stream. If the seconds of an arm are dearer or cheaper in the text itself, the
difference, `excess_cost`, is subtracted from its bound. Within a text the policy learns from its own rounds, and from
text to text from the rounds of all arms that played (`prompt_memory`). No reset forgets the latter. A text may turn,
for instance from prose to code, so its earlier rewards count less and less (`fade`).

Symbols: N arms; m, v [N] mean and variance of f_i(x), the latter in units of s²; n [N] rounds of each arm in the text
and r [N] their mean rewards.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from specctl.recipe.select import PolicyRecipe
from specctl.selection.policies.policy import Arms, Learns, Numbers, Policy, argmax, one_hot

# β, scale of the uncertainty that is added to a mean (the paper's proof asks for far more). Averaged over orders of the
# prompts, 0.5 chooses as well; but if a stream begins with one kind of prompts, with 0.5 some arms are never tried at
# the others.
BETA = 1.0
SWITCH_ROUNDS = 4.0  # rounds that share the cost of a switch to another arm
TRIAL_ROUNDS = 2  # rounds of drafts at the beginning of a text, after many plainly decoded texts
# Rounds of a text after which its fading halves. Texts that turn after 120, 240 and 480 tokens are 1, 3 and 2 % faster
# with it (SmolLM2-135M, eight drafters; 1, 3 and 6 % on a synthetic table), and texts that do not turn are 0.99 to 1.00
# as fast (`tests/benchmarks/shifts.py`). With a constant discount of 0.95 a round, texts of 1,000 tokens that do not
# turn lose 2 to 6 %.
STEADY = 20.0


@dataclass(frozen=True)
class Belief:
    """Expectations of the arms before a text's first round: m [N], which includes the mean of all, v [N], and the
    variances σ², s² and τ²."""

    m: Numbers
    v: Numbers
    noise: float
    signal: float
    shared: float


def fade(t: int) -> float:
    """Share of their weight that the earlier rewards of a text keep in its round t: 1 − 1/(t + `STEADY`).

    After t rounds, round u weighs (u + `STEADY`)/(t + `STEADY`). The memory is thus a share of the text. A constant
    discount (D-UCB) gives a long text that does not turn the same short memory as a text that does. Means fade, and
    counts do not, because faded counts lead to more exploration.
    """
    return 1 - 1 / (t + STEADY)


def ease(belief: Belief, n: Sequence[int], r: Sequence[float]) -> tuple[float, float]:
    """Mean and variance of d, from the rounds of a text: the difference between its rewards and their expectation."""
    weight, total = 1 / belief.shared, 0.0
    for m, v, rounds, mean in zip(belief.m, belief.v, n, r, strict=True):
        if rounds:
            w = 1 / (v * belief.signal + belief.noise / rounds)
            weight, total = weight + w, total + w * (mean - m)
    return total / weight, 1 / weight


def indices(belief: Belief, n: Sequence[int], r: Sequence[float], beta: float) -> Numbers:
    """[N] upper confidence bounds of the arms, given the text's rounds: mean + β · standard deviation of μ + f_i(x)."""
    d, _ = ease(belief, n, r)
    bounds = prior_bounds(belief, beta)
    for arm, rounds in enumerate(n):
        if rounds:
            bounds[arm] = bound(belief, arm, rounds, r[arm] - d, beta)
    return bounds


def prior_bounds(belief: Belief, beta: float) -> Numbers:
    """[N] upper confidence bounds of the arms before the text's first round."""
    return [m + beta * math.sqrt(v * belief.signal) for m, v in zip(belief.m, belief.v, strict=True)]


def bound(belief: Belief, arm: int, rounds: int, mean: float, beta: float) -> float:
    """Upper confidence bound of an arm with `rounds` rounds in the text and this mean reward, less the text's ease."""
    m, variance = belief.m[arm], belief.v[arm] * belief.signal
    gain = variance / (variance + belief.noise / rounds)
    return m + gain * (mean - m) + beta * math.sqrt(variance * (1 - gain))


class ArmRounds(NamedTuple):
    """The rounds of an arm in a text: their number, the sum of their rewards, and the sum of the squares."""

    rounds: int
    total: float
    squares: float


class ContextualUcb(Policy):
    """`cgp-ucb`: the arm with the largest upper bound, given the prompt and the text's own rounds. If nothing is known
    yet, every arm plays once, and then the best one."""

    learns: ClassVar[Learns] = "reward"

    def __init__(self, arms: Arms, options: PolicyRecipe):
        super().__init__(arms, play="argmax")
        self.switch_cost = [0.0] * arms.count  # cost of switching to an arm, which must catch up, in rewards
        self.plain_reward = 0.0  # of a round of `arms.plain`, known without playing it
        self.last: int | None = None  # the arm of the round before
        self.excess_cost: Numbers  # excess of each arm's rewards over their worth in this text
        self.begin_text(None)

    def begin_text(self, belief: Belief | None, overdue: bool = False) -> None:
        """Begin a text. `overdue`: no arm has drafted for many texts, so one must be tried even if none should pay."""
        self.belief, self.last = belief, None
        self._tries = TRIAL_ROUNDS if overdue else 0
        self.excess_cost = [0.0] * self.arms.count
        self.n, self.r = [0] * self.arms.count, [0.0] * self.arms.count
        self._recent, self._left = [0.0] * self.arms.count, [0.0] * self.arms.count  # faded mean; sum of its weights
        self._shown = [ArmRounds(0, 0.0, 0.0)] * self.arms.count
        # The bounds of idle arms and the costs of switching do not change: a round is work for the played arms only.
        self._idle = [] if belief is None else prior_bounds(belief, BETA)
        self._played: list[int] = []
        self._changed()

    def shown(self) -> list[ArmRounds]:
        """Rounds and rewards of each arm in the text, none of them faded."""
        return self._shown.copy()

    def set_plain_reward(self, reward: float) -> None:
        """Set the reward of a round of plain decoding: it is known, and need not be tried."""
        if reward != self.plain_reward:
            self.plain_reward = reward
            self._changed()

    def reward(self, arm: int, reward: float) -> None:
        if arm == self.arms.plain:  # plain decoding tells nothing about the text
            if math.isfinite(self.plain_reward):  # otherwise it was only timed: the arm before it, or none, goes on
                self.last = arm
                self._changed()
            return
        self._tries = max(self._tries - 1, 0)
        if not self.n[arm]:
            self._played.append(arm)
        self.n[arm] += 1
        left = fade(sum(self.n))
        self._left = [weight * left for weight in self._left]
        self._left[arm] += 1
        self._recent[arm] += (reward - self._recent[arm]) / self._left[arm]
        self.r[arm] += (reward - self.r[arm]) / self.n[arm]
        rounds, total, squares = self._shown[arm]
        self._shown[arm] = ArmRounds(rounds + 1, total + reward, squares + reward * reward)
        self.last = arm
        self._changed()

    def _weigh(self) -> Numbers:
        plain = self.arms.plain
        if self.belief is None:
            untried = [arm for arm, n in enumerate(self.n) if not n and arm != plain]
            means = [self.plain_reward if arm == plain else mean for arm, mean in enumerate(self.r)]
            worth = [mean - dear for mean, dear in zip(means, self.excess_cost, strict=True)]
            return one_hot(untried[0] if untried else argmax(worth), self.arms.count)
        bounds = self._idle.copy()
        if plain is not None:
            bounds[plain] = self.plain_reward
        if plain is not None and self._tries and self.last is None:  # try the arm with the least cost of switching
            bounds = [bound - moved / SWITCH_ROUNDS for bound, moved in zip(bounds, self.switch_cost, strict=True)]
        if self.last is not None and plain is not None:
            bounds = self._within(bounds, self.last, self.r)
        if plain is not None and self._tries:
            bounds[plain] = -math.inf
        # Whether to draft is decided at the stream's rate, and which arm drafts at the text's rate. At the rate of a
        # text that is decoded plainly, drafting looks nearly as good and is explored too much. Means that fade are as
        # noisy as few rounds, so that a draft looks good enough too often: they, too, decide only which arm drafts.
        if self.last is not None and (plain is None or argmax(bounds) != plain):
            bounds = self._within(self._idle.copy(), self.last, self._recent)
            bounds = [bound - dear for bound, dear in zip(bounds, self.excess_cost, strict=True)]
            if plain is not None:
                bounds[plain] = -math.inf
        return one_hot(argmax(bounds), self.arms.count)

    def _within(self, bounds: Numbers, last: int, r: Numbers) -> Numbers:
        """The bounds of arms before the text, changed by the text's mean rewards r and by the costs of a switch."""
        assert self.belief is not None
        d, _ = ease(self.belief, self.n, r)
        for arm in self._played:
            bounds[arm] = bound(self.belief, arm, self.n[arm], r[arm] - d, BETA)
        if self.arms.plain is not None:  # a text that is easy to draft is no easier without drafts
            bounds[self.arms.plain] -= d
        stay = bounds[last]
        bounds = [bound - moved / SWITCH_ROUNDS for bound, moved in zip(bounds, self.switch_cost, strict=True)]
        bounds[last] = stay
        return bounds
