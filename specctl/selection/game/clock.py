"""Measured seconds per round of each arm."""

from collections import deque
from dataclasses import dataclass, field
from typing import Self

from specctl.selection.policies.policy import Numbers

RATE_MEMORY = 2048  # rounds, about, that the rate of all arms remembers
MEMORY = 64  # rounds of an arm, about, that its mean remembers: the first are slow, and machines are shared
# A round counts at most twice the third longest of its arm's last `MEMORY` rounds. A longer time that occurs once or
# twice is a delay; one that occurs more often belongs to the arm, however rare it is. A limit of twice the arm's mean
# made arms with every fifth round 4 times as long look 17 % too cheap.
LONGEST = 2.0
OFTEN = 3
# Rounds after which a text's own rate counts as much as the stream's: single rounds vary by 0.7 of their mean, rates of
# texts by a quarter.
TEXT = 8


@dataclass
class ArmClock:
    """Seconds per round of each arm. They depend on the machine and not on the text, so games share one clock.

    Attributes:
        n: number of rounds of each arm.
        mean: mean seconds of an arm's last rounds.
        recent: measured seconds of each of an arm's last rounds.
        tokens, seconds: sums over the rounds of all arms; earlier rounds count less and less.
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
        """Tokens per second of all rounds; 0 before the first one."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def record(self, arm: int, seconds: float, tokens: float = 0.0) -> float:
        """Record a round of `arm`; return the seconds that count."""
        recent = self.recent[arm]
        recent.append(seconds)
        longest = LONGEST * sorted(recent)[max(len(recent) - OFTEN, 0)]
        counts = min(seconds, longest) if longest > 0 else seconds
        self.tokens += tokens - self.tokens / RATE_MEMORY
        self.seconds += counts - self.seconds / RATE_MEMORY
        self.n[arm] += 1
        n = self.n[arm]
        if n <= OFTEN:  # an earlier delay shows only now; the first round often has one
            known = sum(min(one, longest) for one in recent) if longest > 0 else sum(recent)
            self.seconds = max(self.seconds + known - counts - self.mean[arm] * (n - 1), counts)
            self.mean[arm] = known / n
        else:
            self.mean[arm] += (counts - self.mean[arm]) / min(n, MEMORY)
        return counts

    def costs(self, least: float | None = None) -> Numbers:
        """[N] seconds. An arm that has not played gets `least`, so it will be tried. If `least` is None, it counts as
        cheap as the cheapest arm that has played."""
        if least is None:
            least = min([mean for mean, n in zip(self.mean, self.n, strict=True) if n], default=1.0)
        return [mean if n else least for mean, n in zip(self.mean, self.n, strict=True)]


class TextRate:
    """Tokens per second of the text that is being decoded.

    A text has a given number of tokens, so its best arm is the one with the most tokens per second in this text.
    Measured against the rate of the stream, arms that commit much would win on easy texts, and cheap arms on hard ones.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Begin a text."""
        self._rounds, self._tokens, self._seconds = 0, 0.0, 0.0

    def record(self, seconds: float, tokens: float) -> None:
        """Record a round of the text."""
        self._rounds += 1
        self._tokens += tokens
        self._seconds += seconds

    def rate(self, stream: float) -> float:
        """Tokens per second, drawn towards the stream's rate; after `TEXT` rounds each counts for half."""
        if not self._seconds > 0:
            return stream
        return stream + self._rounds / (self._rounds + TEXT) * (self._tokens / self._seconds - stream)
