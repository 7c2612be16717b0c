"""Correction of the lengths that scores promise, by the lengths of the rounds that an arm has played."""

from math import sqrt

import numpy as np

from specctl.selection.policies.policy import AnyArray, Array

# Standard errors that are subtracted from the distance of a ratio to its center; only the rest counts. An arm that was
# unlucky in its first rounds is not played again, so nothing would correct a ratio that is too low.
STANDARD_ERRORS = 1.0


class LengthCorrection:
    """Ratios of accepted draft tokens to the number that scores promised, at the same positions.

    Scores of depth 1 promise too much for an arm that gets worse with depth, or ends its drafts early. An arm that has
    hardly played is corrected like all arms together.
    """

    def __init__(self, count: int):
        self._rounds = np.zeros((count, 6))  # by arm: number of rounds; Σ a, Σ p, Σ a², Σ ap, Σ p²

    def record(self, arm: int, accepted: int, promised: float) -> None:
        """Record a round."""
        a, p = accepted, promised
        self._rounds[arm] += (1, a, p, a * a, a * p, p * p)

    def ratios(self) -> Array:
        """[N] accepted ÷ promised. The ratio of each arm is drawn towards the ratio of all arms, and that one towards
        1, as far as the difference is uncertain."""
        pool = shrunk_ratio(1.0, self._rounds.sum(axis=0).tolist())
        return np.array([shrunk_ratio(pool, sums) for sums in self._rounds.tolist()])

    def corrected(self, losses: Array, reach: AnyArray, horizon: int) -> Array:
        """[M, N] losses 1 − AL/(K + 1), K the `horizon`, with promised tokens times ratios, at most `reach` [N]."""
        promised = (1 - losses) * (horizon + 1) - 1
        return 1 - (1 + np.minimum(promised * self.ratios(), reach)) / (horizon + 1)


def shrunk_ratio(center: float, sums: list[float]) -> float:
    """The ratio Σ a/Σ p, moved towards `center` by `STANDARD_ERRORS` standard errors, but not past it.

    The standard error is the one for a ratio estimator (Cochran 1977, Sampling Techniques, Eq. 6.13), with one more
    round that is off by as much as it commits: a few rounds that are alike give no certainty.
    """
    n, a, p, aa, ap, pp = sums
    if n < 2 or p <= 0:
        return center
    ratio = a / p
    squares = max(aa - 2 * ratio * ap + ratio * ratio * pp, 0.0) + (1 + a / n) ** 2
    error = sqrt(squares * n / (n - 1)) / p
    return (
        max(ratio - STANDARD_ERRORS * error, center) if ratio > center else min(ratio + STANDARD_ERRORS * error, center)
    )
