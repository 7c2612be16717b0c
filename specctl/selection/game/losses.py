"""Losses of full information: what every arm would have cost at a position, from its acceptance probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from specctl.selection.policies.policy import AnyArray, Array
from specctl.selection.recorded.trace import INNER


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


def realised_length(hit: Array) -> Array:
    """Committed tokens of a round that starts at each of M positions, as far as a draft of K tokens sees them.

    AL_t = 1 + Σ_{k≤K} 1{token t + k − 1 is in the draft at depth k} Π_{j<k} 1{token t + j − 1 is an inner node of it}:
    behind a leaf a draft does not go on.

    Args:
        hit: [N, M + K − 1, K] as in `Trace`.

    Returns:
        [M, N] in [1, K + 1].
    """
    along = along_drafts(hit)
    going = np.concatenate([np.ones_like(along[..., :1]), along[..., :-1] == INNER], axis=2).cumprod(axis=2)
    return 1 + (going * (along > 0)).sum(axis=2).T


def continued(values: AnyArray, reach: AnyArray, K: int) -> AnyArray:
    """[N, S, D] of the first D draft depths → [N, S, K]: deeper proposals are as good as those at
    depth D, and an arm that drafts at most `reach` [N] tokens has none beyond them.

    The scores of consecutive tokens then say how far a draft would go on, without scoring any deeper.
    """
    deeper = np.repeat(values[:, :, -1:], K - values.shape[2], axis=2)
    return np.where(np.arange(K) < reach[:, None, None], np.concatenate([values, deeper], axis=2), 0)


def geometric_length(gamma: Array, K: AnyArray) -> Array:
    """1 + Σ_{k≤K} γ^k: expected committed tokens of a round whose K draft tokens are each accepted with probability γ
    (Leviathan et al. 2023, Eq. 1), of each arm: γ, K [N]."""
    depths = np.arange(1, K.max() + 1)
    return 1 + (gamma[:, None] ** depths * (depths <= K[:, None])).sum(axis=1)


def settled(values: Array, estimator: Literal["product", "realised"], below: float) -> int:
    """Number of positions, from the first on, whose drafts are all over or go on with a probability under `below`: what
    tokens to come would add to their length, K · `below` at most (of `realised`, nothing).

    Args:
        values: [N, T, K] acceptance γ of the tokens that are known, or hits, as in `length_loss`. One that is not
            finite does not go on.
    """
    _, T, K = values.shape
    unknown = np.full((len(values), K - 1, K), INNER if estimator == "realised" else 1.0)
    along = along_drafts(np.concatenate([np.nan_to_num(values), unknown], axis=1))
    going = along == INNER if estimator == "realised" else along
    still = going.prod(axis=2).max(axis=0) >= below
    still[: max(T - K + 1, 0)] = False  # all of their tokens are known
    return int(still.argmax()) if still.any() else T


def length_loss(values: Array, estimator: Literal["product", "realised"] = "product") -> Array:
    """[M, N] f = 1 − AL/(K + 1) in [0, 1), of `expected_length` or `realised_length`."""
    length = expected_length(values) if estimator == "product" else realised_length(values)
    return 1 - length / (values.shape[2] + 1)


def per_second(losses: Array, costs: Sequence[float], step: float) -> Array:
    """[M, N] losses of gains 1 − ℓ → those of gains a second: 1 − (1 − ℓ) min(step/c_i, 1), `step` the seconds of plain
    decoding's, than which no round takes less.

    Of expected lengths: AL/c in place of AL. Rounds renew the game, so in the long run an arm alone decodes E[AL]/c
    tokens a second. The mean of c/AL, seconds a token, is larger than c/E[AL], the more so the more lengths vary.
    """
    return 1 - (1 - losses) * np.minimum(step / np.asarray(costs), 1)


def at_success(losses: Array, kept: Sequence[float]) -> Array:
    """[M, N] losses of drafts that are made → of drafts that are made as often as each arm's were: 1 − (1 − ℓ) s_i, s_i
    the share of its rounds in which it did not fail. Who has only failed costs 1, whatever its scores promise."""
    return 1 - (1 - losses) * np.asarray(kept)


def usable(losses: Array) -> tuple[Array, NDArray[np.bool_]]:
    """Losses [M, N] of which some may not be finite: (1 in their place, [M] whether any arm has shown something).

    An arm without a usable score is worth nothing; the others are told apart all the same.
    """
    finite = np.isfinite(losses)
    return np.where(finite, losses, 1.0), np.any(finite, axis=1)
