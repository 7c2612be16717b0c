"""Test whether a mean gain over a few texts is more than chance: Student's t, and a variant for skewed gains.

Learning tends to help most texts a little and to hurt a few a lot. With five to ten such texts, plain t is fooled: if
the mean gain is 0 and gains are distributed as 1 − Exp(1), it reports a gain at a level of 5 % in 14 to 16 % of
samples.
"""

import math
from functools import cache

import numpy as np
from numpy.typing import NDArray

DRAWS = 40_000  # samples of the reference distribution
MOST_TEXTS = 64  # texts per sample; the limit falls with their number, so the limit for 64 is safe for more
MIN_SHARE_OF_T = 0.7  # see `skewed_t`

Floats = NDArray[np.float64]


def normal_equivalent(t: float, freedom: int) -> float:
    """Convert Student's t ≥ 0 with `freedom` degrees of freedom into the z ≥ 0 with the same tail probability under the
    normal distribution (Wallace 1959)."""
    return (8 * freedom + 1) / (8 * freedom + 3) * math.sqrt(freedom * math.log1p(t * t / freedom))


def skewed_t(gains: Floats) -> Floats:
    """Student's t of samples [m, n], n ≥ 2, corrected for their skewness: √n (W + γW²/3 + γ²W³/27 + γ/(6n)), with W the
    mean / standard deviation and γ the skewness (Hall 1992, "On the removal of skewness by transformation").

    The cubic is flat where γW is near −3, so that gains of many standard deviations would hardly count; hence the
    result is at least 0.7 t. If all gains of a sample are equal the result is ±∞, or NaN for gains of 0.
    """
    n, mean = gains.shape[1], gains.mean(1)
    with np.errstate(divide="ignore", invalid="ignore"):
        away = gains - mean[:, None]
        variance = (away**2).mean(1)
        w = mean / np.sqrt(variance * n / (n - 1))
        skew = np.where(variance > 0, (away**3).mean(1) / variance**1.5, 0.0)
        hall = w + skew * w**2 / 3 + skew**2 * w**3 / 27 + skew / (6 * n)
    return math.sqrt(n) * np.where(np.isfinite(hall), np.maximum(hall, MIN_SHARE_OF_T * w), w)


@cache
def critical_value(texts: int, level: float) -> float:
    """The value that `skewed_t` exceeds with probability `level` if gains are 1 − Exp(1): mean 0, skewness −2.

    For normal gains it is exceeded less often, so it is safe for them, too.
    """
    sample = 1 - np.random.default_rng(0).exponential(size=(DRAWS, min(texts, MOST_TEXTS)))
    return float(np.quantile(skewed_t(sample), 1 - level))


def mean_gain_is_significant(gains: Floats, level: float) -> NDArray[np.bool_]:
    """[m] whether the mean of each sample of `gains` [m, n], n ≥ 2, is above 0 (one-sided).

    Args:
        level: probability of reporting a gain if the mean gain is 0. It holds for gains from symmetric to as skewed as
            1 − Exp(1). No test holds it for any skewness: five texts cannot reveal a loss that one text in twenty has.
    """
    return (gains.mean(1) > 0) & (skewed_t(gains) > critical_value(gains.shape[1], level))
