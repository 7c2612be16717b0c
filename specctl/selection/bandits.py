"""Bandits with an index: play the arm whose mean reward plus radius is largest.

Symbols: n [N] pulls of each arm, μ̂ [N] their mean rewards, t the round to be played (from 1), N arms, K the depth.
"""

from __future__ import annotations

from abc import abstractmethod
from math import log, sqrt
from typing import ClassVar

import numpy as np

from specctl.recipe.select import PolicyRecipe
from specctl.selection.policy import Arms, Array, Learns, Scale, Weighted, one_hot


def ucbspec_radius(n: Array, t: int, K: int, delta: float) -> Array:
    """cr = K/2 · √((1 + n)/n² · (1 + 2 ln(N t² √(1 + n)/δ))), of rewards in [1, K + 1] (BanditSpec, Algorithm 8)."""
    m = n + 1  # 2 ln √m = ln m, and numbers before arrays: every operation on a small array costs a microsecond
    return K / 2 * np.sqrt(m * (np.log(m) + (1 + 2 * log(len(n) * t * t / delta)))) / n


def ucb_radius(n: Array, t: float, beta: float) -> Array:
    """β √(2 ln t / n), of rewards in [0, 1] (MetaSD, Algorithm 2)."""
    return beta * sqrt(2 * log(t)) / np.sqrt(n)


class Index(Weighted):
    """What all index policies share: an arm that was never pulled is pulled first, in order; then the largest index."""

    learns: ClassVar[Learns] = "reward"
    learnt: ClassVar[tuple[str, ...]] = ("n", "total", "t")

    def __init__(self, arms: Arms, options: PolicyRecipe):
        super().__init__(arms, play="argmax")
        self.options = options
        self.n = np.zeros(arms.count)
        self.total = np.zeros(arms.count)
        self.t = 1

    def reward(self, arm: int, reward: float) -> None:
        self.n[arm] += 1
        self.total[arm] += reward
        self.t += 1
        self._changed()

    @abstractmethod
    def _radius(self) -> Array:
        """[N] what uncertainty adds to the means."""

    def _weigh(self) -> Array:
        index = self.total / self.n + self._radius() if self.n.all() else self.n == 0
        return one_hot(int(index.argmax()), self.arms.count)


class UcbSpec(Index):
    """`ucbspec`: the reward is the number of committed tokens. Its literal radius explores for hundreds of rounds."""

    scale: ClassVar[Scale] = "tokens"

    def _radius(self) -> Array:
        literal = ucbspec_radius(self.n, self.t, self.arms.depth, self.options.delta)
        return self.options.radius_scale * literal


class MetaUcb(Index):
    """`metasd-ucb`: UCB1 with a small β."""

    def _radius(self) -> Array:
        return ucb_radius(self.n, self.t, self.options.beta)


class DiscountedUcb(MetaUcb):
    """`metasd-ducb`: rewards and counts fade by λ every round (MetaSD, Algorithm 6); t is the sum of the counts."""

    def reward(self, arm: int, reward: float) -> None:
        self.n *= self.options.discount
        self.total *= self.options.discount
        super().reward(arm, reward)

    def _radius(self) -> Array:
        return ucb_radius(self.n, max(self.n.sum(), 1.0), self.options.beta)


class SlidingUcb(MetaUcb):
    """`metasd-swucb`: only the last `window` rounds count (MetaSD, Algorithm 8); an arm that left them is pulled."""

    learnt = (*MetaUcb.learnt, "past")

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

    def _radius(self) -> Array:
        return ucb_radius(self.n, min(self.t, self.options.window), self.options.beta)
