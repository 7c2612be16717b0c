"""Losses of full information: the cost of every arm at a position, from its acceptance probabilities."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from specctl.selection.policies.policy import AnyArray, Array

LEAF, INNER = 1, 2  # a committed token is among an arm's proposals: the draft ends there, or continues


def along_drafts(values: AnyArray) -> AnyArray:
    """[N, M + K − 1, K] by token and draft depth → [N, M, K] by start and draft depth: token t + j − 1 at depth j."""
    depths = np.arange(values.shape[2])
    starts = np.arange(values.shape[1] - len(depths) + 1)
    return values[:, starts[:, None] + depths, depths]


def beyond_the_end(values: AnyArray) -> AnyArray:
    """[N, T, K] → [N, T + K − 1, K]: nothing is accepted beyond the end, so every token of a text can be a start."""
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
    """Committed tokens of a round that starts at each of M positions, as far as a draft of K tokens can tell.

    AL_t = 1 + Σ_{k≤K} 1{token t + k − 1 is in the draft at depth k} Π_{j<k} 1{token t + j − 1 is an inner node of it}:
    a draft does not go on after a leaf.

    Args:
        hit: [N, M + K − 1, K] as in `Trace`.

    Returns:
        [M, N] in [1, K + 1].
    """
    along = along_drafts(hit)
    going = np.concatenate([np.ones_like(along[..., :1]), along[..., :-1] == INNER], axis=2).cumprod(axis=2)
    return 1 + (going * (along > 0)).sum(axis=2).T


def extrapolated_depths(values: AnyArray, reach: AnyArray, K: int) -> AnyArray:
    """[N, S, D] of the first D draft depths → [N, S, K]: deeper proposals are taken to be as good as at depth D. An arm
    that drafts at most `reach` [N] tokens has none beyond.

    The scores of consecutive tokens then say how far a draft would go on, without deeper scoring.
    """
    deeper = np.repeat(values[:, :, -1:], K - values.shape[2], axis=2)
    return np.where(np.arange(K) < reach[:, None, None], np.concatenate([values, deeper], axis=2), 0)


def geometric_length(gamma: Array, K: AnyArray) -> Array:
    """1 + Σ_{k≤K} γ^k: expected committed tokens of a round with K draft tokens, each accepted with probability γ
    (Leviathan et al. 2023, Eq. 1). γ and K [N] are given per arm."""
    depths = np.arange(1, K.max() + 1)
    return 1 + (gamma[:, None] ** depths * (depths <= K[:, None])).sum(axis=1)


def settled_positions(values: Array, estimator: Literal["product", "realised"], below: float) -> int:
    """Number of positions, from the first on, with drafts that are all over or go on with a probability under `below`.
    Later tokens would add at most K · `below` to their lengths (with `realised`, nothing).

    Args:
        values: [N, T, K] acceptance γ of the known tokens, or hits, as in `length_loss`. A draft does not go on after a
            value that is not finite.
    """
    _, T, K = values.shape
    unknown = np.full((len(values), K - 1, K), INNER if estimator == "realised" else 1.0)
    along = along_drafts(np.concatenate([np.nan_to_num(values), unknown], axis=1))
    going = along == INNER if estimator == "realised" else along
    still = going.prod(axis=2).max(axis=0) >= below
    still[: max(T - K + 1, 0)] = False  # all of their tokens are known
    return int(still.argmax()) if still.any() else T


def length_loss(values: Array, estimator: Literal["product", "realised"] = "product") -> Array:
    """[M, N] f = 1 − AL/(K + 1) in [0, 1), with AL from `expected_length` or `realised_length`."""
    length = expected_length(values) if estimator == "product" else realised_length(values)
    return 1 - length / (values.shape[2] + 1)


def per_second(losses: Array, costs: Sequence[float], step: float) -> Array:
    """[M, N] losses ℓ → losses per second, 1 − (1 − ℓ) min(step/c_i, 1). `step` is the seconds of a plain decoding
    step; no round takes less.

    For expected lengths this puts AL/c in place of AL. Rounds renew the game, so in the long run an arm alone decodes
    E[AL]/c tokens per second. The mean of c/AL, seconds per token, is larger than c/E[AL], the more so the more lengths
    vary.
    """
    return 1 - (1 - losses) * np.minimum(step / np.asarray(costs), 1)


def with_failures(losses: Array, kept: Sequence[float]) -> Array:
    """[M, N] losses of drafts that are made → losses that count failures: 1 − (1 − ℓ) s_i, with s_i the share of an
    arm's rounds in which it did not fail. An arm that has always failed costs 1, however good its scores are."""
    return 1 - (1 - losses) * np.asarray(kept)


def usable(losses: Array) -> tuple[Array, NDArray[np.bool_]]:
    """Losses [M, N] with 1 in place of values that are not finite, and [M] whether any arm had a finite one.

    An arm without a usable score is worth nothing; the others are compared all the same.
    """
    finite = np.isfinite(losses)
    return np.where(finite, losses, 1.0), np.any(finite, axis=1)
