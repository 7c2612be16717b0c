"""`specctl train-drafter`: distil first when there is no data for the domain, then train."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from specctl import progress
from specctl.cli.command import library_output, recipe_command
from specctl.cli.options import TARGET
from specctl.cli.output import fields, output, table
from specctl.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from specctl.recipe import DistillRecipe, TrainRecipe

FLAGS = (
    *("arch", "domain", "each", "init", "lora", "prompts", "data_limit"),
    *(*TARGET, "seed", "log", "output_dir", "resume", "overwrite"),
)


def register(app: typer.Typer) -> None:
    recipe_command(app, "train-drafter", FLAGS)(train_drafter)


def train_drafter(recipe: TrainRecipe, dry_run: bool) -> None:
    """Train or fine-tune a draft head with DeepSpeed; distils data first when there is none for the domain.

    Several processes: torchrun --nproc-per-node 2 -m specctl train-drafter …
    """
    from specctl import api
    from specctl.cli import plan

    plan.check_data(recipe.data)
    if recipe.init is not None and not (recipe.init / "config.json").is_file():
        raise CheckpointError(f"init: {recipe.init} is not a drafter directory: it has no config.json")
    general = recipe.first_stage()
    recipes = (recipe if general is None else recipe.second_stage(general)).one_each()
    if general is not None and not (general.output / "config.json").is_file():  # one that is there serves again
        recipes.insert(0, general)
    for one in recipes:
        plan.check_output(one.output, resume=recipe.resume, overwrite=recipe.overwrite)
    first = {path: data for one in recipes for path, data in distil_first(one).items()}
    if dry_run:
        return plan.show("train-drafter", recipe, steps(recipes, first))
    with library_output():
        for source, missing in first.items():
            progress.log(f"no finished data in {source}: distilling from {missing.data.limit} prompts first")
            api.execute("distill", missing)
        documents = [api.execute("train-drafter", one)[1] for one in recipes]
    if not recipe.each:
        return output.result(documents[-1], fields, brief=documents[-1]["drafter"])
    pool = str(recipes[-1].output.parent)
    output.result({"command": "train-drafter", "pool": pool, "drafters": documents}, show_pool, brief=pool)


def distil_first(recipe: TrainRecipe) -> dict[Path, DistillRecipe]:
    """The recipes that make the missing data (or, with --resume, finish it), by directory; empty where all is there.

    Raises UsageError where the data was named by the user, or where several processes would each write it.
    """
    return {
        source: first
        for source, domains in zip(recipe.sources, _domains(recipe), strict=False)
        if (first := _missing(recipe, source, domains)) is not None
    }


def _domains(recipe: TrainRecipe) -> list[list[str]]:
    """The domains of each of `recipe.sources`."""
    every = recipe.data.domain
    if recipe.corpus is not None:
        return []
    return [every] if len(recipe.sources) == 1 else [[domain] for domain in every]


def _missing(recipe: TrainRecipe, source: Path, domains: list[str]) -> DistillRecipe | None:
    from specctl.distillation import store
    from specctl.recipe import DistillRecipe

    if store.exists(source):
        held = store.summary(source)
        if held.complete or recipe.distilled is not None:
            return None
        if not recipe.resume:
            progress.warn(f"{source} is unfinished: training on the {held.responses} responses that are there")
            return None
    elif recipe.distilled is not None:
        raise UsageError(f"no distilled data in {source}", hint=f"specctl distill --output-dir {source}")
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise UsageError(f"no distilled data in {source}", hint=f"run specctl distill --domain {domains[0]} first")
    data = recipe.data.model_copy(update={"domain": domains, "limit": recipe.data.limit or recipe.distill.responses})
    return DistillRecipe(
        target=recipe.target, data=data, resources=recipe.resources, output_dir=source, resume=recipe.resume
    )


def steps(recipes: list[TrainRecipe], first: dict[Path, DistillRecipe]) -> list[str]:
    """What `train-drafter` would do, in words."""
    from specctl.cli import distill, plan

    found = [step for missing in first.values() for step in distill.steps(missing)]
    if not first:
        found.append(plan.check_target(recipes[0].target))
    for recipe in recipes:
        found.append(f"read distilled data from {', '.join(map(str, recipe.sources))}")
        found += _collecting(recipe) if recipe.arch == "retrieval" else _training(recipe)
        found.append(f"write the drafter to {recipe.output}")
    return found


def _collecting(recipe: TrainRecipe) -> list[str]:
    return ["index the responses, without training", f"measure mat on {recipe.eval.prompts} held-out prompts"]


def _training(recipe: TrainRecipe) -> list[str]:
    lengths = {"epochs": recipe.epochs, "steps": recipe.max_steps, "minutes": recipe.max_minutes}
    until = " or ".join(f"{length:g} {name}" for name, length in lengths.items() if length) or "the default length"
    what = "a LoRA adapter of" if recipe.lora.enabled else "from" if recipe.init else ""
    start = f"{what} {recipe.init} " if recipe.init else ""
    return [
        f"train {recipe.arch} {start}for {until} with {recipe.optimizer_type} and ZeRO stage {recipe.zero_stage}",
        f"measure mat on {recipe.eval.prompts} held-out prompts every {recipe.eval.every} steps and keep the best",
    ]


def show_pool(document: dict[str, Any]) -> Any:
    """One row per drafter of the pool."""
    names = ("drafter", "domain", "mat", "steps", "train_tokens", "elapsed_s")
    return table(*names, rows=[[drafter[name] for name in names] for drafter in document["drafters"]])
