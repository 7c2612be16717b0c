"""How far a learner goes on the way that a chunk leads it: texts that it has not learnt from decide.

How often chance decides, with texts as different as they are large: an update that changes nothing on average is taken
in 32, 32 and 31 % of the chunks with 5, 10 and 20 texts held out, P(T > ½) of Student's t; one that costs a text a
quarter of a standard deviation in 15, 10 and 6 %. Where the weights that the stream began with are as good as the
present ones, 27 % take the update and 27 % go back. So what is taken need not be good; what does much harm is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from specctl.training.example import Example

Point = float | None
"""A place on the way, by the share of it that lies behind; None = the weights that the stream began with."""

WHOLE, STAY, HOME = 1.0, 0.0, None

SHARES = (WHOLE, 0.5, 0.25)
"""How far it may go, the farthest first."""

DOUBT = 0.5  # standard errors by which the mean gain over those texts must exceed 0


def split(examples: Sequence[Example], share: float) -> tuple[list[Example], list[Example]]:
    """The texts to learn from now, and those that judge: the newest, which are likest to those that come; none of one
    or two."""
    ordered = sorted(examples, key=lambda example: example.index)
    count = len(ordered) - round(share * len(ordered))
    return ordered[:count], ordered[count:]


def places(losses: Callable[[Point], Tensor]) -> tuple[Point, ...]:
    """The place where each of N learners is best: the farthest of `SHARES` that is better for the texts held out than
    to stay, or home where that is better still.

    Args:
        losses: of every text with every learner at a place [n, N]; NaN for a text without weight. Where none has
            weight, nothing is forbidden.
    """
    stay = losses(STAY)
    known = ~stay.isnan().all(1)
    if not known.any():
        return (WHOLE,) * stay.shape[1]

    def gains(place: Point) -> list[tuple[float, float]]:
        """The mean gain over the texts, and what it has to exceed, by learner."""
        savings = (stay - losses(place))[known]
        error = savings.std(0) / math.sqrt(len(savings)) if len(savings) > 1 else torch.zeros(savings.shape[1])
        return list(zip(savings.mean(0).tolist(), (DOUBT * error).tolist(), strict=True))

    best: list[tuple[float, Point]] = [(0.0, STAY)] * stay.shape[1]
    for share in SHARES:
        if all(place != STAY for _, place in best):
            break
        for n, (gain, doubt) in enumerate(gains(share)):
            if best[n][1] == STAY and gain > doubt:
                best[n] = (gain, share)
    for n, (gain, doubt) in enumerate(gains(HOME)):
        if gain > max(best[n][0], doubt):
            best[n] = (gain, HOME)
    return tuple(place for _, place in best)
