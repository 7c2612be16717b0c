"""Data and drafters that a command makes first if they are missing, and reports about existing data."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specctl import progress
from specctl.cli import checks
from specctl.cli.command import execute
from specctl.errors import Interrupted, UsageError

if TYPE_CHECKING:
    from specctl.recipe import DistillRecipe, LearningRecipe, TrainRecipe


def check_data(recipe: TrainRecipe) -> None:
    """Check that the domains and their prompts files exist. A domain with data of its own may have any name.

    Raises UsageError, DataError.
    """
    from specctl.distillation import store

    held = recipe.distilled is not None or all(map(store.exists, recipe.data_dirs))
    if recipe.data.prompts is None and recipe.corpus is None and held:
        for domain in recipe.data.domain:
            checks.check_label(domain)
    else:
        checks.check_data(recipe.data)


def missing_distillations(recipe: TrainRecipe) -> dict[Path, DistillRecipe]:
    """Return the recipes that distil the missing data, or finish it with --resume, by directory.

    Raises UsageError if the user has named the data, or if several processes would each write it.
    """
    return {
        directory: distillation
        for directory, domains in zip(recipe.data_dirs, _domains(recipe), strict=False)
        if (distillation := _missing(recipe, directory, domains)) is not None
    }


def _domains(recipe: TrainRecipe) -> list[list[str]]:
    """Return the domains of each directory in `recipe.sources`."""
    every = recipe.data.domain
    if recipe.corpus is not None:
        return []
    return [every] if len(recipe.data_dirs) == 1 else [[domain] for domain in every]


def _missing(recipe: TrainRecipe, source: Path, domains: list[str]) -> DistillRecipe | None:
    from specctl.distillation import store
    from specctl.recipe import DistillRecipe, SamplingRecipe
    from specctl.training import checkpoint
    from specctl.training.adapters import recorded

    if store.exists(source):
        held = store.summary(source)
        if held.complete:
            return None
        resumed = checkpoint.directory(recipe.output).is_dir()  # a resumed training needs the same data
        if recipe.distilled is not None or not recipe.resume or resumed:
            progress.warn(f"data in {source} is incomplete: training on its {held.responses} responses")
            return None
    elif recipe.distilled is not None:
        raise UsageError(f"no distilled data in {source}", hint=f"specctl distill --output-dir {source}")
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise UsageError(f"no distilled data in {source}", hint=f"run specctl distill --domain {domains[0]} first")
    data = recipe.data.model_copy(update={"domain": domains, "limit": recipe.data.limit or recipe.distill.responses})
    for mixture in sorted(source.parent.glob("*+*")):
        if source.name in mixture.name.split("+") and store.exists(mixture):
            readers = mixture.name.replace("+", ",")
            progress.warn(f"{mixture} has texts of {source.name}, too, but only --domain {readers} reads them")
    longest, target = recipe.distill.max_new_tokens, recipe.target
    if target.adapter is None and store.exists(source):  # the rest is written by the same adapter
        target = target.model_copy(update={"adapter": recorded(source)})
    return DistillRecipe(
        target=target,
        data=data,
        sampling=SamplingRecipe(max_new_tokens=longest) if longest else SamplingRecipe(),
        resources=recipe.resources,
        output_dir=source,
        resume=recipe.resume,
    )


def report_existing_data(recipe: TrainRecipe, sources: list[Path]) -> None:
    """Report data from another target, and options without effect because their data exists already."""
    from specctl.decoding.target_text import adapter_digest
    from specctl.distillation import store
    from specctl.drafters.checkpoint import named_adapter

    adapter = recipe.target.adapter
    set_here = [f"data.{key}" for key in ("prompts", "limit") if getattr(recipe.data, key) is not None]
    set_here += [f"distill.{key}" for key in sorted(recipe.distill.model_fields_set - {"prompt_tokens"})]
    for source in filter(store.exists, sources):
        meta = store.summary(source).meta
        written_by = meta.get("target", {})
        if written_by.get("name", recipe.target.name) != recipe.target.name:
            progress.warn(f"data in {source} was written by target {written_by['name']}, not {recipe.target.name}")
        elif written_by and adapter and written_by.get("adapter_weights") != adapter_digest(adapter):
            told = named_adapter(written_by)
            progress.warn(f"data in {source} was written with {told}, not with adapter {adapter}")
        elif meta.get("model") and not (adapter or written_by.get("adapter") or recipe.features.is_served):
            progress.warn(
                f"data in {source} was written by the engine's model {meta['model']}, and is read by target "
                f"{recipe.target.name}: name its adapter with --target-adapter, or its engine with --features-from"
            )
        if set_here and not recipe.resume:
            again = f"specctl distill --output-dir {source} --overwrite generates it again"
            progress.log(f"training on the existing data in {source}; ignored: {', '.join(set_here)} ({again})")


def warm_ups(recipe: LearningRecipe) -> list[TrainRecipe]:
    """Return the recipes that train the missing drafters from which the stream should start.

    Raises UsageError if there are no prompts for a training, DataError if their file cannot be used.
    """
    from specctl import data_prep
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
