"""`specctl replay`: its flags, checks and plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specctl.cli import checks
from specctl.cli.command import Operand, recipe_command, run_or_plan
from specctl.cli.select import presets, show

if TYPE_CHECKING:
    from specctl.lab.replay.recipe import ReplayRecipe

FLAGS = ("algo", "reset", "session", "seeds", "seed", "output_dir", "overwrite")


@recipe_command(
    "replay",
    FLAGS,
    "specctl replay table.parquet --algo cgp-ucb,hedgespec --seeds 0,1,2",
    Operand("replay", "File of the table.", "TABLE"),
)
def replay(recipe: ReplayRecipe, dry_run: bool) -> None:
    """Play policies on a recorded table in seconds, beside every arm and the oracle. No model is loaded.

    `specctl record` writes the table. Speeds are modeled from the costs in the table."""
    from specctl.selection.policies import registry

    registry.check(recipe.algo)
    checks.check_run_dir("replay", recipe)
    run_or_plan("replay", recipe, dry_run, lambda: steps(recipe), show, "run_dir")


def steps(recipe: ReplayRecipe) -> list[str]:
    from specctl.lab.replay.run import arms_of

    arms_of(recipe)
    times = f", with {len(recipe.seeds)} seeds" if len(recipe.seeds) > 1 else ""
    return [
        f"play on {recipe.table} with {', '.join(recipe.algo)}, reset after every {recipe.reset}{times}",
        *presets(recipe.algo, recipe.game),
        "for comparison: every arm, the oracle, draft-all",
    ]
