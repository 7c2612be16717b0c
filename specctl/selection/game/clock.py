"""Seconds that a round of each arm takes, as measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from specctl.selection.policies.policy import Numbers

MEMORY = 64  # rounds of an arm, about, that its mean remembers: the first are slow, and machines are shared


@dataclass
class ArmClock:
    """Seconds of a round of each arm: a machine's, not a text's, so games that follow each other share one.

    Attributes:
        n: rounds of each arm.
        mean: seconds of its last ones.
    """

    n: list[int]
    mean: Numbers

    @classmethod
    def of(cls, count: int) -> Self:
        """A clock that has measured nothing yet."""
        return cls([0] * count, [0.0] * count)

    def forget(self) -> None:
        """Forget all measurements."""
        self.n[:], self.mean[:] = [0] * len(self.n), [0.0] * len(self.mean)

    def took(self, arm: int, seconds: float) -> None:
        """A round of `arm`."""
        self.n[arm] += 1
        self.mean[arm] += (seconds - self.mean[arm]) / min(self.n[arm], MEMORY)

    def costs(self) -> Numbers:
        """[N] seconds; an arm that has not played is thought as cheap as the cheapest, so that it is tried."""
        known = [mean for mean, n in zip(self.mean, self.n, strict=True) if n]
        least = min(known, default=1.0)
        return [mean if n else least for mean, n in zip(self.mean, self.n, strict=True)]
