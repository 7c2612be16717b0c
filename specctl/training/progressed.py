"""How far a training has come: what resuming needs besides weights and optimizer, and whether the run is the same."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import Field

from specctl.errors import UsageError
from specctl.recipe import TrainRecipe
from specctl.training.checkpoint import Count

Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass
class Progressed:
    """Everything besides the engine that a resumed run needs."""

    step: Count = 0
    epoch: Count = 0
    place: Count = 0  # batches of the epoch that this number of processes has taken
    taken: list[tuple[Count, Count]] = field(
        default_factory=list
    )  # (processes, batches) of others before, in the epoch
    tokens: Count = 0
    seconds: Amount = 0.0  # in training steps, over all sittings
    loss: float = math.nan
    best_mat: Amount = 0.0
    best_expected: Amount = 0.0  # instead, where the target has no layers here
    reported_expected: Amount = 0.0  # of the same weights, on the other half
    recipe: str = ""
    made_of: dict[str, str] = field(default_factory=dict)  # what a recipe only names, by digest
    run: str = ""  # the run that has saved this, and the bytes of its metrics.jsonl that belong to it
    metrics: Count = 0
    world: Count = 1  # processes that took part


def check_same(recipe: TrainRecipe, path: Path, there: Progressed, now: Progressed) -> None:
    """UsageError where a checkpoint is of another recipe, or what its recipe names has been replaced since."""
    if there.recipe != now.recipe:
        raise UsageError(
            f"{path} was made by another recipe",
            "resume with the recipe it was started with, its length included; --overwrite starts over",
        )
    names = {
        "data": f"the data in {', '.join(map(str, recipe.sources if recipe.corpus is None else [recipe.corpus]))}",
        "target": f"the weights of target {recipe.target.name}",
        "init": f"the drafter {recipe.init}",
    }
    for key, digest in now.made_of.items():
        if there.made_of.get(key) != digest:
            raise UsageError(
                f"{names[key]} changed since {path} was made",
                "put back what it was started with; --overwrite starts over with what is there now",
            )
