"""Bandits with an index: play the arm with the largest sum of mean reward and radius.

Symbols: n pulls of an arm, μ̂ its mean reward, t rounds played, N arms, K the depth.
"""

from abc import abstractmethod
from math import log, sqrt
from typing import ClassVar

from specctl.recipe.select import PolicyRecipe
from specctl.selection.policies.policy import Arms, Learns, Numbers, Policy, Scale, argmax, one_hot


def ucbspec_radius(n: float, t: int, N: int, K: int, delta: float) -> float:
    """cr = K/2 · √((1 + n)/n² · (1 + 2 ln(N t² √(1 + n)/δ))), of rewards in [1, K + 1] (BanditSpec, Algorithm 8)."""
    return K / 2 * sqrt((1 + n) * (1 + 2 * log(N * t * t * sqrt(1 + n) / delta))) / n


def ucb_radius(n: float, t: float, beta: float) -> float:
    """β √(2 ln t / n), of rewards in [0, 1] (MetaSD, Algorithm 2)."""
    return beta * sqrt(2 * log(t) / n)


class Index(Policy):
    """Base of the index policies: arms that were never pulled come first, in order; then the largest index."""

    learns: ClassVar[Learns] = "reward"

    def __init__(self, arms: Arms, options: PolicyRecipe):
        super().__init__(arms, play="argmax")
        self.options = options
        self.n = [0.0] * arms.count
        self.total = [0.0] * arms.count
        self.t = 0

    def reward(self, arm: int, reward: float) -> None:
        self.n[arm] += 1
        self.total[arm] += reward
        self.t += 1
        self._changed()

    @abstractmethod
    def radius(self) -> Numbers:
        """[N] the amount that uncertainty adds to the means."""

    def _weigh(self) -> Numbers:
        if 0 in self.n:
            return one_hot(self.n.index(0), self.arms.count)
        index = [total / n + radius for total, n, radius in zip(self.total, self.n, self.radius(), strict=True)]
        return one_hot(argmax(index), self.arms.count)


class UcbSpec(Index):
    """`ucbspec`: the reward is the number of committed tokens. The paper's radius explores for hundreds of rounds."""

    scale: ClassVar[Scale] = "tokens"

    def radius(self) -> Numbers:
        N, K, options = self.arms.count, self.arms.depth, self.options
        return [options.radius_scale * ucbspec_radius(n, self.t, N, K, options.delta) for n in self.n]


class MetaUcb(Index):
    """`metasd-ucb`: UCB1 with a small β."""

    def _time(self) -> float:
        return self.t

    def radius(self) -> Numbers:
        t = self._time()
        return [ucb_radius(n, t, self.options.beta) for n in self.n]


class DiscountedUcb(MetaUcb):
    """`metasd-ducb`: rewards fade by λ every round (MetaSD, Algorithm 6).

    Unlike in the printed rule, the counts n fade, too, and t is their sum. If the counts did not fade, the means of all
    arms would fade to 0, and radii would shrink for rounds that no longer count (Garivier and Moulines 2011, D-UCB).
    """

    def reward(self, arm: int, reward: float) -> None:
        self.n = [n * self.options.discount for n in self.n]
        self.total = [total * self.options.discount for total in self.total]
        super().reward(arm, reward)

    def _time(self) -> float:
        return max(sum(self.n), 1.0)


class SlidingUcb(MetaUcb):
    """`metasd-swucb`: only the last `window` rounds count (MetaSD, Algorithm 8); an arm with no round in the window is
    pulled. The t of its radius counts all rounds, as printed."""

    def __init__(self, arms: Arms, options: PolicyRecipe):
        super().__init__(arms, options)
        self.past: list[tuple[int, float]] = []

    def reward(self, arm: int, reward: float) -> None:
        self.past.append((arm, reward))
        if len(self.past) > self.options.window:
            old, earned = self.past.pop(0)
            self.n[old] -= 1
            self.total[old] -= earned
        super().reward(arm, reward)
