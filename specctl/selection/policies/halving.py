"""Sequential halving: pull the surviving arms equally often, drop the worse half, and so on; then keep one arm."""

from collections.abc import Sequence
from math import ceil, floor, log, log2
from typing import ClassVar

from specctl.recipe.select import PolicyRecipe
from specctl.selection.policies.policy import Arms, Learns, Numbers, Policy, one_hot


def halvings(N: int, literal: bool) -> int:
    """Number of times that N arms are halved: ⌈log₂ N⌉ leaves one arm; the printed ⌊log₂ N⌋ leaves two of five."""
    return floor(log2(N)) if literal else ceil(log2(N))


def survivors(arms: list[int], means: Sequence[float], literal: bool) -> list[int]:
    """The better ⌈n/2⌉ of n arms, the lower id first in a tie; `literal` keeps the worse half (MetaSD, Algorithm 5)."""
    order = sorted(arms, key=lambda arm: (means[arm] if literal else -means[arm], arm))
    return sorted(order[: ceil(len(arms) / 2)])


class SequentialHalving(Policy):
    """`metasd-sh`: every survivor is pulled `period` times, in order, before each halving (MetaSD, Algorithm 5).

    It departs from the printed rule, which `literal` follows, in two ways. It keeps the better half, and its means are
    over all pulls of an arm. The printed means are over the pulls since the last halving, a single one if `period` is
    1. If several arms are left in the end, as with `literal`, they take turns.
    """

    learns: ClassVar[Learns] = "reward"

    def __init__(self, arms: Arms, options: PolicyRecipe):
        super().__init__(arms, play="argmax")
        self.options = options
        self.n = [0] * arms.count
        self.total = [0.0] * arms.count
        self.alive = list(range(arms.count))
        self.left = halvings(arms.count, options.literal)
        self.pulled = 0  # since the last halving

    @property
    def takes_turns(self) -> bool:
        return len(self.alive) > 1

    def _pulls(self) -> int:
        """Number of pulls of each survivor before the next halving."""
        return self.options.period

    def reward(self, arm: int, reward: float) -> None:
        self.n[arm] += 1
        self.total[arm] += reward
        self.pulled += 1
        if self.left and self.pulled >= len(self.alive) * self._pulls():
            means = [total / max(n, 1) for total, n in zip(self.total, self.n, strict=True)]
            self.alive = survivors(self.alive, means, self.options.literal)
            self.left -= 1
            self.pulled = 0
            if self.options.literal:
                self.n, self.total = [0] * self.arms.count, [0.0] * self.arms.count
        self._changed()

    def _weigh(self) -> Numbers:
        return one_hot(self.alive[self.pulled % len(self.alive)], self.arms.count)


class ExploreThenCommit(SequentialHalving):
    """`metasd-petc`: halving for about B0 = c ln B rounds, at least a pull each; then commit (MetaSD, Algorithm 4)."""

    def _pulls(self) -> int:
        c = self.options.petc_c or 2 * self.arms.count
        budget = c * log(self.options.horizon)
        return max(1, floor(budget / (len(self.alive) * halvings(self.arms.count, self.options.literal))))
