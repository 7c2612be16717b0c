"""Aggregate rounds.jsonl of `select`: arms played per domain, and weights over time."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from specctl.reporting.collect import RunRecord

BINS = 200
"""Minimal number of points in a picture of weights, given enough rounds; the maximum is twice this number."""
MOST_ARMS = 1000


@dataclass
class Rounds:
    """Rounds of one policy, aggregated line by line, because a long run has millions.

    `arms` is extended by arms that are missing in the result of a stopped run. `weights` are sums over stretches of
    `stretch` rounds: sums of the policy's weights or, for a policy without weights, of its plays.
    """

    arms: list[str]
    pulls: dict[str, Counter[int]] = field(default_factory=dict)  # keyed by domain
    weights: list[list[float]] = field(default_factory=list)
    has_weights: bool = False
    stretch: int = 1
    count: int = 0

    def add(self, line: Mapping[str, Any], weights: Sequence[float] | None = None) -> None:
        """Count a round. A policy without plain decoding, the first arm, has one weight less than there are arms."""
        arm, given = self._index(line["arm"]), weights and [0.0] * (len(self.arms) - len(weights)) + list(weights)
        self.pulls.setdefault(str(line.get("domain") or "all"), Counter())[arm] += 1
        self.has_weights |= given is not None
        if self.count % self.stretch == 0:
            if len(self.weights) == 2 * BINS:
                self.weights = [_sum(*pair) for pair in zip(self.weights[::2], self.weights[1::2], strict=True)]
                self.stretch *= 2
            self.weights.append([])
        self.weights[-1] = _sum(self.weights[-1], given or [float(index == arm) for index in range(len(self.arms))])
        self.count += 1

    @property
    def shares(self) -> list[list[float]]:
        """Means per stretch [arms, stretches]."""
        sizes = [min(self.stretch, self.count - self.stretch * n) for n in range(len(self.weights))]
        return [
            [(total[arm] if arm < len(total) else 0.0) / size for total, size in zip(self.weights, sizes, strict=True)]
            for arm in range(len(self.arms))
        ]

    @property
    def middles(self) -> list[float]:
        return [(n + 0.5) * self.stretch for n in range(len(self.weights))]

    def _index(self, arm: int | str) -> int:
        if isinstance(arm, int):
            if not 0 <= arm < MOST_ARMS:
                raise ValueError(f"there is no arm {arm}")
            self.arms.extend(f"arm {index}" for index in range(len(self.arms), arm + 1))
            return arm
        if arm not in self.arms:
            self.arms.append(arm)
        return self.arms.index(arm)


def read(run: RunRecord) -> Rounds:
    """Read the rounds of the run's policy. If several policies answer every prompt in turn, only the first is read."""
    named = run.result.get("arms") or []
    rounds = Rounds([str(arm) for arm in named])
    policy = run.result.get("algo")
    for line in run.lines("rounds.jsonl"):
        policy = policy or line.get("algo")
        if line.get("algo") in (None, policy):
            rounds.add(line, line.get("weights") if named else None)  # a stopped run does not name the arms in order
    return rounds


def _sum(first: Sequence[float], second: Sequence[float]) -> list[float]:
    return [a + b for a, b in zip_longest(first, second, fillvalue=0.0)]
