"""Ratios with their intervals, and the two columns that each of them has in a row."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from specctl.decoding import metrics
from specctl.decoding.metrics import Interval
from specctl.decoding.records import Decoded


@dataclass(frozen=True)
class Measured:
    """A ratio of sums and its bootstrap interval; None where there is nothing to divide by, or to draw from."""

    value: float | None = None
    interval: Interval | None = None


def columns(**figures: Measured) -> dict[str, Any]:
    """Fields of a row: every figure under its name, and its interval beside it."""
    intervals = {f"{name}_interval": figure.interval for name, figure in figures.items()}
    return {name: figure.value for name, figure in figures.items()} | intervals


def mat(units: Sequence[Hashable], decoded: Sequence[Decoded]) -> Measured:
    """Mat over units that are drawn together: `units[i]` names that of `decoded[i]`."""
    return Measured(metrics.mat(decoded), metrics.mat_interval(units, decoded))


def speedup(units: Sequence[Hashable], decoded: Sequence[Decoded], baseline: Sequence[Decoded] | None) -> Measured:
    """Tokens a second relative to a baseline's answers to the same prompts; nothing without these."""
    if not baseline:
        return Measured()
    return Measured(metrics.speedup(decoded, baseline), metrics.speedup_interval(units, decoded, baseline))


def unusable(speedup: Measured, mat: Measured | None = None) -> str | None:
    """Why a speed-up says nothing (`metrics.unusable`)."""
    return metrics.unusable(speedup.value, speedup.interval, None if mat is None else mat.value)
