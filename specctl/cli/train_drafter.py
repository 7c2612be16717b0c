"""`specctl train-drafter`: distil first when there is no data for the domain, then train."""

from __future__ import annotations

import os
from dataclasses import asdict
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from specctl import progress
from specctl.cli.command import library_output, recipe_command
from specctl.cli.options import TARGET
from specctl.cli.output import fields, output
from specctl.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from specctl.recipe import DistillRecipe, TrainRecipe
    from specctl.training.estimate import Texts

PROMPT_TOKENS = 128  # assumed of prompts that nobody has rendered yet
PROMPT_SAMPLE = 200  # records whose prompts are measured
FLAGS = ("arch", "domain", "prompts", "data_limit", *TARGET, "seed", "log", "output_dir", "resume", "overwrite")


def register(app: typer.Typer) -> None:
    recipe_command(app, "train-drafter", FLAGS)(train_drafter)


def train_drafter(recipe: TrainRecipe, dry_run: bool) -> None:
    """Train or fine-tune a draft head with DeepSpeed; distils data first when there is none for the domain.

    Several processes: torchrun --nproc-per-node 2 -m specctl train-drafter …
    """
    from specctl import api
    from specctl.cli import plan

    plan.check_data(recipe.data)
    plan.check_output(recipe.output, resume=recipe.resume, overwrite=recipe.overwrite)
    if recipe.init is not None and not (recipe.init / "config.json").is_file():
        raise CheckpointError(f"init: {recipe.init} is not a drafter directory: it has no config.json")
    first = distil_first(recipe)
    if dry_run:
        expected = estimate(recipe, first)
        return plan.show("train-drafter", recipe, steps(recipe, first) + expected.lines, estimate=expected.document)
    with library_output():
        if first is not None:
            progress.log(f"no finished data in {recipe.source}: distilling from {first.data.limit} prompts first")
            api.execute("distill", first)
        _, document = api.execute("train-drafter", recipe)
    output.result(document, fields, brief=document["drafter"])


def distil_first(recipe: TrainRecipe) -> DistillRecipe | None:
    """The recipe that makes the missing data (or, with --resume, finishes it); None where there is some.

    Raises UsageError where the data was named by the user, or where several processes would each write it.
    """
    from specctl.distillation import store
    from specctl.recipe import DistillRecipe, SamplingRecipe

    if store.exists(recipe.source):
        held = store.summary(recipe.source)
        if held.complete or recipe.distilled is not None:
            return None
        if not recipe.resume:
            progress.warn(f"{recipe.source} is unfinished: training on the {held.responses} responses that are there")
            return None
    elif recipe.distilled is not None:
        raise UsageError(f"no distilled data in {recipe.source}", hint=f"specctl distill --output-dir {recipe.source}")
    if os.environ.get("WORLD_SIZE", "1") != "1":
        domains = ",".join(recipe.data.domain)
        raise UsageError(f"no distilled data in {recipe.source}", hint=f"run specctl distill --domain {domains} first")
    data = recipe.data.model_copy(update={"limit": recipe.data.limit or recipe.distill.responses})
    longest = recipe.distill.max_new_tokens
    return DistillRecipe(
        target=recipe.target,
        data=data,
        sampling=SamplingRecipe(max_new_tokens=longest) if longest else SamplingRecipe(),
        resources=recipe.resources,
        output_dir=recipe.source,
        resume=recipe.resume,
    )


class Expected(NamedTuple):
    """The estimate in words, and as a document; None where there is none, and the words say why."""

    lines: list[str]
    document: dict[str, Any] | None


def estimate(recipe: TrainRecipe, first: DistillRecipe | None) -> Expected:
    """Memory, disk and time of the training, as far as they follow from configurations."""
    from specctl.cli import plan
    from specctl.decoding.target import load_config
    from specctl.drafters.pool import FAMILIES
    from specctl.training.estimate import estimate
    from specctl.training.machine import machine_for

    where, machine = plan.local_target(recipe.target), machine_for(recipe)
    if recipe.arch not in FAMILIES:
        return Expected([f"no estimate: {recipe.arch} has no weights to train"], None)
    if where is None:
        cached = f"its config.json in the Hugging Face cache (hf download {recipe.target.name} config.json)"
        return Expected([f"no estimate: that of target {recipe.target.name} needs {cached}"], None)
    if machine is None:
        return Expected(["no estimate: this GPU is not in the table; set resources.gpu to the nearest one"], None)
    config = load_config(where, trust_remote_code=recipe.target.trust_remote_code)
    found = estimate(recipe, config, machine, texts(recipe, first))
    return Expected(found.lines, asdict(found))


def texts(recipe: TrainRecipe, first: DistillRecipe | None) -> Texts:
    """What is known of the data; of data that is still to be distilled a guess, responses of half their longest."""
    from specctl.distillation import store
    from specctl.training.estimate import Texts

    if first is not None:
        assert first.data.limit is not None
        number = first.data.limit * len(first.data.domain) * first.samples_per_prompt
        return Texts(number, first.sampling.max_new_tokens / 2, PROMPT_TOKENS, counted=False)
    held = store.summary(recipe.source)
    prompts = [len(record["prompt_ids"]) for record in islice(store.read(recipe.source), PROMPT_SAMPLE)]
    mean = held.response_tokens / max(1, held.responses)
    return Texts(held.responses, max(1.0, mean), sum(prompts) / max(1, len(prompts)), counted=True)


def steps(recipe: TrainRecipe, first: DistillRecipe | None) -> list[str]:
    """What `train-drafter` would do, in words."""
    from specctl.cli import distill, plan

    lengths = {"epochs": recipe.epochs, "steps": recipe.max_steps, "minutes": recipe.max_minutes}
    until = " or ".join(f"{length:g} {name}" for name, length in lengths.items() if length) or "the default length"
    ready = [plan.check_target(recipe.target), f"read distilled data from {recipe.source}"]
    return [
        *(distill.steps(first) if first else ready),
        f"train {recipe.arch} for {until} with {recipe.optimizer_type} and ZeRO stage {recipe.zero_stage}",
        f"measure mat on {recipe.eval.prompts} held-out prompts every {recipe.eval.every} steps and keep the best",
        f"write the drafter to {recipe.output}",
    ]
