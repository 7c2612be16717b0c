"""Seconds that a round of each arm takes, as measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from specctl.selection.policies.policy import Numbers

RATE_MEMORY = 2048  # rounds, about, that the rate of all remembers
MEMORY = 64  # rounds of an arm, about, that its mean remembers: the first are slow, and machines are shared
# A round counts at most so many times its arm's mean: what takes longer was held up. In replays where one round of
# fifty takes 2 to 6 times as long, `cgp-ucb` falls from 0.91 to 0.86 of each text's fastest arm without, to 0.90 with.
LONGEST = 2.0


@dataclass
class ArmClock:
    """Seconds of a round of each arm: a machine's, not a text's, so games that follow each other share one.

    Attributes:
        n: rounds of each arm.
        mean: seconds of its last ones.
        tokens, seconds: of the rounds of all arms, the earlier ones counting less and less.
    """

    n: list[int]
    mean: Numbers
    tokens: float = 0.0
    seconds: float = 0.0

    @classmethod
    def of(cls, count: int) -> Self:
        """A clock that has measured nothing yet."""
        return cls([0] * count, [0.0] * count)

    def forget(self) -> None:
        """Forget all measurements."""
        self.n[:], self.mean[:] = [0] * len(self.n), [0.0] * len(self.mean)
        self.tokens = self.seconds = 0.0

    @property
    def rate(self) -> float:
        """Tokens a second of all rounds; 0 before there was one."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def took(self, arm: int, seconds: float, tokens: float = 0.0) -> float:
        """A round of `arm`; returns the seconds of it that count."""
        if self.n[arm] and seconds > 0:
            seconds = min(seconds, LONGEST * self.mean[arm])
        self.tokens += tokens - self.tokens / RATE_MEMORY
        self.seconds += seconds - self.seconds / RATE_MEMORY
        self.n[arm] += 1
        self.mean[arm] += (seconds - self.mean[arm]) / min(self.n[arm], MEMORY)
        return seconds

    def costs(self) -> Numbers:
        """[N] seconds; an arm that has not played is thought as cheap as the cheapest, so that it is tried."""
        known = [mean for mean, n in zip(self.mean, self.n, strict=True) if n]
        least = min(known, default=1.0)
        return [mean if n else least for mean, n in zip(self.mean, self.n, strict=True)]
