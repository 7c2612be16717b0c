"""A minimal training: a few fp32 steps on the responses of the fixture `distilled`."""

import json

from specctl.recipe import DrafterRecipe, HeldOutRecipe, OptimizerRecipe, TargetRecipe, TrainRecipe
from specctl.runs import Run
from specctl.training import loop


def recipe(distilled, place, **changes):
    """Return the recipe with `changes`; the drafter is written to `place`."""
    values = dict(
        target=TargetRecipe(dtype="fp32", device="cpu"),
        distilled=distilled,
        output_dir=place / "drafter",
        drafter=DrafterRecipe(vocab_size=256),
        max_steps=2,
        ttt_steps=2,
        batch_tokens=128,
        eval=HeldOutRecipe(prompts=1, max_new_tokens=2),
        optimizer=OptimizerRecipe(type="adamw"),
        precision="fp32",
    )
    return TrainRecipe(**{**values, **changes})


def train(made, place):
    """Run a recipe in `place` and return its result."""
    return loop.train_drafter(made, Run.create("train-drafter", made, place))


def metrics(place):
    """Return the records of metrics.jsonl."""
    return [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
