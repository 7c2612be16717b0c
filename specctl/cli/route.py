"""`specctl route`: its flags, checks, plan and table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from specctl.cli.command import recipe_command, run_or_plan
from specctl.cli.output import cell, table

if TYPE_CHECKING:
    from specctl.recipe.route import RouteRecipe

FLAGS = ("server", "listen", "algo", "seeds", "target", "output_dir", "overwrite")
EXAMPLE = "specctl route --server http://a:8000,http://b:8000 --listen 0.0.0.0:8100"

COLUMNS = {
    "server": "server",
    "engine": "engine",
    "requests": "requests",
    "share": "share",
    "mat": "mat",
    "tokens": "tokens",
    "failures": "failed",
}


def register(app: typer.Typer) -> None:
    recipe_command(app, "route", FLAGS, EXAMPLE)(route)


def route(recipe: RouteRecipe, dry_run: bool) -> None:
    """Send each request to the server with the drafter that suits its prompt. It learns from the servers' counters.

    The servers have the same model and different drafters. A signal ends the run."""
    from specctl.cli import checks
    from specctl.selection import dispatch

    dispatch.check(recipe.algo)
    recipe.check_servers()
    if recipe.output_dir:
        checks.check_output("route", recipe.output_dir, overwrite=recipe.overwrite)
    run_or_plan("route", recipe, dry_run, lambda: steps(recipe), show, "run_dir")


def steps(recipe: RouteRecipe) -> list[str]:
    """Return the plan in words. No server is asked."""
    from specctl.cli import checks

    if "target" in recipe.model_fields_set:
        checks.target_config(recipe.target)
    return [
        f"check that {', '.join(recipe.server.urls)} serve the same model",
        f"accept requests at {recipe.listen}, and route each to the server that {recipe.algo[0]} chooses by the "
        "acceptance of earlier drafts",
    ]


def show(document: dict[str, Any]) -> Any:
    """Render one row per server, and the totals."""
    from rich.console import Group

    rows = [[_shown(name, row[name]) for name in COLUMNS] for row in document["servers"]]
    decided = document["decide_us_p50"]
    return Group(
        table(*COLUMNS.values(), rows=rows),
        f"{document['requests']} texts routed by {document['algo']}, mat {cell(document['mat'])}"
        + (f", {decided / 1000:.2f} ms per choice" if decided is not None else ""),
        f"run: {cell(document['run_dir'])}",
    )


def _shown(name: str, value: Any) -> Any:
    return f"{100 * value:.0f} %" if name == "share" and value is not None else value
