"""Result document of `specctl export`, and the check of its output directory."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specctl.drafters import checkpoint
from specctl.engines.corpora import PublishedCorpus
from specctl.errors import UsageError
from specctl.measuring.served_costs import Tuning
from specctl.recipe import ExportRecipe

RECORD = "export.json"
"""File in the output directory that says where the export comes from. A directory with this file may be overwritten."""


@dataclass(frozen=True)
class ExportResult:
    """The result document of `export`.

    Attributes:
        output: the output directory. It is the drafter's own directory, with no files written, if servers were given a
            corpus or the engine drafts from our format.
        max_difference: largest difference between the original and the drafter read back from the output, over all
            logits and activations of draft steps 1 … `tokens`; null without --check.
        commands: shell commands that put the output to use.
        published: corpora that servers were given.
        pushed: address of the repository that has the files, or None without --push.
    """

    drafter: str
    family: str
    to: str
    output: str
    files: list[str]
    params: int
    tokens: int
    max_difference: float | None
    tuning: Tuning | None
    commands: list[str]
    notes: list[str]
    published: list[PublishedCorpus] = field(default_factory=list)
    pushed: str | None = None


def record(recipe: ExportRecipe, drafter: checkpoint.Checkpoint, commands: list[str]) -> dict[str, Any]:
    """Content of export.json."""
    origin = {"drafter": str(recipe.source.absolute()), "to": recipe.to, "target": drafter.config["target"]}
    return origin | {"commands": commands}


def check_free(place: Path, overwrite: bool) -> None:
    """Raise UsageError if the output directory is taken; only an earlier export is ever replaced."""
    if not place.exists() or (place.is_dir() and not any(place.iterdir())):
        return
    if not (place / RECORD).is_file():
        raise UsageError(f"{place} exists and was not written by specctl export", hint="choose another --output-dir")
    if not overwrite:
        raise UsageError(f"{place} exists", hint="--overwrite replaces it")
