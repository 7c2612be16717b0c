"""Features of prompts: what the target's states say of one, which the prefill has computed anyway."""

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

FEATURES = 256  # of a prompt; more are projected

Features = NDArray[np.float64]


def features_of(states: Tensor) -> Features:
    """[D] features of a prompt, whose states are [P, F]: their mean, projected where it is long (Achlioptas 2003)."""
    mean = states.float().mean(0).nan_to_num().cpu()
    if len(mean) > FEATURES:
        mean = mean @ _projection(len(mean))
    return mean.double().numpy()


@functools.lru_cache(maxsize=4)
def _projection(size: int) -> Tensor:
    """[size, D] random signs, scaled so that lengths stay as they are."""
    signs = np.random.default_rng(0).choice([-1.0, 1.0], (size, FEATURES))
    return torch.from_numpy(signs / math.sqrt(FEATURES)).float()


@dataclass(frozen=True)
class Kinds:
    """Kinds of prompts.

    Attributes:
        means: [n, D] mean features of each.
        errors: [n] how far other prompts of a kind may have another mean: their distance from it, by the root of their
            number.
        taps: the target's layers whose states these are; () where that is not told.
    """

    means: Features
    errors: Features
    taps: tuple[int, ...] = ()

    @classmethod
    def none(cls) -> Kinds:
        return cls(np.zeros((0, 0)), np.zeros(0))

    @classmethod
    def of(cls, kinds: Iterable[tuple[Sequence[float], float]], taps: tuple[int, ...] = ()) -> Kinds:
        """Kinds from (mean, error) pairs."""
        pairs = list(kinds)
        if not pairs:
            return cls.none()
        means, errors = (np.array(part) for part in zip(*pairs, strict=True))
        return cls(means, errors, taps)

    @property
    def pairs(self) -> list[tuple[list[float], float]]:
        """The inverse of `of`."""
        return list(zip(self.means.tolist(), self.errors.tolist(), strict=True))


@torch.inference_mode()
def kind_of(target: Target, prompts: Sequence[list[int]], taps: tuple[int, ...]) -> tuple[Features, float]:
    """Mean [D] of the features of prompts, and its error, by the target's states of these layers.

    All processes that hold a slice of the target call this.
    """
    found = []
    for prompt in prompts:
        fitting = prompt[: target.context_length - 1]
        _, _, tapped = target.prefill([fitting], target.model.new_cache(1, len(fitting)), taps)
        assert tapped is not None
        found.append(features_of(tapped[0]))
    features = np.stack(found)
    mean = features.mean(0)
    return mean, float(np.linalg.norm(features - mean, axis=1).mean()) / math.sqrt(len(prompts))
