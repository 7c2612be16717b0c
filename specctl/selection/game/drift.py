"""A change for the worse, noticed in what costs nothing: how much of its drafts is accepted from the arm that plays."""

from __future__ import annotations

from math import sqrt

SLACK = 0.5  # k: half of the fall to be noticed, in standard deviations
LEAST = 6  # rounds of an arm before it has a mean to fall below
FLOOR = 0.5  # tokens: an arm that accepts nearly the same every time has too small a yardstick of its own


def cusum(S: float, z: float, k: float) -> float:
    """S ← max(0, S + z − k): the one-sided test for a mean of z above 0 (Page 1954, Biometrika 41, section 2)."""
    return max(0.0, S + z - k)


class Drift:
    """Page's test on the rounds of a game: does the arm that plays accept less than it did?

    z is how far a round stays below the mean of the arm's earlier rounds, in their standard deviations; a round of an
    arm that has hardly played says nothing. Rounds under suspicion, since S was last 0, are not yet part of that mean:
    it would follow a change before the change is noticed.

    Attributes:
        S: the statistic; beyond the threshold h it is an alarm.
        since: vectors of losses that the rounds under suspicion are worth: the estimate of where the change is.
    """

    def __init__(self, count: int, h: float):
        self.h = h
        self._count = count
        self.reset()

    def reset(self) -> None:
        """Forget all rounds."""
        self.S = 0.0
        self.since = 0
        self._suspects: list[tuple[int, int]] = []  # arm and accepted tokens of rounds
        self._n = [0] * self._count
        self._mean = [0.0] * self._count
        self._squares = [0.0] * self._count  # Σ (x − mean)², by Welford's recurrence

    def seen(self, arm: int, accepted: int | None, vectors: int) -> bool:
        """Whether this round is an alarm; `accepted` is None where the text ended inside the draft."""
        self.since += vectors
        if accepted is not None and self._n[arm] < LEAST:
            self._trust(arm, accepted)
        elif accepted is not None:
            self._suspects.append((arm, accepted))
            deviation = max(sqrt(self._squares[arm] / (self._n[arm] - 1)), FLOOR)
            self.S = cusum(self.S, (self._mean[arm] - accepted) / deviation, SLACK)
        if not self.S:
            for suspect in self._suspects:
                self._trust(*suspect)
            self._suspects.clear()
            self.since = 0
        return self.h < self.S

    def _trust(self, arm: int, accepted: int) -> None:
        """Let a round count in its arm's mean and deviation."""
        off = accepted - self._mean[arm]
        self._n[arm] += 1
        self._mean[arm] += off / self._n[arm]
        self._squares[arm] += off * (accepted - self._mean[arm])
