"""Feature vectors of prompts, from the target's hidden states that the prefill computes anyway."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specctl.decoding.target import Target

FEATURES = 256  # dimensions per prompt; longer vectors are projected

Features = NDArray[np.float64]


def features_of(states: Tensor) -> Features:
    """[D] features of a prompt with states [P, F]: their mean, projected if it is longer than `FEATURES` (Achlioptas
    2003)."""
    mean = states.float().mean(0).nan_to_num().cpu()
    if len(mean) > FEATURES:
        mean = mean @ _projection(len(mean))
    return mean.double().numpy()


def width(target: Target, taps: Sequence[int]) -> int:
    """Number D of the features that a prompt has at layers `taps`."""
    return min(len(taps) * target.hidden_size, FEATURES)


@functools.lru_cache(maxsize=4)
def _projection(size: int) -> Tensor:
    """[size, D] random signs, scaled so that the projection preserves lengths."""
    signs = np.random.default_rng(0).choice([-1.0, 1.0], (size, FEATURES))
    return torch.from_numpy(signs / math.sqrt(FEATURES)).float()


@dataclass(frozen=True)
class PromptClusters:
    """Clusters of prompts, each with a mean feature vector.

    Attributes:
        means: [n, D] mean features of each kind.
        errors: [n] standard error of each mean: the average distance of the prompts from it ÷ √(number of prompts).
        taps: indices of the target layers with these states; () if unknown.
    """

    means: Features
    errors: Features
    taps: tuple[int, ...] = ()

    @classmethod
    def none(cls) -> PromptClusters:
        return cls(np.zeros((0, 0)), np.zeros(0))

    @classmethod
    def of(cls, kinds: Iterable[tuple[Sequence[float], float]], taps: tuple[int, ...] = ()) -> PromptClusters:
        """Build kinds from (mean, error) pairs."""
        pairs = list(kinds)
        if not pairs:
            return cls.none()
        means, errors = (np.array(part) for part in zip(*pairs, strict=True))
        return cls(means, errors, taps)

    @property
    def pairs(self) -> list[tuple[list[float], float]]:
        """The (mean, error) pairs: the inverse of `of`."""
        return list(zip(self.means.tolist(), self.errors.tolist(), strict=True))


@torch.inference_mode()
def features_at(target: Target, prompts: Sequence[list[int]], taps: tuple[int, ...]) -> list[Features]:
    """[D] features of each prompt, from the target's states at layers `taps`.

    With tensor parallelism, all ranks of the target must call this.
    """
    found = []
    for prompt in prompts:
        fitting = prompt[: target.context_length - 1]
        _, _, tapped = target.prefill([fitting], target.model.new_cache(1, len(fitting)), taps)
        assert tapped is not None
        found.append(features_of(tapped[0]))
    return found


def cluster_of(found: Sequence[Features]) -> tuple[Features, float]:
    """Mean [D] of the features [D] of prompts, and its standard error."""
    features = np.stack(found)
    mean = features.mean(0)
    return mean, float(np.linalg.norm(features - mean, axis=1).mean()) / math.sqrt(len(features))
