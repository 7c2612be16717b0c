"""Plan of `train-drafter`, which --dry-run prints: steps, how to start several processes, and estimates."""

from __future__ import annotations

import os
from dataclasses import asdict
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from specctl.cli import checks, distill
from specctl.threads import counted

if TYPE_CHECKING:
    from specctl.engines.records import HiddenStatesSpec
    from specctl.recipe import DataRecipe, DistillRecipe, TrainRecipe
    from specctl.training.estimate import Estimate, Texts
    from specctl.training.example import Author

STARTS = "start a server with: "  # begins a step of the plan, which recipes/slurm/stream.sbatch looks for
PROMPT_SAMPLE = 200  # number of records with prompts that are measured
NO_HELD_OUT = "mat is not measured, as no prompt is held out; distil more, or raise eval.fraction"


class Training(NamedTuple):
    """A training that has not begun.

    Attributes:
        recipe: its recipe, with the adapter of its data.
        authors: the model that wrote each directory of data (`training.adapters.with_adapters`).
        silent: addresses of the servers that do not respond, or None if they were not asked (`silent_servers`).
    """

    recipe: TrainRecipe
    authors: dict[Path, Author]
    silent: list[str] | None


def silent_servers(recipe: TrainRecipe, authors: dict[Path, Author]) -> list[str] | None:
    """Ask the servers that compute features whether they list the models that wrote the data. Return the addresses that
    do not respond, or None if no model or no server is named, or if the target's configuration is not on this machine.

    Raises UsageError if a server does not list one.
    """
    if not recipe.features.is_served or not (authors or recipe.features.server.model):
        return None
    from specctl.training.served_features import addresses, check_models

    states = served_states(recipe, authors) if addresses(recipe.features) else None
    return None if states is None else check_models(recipe.features, states)


def served_states(recipe: TrainRecipe, authors: dict[Path, Author]) -> HiddenStatesSpec | None:
    """Return the states that servers compute, or None without the target's configuration on this machine."""
    from specctl.decoding.models.loading import DTYPES, load_config
    from specctl.drafters import checkpoint
    from specctl.training import served_features
    from specctl.training.example import Author
    from specctl.training.target_outline import Outline

    where = checks.local_target(recipe.target)
    if where is None:
        return None
    config = load_config(where, trust_remote_code=recipe.target.trust_remote_code)
    taps = checkpoint.taps(recipe.init) if recipe.init is not None else None
    if taps is None:
        taps = list(getattr(Outline.of(config, DTYPES["bf16"]).drafter(recipe), "taps", ()))
    text = config.get_text_config()
    states = served_features.needed_states(
        recipe.target.name, recipe.target.revision, tuple(taps), text.num_hidden_layers, text.hidden_size
    )
    alone = Author(recipe.target.adapter, recipe.features.server.model)
    return served_features.with_adapters(states, authors.values() or ([alone] if alone.adapter else []))


class TrainingPlan:
    """Plan of trainings that run one after the other.

    Args:
        trainings: at least one.
        missing: the recipes that distil missing data first, by directory.
    """

    def __init__(self, trainings: list[Training], missing: dict[Path, DistillRecipe]):
        self.trainings, self.missing = trainings, missing
        self.prompts = {source: known_prompts(recipe.data) for source, recipe in missing.items()}
        """Ids of all prompts of missing data, or None if the files may have more prompts than the limit."""

    @property
    def lines(self) -> list[str]:
        return [*self._steps(), *launching(self.trainings[-1].recipe), *self._estimate_lines()]

    @cached_property
    def estimates(self) -> list[Estimate | str]:
        """The estimate of each training, or the reason why there is none."""
        return [self._estimate(training.recipe) for training in self.trainings]

    @property
    def documents(self) -> list[dict[str, Any] | None]:
        """The estimates for `--json`."""
        return [None if isinstance(one, str) else asdict(one) for one in self.estimates]

    def _steps(self) -> list[str]:
        target = self.trainings[0].recipe.target
        plans = [step for recipe in self.missing.values() for step in distill.steps(recipe)]
        reason = checks.engine_only(target)
        checks.check_made_for(target, [str(one.recipe.init) for one in self.trainings if one.recipe.init])
        if reason is not None:
            plans.append(f"target {target.name} is run by an engine only: {reason}")
        elif not self.missing:
            plans.append(checks.check_target(target))
        for training in self.trainings:
            recipe, held_out = training.recipe, self._held_out(training.recipe)
            own = {source: f" ({_shown(author)})" for source, author in training.authors.items()}
            sources = [f"{source}{own.get(source, '')}" for source in recipe.data_dirs]
            plans.append(f"read distilled data from {', '.join(sources)}")
            served = _served(training) if recipe.features.is_served else []
            plans += [line for line in served if line not in plans or not line.startswith(STARTS)]
            plans += _training(recipe, held_out) if _has_weights(recipe) else _collecting(recipe, reason, held_out)
            plans.append(f"write the drafter to {recipe.output}")
        return plans

    def _held_out(self, recipe: TrainRecipe) -> tuple[int, int] | None:
        """Return the numbers of held-out prompts, if known: how many choose a checkpoint, and on how many
        the choice is measured."""
        from specctl.distillation import store
        from specctl.training.data import held_out_numbers

        ids = [
            self.prompts[source] if source in self.prompts else (record["prompt_id"] for record in store.read(source))
            for source in recipe.data_dirs
        ]
        known = [source for source in ids if source is not None]
        if recipe.corpus is not None or len(known) < len(ids):
            return None
        return held_out_numbers(known, recipe.eval.fraction, 2 * recipe.eval.prompts)

    def _estimate(self, recipe: TrainRecipe) -> Estimate | str:
        from specctl.decoding.models.loading import load_config
        from specctl.training.estimate import estimate
        from specctl.training.machine import machine_for

        if not _has_weights(recipe) or recipe.corpus is not None:
            return f"not available for {'a corpus' if recipe.corpus is not None else recipe.arch}"
        where, machine = checks.local_target(recipe.target), machine_for(recipe)
        if where is None:
            cached = f"config.json in the Hugging Face cache (hf download {recipe.target.name} config.json)"
            return f"target {recipe.target.name} needs its {cached}"
        if machine is None:
            return "this GPU is not in the table; set resources.gpu to the most similar GPU"
        config = load_config(where, trust_remote_code=recipe.target.trust_remote_code)
        return estimate(recipe, config, machine, self._texts(recipe))

    def _texts(self, recipe: TrainRecipe) -> Texts:
        """Return counts and lengths of the data. Responses still to be distilled count as half of the longest."""
        from specctl.distillation import store
        from specctl.training.estimate import Texts

        number, responses, prompts = 0, 0.0, 0.0  # number of texts, tokens of responses, tokens of prompts
        for source in recipe.data_dirs:
            if source in self.missing:
                missing, known = self.missing[source], self.prompts[source]
                assert missing.data.limit is not None
                here = missing.data.limit * len(missing.data.domain) if known is None else len(known)
                here *= missing.samples_per_prompt
                mean, prompt = missing.sampling.max_new_tokens / 2, float(recipe.distill.prompt_tokens)
            else:
                held = store.summary(source)
                sample = [len(record["prompt_ids"]) for record in islice(store.read(source), PROMPT_SAMPLE)]
                here, mean = held.responses, held.response_tokens / max(1, held.responses)
                prompt = sum(sample) / max(1, len(sample))
            number, responses, prompts = number + here, responses + here * mean, prompts + here * prompt
        counted = not any(source in self.missing for source in recipe.data_dirs)
        return Texts(number, max(1.0, responses / max(1, number)), prompts / max(1, number), counted)

    def _estimate_lines(self) -> list[str]:
        from specctl.training.estimate import duration

        lines, several = [], len(self.trainings) > 1
        for training, found in zip(self.trainings, self.estimates, strict=True):
            what = f"estimate for {training.recipe.output.name}:" if several else "estimate:"
            lines += [f"no {what} {found}"] if isinstance(found, str) else [f"{what} {line}" for line in found.lines]
        hours = [found.hours for found in self.estimates if not isinstance(found, str)]
        if several and len(hours) == len(self.estimates):
            lines.append(f"estimate for all {len(hours)} drafters, one after the other: {duration(sum(hours))}")
        return lines


def known_prompts(data: DataRecipe) -> list[str] | None:
    """Return the ids of all prompts that the data to be distilled will have, if its files have fewer prompts than the
    limit."""
    from specctl.distillation.prompts import HUB, read_prompts

    files = [str(data.prompts_of(domain) or "-") for domain in data.domain]
    if any(file == "-" or file.startswith(HUB) for file in files):
        return None
    found = [read_prompts(data, domain) for domain in data.domain]
    limited = any(len(prompts) == data.limit for prompts in found)
    return None if limited else [prompt.id for prompts in found for prompt in prompts]


def launching(recipe: TrainRecipe) -> list[str]:
    """Return a line about how to start one process per GPU, if the machine has several and no launcher runs."""
    from specctl.training.machine import machine_for

    machine = machine_for(recipe)
    told = "WORLD_SIZE" in os.environ or recipe.resources.processes is not None
    if machine is None or machine.processes == 1 or told or not _has_weights(recipe):
        return []
    return [
        f"one process runs; for {machine.processes} GPUs, distil first, and start this command with torchrun "
        f"--nproc-per-node {machine.processes} -m specctl train-drafter … (specctl guide clusters)"
    ]


def _has_weights(recipe: TrainRecipe) -> bool:
    from specctl.families import trainable_families

    return recipe.arch in trainable_families()


def _shown(author: Author) -> str:
    model = f"model {author.model} of the engine" if author.model is not None else ""
    return " as ".join(filter(None, (f"adapter {author.adapter}" if author.adapter else "", model)))


def _collecting(recipe: TrainRecipe, only_engines: str | None, held_out: tuple[int, int] | None) -> list[str]:
    limit = f"up to {2 * recipe.eval.prompts} held-out prompts"
    chosen = counted(sum(held_out), "held-out prompt") if held_out else limit
    measured = NO_HELD_OUT if held_out == (0, 0) else f"measure mat on {chosen}"
    return [
        "index the responses, without training",
        measured if only_engines is None else "do not measure mat: that needs the target's layers",
    ]


def _training(recipe: TrainRecipe, held_out: tuple[int, int] | None) -> list[str]:
    lengths = {"epoch": recipe.epochs, "step": recipe.max_steps, "minute": recipe.max_minutes}
    until = " or ".join(counted(length, name) for name, length in lengths.items() if length) or "the default length"
    start = f"{'a LoRA adapter of' if recipe.lora.enabled else 'from'} {recipe.init} " if recipe.init else ""
    longest = recipe.piece_length
    return [
        f"train {recipe.arch} {start}for {until} with {recipe.optimizer_type} and ZeRO stage {recipe.zero_stage}",
        *([f"train texts of more than {longest} tokens in pieces of at most {longest}"] if longest else []),
        *_readers(recipe),
        *_checks(recipe, held_out),
    ]


def _readers(recipe: TrainRecipe) -> list[str]:
    """Return a line if no engine can read the head, as far as the target's configuration is on this machine."""
    from specctl.decoding.models.loading import DTYPES
    from specctl.training.readers import unread
    from specctl.training.target_outline import Outline

    config = checks.target_config(recipe.target)
    if config is None or recipe.init is not None:
        return []
    module = Outline.of(config, DTYPES["bf16"]).drafter(recipe)
    reason = unread(recipe.arch, module, recipe.target.name, config.get_text_config())
    return [reason] if reason else []


def _checks(recipe: TrainRecipe, held_out: tuple[int, int] | None) -> list[str]:
    """Return lines about the choice of a checkpoint, as far as the target's configuration is on this machine."""
    from specctl.training.estimate import loads_layers_here

    where = checks.local_target(recipe.target)
    whole = not recipe.trains_without_layers or where is None or loads_layers_here(recipe, where)
    if recipe.features.mode == "cached" and not whole:
        return ["keep the last weights: mat is not measured without the target's layers"]
    if held_out == (0, 0):
        return [f"keep the last weights: {NO_HELD_OUT}"]
    limit = f"up to {recipe.eval.prompts}"
    chosen = counted(held_out[0], "held-out prompt") if held_out else f"{limit} held-out prompts"
    others = counted(held_out[1], "other prompt") if held_out else f"{limit} other prompts"
    chosen += f" every {recipe.eval.every} steps and keep the best"
    if whole:
        return [f"measure mat on {chosen}", f"measure the best checkpoint again on {others}"]
    return [
        f"estimate mat from the responses to {chosen}; to measure mat, export and serve the drafter, and run specctl "
        "eval-server --server"
    ]


def _served(training: Training) -> list[str]:
    """Return lines about the requests to servers, and about how to start a server.

    The latter need the target's configuration on this machine.
    """
    from specctl.decoding.models.loading import ORIGINAL_NOTE, is_gguf
    from specctl.training import served_features

    recipe, silent, states = training.recipe, training.silent, served_states(training.recipe, training.authors)
    server = recipe.features.server
    who = ", ".join(server.urls) or str(recipe.features.servers or "the server in features.server.urls")
    ahead = f" and {recipe.features.ahead} ahead of the training" if recipe.features.mode == "stream" else ""
    asked = f"request the target's hidden states from {who}, {server.concurrency} texts at a time{ahead}; "
    models = ", ".join([name for name, _ in states.adapters] if states and states.adapters else [str(server.model)])
    if silent is None:
        asked += "it is not checked"
    elif silent:
        asked += f"{', '.join(silent)} does not respond, so whether it lists {models} is not checked"
    else:
        asked += f"it lists {models}, and nothing else is checked"
    starts = served_features.commands(server, states) if states is not None else []
    unserved = [ORIGINAL_NOTE] if starts and is_gguf(recipe.target.name) else []
    return [asked, *unserved, *(f"{STARTS}{one}" for one in starts)]
