"""How far a learner goes on the way that a chunk leads it: texts that it has not learnt from decide.

A learner moves only where that is better for them than to stay, by a one-sided test for a few skewed gains
(`adaptation/student.py`). The level is that of the whole decision: an update of no effect moves any of an ensemble's
learners in so many of its chunks at most.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from specctl.adaptation.student import gained
from specctl.training.example import Example

Point = float | None
"""A place on the way, by the share of it that lies behind; None = the weights that the stream began with."""

WHOLE, HALF, STAY, HOME = 1.0, 0.5, 0.0, None


def split(examples: Sequence[Example], share: float) -> tuple[list[Example], list[Example]]:
    """The texts to learn from now, and those that judge: the newest, which are likest to those that come; none of one
    or two."""
    ordered = sorted(examples, key=lambda example: example.index)
    count = len(ordered) - round(share * len(ordered))
    return ordered[:count], ordered[count:]


def places(losses: Callable[[Point], Tensor], level: float) -> tuple[Point, ...]:
    """The place where each of N learners is best: on the way (all of it, or half), or home where that is better still.

    Half of the way is tested first, and all of it only where half is better. With a convex loss half is better wherever
    all of it is, so this costs no power and leaves one test of the way instead of two. Likewise nobody goes where the
    slowest learner would gain nothing: its step is the shortest of the same direction. So the way is tested once,
    whatever N, and home, which is not alike for learners that have gone differently far, N times.

    Args:
        losses: of every text with every learner at a place [n, N], the slowest first; NaN for a text without weight.
            Where none has weight, nothing is forbidden.
        level: how often any learner is to move where no place is better than its own. Half of it is for the way, half
            for home. A single text, which tells no chance from a gain, is believed.
    """
    stay = losses(STAY)
    learners = stay.shape[1]
    known = ~stay.isnan().all(1)
    if not known.any():
        return (WHOLE,) * learners

    def gains(place: Point, each: float) -> list[float]:
        """The mean gain over the texts by learner; 0 where chance may have made it."""
        savings = (stay - losses(place))[known].T.numpy()
        mean = savings.mean(1)
        better = mean > 0 if savings.shape[1] == 1 else gained(savings, each)
        return np.where(better, mean, 0.0).tolist()

    best: list[tuple[float, Point]] = [(0.0, STAY)] * learners
    half = gains(HALF, level / 2)
    if half[0] > 0:
        whole = gains(WHOLE, level / 2)
        for n in range(learners):
            if half[n] > 0:
                best[n] = (whole[n], WHOLE) if whole[n] > 0 else (half[n], HALF)
    for n, gain in enumerate(gains(HOME, level / (2 * learners))):
        if gain > best[n][0]:
            best[n] = (gain, HOME)
    return tuple(place for _, place in best)
