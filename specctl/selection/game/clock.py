"""Seconds that a round of each arm takes, as measured."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Self

from specctl.selection.policies.policy import Numbers

RATE_MEMORY = 2048  # rounds, about, that the rate of all remembers
MEMORY = 64  # rounds of an arm, about, that its mean remembers: the first are slow, and machines are shared
# A round counts at most twice the third longest of its arm's last `MEMORY`: what is longer by itself, or once more, was
# held up; what occurs more often is what the arm costs, however rare it is. Twice the arm's mean, as before, made arms
# of which every fifth round takes 4 times as long look 17 % too cheap.
LONGEST = 2.0
OFTEN = 3
# Rounds of a text by which its own rate counts as much as the stream's: single rounds vary by 0.7 of their mean, rates
# of texts by a quarter.
TEXT = 8


@dataclass
class ArmClock:
    """Seconds of a round of each arm: a machine's, not a text's, so games that follow each other share one.

    Attributes:
        n: rounds of each arm.
        mean: seconds of its last ones.
        recent: seconds of its last ones one by one, as measured.
        tokens, seconds: of the rounds of all arms, the earlier ones counting less and less.
    """

    n: list[int]
    mean: Numbers
    recent: list[deque[float]] = field(default_factory=list)
    tokens: float = 0.0
    seconds: float = 0.0

    @classmethod
    def of(cls, count: int) -> Self:
        """A clock that has measured nothing yet."""
        return cls([0] * count, [0.0] * count, [deque(maxlen=MEMORY) for _ in range(count)])

    def forget(self) -> None:
        """Forget all measurements."""
        self.n[:], self.mean[:] = [0] * len(self.n), [0.0] * len(self.mean)
        self.tokens = self.seconds = 0.0
        for recent in self.recent:
            recent.clear()

    @property
    def rate(self) -> float:
        """Tokens a second of all rounds; 0 before there was one."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def took(self, arm: int, seconds: float, tokens: float = 0.0) -> float:
        """A round of `arm`; returns the seconds of it that count."""
        recent = self.recent[arm]
        recent.append(seconds)
        longest = LONGEST * sorted(recent)[max(len(recent) - OFTEN, 0)]
        counts = min(seconds, longest) if longest > 0 else seconds
        self.tokens += tokens - self.tokens / RATE_MEMORY
        self.seconds += counts - self.seconds / RATE_MEMORY
        self.n[arm] += 1
        n = self.n[arm]
        if n <= OFTEN:  # only now can be told that an earlier one was held up: the first often is
            known = sum(min(one, longest) for one in recent) if longest > 0 else sum(recent)
            self.seconds = max(self.seconds + known - counts - self.mean[arm] * (n - 1), counts)
            self.mean[arm] = known / n
        else:
            self.mean[arm] += (counts - self.mean[arm]) / min(n, MEMORY)
        return counts

    def costs(self, least: float | None = None) -> Numbers:
        """[N] seconds; an arm that has not played is thought to take the `least` time, so that it is tried. None: as
        cheap as the cheapest that has."""
        if least is None:
            least = min([mean for mean, n in zip(self.mean, self.n, strict=True) if n], default=1.0)
        return [mean if n else least for mean, n in zip(self.mean, self.n, strict=True)]


class TextRate:
    """Tokens a second of the text that is being decoded.

    A text has a given number of tokens, so that its best arm is the one with the most tokens a second in it. Held
    against the rate of the stream, arms that commit much would win on easy texts, and cheap arms on hard ones.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Begin a text."""
        self._rounds, self._tokens, self._seconds = 0, 0.0, 0.0

    def took(self, seconds: float, tokens: float) -> None:
        """A round of the text."""
        self._rounds += 1
        self._tokens += tokens
        self._seconds += seconds

    def rate(self, stream: float) -> float:
        """Tokens a second, drawn towards those of the stream: after `TEXT` rounds it is half its own."""
        if not self._seconds > 0:
            return stream
        return stream + self._rounds / (self._rounds + TEXT) * (self._tokens / self._seconds - stream)
