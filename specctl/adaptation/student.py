"""Student's t for paired gains: is a change better than none, at a stated level of error?"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


def as_normal(t: float, freedom: int) -> float:
    """The z ≥ 0 that a normal variable exceeds as rarely as Student's t of so many degrees of freedom exceeds t ≥ 0
    (Wallace 1959)."""
    return (8 * freedom + 1) / (8 * freedom + 3) * math.sqrt(freedom * math.log1p(t * t / freedom))


def gained(gains: Sequence[float], level: float) -> bool:
    """Whether the mean of `gains`, of two texts or more, is above 0 (one-sided).

    `level`: how often that may be said where nothing has changed.
    """
    if len(gains) < 2 or statistics.fmean(gains) <= 0:
        return False
    error = statistics.stdev(gains) / math.sqrt(len(gains))
    limit = statistics.NormalDist().inv_cdf(1 - level)
    return error == 0 or as_normal(statistics.fmean(gains) / error, len(gains) - 1) > limit
