"""Policy interface: a policy chooses an arm every round, and learns from a round's reward or from every token's losses.
The policies `fixed` and `random` learn nothing.

Policies compute with lists of plain numbers: between two rounds of decoding the caches are cold, and every operation on
a small array costs 5 microseconds there, as much as a whole loop over seven arms.
"""

import hashlib
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from specctl.errors import UsageError
from specctl.recipe.select import PolicyRecipe

Array = NDArray[np.float64]
AnyArray = NDArray[Any]  # any floating type, or booleans: scores and traces
Numbers = list[float]  # one for each arm
Learns = Literal["nothing", "reward", "losses"]
Scale = Literal["unit", "tokens"]
Play = Literal["sample", "argmax"]


@dataclass(frozen=True)
class Arms:
    """The arms of a game: their number `count` (N), the `depth` (K) of their longest draft, and the seed of the draws.

    `plain`: the arm that drafts nothing, if there is one.
    """

    count: int
    depth: int
    seed: int
    plain: int | None = None


def seed_of(seed: int, query: str) -> int:
    """The seed of a game that begins with this query: live decoding and replay draw the same arms."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {query}".encode(), digest_size=8).digest())


class Policy(ABC):
    """A rule that plays N arms; plain numbers in, plain numbers out, no torch.

    A subclass defines `_weigh`, and calls `_changed` whenever its knowledge changes: the weights are computed once per
    change. `learns` is the kind of its feedback: nothing; the reward of the arm it played (a bandit); or the losses of
    all arms in [0, 1] (full information). `scale` is the scale of rewards in the policy's paper: [0, 1], or tokens in
    [1, K + 1].
    """

    learns: ClassVar[Learns] = "nothing"
    scale: ClassVar[Scale] = "unit"
    # [N]: the arm of the next reward was drawn from these probabilities. None: from `weights`, which have not changed.
    drawn_from: Numbers | None = None

    def __init__(self, arms: Arms, play: Play):
        self.arms = arms
        self.play = play
        self._generator = np.random.default_rng(arms.seed)
        self._weights: Numbers | None = None
        self._cumulated: Numbers | None = None

    @property
    def takes_turns(self) -> bool:
        """Whether arms are pulled in turn, so that the next choice needs the rewards of all earlier rounds."""
        return False

    @abstractmethod
    def _weigh(self) -> Numbers:
        """[N] probabilities; called once after a change."""

    def _changed(self) -> None:
        self._weights = self._cumulated = None

    def weights(self) -> Numbers:
        """[N] probabilities of playing each arm next, one-hot for a deterministic rule. Do not change the list."""
        if self._weights is None:
            self._weights = self._weigh()
        return self._weights

    def choose(self) -> int:
        """The arm to play this round."""
        weights = self.weights()
        if self.play == "argmax":
            return argmax(weights)
        if self._cumulated is None:
            self._cumulated = list(accumulate(weights))
        # Scaled by the sum, which rounding keeps from being exactly 1; bisecting to the right skips arms of weight 0.
        drawn = bisect_right(self._cumulated, self._generator.random() * self._cumulated[-1])
        return min(drawn, len(weights) - 1)

    def reward(self, arm: int, reward: float) -> None:  # noqa: B027  most rules learn from one of the two only
        """Learn from the reward of a round of `arm`, on the policy's `scale`. Bandits only."""

    def losses(self, losses: Sequence[float]) -> None:  # noqa: B027
        """Learn from the losses [N] in [0, 1] of all arms at one token. Full information only."""

    def forget(self) -> None:  # noqa: B027
        """Begin again with nothing learned: the world has changed. Full information only."""


def one_hot(arm: int, count: int) -> Numbers:
    """[count] all weight on one arm."""
    return [0.0] * arm + [1.0] + [0.0] * (count - arm - 1)


def argmax(values: Sequence[float]) -> int:
    """The index of the largest value, the first one in a tie."""
    return values.index(max(values))


def normalized(weights: Iterable[float]) -> Numbers:
    """Scale weights to the sum 1."""
    weights = list(weights)
    total = sum(weights)
    return [weight / total for weight in weights]


def dot(a: Iterable[float], b: Iterable[float]) -> float:
    """Σ a b."""
    return sum(map(mul, a, b))


class FixedArm(Policy):
    """`fixed`: always the same arm."""

    def __init__(self, arms: Arms, options: PolicyRecipe):
        super().__init__(arms, play="argmax")
        if options.arm >= arms.count:
            raise UsageError(
                f"arm {options.arm} does not exist: there are {arms.count} arms", hint=f"use 0 to {arms.count - 1}"
            )
        self._arm = options.arm

    def _weigh(self) -> Numbers:
        return one_hot(self._arm, self.arms.count)


class Random(Policy):
    """`random`: all arms with equal probability, drawn anew each round."""

    def __init__(self, arms: Arms, options: PolicyRecipe):
        super().__init__(arms, play="sample")

    def _weigh(self) -> Numbers:
        return [1 / self.arms.count] * self.arms.count
