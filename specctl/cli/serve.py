"""`specctl serve`: its flags, checks, plan and table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from specctl.cli.command import recipe_command, run_or_plan
from specctl.cli.options import TARGET
from specctl.cli.output import cell, table

if TYPE_CHECKING:
    from specctl.recipe import ServeRecipe

FLAGS = ("drafters", "pool", "strict", "choose", "server", "listen", *TARGET, "output_dir", "overwrite")
EXAMPLE = "specctl serve --target MODEL --drafter drafters/sql-eagle3+lookup --listen 127.0.0.1:8000"
COLUMNS = {
    "drafter": "drafter",
    "texts": "texts",
    "rounds": "rounds",
    "tokens": "tokens",
    "accepted": "accepted",
    "mat": "mat",
}


def register(app: typer.Typer) -> None:
    recipe_command(app, "serve", FLAGS, EXAMPLE)(serve)


def serve(recipe: ServeRecipe, dry_run: bool) -> None:
    """Serve a target in OpenAI's protocol, with a drafter, or with a pool from which a policy chooses for each text.

    With --server, running engines answer, and the policy chooses one of them for each text.

    / shows what it does, /metrics is for Prometheus. A signal ends it."""
    from specctl.cli import checks
    from specctl.selection import dispatch
    from specctl.selection.policies import registry

    if recipe.server.urls:
        dispatch.check([recipe.choose])
    registry.check([recipe.choose])
    checks.check_drafters(recipe.drafters)
    if recipe.output_dir:
        checks.check_output("serve", recipe.output_dir, overwrite=recipe.overwrite)
    run_or_plan("serve", recipe, dry_run, lambda: steps(recipe), show, "run_dir")


def steps(recipe: ServeRecipe) -> list[str]:
    """Return the plan in words."""
    from specctl.cli import checks

    if recipe.server.urls:
        if "target" in recipe.model_fields_set:
            checks.target_config(recipe.target)
        urls = ", ".join(recipe.server.urls)
        how = f", each by the server that {recipe.choose} chooses" if len(recipe.server.urls) > 1 else ""
        return [f"check that {urls} serve the same model", f"answer requests at {recipe.listen}{how}"]
    drafts = f"draft with {recipe.drafters[0]}" if recipe.drafters else "decode without a drafter"
    if recipe.chooses:
        from specctl.selection.arms import pool_paths

        drafts = f"choose among {', '.join(pool_paths(recipe))} for every text, by {recipe.choose}"
    return [
        checks.check_target(recipe.target),
        f"answer requests at {recipe.listen}, up to {recipe.slots} texts at a time, and {recipe.waiting} may wait",
        drafts,
    ]


def show(document: dict[str, Any]) -> Any:
    """Render one row per drafter, and the totals."""
    from rich.console import Group

    rows = [[row[name] for name in COLUMNS] for row in document["drafters"]]
    return Group(
        table(*COLUMNS.values(), rows=rows),
        f"{document['tokens']} tokens in {document['seconds']:.0f} s, mat {cell(document['mat'])}",
        f"run: {cell(document['run_dir'])}",
    )
