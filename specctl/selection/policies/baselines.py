"""Policies that learn nothing: a fixed arm, and a uniform draw."""

from specctl.errors import UsageError
from specctl.recipe.select import PolicyRecipe
from specctl.selection.policies.policy import Arms, Numbers, Policy, one_hot


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
