"""Recipe of `specctl replay`."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, NonNegativeInt, PositiveInt

from specctl.errors import UsageError
from specctl.recipe.sections import CommandRecipe, LocalPath, Names, Section, Seeds
from specctl.recipe.select import ArmRecipe, GameRecipe, PolicyRecipe


class SeedRecipe(Section):
    """The seed of the policies' draws, under the key that sampling has in live decoding."""

    seed: NonNegativeInt = 0


def _without_shapes(arms: ArmRecipe) -> ArmRecipe:
    if arms.shapes:
        raise ValueError("shapes: a table has each drafter in one shape: set drafting when it is recorded")
    return arms


RecordedArms = Annotated[ArmRecipe, AfterValidator(_without_shapes)]
"""The arms of a table, which cannot change their shapes."""


class ReplayRecipe(CommandRecipe):
    """`specctl replay`: policies on a recorded table, with the games of live decoding."""

    replay: LocalPath | None = None  # file of the table
    sampling: SeedRecipe = SeedRecipe()
    algo: Annotated[Names, Field(min_length=1)] = ["cgp-ucb"]  # one policy, or several side by side
    arms: RecordedArms = ArmRecipe()
    policy: PolicyRecipe = PolicyRecipe()
    game: GameRecipe = GameRecipe()
    reset: Literal["query", "session", "stream"] = "query"  # when a policy forgets
    session: PositiveInt = 8  # prompts per session of the default order; a table has sessions of its own
    seeds: Seeds = [0]  # repeats with other draws
    pool_sizes: list[PositiveInt] = []  # also play with this many of the arms, on several subsets each
    overwrite: bool = False

    @property
    def table(self) -> Path:
        """File of the table. Raises UsageError if none is named."""
        if self.replay is None:
            raise UsageError("replay needs a table", hint="specctl replay table.parquet; specctl record writes one")
        return self.replay
