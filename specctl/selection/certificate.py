"""Certificates: lower bounds of a speed that hold at every moment of a stream at once.

A text j takes Y_j times as long as it takes the comparison, such as plain decoding. A text that takes more than `MOST`
times as long counts as `MOST`. Let μ_j = E[Y_j | Y_1 … Y_j−1], and let m_t be the mean of μ_1 … μ_t. The speed of the
policy relative to the comparison is 1/m_t: every text counts once, whatever its length. The bound U_t satisfies

    P(m_t ≤ U_t for all t) ≥ 1 − α,

so it may be read after every text, and a stream may be stopped when the bound looks best. Texts need not be alike or
independent: means may rise, fall and alternate, and the policy may learn.

Proof. Let Ŷ_j be any guess of Y_j that is made before text j, c = `MOST`, and 0 < λ < 1. For z = λ(μ_j − Ŷ_j)/c

    E[e^z · (1 + λ(Ŷ_j − Y_j)/c) | past] = e^z (1 − z) ≤ 1,

so the product over all texts is a nonnegative supermartingale that starts at 1. So is its weighted mean over several λ.
By Ville's inequality it reaches 1/α with probability at most α. The product depends on the μ_j by their sum alone,
t·m_t. The factors are bets against Y_j, as in Waudby-Smith and Ramdas 2024 (Estimating means of bounded random
variables by betting, JRSS B 86, section 4). Their capital is for a constant mean. The factor e^z, which allows means
that vary, is from the empirical-Bernstein bound of Howard, Ramdas, McAuliffe and Sekhon 2021 (Time-uniform,
nonparametric, nonasymptotic confidence sequences, Annals of Statistics 49, Theorem 4), which bounds the same factors
from below.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from math import isfinite, log
from typing import NamedTuple

import numpy as np

from specctl.selection.policies.policy import Array

LEVEL = 0.95
MOST = 2.0
BETS = 0.9 * 0.5 ** np.arange(8)  # λ; the best one falls with √t, and the last one is the best for 10⁶ texts, about
WEIGHTS = np.arange(1.0, 9.0) ** -1 / sum(1 / k for k in range(1, 9))  # most for few texts, where bounds are loose
STEPS = 40  # of a bisection


@dataclass(frozen=True)
class Certificate:
    """Upper bound of the mean of relative times, and the lower bound of the speed.

    Attributes:
        most: c; a text with more counts as `most`.
        alpha: probability that the bound is wrong at any time.
        texts: t, number of texts.
        clipped: number of texts with more than `most`.
        total, guesses: Σ Y_j, Σ Ŷ_j.
        log_capital: Σ log(1 + λ(Ŷ_j − Y_j)/c), by λ.
    """

    most: float = MOST
    alpha: float = 1 - LEVEL
    texts: int = 0
    clipped: int = 0
    total: float = 0.0
    guesses: float = 0.0
    log_capital: Array = field(default_factory=lambda: np.zeros(len(BETS)))

    def after(self, relative: float) -> Certificate:
        """The certificate after one more text: its time over the comparison's. Times that are not finite count as
        `most`."""
        y = min(max(relative, 0.0), self.most) if isfinite(relative) else self.most
        guess = (self.most / 2 + self.total) / (1 + self.texts)
        return Certificate(
            self.most,
            self.alpha,
            self.texts + 1,
            self.clipped + (not relative <= self.most),
            self.total + y,
            self.guesses + guess,
            self.log_capital + np.log1p(BETS * ((guess - y) / self.most)),
        )

    def refutes(self, mean: float) -> bool:
        """Whether m_t ≥ `mean` is refuted: the capital that it leads to would be too large."""
        won = self.log_capital + BETS * ((self.texts * mean - self.guesses) / self.most)
        largest = float(won.max())
        return largest + log(float(WEIGHTS @ np.exp(won - largest))) >= -log(self.alpha)

    @property
    def at_least(self) -> float | None:
        """1/U_t, the least speed relative to the comparison, or None as long as the texts are too few to tell."""
        if not self.refutes(self.most):
            return None
        low, high = 0.0, self.most  # `refutes` is false at `low`, true at `high`
        for _ in range(STEPS):
            middle = (low + high) / 2
            low, high = (low, middle) if self.refutes(middle) else (middle, high)
        return 1 / high


class Certificates(NamedTuple):
    """Lower bounds of a policy's speed, None if not known, and the number of texts that were clipped over plain."""

    speedup_at_least: float | None
    over_best_arm_at_least: float | None
    slow_texts: int | None


def of_stream(relative: Iterable[float], alpha: float = 1 - LEVEL) -> Certificate:
    """The certificate of a whole stream of relative times."""
    return reduce(Certificate.after, relative, Certificate(alpha=alpha))


def certified(over_plain: Sequence[float] | None, over_arms: Sequence[Sequence[float]]) -> Certificates:
    """Certificates of a policy, from the seconds of its texts relative to plain decoding and to each fixed arm alone.

    The bounds over single arms share α (Bonferroni), so they hold together. The least one is a bound over the best
    arm, whichever it is.
    """
    plain = None if over_plain is None else of_stream(over_plain)
    arms = [of_stream(one, (1 - LEVEL) / len(over_arms)).at_least for one in over_arms]
    known = [speed for speed in arms if speed is not None]
    least = min(known) if known and len(known) == len(arms) else None
    if plain is None:
        return Certificates(None, least, None)
    return Certificates(plain.at_least, least, plain.clipped)


def explanation(texts: int, *notes: str, most: float = MOST) -> str:
    """Meaning and assumptions of the bounds, with notes on the comparisons."""
    counted = f"each of {texts} texts counts once, and at most as {most:g} × the comparison's time"
    return "; ".join(
        [
            f"at least: holds with {LEVEL:.0%} confidence at every moment of the stream; {counted}",
            "no law of the texts is assumed",
            *notes,
        ]
    )


def select_notes(plain: bool, arms: bool) -> list[str]:
    """Notes for policies side by side. `plain`, `arms`: whether plain decoding, and every arm alone, was measured."""
    notes = [] if plain else ["no bound over plain decoding, which was not measured (--baselines vanilla)"]
    return notes + (
        [] if arms else ["no bound over the best arm: only the arms that played were seen (--baselines fixed)"]
    )


def serve_notes(by_passes: bool) -> list[str]:
    """Notes for a policy that serves. `by_passes`: times are the target's passes, since engines report no seconds."""
    own = "plain decoding takes one pass per token, and seconds are not counted"
    timed = "the mean of the plain rounds that were timed counts as exact"
    return [own if by_passes else timed, "no bound over the best drafter: only the drafters that played were seen"]
