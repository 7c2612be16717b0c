"""Ratios with their intervals, and the two columns of each ratio in a result row."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from specctl.decoding import metrics
from specctl.decoding.metrics import Interval
from specctl.decoding.records import Decoded

SHORTEST = 512
"""Limit, in tokens, of the first bucket of prompt lengths; each further bucket doubles the limit."""

Parts = tuple[Sequence[float], Sequence[float]]
"""Dividends and divisors, one per answer."""


@dataclass(frozen=True)
class Measured:
    """A ratio of sums and its bootstrap interval. Each is None if it is undefined: divisor 0, too few units to draw."""

    value: float | None = None
    interval: Interval | None = None


def columns(**figures: Measured) -> dict[str, Any]:
    """Fields of a row: every value under its name, every interval under `<name>_interval`."""
    intervals = {f"{name}_interval": figure.interval for name, figure in figures.items()}
    return {name: figure.value for name, figure in figures.items()} | intervals


def mat(units: Sequence[Hashable], decoded: Sequence[Decoded]) -> Measured:
    """mat with its interval. `units[i]` names the unit of `decoded[i]`; the answers of a unit are drawn together."""
    return Measured(metrics.mat(decoded), metrics.mat_interval(units, decoded))


def speedup(units: Sequence[Hashable], decoded: Sequence[Decoded], baseline: Sequence[Decoded] | None) -> Measured:
    """Tokens per second relative to a baseline's answers to the same prompts; empty without a baseline."""
    if not baseline:
        return Measured()
    return Measured(metrics.speedup(decoded, baseline), metrics.speedup_interval(units, decoded, baseline))


def relative(units: Sequence[Hashable], ours: Parts, theirs: Parts) -> Measured:
    """(Σ a ÷ Σ b) ÷ (Σ c ÷ Σ d) for `ours` (a, b) and `theirs` (c, d), paired by unit; empty if a divisor is 0."""
    quotients = [metrics.ratio(sum(tops), sum(bottoms)) for tops, bottoms in (ours, theirs)]
    if quotients[0] is None or not quotients[1]:
        return Measured()
    one, other = metrics.ratio_of_sums(units, *ours), metrics.ratio_of_sums(units, *theirs)
    interval = metrics.bootstrap(lambda counts: one(counts) / other(counts), len(set(units)))
    return Measured(quotients[0] / quotients[1], interval)


def unusable(speedup: Measured, mat: Measured | None = None) -> str | None:
    """Reason why a speed-up cannot be used (`metrics.why_unusable`), or None."""
    return metrics.why_unusable(speedup.value, speedup.interval, None if mat is None else mat.value)


def bucket(tokens: int) -> int:
    """Limit, in tokens, of the length bucket of a prompt: `SHORTEST` times a power of two."""
    longest = SHORTEST
    while longest < tokens:
        longest *= 2
    return longest


def bucket_start(up_to: int) -> int:
    """Length that all prompts in the bucket with this limit exceed."""
    return up_to // 2 if up_to > SHORTEST else 0
