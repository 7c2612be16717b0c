"""Losses of full information: what every arm would have cost at a position, from its acceptance probabilities."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specctl.selection.policy import AnyArray, Array


def along_drafts(values: AnyArray) -> AnyArray:
    """[N, M + K − 1, K] of token and draft depth → [N, M, K] of start and draft depth: token t + j − 1 at depth j."""
    depths = np.arange(values.shape[2])
    starts = np.arange(values.shape[1] - len(depths) + 1)
    return values[:, starts[:, None] + depths, depths]


def beyond_the_end(values: AnyArray) -> AnyArray:
    """[N, T, K] → [N, T + K − 1, K]: nothing is accepted beyond the end, so that every token of a text is a start."""
    N, _, K = values.shape
    return np.concatenate([values, np.zeros((N, K - 1, K), values.dtype)], axis=1)


def expected_length(gamma: Array) -> Array:
    """Expected number of committed tokens of a round that starts at each of M positions (HedgeSpec, Theorem 3).

    AL_t = 1 + Σ_{k≤K} Π_{j≤k} γ[t + j − 1 at depth j]: the draft's token j is token t + j − 1 of the text.

    Args:
        gamma: [N, M + K − 1, K] acceptance of each arm's proposal for each token, at each draft depth.

    Returns:
        [M, N] in [1, K + 1].
    """
    return 1 + along_drafts(gamma).cumprod(axis=2).sum(axis=2).T


def length_loss(gamma: Array) -> Array:
    """[M, N] f = 1 − AL/(K + 1) in [0, 1), of the positions of `expected_length`."""
    return 1 - expected_length(gamma) / (gamma.shape[2] + 1)


def per_second(losses: Array, costs: Sequence[float]) -> Array:
    """[M, N] losses of gains 1 − ℓ → those of gains a second, in units of the cheapest arm's: 1 − (1 − ℓ) min c / c_i.

    Of expected lengths: AL/c in place of AL. Rounds renew the game, so in the long run an arm alone decodes E[AL]/c
    tokens a second. The mean of c/AL, seconds a token, is larger than c/E[AL], the more so the more lengths vary.
    """
    seconds = np.asarray(costs)
    return 1 - (1 - losses) * (seconds.min() / seconds)


def usable(losses: Array) -> tuple[Array, NDArray[np.bool_]]:
    """Losses [M, N] of which some may not be finite: (1 in their place, [M] whether any arm has shown something).

    An arm without a usable score is worth nothing; the others are told apart all the same.
    """
    finite = np.isfinite(losses)
    return np.where(finite, losses, 1.0), np.any(finite, axis=1)
