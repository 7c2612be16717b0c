"""The result of `specctl export`, and the directory that it goes to."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specctl.drafters import checkpoint
from specctl.engines.corpora import PublishedCorpus
from specctl.errors import UsageError
from specctl.measuring.served_costs import Tuning
from specctl.recipe import ExportRecipe

RECORD = "export.json"
"""Written beside the rest: where it comes from. A directory that has it may be overwritten."""


@dataclass(frozen=True)
class ExportResult:
    """The result document of `export`.

    `commands` put the directory to use; `max_difference` (None without --check) is how far the drafter read back from
    it is from the original, over all logits and activations of draft steps 1 … `tokens`. `published`: what servers have
    been given; then, and where an engine drafts from our own directory, nothing was written, and `output` is that.
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


def record(recipe: ExportRecipe, drafter: checkpoint.Checkpoint, commands: list[str]) -> dict[str, Any]:
    """The content of export.json."""
    origin = {"drafter": str(recipe.source.absolute()), "to": recipe.to, "target": drafter.config["target"]}
    return origin | {"commands": commands}


def check_free(place: Path, overwrite: bool) -> None:
    """Raise UsageError where something is in the way; only an export is ever replaced."""
    if not place.exists() or (place.is_dir() and not any(place.iterdir())):
        return
    if not (place / RECORD).is_file():
        raise UsageError(f"{place} exists and was not written by specctl export", hint="choose another --output-dir")
    if not overwrite:
        raise UsageError(f"{place} exists", hint="--overwrite replaces it")
