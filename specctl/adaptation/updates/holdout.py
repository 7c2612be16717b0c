"""How far a learner goes on the way that a chunk leads it: texts that it has not learnt from decide.

A way is gone where it is better for them than to stay by Student's t, one-sided, at a stated level of error; the
candidates share it (Bonferroni), as the best of several is better than none by chance more often than one is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean

from torch import Tensor

from specctl.adaptation.student import gained
from specctl.training.example import Example

Point = float | None
"""A place on the way, by the share of it that lies behind; None = the weights that the stream began with."""

WHOLE, STAY, HOME = 1.0, 0.0, None

SHARES = (WHOLE, 0.5)
"""How far it may go, the farthest first."""


def split(examples: Sequence[Example], share: float) -> tuple[list[Example], list[Example]]:
    """The texts to learn from now, and those that judge: the newest, which are likest to those that come; none of one
    or two."""
    ordered = sorted(examples, key=lambda example: example.index)
    count = len(ordered) - round(share * len(ordered))
    return ordered[:count], ordered[count:]


def places(losses: Callable[[Point], Tensor], level: float) -> tuple[Point, ...]:
    """The place where each of N learners is best: the farthest of `SHARES` that is better for the texts held out than
    to stay, or home where that is better still.

    Args:
        losses: of every text with every learner at a place [n, N]; NaN for a text without weight. Where none has
            weight, nothing is forbidden.
        level: how often a learner is to move where no place is better than its own. A single text, which tells no
            chance from a gain, is believed.
    """
    stay = losses(STAY)
    known = ~stay.isnan().all(1)
    if not known.any():
        return (WHOLE,) * stay.shape[1]
    each = level / (len(SHARES) + 1)

    def gains(place: Point) -> list[float]:
        """The mean gain over the texts by learner; NaN where chance may have made it."""
        savings = (stay - losses(place))[known].T.tolist()
        return [fmean(one) if gained(one, each) or (len(one) == 1 and one[0] > 0) else math.nan for one in savings]

    best: list[tuple[float, Point]] = [(0.0, STAY)] * stay.shape[1]
    for share in SHARES:
        if all(place != STAY for _, place in best):
            break
        for n, gain in enumerate(gains(share)):
            if best[n][1] == STAY and gain > 0:
                best[n] = (gain, share)
    for n, gain in enumerate(gains(HOME)):
        if gain > best[n][0]:
            best[n] = (gain, HOME)
    return tuple(place for _, place in best)
