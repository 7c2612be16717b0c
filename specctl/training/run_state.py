"""Progress of a training run: the state that resuming needs besides weights and optimizer, and a check that a
checkpoint belongs to the same run."""

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
class RunState:
    """Everything that a resumed run needs in addition to the engine's state."""

    step: Count = 0
    epoch: Count = 0
    place: Count = 0  # batches of the epoch that were trained with this number of processes
    # Earlier in the epoch, with other numbers of processes: (processes, batches).
    taken: list[tuple[Count, Count]] = field(default_factory=list)
    tokens: Count = 0
    seconds: Amount = 0.0  # in training steps, summed over all resumes
    loss: float = math.nan
    best_mat: Amount = 0.0
    best_expected: Amount = 0.0  # replaces `best_mat` if the target's layers are not loaded
    reported_expected: Amount = 0.0  # of the same weights, on the half that reports
    recipe: str = ""
    made_of: dict[str, str] = field(default_factory=dict)  # digests of the files that the recipe only names
    run: str = ""  # directory of the run that saved this state
    metrics: Count = 0  # bytes of that run's metrics.jsonl that belong to this state
    world: Count = 1  # number of processes


def check_same(recipe: TrainRecipe, path: Path, there: RunState, now: RunState) -> None:
    """Raise UsageError if a checkpoint belongs to another recipe, or if data, target or init have changed since."""
    if there.recipe != now.recipe:
        raise UsageError(
            f"{path} was made with a different recipe",
            "resume with the original recipe, including its length, or start over with --overwrite",
        )
    names = {
        "data": f"the data in {', '.join(map(str, recipe.data_dirs if recipe.corpus is None else [recipe.corpus]))}",
        "target": f"the weights of target {recipe.target.name}",
        "init": f"the drafter {recipe.init}",
    }
    for key, digest in now.made_of.items():
        if there.made_of.get(key) != digest:
            raise UsageError(
                f"{names[key]} changed since {path} was made", "restore the original, or start over with --overwrite"
            )
