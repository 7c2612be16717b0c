"""What a policy is: it chooses an arm every round, and learns from what the round, or every token, has shown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Learns = Literal["nothing", "reward", "losses"]


@dataclass(frozen=True)
class Arms:
    """What a policy is made for: `count` arms N, whose drafts are at most `depth` K long, and a seed."""

    count: int
    depth: int
    seed: int


class Policy(Protocol):
    """A rule that plays N arms; plain numbers in, plain numbers out, no torch.

    `learns` says what it is told: nothing; the reward of the arm it played (a bandit); or the losses of all arms in
    [0, 1] (full information).
    """

    learns: ClassVar[Learns]

    def weights(self) -> Array:
        """[N] probabilities of playing each arm next; one-hot where the rule is deterministic."""
        ...

    def choose(self) -> int:
        """The arm to play this round."""
        ...

    def reward(self, arm: int, reward: float) -> None:
        """A round of `arm` earned so much. Bandits only; the scale of the reward is that of the policy's paper."""
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
