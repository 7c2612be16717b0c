"""Full-information policies: the losses of all arms are seen, so every arm is judged on every token.

Symbols of the papers: ℓ [N] losses of one step; p [N] weights; L [N] cumulated losses; R [N] cumulated regret for not
having followed each arm, R_i = Σ (⟨p, ℓ⟩ − ℓ_i); C [N] = Σ |⟨p, ℓ⟩ − ℓ_i|; t steps until now; η rate.
"""

from abc import abstractmethod
from collections.abc import Sequence
from math import exp, log, sqrt
from operator import add
from typing import ClassVar

from specctl.recipe.select import PolicyRecipe
from specctl.selection.policies.policy import Arms, Learns, Numbers, Policy, dot, normalized


def leader_weights(L: Numbers) -> Numbers:
    """Follow the leader: all weight on the arm with the least loss until now, shared in a tie."""
    least = min(L)
    return normalized(float(loss == least) for loss in L)


def hedge_rate(t: int, N: int) -> float:
    """η_t = √(8 ln N / t) for the step t ≥ 1 to come (Cesa-Bianchi and Lugosi 2006, Theorem 2.3)."""
    return sqrt(8 * log(N) / t)


def exponential_weights(L: Numbers, eta: float) -> Numbers:
    """p ∝ exp(−η L); the least loss is subtracted first, so that exp cannot overflow."""
    least = min(L)
    return normalized(exp(eta * (least - loss)) for loss in L)


def normalizer(u: Numbers, N: int, start: float) -> float:
    """The y ≥ 1 with mean exp(u y) = e, for N numbers u in [0, 1] with maximum 1; `start` is a guess.

    Zeros may be left out of `u`: exp(0 y) = 1, and mostly few arms of many have a positive regret.

    Newton on the convex, increasing log mean exp(u y) − 1. Since exp(y)/N ≤ mean exp(u y) ≤ exp(y), the root lies in
    [1, 1 + ln N]; from the second step on the iterates fall towards it monotonically.
    """
    zeros = N - len(u)
    high = 1 + log(N)
    y = min(max(start, 1.0), high)
    for _ in range(50):
        e = [exp(x * y) for x in u]
        total = sum(e) + zeros
        excess = log(total / N) - 1
        if abs(excess) <= 1e-9:
            break
        y = min(max(y - excess * total / dot(u, e), 1.0), high)
    return y


def normalhedge_weights(R: Numbers, start: float) -> tuple[Numbers, float]:
    """p ∝ [R]₊/c · exp([R]₊²/2c) with mean exp([R]₊²/2c) = e; uniform when no R is positive.

    NormalHedge (Chaudhuri, Freund and Hsu 2009, Figure 1). Scaled by the largest R, r = [R]₊/max R, the normalizer is y
    = max R²/2c with mean exp(r² y) = e. It is bounded for any scale of R, so nothing overflows.

    Returns:
        p [N], and y to start the next search from.
    """
    top = max(R)
    if top <= 0:
        return [1 / len(R)] * len(R), start
    r = [max(regret, 0.0) / top for regret in R]
    y = normalizer([x * x for x in r if x], len(R), start)
    return normalized(x and x * exp(x * x * y) for x in r), y


def adanormalhedge_weights(R: Numbers, C: Numbers) -> Numbers:
    """p_i ∝ ½(Φ(R_i + 1, C_i + 1) − Φ(R_i − 1, C_i + 1)), Φ(R, C) = exp([R]₊²/3C); uniform if all are 0.

    AdaNormalHedge (Luo and Schapire 2015, Algorithm 1) with a uniform prior.
    """
    up = [max(r + 1, 0.0) ** 2 / (3 * (c + 1)) for r, c in zip(R, C, strict=True)]
    down = [max(r - 1, 0.0) ** 2 / (3 * (c + 1)) for r, c in zip(R, C, strict=True)]
    top = max(up)
    weights = [exp(high - top) - exp(low - top) for high, low in zip(up, down, strict=True)]
    return normalized(weights) if any(weights) else [1 / len(R)] * len(R)


class HedgeLearner(Policy):
    """Base of the full-information learners, which can forget everything and begin again."""

    learns: ClassVar[Learns] = "losses"

    def __init__(self, arms: Arms, options: PolicyRecipe):
        super().__init__(arms, options.play)
        self.forget()

    @abstractmethod
    def forget(self) -> None:
        """Begin again with nothing learned."""


class FollowTheLeader(HedgeLearner):
    """`ftl`: follow the leader, the ablation of the learners below."""

    def forget(self) -> None:
        self.L = [0.0] * self.arms.count
        self._changed()

    def losses(self, losses: Sequence[float]) -> None:
        self.L = list(map(add, self.L, losses))
        self._changed()

    def _weigh(self) -> Numbers:
        return leader_weights(self.L)


class Hedge(FollowTheLeader):
    """`hedge`: exponential weights, with the rate that needs no horizon unless `eta` is given."""

    def __init__(self, arms: Arms, options: PolicyRecipe):
        super().__init__(arms, options)
        self._eta = options.eta

    def forget(self) -> None:
        super().forget()
        self.t = 0

    def losses(self, losses: Sequence[float]) -> None:
        super().losses(losses)
        self.t += 1

    def _weigh(self) -> Numbers:
        return exponential_weights(self.L, self._eta or hedge_rate(self.t + 1, self.arms.count))


class NormalHedge(HedgeLearner):
    """`normalhedge`, the learner of `hedgespec`: no rate to choose."""

    def forget(self) -> None:
        self.R = [0.0] * self.arms.count
        self.y = 1.0
        self._changed()

    def losses(self, losses: Sequence[float]) -> None:
        expected = dot(self.weights(), losses)
        self.R = [regret + expected - loss for regret, loss in zip(self.R, losses, strict=True)]
        self._changed()

    def _weigh(self) -> Numbers:
        weights, self.y = normalhedge_weights(self.R, self.y)
        return weights


class AdaNormalHedge(HedgeLearner):
    """`adanormalhedge`: NormalHedge that also adapts to the size of each arm's regrets."""

    def forget(self) -> None:
        self.R = [0.0] * self.arms.count
        self.C = [0.0] * self.arms.count
        self._changed()

    def losses(self, losses: Sequence[float]) -> None:
        expected = dot(self.weights(), losses)
        regrets = [expected - loss for loss in losses]
        self.R = list(map(add, self.R, regrets))
        self.C = [total + abs(regret) for total, regret in zip(self.C, regrets, strict=True)]
        self._changed()

    def _weigh(self) -> Numbers:
        return adanormalhedge_weights(self.R, self.C)
