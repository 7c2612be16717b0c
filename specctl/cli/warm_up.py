"""Training of the drafters from which a stream starts, if they are missing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specctl import progress
from specctl.cli import checks
from specctl.cli.command import execute
from specctl.errors import Interrupted, UsageError

if TYPE_CHECKING:
    from specctl.recipe import DistillRecipe, LearningRecipe, TrainRecipe


def warm_ups(recipe: LearningRecipe) -> list[TrainRecipe]:
    """Return the recipes that train the missing drafters from which the stream should start.

    Raises UsageError if there are no prompts for a training, DataError if their file cannot be used.
    """
    from specctl import data_prep
    from specctl.cli.training_data import check_data
    from specctl.recipe import DataRecipe, TrainRecipe
    from specctl.recipe.train import AutoDistillRecipe

    options, trainings = recipe.warmup, []
    for family in recipe.families:
        place = recipe.initial_drafter(family)
        if (place / "config.json").is_file():
            continue
        if options.prompts is None and recipe.first_domain not in data_prep.DOMAINS:
            raise UsageError(
                f"no drafter in {place}, and no prompts of {recipe.first_domain} to train one on",
                "set --init DRAFTER, --domain NAME or warmup.prompts=FILE (other prompts than the stream's)",
            )
        training = TrainRecipe(
            target=recipe.target,
            resources=recipe.resources,
            data=DataRecipe(domain=[recipe.first_domain], prompts=options.prompts),
            arch=family,
            distill=AutoDistillRecipe(responses=options.responses),
            max_minutes=options.minutes,
            output_dir=place,
            resume=recipe.resume,
        )
        check_data(training)
        trainings.append(training)
    return trainings


def warm_up(recipe: LearningRecipe, first: list[TrainRecipe], data: dict[Any, DistillRecipe]) -> None:
    """Distil the missing data, and train the missing drafters. Raises Interrupted, with a hint how to continue."""
    for one in first:
        progress.log(f"no drafter in {one.output}: training one on {one.distill.responses} responses first")
    try:
        for missing in data.values():
            execute("distill", missing)
        for one in first:
            execute("train-drafter", one)
    except (Interrupted, KeyboardInterrupt) as stop:
        hint = f"{progress.RESUME} --output-dir {recipe.output_dir or 'DIR'}"
        if isinstance(stop, KeyboardInterrupt):
            progress.interrupts.advice = hint
            raise
        raise Interrupted(f"{stop.message} during the warm-up", hint) from None


def warm_up_steps(recipe: LearningRecipe, first: list[TrainRecipe], data: dict[Any, DistillRecipe]) -> list[str]:
    """Return the first steps of a plan in words: the target's check and the warm-up."""
    starts = [str(recipe.initial_drafter(family)) for family in recipe.families]
    return [
        checks.check_target(recipe.target, starts),
        *(f"distill {missing.data.limit} prompts of {', '.join(missing.data.domain)}" for missing in data.values()),
        *(
            f"train {one.output}, of family {one.arch}, on responses to prompts of {one.data.domain[0]}"
            for one in first
        ),
    ]


def stream_of(recipe: LearningRecipe) -> str:
    """Describe the stream in words: prompts per domain, and their order."""
    domains = ", ".join(f"{count} {domain}" for domain, count in recipe.stream.segments)
    return f"{domains or 'domains ' + ', '.join(recipe.data.domain)}; {recipe.stream.kind}"
