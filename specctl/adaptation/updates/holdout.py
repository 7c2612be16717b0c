"""Held-out texts decide how far a learner moves along the descent that a chunk suggests.

A learner moves only if the held-out texts are better off than if it stays, by a one-sided test for a few skewed gains
(`adaptation/skewed_t_test.py`). The level covers the whole decision: if an update has no effect, it is the largest
probability that any learner of an ensemble moves.
"""

from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from specctl.adaptation.skewed_t_test import mean_gain_is_significant
from specctl.training.example import Example

Point = float | None
"""A place on the descent, as the share of the way covered; None = the weights that the stream began with."""

WHOLE, HALF, STAY, HOME = 1.0, 0.5, 0.0, None


def split(examples: Sequence[Example], share: float) -> tuple[list[Example], list[Example]]:
    """Split texts into (texts to learn from now, judges). The judges are the newest texts, which are most like the next
    ones. With the default share, one or two texts have no judge."""
    ordered = sorted(examples, key=lambda example: example.index)
    count = len(ordered) - round(share * len(ordered))
    return ordered[:count], ordered[count:]


def best_places(losses: Callable[..., Tensor], level: float) -> tuple[Point, ...]:
    """The place that is best for each of N learners: on the way (all of it or half), or home if that is better still.

    Half of the way is tested first, and all of it only if half is better. With a convex loss, half is better whenever
    all of it is. So this costs no power and leaves one test of the way instead of two. Likewise no learner moves if the
    slowest one would gain nothing, because its step is the shortest in the same direction. So the way is tested once
    for all N learners. Home is tested N times, because the learners are at different distances from home.

    Args:
        losses: of k places: loss of every text with every learner at each place [k, n, N], the slowest learner first;
            NaN for a text without weight. If no text has weight, all learners go the whole way.
        level: probability that any learner moves if its present place is the best. Half of it is for the way, half for
            home. A single text cannot tell chance from a gain, and is believed.
    """
    stay, half, home = losses(STAY, HALF, HOME)
    learners = stay.shape[1]
    known = ~stay.isnan().all(1)
    if not known.any():
        return (WHOLE,) * learners

    def gains(there: Tensor, each: float) -> list[float]:
        """Mean gain over the texts, by learner, from their losses [n, N]; 0 if chance may explain it."""
        savings = (stay - there)[known].T.numpy()
        mean = savings.mean(1)
        better = mean > 0 if savings.shape[1] == 1 else mean_gain_is_significant(savings, each)
        return np.where(better, mean, 0.0).tolist()

    best: list[tuple[float, Point]] = [(0.0, STAY)] * learners
    halfway = gains(half, level / 2)
    if halfway[0] > 0:
        (whole,) = losses(WHOLE)
        for n, gain in enumerate(gains(whole, level / 2)):
            if halfway[n] > 0:
                best[n] = (gain, WHOLE) if gain > 0 else (halfway[n], HALF)
    for n, gain in enumerate(gains(home, level / (2 * learners))):
        if gain > best[n][0]:
            best[n] = (gain, HOME)
    return tuple(place for _, place in best)
