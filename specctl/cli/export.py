"""`specctl export`: a drafter as vLLM, SGLang, speculators or a reference repository reads it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from specctl.cli.command import carry_out, recipe_command
from specctl.cli.output import cell, fields

if TYPE_CHECKING:
    from specctl.recipe import ExportRecipe

FLAGS = ("to", "check", "target", "output_dir", "overwrite")
SHOWN = ("family", "to", "output", "params", "max_difference")
EXAMPLE = "specctl export drafters/sql-eagle3 --to vllm --check"


def register(app: typer.Typer) -> None:
    recipe_command(app, "export", FLAGS, EXAMPLE, "drafter", "Drafter directory.")(export)


def export(recipe: ExportRecipe, dry_run: bool) -> None:
    """Write a drafter for vLLM, SGLang, speculators or transformers, and print the command that serves it."""
    from specctl.cli import plan

    plan.check_directory(str(recipe.source))
    plan.check_output("export", recipe.output, overwrite=recipe.overwrite)
    carry_out("export", recipe, dry_run, lambda: steps(recipe), show, "output")


def steps(recipe: ExportRecipe) -> list[str]:
    """The plan of `export`, in words."""
    checked = [f"read it back and compare logits of draft steps 1 … {recipe.tokens}"] if recipe.check else []
    return [f"verify {recipe.drafter}", f"write it for {recipe.to} to {recipe.output}", *checked]


def show(document: dict[str, Any]) -> Any:
    """The files that were written, and how they are served."""
    from rich.console import Group

    facts = {name: document[name] for name in SHOWN if document[name] is not None}
    return Group(fields(facts), "", *(cell(line) for line in (*document["notes"], *document["commands"])))
