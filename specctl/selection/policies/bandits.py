"""Bandits, which see the reward of the arm that they played: by an index, with exponential weights, and by halving.

Symbols: I the arm played, n pulls of an arm, μ̂ its mean reward, t rounds played, N arms, K the depth, p [N] the
probabilities that an arm was drawn from, Y tokens committed.
"""

from abc import abstractmethod
from collections.abc import Sequence
from math import ceil, exp, floor, log, log2, sqrt
from operator import add
from typing import ClassVar

from specctl.recipe.select import PolicyRecipe
from specctl.selection.policies.hedge import exponential_weights
from specctl.selection.policies.policy import Arms, Learns, Numbers, Policy, Scale, argmax, normalized, one_hot


def ucbspec_radius(n: float, t: int, N: int, K: int, delta: float) -> float:
    """cr = K/2 · √((1 + n)/n² · (1 + 2 ln(N t² √(1 + n)/δ))), of rewards in [1, K + 1] (BanditSpec, Algorithm 8)."""
    return K / 2 * sqrt((1 + n) * (1 + 2 * log(N * t * t * sqrt(1 + n) / delta))) / n


def ucb_radius(n: float, t: float, beta: float) -> float:
    """β √(2 ln t / n), of rewards in [0, 1] (MetaSD, Algorithm 2)."""
    return beta * sqrt(2 * log(t) / n)


class Index(Policy):
    """Base of the index policies: arms that were never pulled come first, in order; then the largest index,
    mean reward plus radius."""

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


def importance_weighted(arm: int, value: float, p: Sequence[float]) -> Numbers:
    """[N] value/p_I at the arm I played and 0 elsewhere: its mean over I ~ p is the value of every arm."""
    estimate = [0.0] * len(p)
    estimate[arm] = value / p[arm]
    return estimate


def mixed_weights(log_w: Sequence[float], mix: float) -> Numbers:
    """p = (1 − γ) w/Σw + γ/N, from ln w; γ is `mix` (MetaSD, Algorithm 7)."""
    top = max(log_w)
    return [(1 - mix) * share + mix / len(log_w) for share in normalized(exp(weight - top) for weight in log_w)]


class Exp3Spec(Policy):
    """`exp3spec`: loss (K + 1 − Y)/K, η_t = √(ln N/(t N)) (BanditSpec, Algorithms 5 and 9); Z [N] estimated losses."""

    learns: ClassVar[Learns] = "reward"
    scale: ClassVar[Scale] = "tokens"

    def __init__(self, arms: Arms, options: PolicyRecipe):
        super().__init__(arms, options.play)
        self.Z = [0.0] * arms.count
        self.t = 1
        self._eta = options.eta

    def reward(self, arm: int, reward: float) -> None:
        loss = (self.arms.depth + 1 - reward) / self.arms.depth
        self.Z = list(map(add, self.Z, importance_weighted(arm, loss, self.drawn_from or self.weights())))
        self.t += 1
        self._changed()

    def _weigh(self) -> Numbers:
        N = self.arms.count
        return exponential_weights(self.Z, self._eta or sqrt(log(N) / (self.t * N)))


class MetaExp3(Policy):
    """`metasd-exp3`: w_j ← w_j exp(γ r̂_j/N), with uniform exploration γ (MetaSD, Algorithm 7)."""

    learns: ClassVar[Learns] = "reward"

    def __init__(self, arms: Arms, options: PolicyRecipe):
        super().__init__(arms, options.play)
        self.log_w = [0.0] * arms.count
        self._mix = options.mix

    def reward(self, arm: int, reward: float) -> None:
        gain = self._mix / self.arms.count * reward
        self.log_w = list(map(add, self.log_w, importance_weighted(arm, gain, self.drawn_from or self.weights())))
        self._changed()

    def _weigh(self) -> Numbers:
        return mixed_weights(self.log_w, self._mix)


def halvings(N: int, literal: bool) -> int:
    """Number of times that N arms are halved: ⌈log₂ N⌉ leaves one arm; the printed ⌊log₂ N⌋ leaves two of five."""
    return floor(log2(N)) if literal else ceil(log2(N))


def survivors(arms: list[int], means: Sequence[float], literal: bool) -> list[int]:
    """The better ⌈n/2⌉ of n arms, the lower id first in a tie; `literal` keeps the worse half (MetaSD, Algorithm 5)."""
    order = sorted(arms, key=lambda arm: (means[arm] if literal else -means[arm], arm))
    return sorted(order[: ceil(len(arms) / 2)])


class SequentialHalving(Policy):
    """`metasd-sh`: every survivor is pulled `period` times, in order, before each halving (MetaSD, Algorithm 5).

    It departs from the printed rule, which `literal` follows, in two ways. It keeps the better half, and its means are
    over all pulls of an arm. The printed means are over the pulls since the last halving, a single one if `period` is
    1. If several arms are left in the end, as with `literal`, they take turns.
    """

    learns: ClassVar[Learns] = "reward"

    def __init__(self, arms: Arms, options: PolicyRecipe):
        super().__init__(arms, play="argmax")
        self.options = options
        self.n = [0] * arms.count
        self.total = [0.0] * arms.count
        self.alive = list(range(arms.count))
        self.left = halvings(arms.count, options.literal)
        self.pulled = 0  # since the last halving

    @property
    def takes_turns(self) -> bool:
        return len(self.alive) > 1

    def _pulls(self) -> int:
        """Number of pulls of each survivor before the next halving."""
        return self.options.period

    def reward(self, arm: int, reward: float) -> None:
        self.n[arm] += 1
        self.total[arm] += reward
        self.pulled += 1
        if self.left and self.pulled >= len(self.alive) * self._pulls():
            means = [total / max(n, 1) for total, n in zip(self.total, self.n, strict=True)]
            self.alive = survivors(self.alive, means, self.options.literal)
            self.left -= 1
            self.pulled = 0
            if self.options.literal:
                self.n, self.total = [0] * self.arms.count, [0.0] * self.arms.count
        self._changed()

    def _weigh(self) -> Numbers:
        return one_hot(self.alive[self.pulled % len(self.alive)], self.arms.count)


class ExploreThenCommit(SequentialHalving):
    """`metasd-petc`: halving for about B0 = c ln B rounds, at least a pull each; then commit (MetaSD, Algorithm 4)."""

    def _pulls(self) -> int:
        c = self.options.petc_c or 2 * self.arms.count
        budget = c * log(self.options.horizon)
        return max(1, floor(budget / (len(self.alive) * halvings(self.arms.count, self.options.literal))))
