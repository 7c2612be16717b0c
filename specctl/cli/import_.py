"""`specctl import`: convert a published draft head into a specctl drafter."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specctl import regular_files
from specctl.cli import checks
from specctl.cli.command import Operand, recipe_command, run_or_plan
from specctl.cli.options import DATA, TARGET
from specctl.cli.output import fields, with_next
from specctl.errors import CheckpointError, UsageError, near_path
from specctl.hub import DOWNLOAD

if TYPE_CHECKING:
    from specctl.recipe import ImportRecipe

FLAGS = ("format", *TARGET, *DATA, "no_probe", "output_dir", "overwrite")
SHOWN = ("format", "family", "params", "drafter", "notes")


@recipe_command(
    "import",
    FLAGS,
    "specctl import ./EAGLE3-LLaMA3.1-Instruct-8B --target meta-llama/Llama-3.1-8B-Instruct",
    Operand("head", "Directory or GGUF file of a published head."),
)
def import_head(recipe: ImportRecipe, dry_run: bool) -> None:
    """Convert a published head into a drafter, and try it.

    Reads EAGLE, EAGLE-3, P-EAGLE, DFlash, DSpark, MTP, Hydra, Medusa, speculators, Hugging Face, and llama.cpp's GGUF.
    """
    check_head(recipe.source)
    checks.check_data(recipe.data)
    checks.check_output("import", recipe.output, overwrite=recipe.overwrite)
    run_or_plan("import", recipe, dry_run, lambda: steps(recipe), partial(show, recipe=recipe), "drafter")


def check_head(source: Path) -> None:
    """Raise UsageError for a head that is not there, and CheckpointError for a directory without a head's files."""
    from specctl.drafters import checkpoint

    if source.suffix == ".gguf" and source.is_file():
        return
    if (source / checkpoint.INFO).is_file():
        raise UsageError(f"{source} is a drafter of specctl already", hint=f"use it: --drafter {source}")
    if not source.is_dir():
        raise UsageError(regular_files.no_directory("head", source), near_path(source) + DOWNLOAD)
    if not (source / "config.json").is_file() and not any(source.glob("*.gguf")):
        raise CheckpointError(f"{source} has no config.json", hint="a head has config.json and weights, or a GGUF file")


def steps(recipe: ImportRecipe) -> list[str]:
    reason = checks.engine_only(recipe.target)
    target = f"target {recipe.target.name} is loaded without its layers: {reason}"
    what = f"test it on {recipe.probe.prompts} prompts of {recipe.data.prompts or recipe.data.domain[0]}"
    if reason is not None:
        what = "do not test it: only an engine can run the target"
    return [
        target if reason is not None else checks.check_target(recipe.target),
        f"read {recipe.head} (format {recipe.format}), and check it against the target",
        *([what] if recipe.probe.enabled else []),
        f"write the drafter to {recipe.output}",
    ]


def show(document: dict[str, Any], recipe: ImportRecipe) -> Any:
    facts = {name: document[name] for name in SHOWN if document[name]}
    shown = fields(facts | {f"probe: {name}": value for name, value in (document["probe"] or {}).items()})
    if not document["probe"]:
        return shown
    drafters = ["--drafter", document["drafter"], "--drafter", "lookup"]
    return with_next(shown, ["specctl", "eval", *checks.target_flags(recipe.target), *drafters])
