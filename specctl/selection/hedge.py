"""Full information: the losses of all arms are seen, so every arm is judged on every token.

Symbols of the papers: ℓ [N] losses of one step; p [N] weights; L [N] cumulated losses; R [N] cumulated regret of not
having followed each arm, R_i = Σ (⟨p, ℓ⟩ − ℓ_i); C [N] = Σ |⟨p, ℓ⟩ − ℓ_i|; t steps so far; η rate.
"""

from __future__ import annotations

from math import log, sqrt
from typing import ClassVar

import numpy as np

from specctl.recipe.select import PolicyRecipe
from specctl.selection.policy import Arms, Array, Learns, Weighted


def leader_weights(L: Array) -> Array:
    """Follow the leader: all weight on the arm with the least loss so far, shared among equals."""
    leaders = np.equal(L, L.min()).astype(float)
    return leaders / leaders.sum()


def hedge_rate(t: int, N: int) -> float:
    """η_t = √(8 ln N / t) for the step t ≥ 1 to come (Cesa-Bianchi and Lugosi 2006, Theorem 2.3)."""
    return sqrt(8 * log(N) / t)


def exponential_weights(L: Array, eta: float) -> Array:
    """p ∝ exp(−η L); the least loss is subtracted first, so that exp cannot overflow."""
    weights = np.exp(eta * (L.min() - L))
    return weights / weights.sum()


def normalizer(u: Array, start: float, tolerance: float = 1e-12) -> float:
    """The y ≥ 1 with mean exp(u y) = e, for u [N] in [0, 1] whose maximum is 1; `start` is a guess.

    Newton on the convex, increasing log mean exp(u y) − 1. As exp(y)/N ≤ mean exp(u y) ≤ exp(y), the root lies in
    [1, 1 + ln N]; from the second step on the iterates fall towards it monotonically.
    """
    N = len(u)
    high = 1 + log(N)
    y = min(max(start, 1.0), high)
    for _ in range(50):
        e = np.exp(u * y)
        total = float(e.sum())
        excess = log(total / N) - 1
        if abs(excess) <= tolerance:
            break
        y = min(max(y - excess * total / float(u @ e), 1.0), high)
    return y


def normalhedge_weights(R: Array, start: float) -> tuple[Array, float]:
    """p ∝ [R]₊/c · exp([R]₊²/2c) with mean exp([R]₊²/2c) = e; uniform when no R is positive.

    NormalHedge (Chaudhuri, Freund and Hsu 2009, Figure 1). Scaled by the largest R, r = [R]₊/max R, the normaliser is
    y = max R²/2c with mean exp(r² y) = e, which is bounded whatever the scale of R is: nothing overflows.

    Returns:
        p [N], and y to start the next search from.
    """
    top = float(R.max())
    if top <= 0:
        return np.full(len(R), 1 / len(R)), start
    r = np.maximum(R, 0) / top
    u = r * r
    y = normalizer(u, start)
    weights = r * np.exp(u * y)
    return weights / weights.sum(), y


def adanormalhedge_weights(R: Array, C: Array) -> Array:
    """p_i ∝ ½(Φ(R_i + 1, C_i + 1) − Φ(R_i − 1, C_i + 1)), Φ(R, C) = exp([R]₊²/3C); uniform if all are 0.

    AdaNormalHedge (Luo and Schapire 2015, Algorithm 1) with a uniform prior.
    """
    scale = 3 * (C + 1)
    up = np.maximum(R + 1, 0) ** 2 / scale
    down = np.maximum(R - 1, 0) ** 2 / scale
    top = up.max()
    weights = np.exp(up - top) - np.exp(down - top)
    total = weights.sum()
    return weights / total if total > 0 else np.full(len(R), 1 / len(R))


class FollowTheLeader(Weighted):
    """`ftl`: the honest ablation of all that follows."""

    learns: ClassVar[Learns] = "losses"
    learnt = ("L",)

    def __init__(self, arms: Arms, options: PolicyRecipe):
        super().__init__(arms, options.play)
        self.L = np.zeros(arms.count)

    def losses(self, losses: Array) -> None:
        self.L = self.L + losses
        self._changed()

    def _weigh(self) -> Array:
        return leader_weights(self.L)


class Hedge(Weighted):
    """`hedge`: exponential weights, with the rate that needs no horizon unless `eta` is given."""

    learns: ClassVar[Learns] = "losses"
    learnt = ("L", "t")

    def __init__(self, arms: Arms, options: PolicyRecipe):
        super().__init__(arms, options.play)
        self.L = np.zeros(arms.count)
        self.t = 0
        self._eta = options.eta

    def losses(self, losses: Array) -> None:
        self.L = self.L + losses
        self.t += 1
        self._changed()

    def _weigh(self) -> Array:
        return exponential_weights(self.L, self._eta or hedge_rate(self.t + 1, self.arms.count))


class NormalHedge(Weighted):
    """`normalhedge`, the learner of `hedgespec`: no rate to choose."""

    learns: ClassVar[Learns] = "losses"
    learnt = ("R", "y")

    def __init__(self, arms: Arms, options: PolicyRecipe):
        super().__init__(arms, options.play)
        self.R = np.zeros(arms.count)
        self.y = 1.0

    def losses(self, losses: Array) -> None:
        self.R = self.R + (self.weights() @ losses - losses)
        self._changed()

    def _weigh(self) -> Array:
        weights, self.y = normalhedge_weights(self.R, self.y)
        return weights


class AdaNormalHedge(Weighted):
    """`adanormalhedge`: as NormalHedge, and adapts to how large each arm's regrets are."""

    learns: ClassVar[Learns] = "losses"
    learnt = ("R", "C")

    def __init__(self, arms: Arms, options: PolicyRecipe):
        super().__init__(arms, options.play)
        self.R = np.zeros(arms.count)
        self.C = np.zeros(arms.count)

    def losses(self, losses: Array) -> None:
        regret = self.weights() @ losses - losses
        self.R = self.R + regret
        self.C = self.C + np.abs(regret)
        self._changed()

    def _weigh(self) -> Array:
        return adanormalhedge_weights(self.R, self.C)
