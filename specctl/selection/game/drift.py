"""Drift test: notices a change for the worse in the accepted tokens of the playing arm, which are known anyway."""

from math import sqrt

SLACK = 0.5  # k: half of the fall to be noticed, in standard deviations
LEAST = 6  # rounds of an arm before it has a mean to fall below
FLOOR = 0.5  # tokens: least standard deviation, for arms that nearly always accept the same number


def cusum(S: float, z: float, k: float) -> float:
    """S ← max(0, S + z − k): the one-sided test for a mean of z above 0 (Page 1954, Biometrika 41, section 2)."""
    return max(0.0, S + z - k)


class Drift:
    """Page's test on the rounds of a game: does the playing arm accept less than it did?

    z is the distance of a round below the mean of the arm's earlier rounds, in their standard deviations. A round of an
    arm that has hardly played says nothing. Rounds under suspicion, since S was last 0, are not yet part of the mean;
    otherwise it would follow a change before the change is noticed.

    Attributes:
        S: the statistic; above the threshold h it is an alarm.
        since: number of loss vectors from the rounds under suspicion: the estimated place of the change.
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

    def record(self, arm: int, accepted: int | None, vectors: int) -> bool:
        """Record a round; return whether it is an alarm. `accepted` is None if the text ended inside the draft."""
        self.since += vectors
        if accepted is not None and self._n[arm] < LEAST:
            self._include(arm, accepted)
        elif accepted is not None:
            self._suspects.append((arm, accepted))
            deviation = max(sqrt(self._squares[arm] / (self._n[arm] - 1)), FLOOR)
            self.S = cusum(self.S, (self._mean[arm] - accepted) / deviation, SLACK)
        if not self.S:
            for suspect in self._suspects:
                self._include(*suspect)
            self._suspects.clear()
            self.since = 0
        return self.h < self.S

    def _include(self, arm: int, accepted: int) -> None:
        """Include a round in its arm's mean and deviation."""
        off = accepted - self._mean[arm]
        self._n[arm] += 1
        self._mean[arm] += off / self._n[arm]
        self._squares[arm] += off * (accepted - self._mean[arm])
