"""Bandits with exponential weights: they draw their arm, and divide its reward by the probability of the draw.

Symbols: I the arm played, p [N] the probabilities it was drawn from, Y tokens committed, K the depth, t rounds.
"""

from collections.abc import Sequence
from math import exp, log, sqrt
from operator import add
from typing import ClassVar

from specctl.recipe.select import PolicyRecipe
from specctl.selection.policies.hedge import exponential_weights
from specctl.selection.policies.policy import Arms, Learns, Numbers, Policy, Scale, normalized


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
