"""Plan and result of `specctl select --server`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specctl.cli.output import cell, table

if TYPE_CHECKING:
    from specctl.recipe import SelectRecipe

COLUMNS = {
    "server": "server",
    "engine": "engine",
    "requests": "requests",
    "share": "share",
    "mat": "mat",
    "tokens": "tokens",
    "failures": "failed",
}


def steps(recipe: SelectRecipe) -> list[str]:
    """Return the plan in words. No server is asked."""
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
