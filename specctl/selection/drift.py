"""A change for the worse, noticed in what costs nothing: how much of its drafts is accepted from the arm that plays."""

from __future__ import annotations

from math import sqrt
from typing import Any

SLACK = 0.5  # k: half of the fall to be noticed, in standard deviations
LEAST = 6  # rounds of an arm before it has a mean to fall below
FLOOR = 0.5  # tokens: an arm that accepts nearly the same every time has too small a yardstick of its own


def cusum(S: float, z: float, k: float) -> float:
    """S ← max(0, S + z − k): the one-sided test for a mean of z above 0 (Page 1954, Biometrika 41, section 2)."""
    return max(0.0, S + z - k)


class Drift:
    """Page's test on the rounds of a game: does the arm that plays accept less than it did?

    z is how far a round stays below the mean of the arm's earlier rounds, in their standard deviations; a round of an
    arm that has hardly played says nothing.

    Attributes:
        S: the statistic; beyond the threshold h it is an alarm.
        since: vectors of losses that the rounds since S was 0 are worth: the estimate of where the change is.
    """

    def __init__(self, count: int, h: float):
        self.h = h
        self._count = count
        self.reset()

    def reset(self) -> None:
        """Nothing was seen."""
        self.S = 0.0
        self.since = 0
        self._n = [0] * self._count
        self._mean = [0.0] * self._count
        self._squares = [0.0] * self._count  # Σ (x − mean)², by Welford's recurrence

    def seen(self, arm: int, accepted: int | None, vectors: int) -> bool:
        """Whether this round is an alarm; `accepted` is None where the text ended inside the draft."""
        if accepted is not None:
            self._test(arm, accepted)
        self.since = self.since + vectors if self.S else 0
        return self.h < self.S

    def _test(self, arm: int, accepted: int) -> None:
        n, mean = self._n[arm], self._mean[arm]
        if n >= LEAST:
            deviation = max(sqrt(self._squares[arm] / (n - 1)), FLOOR)
            self.S = cusum(self.S, (mean - accepted) / deviation, SLACK)
        self._n[arm] = n + 1
        self._mean[arm] = mean + (accepted - mean) / (n + 1)
        self._squares[arm] += (accepted - mean) * (accepted - self._mean[arm])

    def state(self) -> dict[str, Any]:
        """What was seen, as JSON can hold it."""
        return {
            "S": self.S,
            "since": self.since,
            "n": list(self._n),
            "mean": list(self._mean),
            "squares": list(self._squares),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a `state`."""
        self.S, self.since = state["S"], state["since"]
        self._n, self._mean, self._squares = list(state["n"]), list(state["mean"]), list(state["squares"])
