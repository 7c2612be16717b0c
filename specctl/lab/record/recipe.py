"""Recipe of `specctl record`."""

from pathlib import Path

from specctl.errors import UsageError
from specctl.lab.replay.recipe import RecordedArms
from specctl.recipe.sections import LocalPath, ResumableRecipe
from specctl.recipe.select import ArmRecipe, PoolRecipe


class RecordRecipe(PoolRecipe, ResumableRecipe):
    """`specctl record`: a table of all drafters of a pool at all positions of the answers."""

    record: LocalPath | None = None  # file of the table
    arms: RecordedArms = ArmRecipe()

    @property
    def table(self) -> Path:
        """File of the table. Raises UsageError if none is named."""
        if self.record is None:
            raise UsageError("record needs a file for the table", hint="specctl record table.parquet")
        return self.record
