"""From a name or a directory to a drafter that is ready to propose."""

from __future__ import annotations

import importlib
import os
from pathlib import Path

from specctl.decoding.draft import Drafter, NoDraft
from specctl.decoding.target import Target
from specctl.drafters.lookup import Lookup
from specctl.errors import CheckpointError
from specctl.formats import checkpoint
from specctl.recipe import DraftingRecipe

# Family → module, imported when a drafter of it is loaded. Each has from_checkpoint(config, tensors, target, drafting).
FAMILIES = {"eagle3": "specctl.drafters.eagle3", "lm": "specctl.drafters.lm"}
WEIGHTLESS = ("none", "lookup")


def load_drafter(path_or_name: str, target: Target, drafting: DraftingRecipe) -> Drafter:
    """The drafter `none`, `lookup`, or the one in a directory, checked against its manifest and the target.

    Raises:
        CheckpointError: there is no such drafter, it is damaged, of an unknown family, or made for another target.
    """
    if path_or_name == "none":
        return NoDraft()
    if path_or_name == "lookup":
        return Lookup(drafting.depth)
    path = Path(path_or_name).expanduser()
    if not os.path.lexists(path) and path.name == path_or_name:
        raise CheckpointError(
            f"no drafter {path_or_name!r}", hint=f"give one of {', '.join(WEIGHTLESS)}, or a drafter directory"
        )
    found = checkpoint.load(path)
    module = FAMILIES.get(found.config["family"])
    if module is None:
        raise CheckpointError(
            f"drafter {path} is of family {found.config['family']!r}", hint=f"known families: {', '.join(FAMILIES)}"
        )
    checkpoint.check_target(found.config, target, str(path))
    return importlib.import_module(module).from_checkpoint(found.config, found.tensors, target, drafting)


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
