"""From a name or a directory to a drafter that is ready to propose."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, cast

from torch import Tensor, nn

from specctl.decoding.draft import Drafter, NoDraft
from specctl.decoding.target import Target
from specctl.drafters.lookup import Lookup
from specctl.errors import CheckpointError
from specctl.formats import checkpoint
from specctl.recipe import DraftingRecipe, TrainRecipe

# Family → module, imported when a drafter of it is loaded: a `Family`.
FAMILIES = {
    "eagle3": "specctl.drafters.eagle3",
    "hydra": "specctl.drafters.hydra",
    "medusa": "specctl.drafters.medusa",
    "lm": "specctl.drafters.lm",
}
WEIGHTLESS: dict[str, Callable[[DraftingRecipe], Drafter]] = {
    "none": lambda drafting: NoDraft(),
    "lookup": lambda drafting: Lookup(drafting.depth),
}
"""Drafters that are named, not loaded."""


class Family(Protocol):
    """The module of a family with weights. `config` is a checkpoint's config.json, `tensors` its weights."""

    def published(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """The module's state dict as a checkpoint stores it."""
        ...

    def restore(self, config: dict[str, Any], tensors: dict[str, Tensor]) -> nn.Module:
        """The trainable module; CheckpointError where weights and architecture do not fit."""
        ...

    def drafter(self, module: Any, target: Target, drafting: DraftingRecipe) -> Drafter:
        """Inference of the module, with a copy of its weights in the target's dtype."""
        ...

    def config(self, module: Any, target: dict[str, Any]) -> dict[str, Any]:
        """config.json of a checkpoint of this module; `target` is `Target.identity`."""
        ...

    def build(self, recipe: TrainRecipe, target: Target, frequent: Callable[[int], list[int]]) -> nn.Module:
        """A new module to train, started from the target where the family can. `frequent(n)`: a draft vocabulary of the
        n tokens most frequent in the training responses."""
        ...


def family(name: str) -> Family:
    """The module of a family."""
    return cast(Family, importlib.import_module(FAMILIES[name]))


def load_drafter(path_or_name: str, target: Target, drafting: DraftingRecipe) -> Drafter:
    """A drafter without weights by its name, or the one in a directory, checked against its manifest and the target.

    Raises:
        CheckpointError: there is no such drafter, it is damaged, of an unknown family, or made for another target.
    """
    if path_or_name in WEIGHTLESS:
        return WEIGHTLESS[path_or_name](drafting)
    path = Path(path_or_name).expanduser()
    if not os.path.lexists(path) and path.name == path_or_name:
        raise CheckpointError(
            f"no drafter {path_or_name!r}", hint=f"give one of {', '.join(WEIGHTLESS)}, or a drafter directory"
        )
    found = checkpoint.load(path)
    name = found.config["family"]
    if name not in FAMILIES:
        raise CheckpointError(f"drafter {path} is of family {name!r}", hint=f"known families: {', '.join(FAMILIES)}")
    checkpoint.check_target(found.config, target, str(path))
    return family(name).drafter(family(name).restore(found.config, found.tensors), target, drafting)


def find_pool(directory: str | Path) -> list[Path]:
    """Every drafter directory at or below `directory`, sorted by path.

    Raises:
        CheckpointError: nothing is there, or a link leads out of the directory.
    """
    root = Path(directory).expanduser()
    if not root.is_dir():
        raise CheckpointError(f"no pool directory at {root}", hint="specctl train-drafter writes to ./drafters")
    found: list[Path] = []
    for here, below, _ in os.walk(root):
        for name in below:
            if not name.isprintable() or not (Path(here) / name).resolve().is_relative_to(root.resolve()):
                raise CheckpointError(
                    f"{Path(here) / name!r} leads out of the pool", hint="copy the drafter into the pool"
                )
        below[:] = [name for name in below if not name.startswith(".")]  # drafters being written or replaced
        if checkpoint.is_drafter(Path(here)):
            found.append(Path(here))
            below.clear()
    if not found:
        raise CheckpointError(f"no drafters in {root}", hint="specctl train-drafter --domain sql makes one")
    return sorted(found)
