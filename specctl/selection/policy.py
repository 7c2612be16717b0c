"""What a policy is: it chooses an arm every round, and learns from what the round, or every token, has shown."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
AnyArray = NDArray[Any]  # of any floating type, or booleans: what scores and traces hold
Learns = Literal["nothing", "reward", "losses"]
Scale = Literal["unit", "tokens"]
Play = Literal["sample", "argmax"]


@dataclass(frozen=True)
class Arms:
    """What a policy is made for: `count` arms N, whose drafts are at most `depth` K long, and a seed."""

    count: int
    depth: int
    seed: int


def seed_of(seed: int, query: str) -> int:
    """The seed of a game that begins with this query: live decoding and replay draw the same arms."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {query}".encode(), digest_size=8).digest())


class Policy(Protocol):
    """A rule that plays N arms; plain numbers in, plain numbers out, no torch.

    `learns` says what it is told: nothing; the reward of the arm it played (a bandit); or the losses of all arms in
    [0, 1] (full information). `scale` is that of the rewards in the policy's paper: [0, 1], or tokens in [1, K + 1].
    """

    learns: ClassVar[Learns]
    scale: ClassVar[Scale]

    def weights(self) -> Array:
        """[N] probabilities of playing each arm next; one-hot where the rule is deterministic."""
        ...

    def choose(self) -> int:
        """The arm to play this round."""
        ...

    def reward(self, arm: int, reward: float) -> None:
        """A round of `arm` earned so much, on the policy's `scale`. Bandits only."""
        ...

    def losses(self, losses: Array) -> None:
        """What one token has cost each arm, [N] in [0, 1]. Full information only."""
        ...

    def state(self) -> dict[str, Any]:
        """All that it has learnt, and its generator, as JSON can hold it."""
        ...

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a `state`."""
        ...


class Weighted(ABC):
    """The half of a policy that is the same for all: weights are made once per change, an arm is drawn from them.

    A rule has `_weigh`, names what it has learnt in `learnt` (arrays and plain numbers), and calls `_changed` whenever
    that changes.
    """

    learns: ClassVar[Learns] = "nothing"
    scale: ClassVar[Scale] = "unit"
    learnt: ClassVar[tuple[str, ...]] = ()

    def __init__(self, arms: Arms, play: Play):
        self.arms = arms
        self.play = play
        self._generator = np.random.default_rng(arms.seed)
        self._weights: Array | None = None
        self._cumulated: list[float] | None = None

    @abstractmethod
    def _weigh(self) -> Array:
        """[N] probabilities; called once after a change."""

    def _changed(self) -> None:
        self._weights = self._cumulated = None

    def weights(self) -> Array:
        if self._weights is None:
            self._weights = self._weigh()
        return self._weights

    def choose(self) -> int:
        weights = self.weights()
        if self.play == "argmax":
            return int(weights.argmax())
        if self._cumulated is None:  # a list: between two rounds of decoding an operation on a small array is slow
            self._cumulated = list(accumulate(weights.tolist()))
        # Scaled by the sum, which rounding keeps from being exactly 1; `right` passes over arms of weight 0.
        drawn = bisect_right(self._cumulated, self._generator.random() * self._cumulated[-1])
        return min(drawn, len(weights) - 1)

    def reward(self, arm: int, reward: float) -> None:  # noqa: B027  most rules learn from one of the two only
        """Not a bandit: nothing to learn from a reward."""

    def losses(self, losses: Array) -> None:  # noqa: B027
        """Without full information: nothing to learn from losses."""

    def state(self) -> dict[str, Any]:
        held = {name: getattr(self, name) for name in self.learnt}
        plain = {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in held.items()}
        return {**plain, "generator": self._generator.bit_generator.state}

    def restore(self, state: dict[str, Any]) -> None:
        for name in self.learnt:
            old, new = getattr(self, name), state[name]
            setattr(self, name, np.array(new, old.dtype) if isinstance(old, np.ndarray) else new)
        self._generator.bit_generator.state = state["generator"]
        self._changed()


def one_hot(arm: int, count: int) -> Array:
    """[count] all weight on one arm."""
    weights = np.zeros(count)
    weights[arm] = 1.0
    return weights
