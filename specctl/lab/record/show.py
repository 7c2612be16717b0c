"""`specctl record`: its flags, checks and plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specctl.cli import checks
from specctl.cli.command import Operand, recipe_command, run_or_plan
from specctl.cli.options import SAMPLING, TARGET
from specctl.cli.select import show, stream_steps, with_pool
from specctl.replaced_directories import check_outside

if TYPE_CHECKING:
    from specctl.lab.record.recipe import RecordRecipe

FLAGS = (
    *("pool", "drafters", "strict", "domain", "prompts", "limit", "session", *TARGET, *SAMPLING),
    *("output_dir", "resume", "overwrite"),
)


@recipe_command(
    "record", FLAGS, "specctl record table.parquet --pool ./drafters", Operand("record", "File of the table.", "TABLE")
)
def record(recipe: RecordRecipe, dry_run: bool) -> None:
    """Record every drafter's drafts at every position of the answers, in a table for `replay`."""
    from specctl.lab.recorded import recording

    recipe, pool = with_pool(recipe)
    # Checked before the run directory: --overwrite would replace both.
    recording.check_free(recipe.table, resume=recipe.resume, overwrite=recipe.overwrite)
    check_outside(recipe.table)
    checks.check_writable(recipe.table.parent)
    checks.check_run_dir("record", recipe)
    run_or_plan("record", recipe, dry_run, lambda: steps(recipe, pool), show, "run_dir")


def steps(recipe: RecordRecipe, pool: list[str]) -> list[str]:
    return [
        *stream_steps(recipe, pool),
        f"record in {recipe.table} what {', '.join(pool)} would draft at every position",
    ]
