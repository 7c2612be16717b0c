"""Lengths that scores promise, corrected by the lengths of the rounds that an arm has played."""

from __future__ import annotations

from math import sqrt

import numpy as np

from specctl.selection.policies.policy import AnyArray, Array

# Standard errors by which a ratio must differ from what it is drawn to before it counts, and then only by the rest: an
# arm that was unlucky in its first rounds is not played again, so that nothing would correct a ratio that is too low.
DOUBT = 1.0


class Realised:
    """Ratios of the draft tokens that were accepted to those that scores promised, at the same positions.

    Scores of depth 1 promise too much for an arm that gets worse with depth, or ends its drafts early. An arm that has
    hardly played is corrected as the arms that have.
    """

    def __init__(self, count: int):
        self._rounds = np.zeros((count, 6))  # of each arm: their number; Σ a, Σ p, Σ a², Σ ap, Σ p²

    def seen(self, arm: int, accepted: int, promised: float) -> None:
        """Take in a round."""
        a, p = accepted, promised
        self._rounds[arm] += (1, a, p, a * a, a * p, p * p)

    def ratios(self) -> Array:
        """[N] accepted ÷ promised: that of each arm as far as it surely differs from that of all, which is 1 as far as
        it does not surely differ from that."""
        pool = towards(1.0, self._rounds.sum(axis=0).tolist())
        return np.array([towards(pool, sums) for sums in self._rounds.tolist()])

    def corrected(self, losses: Array, reach: AnyArray, horizon: int) -> Array:
        """[M, N] losses 1 − AL/(K + 1), K the `horizon`, with promises times ratios, at most `reach` [N] tokens."""
        promised = (1 - losses) * (horizon + 1) - 1
        return 1 - (1 + np.minimum(promised * self.ratios(), reach)) / (horizon + 1)


def towards(center: float, sums: list[float]) -> float:
    """The ratio Σ a/Σ p, moved towards `center` by `DOUBT` standard errors; the center where these reach that far.

    The standard error is that of a ratio estimator (Cochran 1977, Sampling Techniques, Eq. 6.13), with one more round
    that is off by as much as it commits: a few rounds that are alike do not make certain.
    """
    n, a, p, aa, ap, pp = sums
    if n < 2 or p <= 0:
        return center
    ratio = a / p
    squares = max(aa - 2 * ratio * ap + ratio * ratio * pp, 0.0) + (1 + a / n) ** 2
    error = sqrt(squares * n / (n - 1)) / p
    return max(ratio - DOUBT * error, center) if ratio > center else min(ratio + DOUBT * error, center)
