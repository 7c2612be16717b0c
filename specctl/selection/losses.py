"""Losses of full information: what every arm would have cost at a position, from its acceptance probabilities."""

from __future__ import annotations

import numpy as np

from specctl.selection.policy import Array


def expected_length(gamma: Array) -> Array:
    """Expected number of committed tokens of a round that starts at each of M positions (HedgeSpec, Theorem 3).

    AL_t = 1 + Σ_{k≤K} Π_{j≤k} γ[t + j − 1 at depth j]: the draft's token j is token t + j − 1 of the text.

    Args:
        gamma: [N, M + K − 1, K] acceptance of each arm's proposal for each token, at each draft depth.

    Returns:
        [M, N] in [1, K + 1].
    """
    K = gamma.shape[2]
    # [N, M, K, K]: the K tokens from each start on, at all depths; the diagonal has token j at depth j.
    windows = np.lib.stride_tricks.sliding_window_view(gamma, K, axis=1)
    along = np.diagonal(windows, axis1=2, axis2=3)
    return 1 + along.cumprod(axis=2).sum(axis=2).T


def length_loss(gamma: Array) -> Array:
    """[M, N] f = 1 − AL/(K + 1) in [0, 1), of the positions of `expected_length`."""
    return np.maximum(1 - expected_length(gamma) / (gamma.shape[2] + 1), 0)
