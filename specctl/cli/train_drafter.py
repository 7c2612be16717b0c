"""`specctl train-drafter`: train a drafter, and first distil the missing data of its domain."""

from __future__ import annotations

import math
import os
import pkgutil
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specctl import progress, regular_files
from specctl.cli import checks, distill
from specctl.cli.command import execute, library_output, recipe_command
from specctl.cli.options import TARGET
from specctl.cli.output import fields, output, table, with_next
from specctl.errors import CheckpointError, RecipeError, UsageError
from specctl.reporting.tables import text
from specctl.threads import counted

if TYPE_CHECKING:
    from specctl.engines.records import HiddenStatesSpec
    from specctl.recipe import DataRecipe, DistillRecipe, TrainRecipe
    from specctl.training.estimate import Texts
    from specctl.training.example import Author

AUTO = Path("auto")  # value of `init`: start from a generalist, if there is one
STARTS = "start a server with: "  # begins a step of the plan, which recipes/slurm/stream.sbatch looks for
PROMPT_SAMPLE = 200  # number of records with prompts that are measured
NO_HELD_OUT = "mat is not measured, as no prompt is held out; distil more, or raise eval.fraction"
HeldOutNumbers = tuple[int, int]  # prompts that choose a checkpoint, and prompts on which the choice is measured
FLAGS = (
    *("arch", "domain", "each", "init", "lora", "prompts", "data_limit", "features_from"),
    *(*TARGET, "seed", "log", "output_dir", "resume", "overwrite"),
)


@recipe_command("train-drafter", FLAGS, "specctl train-drafter --domain sql --arch eagle3 --prompts sql.jsonl")
def train_drafter(recipe: TrainRecipe, dry_run: bool) -> None:
    """Train or fine-tune a drafter with DeepSpeed. Data is distilled first if there is none for the domain.

    For several processes: torchrun --nproc-per-node 2 -m specctl train-drafter …
    """
    check_data(recipe)
    if recipe.features.servers is not None:
        from specctl.training.served_features import addresses

        addresses(recipe.features)
    if recipe.init == AUTO:
        recipe = with_generalist(recipe)
    if recipe.init is not None:
        recipe = with_init_arch(recipe, recipe.init)
    else:
        check_target(recipe)
        report_norms(recipe)
    general = recipe.first_stage()
    recipes = (recipe if general is None else recipe.second_stage(general)).per_domain()
    if general is not None and not (general.output / "config.json").is_file():  # an existing one is used again
        recipes.insert(0, general)
    recipes, adapters = map(list, zip(*map(with_adapters, recipes), strict=True))
    if not recipe.each:
        recipe = recipe.model_copy(update={"target": recipes[-1].target})
    for training in recipes:
        checks.check_output("train-drafter", training.output, resume=recipe.resume, overwrite=recipe.overwrite)
    first = {path: data for training in recipes for path, data in missing_distillations(training).items()}
    check_layers(recipe, first)
    if recipe.distilled is None:
        report_existing_data(recipe, [path for training in recipes for path in training.data_dirs if path not in first])
    silent = [unanswered(training, authors) for training, authors in zip(recipes, adapters, strict=True)]
    if dry_run:
        asked = {source: known_prompts(missing.data) for source, missing in first.items()}
        expected = [estimate(training, first, asked) for training in recipes]
        held_out = [held_out_numbers(training, asked) for training in recipes]
        estimates = [document for _, document in expected]
        words = steps(list(zip(recipes, adapters, silent, held_out, strict=True)), first) + launching(recipe)
        for training, (lines, _) in zip(recipes, expected, strict=True):
            named = f"estimate for {training.output.name}:" if len(recipes) > 1 else "estimate:"
            words += [line.replace("estimate:", named, 1) for line in lines]
        known = [one for one in estimates if one is not None]
        if len(known) == len(recipes) > 1:
            words.append(total(known))
        return checks.show("train-drafter", recipe, words, estimate=estimates if recipe.each else estimates[-1])
    with library_output():
        for source, missing in first.items():
            prompts = f"{missing.data.limit:,} prompts {distill.origin(missing.data)}"
            progress.log(f"no complete data in {source}: distilling from up to {prompts} first")
            execute("distill", missing)
        documents = [execute("train-drafter", training) for training in recipes]
    if not recipe.each:
        return output.result(documents[-1], partial(show, recipe=recipe), brief=documents[-1]["drafter"])
    pool = str(recipes[-1].output.parent)
    output.result({"command": "train-drafter", "pool": pool, "drafters": documents}, show_pool, brief=pool)


def check_data(recipe: TrainRecipe) -> None:
    """Check that the domains and their prompts files exist. A domain with distilled data may have any name.

    Raises UsageError, DataError.
    """
    from specctl.distillation import store

    if recipe.data.prompts is None and recipe.corpus is None and all(map(store.exists, recipe.data_dirs)):
        for domain in recipe.data.domain:
            checks.check_label(domain)
    else:
        checks.check_data(recipe.data)


def check_target(recipe: TrainRecipe) -> None:
    """Check that a new drafter of the family can be built from the target, with the sizes in the recipe.

    This comes before thousands of responses are distilled. Raises CheckpointError, UsageError.
    """
    from specctl.families import FAMILIES
    from specctl.recipe import DrafterRecipe

    family = FAMILIES[recipe.arch]
    if family.check_target is not None:
        pkgutil.resolve_name(family.check_target)(recipe.target)
    elif family.trainable is not None and recipe.drafter != DrafterRecipe():
        from specctl.decoding.models.loading import DTYPES
        from specctl.training.target_outline import Outline

        config = checks.target_config(recipe.target)
        if config is not None:
            Outline.of(config, DTYPES["bf16"]).drafter(recipe)


def report_norms(recipe: TrainRecipe) -> None:
    """Report that llama.cpp cannot run the head, which the owner of a GGUF file may expect. A training takes hours."""
    from specctl.decoding.models.loading import is_gguf

    drafter = recipe.drafter
    readable = drafter.norm_output is False and (drafter.norm_before_fc or drafter.fc_norm is False)
    if recipe.arch == "eagle3" and is_gguf(recipe.target.name) and not readable:
        progress.log("llama.cpp does not compute this head's norms; for llama.cpp add --recipe train-drafter/llama-cpp")


def check_layers(recipe: TrainRecipe, first: dict[Path, DistillRecipe]) -> None:
    """Check that specctl itself can run the target, if it would: for the missing data in `first`, for features, or to
    measure mat.

    Raises CheckpointError.
    """
    from specctl.decoding.models.supported import unsupported_error
    from specctl.families import FAMILIES

    reason = checks.engine_only(recipe.target)
    if reason is None:
        return
    refused = unsupported_error(recipe.target.name, reason)
    if first:
        source = next(iter(first))
        hint = f"let an engine write it: specctl distill --server http://host:8000 --output-dir {source}"
        raise CheckpointError(f"no complete data in {source}, and {refused.message}", hint)
    collected = FAMILIES[recipe.arch].trainable is None
    if not collected and not (recipe.trains_without_layers and recipe.features.whole_target is not True):
        raise refused


def with_adapters(recipe: TrainRecipe) -> tuple[TrainRecipe, dict[Path, Author]]:
    """Return a recipe with the target's adapters that its data records (`training.adapters.with_adapters`).

    Raises CheckpointError, also if an adapter does not fit the target, and UsageError.
    """
    from specctl.training import adapters

    recipe, found = adapters.with_adapters(recipe)
    for adapter in dict.fromkeys([*(author.adapter for author in found.values()), recipe.target.adapter]):
        if adapter is not None:
            checks.target_config(recipe.target.model_copy(update={"adapter": adapter}))
    return recipe, found


def unanswered(recipe: TrainRecipe, authors: dict[Path, Author]) -> list[str] | None:
    """Ask the servers that compute features whether they list the models that wrote the data. Return the addresses that
    do not respond; None if no model or no server is named, or if the target's configuration is not on this machine.

    Raises UsageError if a server does not list one.
    """
    if not recipe.features.is_served or not (authors or recipe.features.server.model):
        return None
    from specctl.training.served_features import addresses, check_models

    states = _states(recipe, authors) if addresses(recipe.features) else None
    return None if states is None else check_models(recipe.features, states)


def with_generalist(recipe: TrainRecipe) -> TrainRecipe:
    """Replace `init=auto` by the generalist that is found, or by None if there is none.

    Raises RecipeError if the recipe asks for an adapter and there is no drafter to adapt.
    """
    from specctl.drafters import checkpoint

    place = recipe.output_dir or Path("drafters")
    places = dict.fromkeys([place if recipe.each else recipe.output.parent, Path("drafters")])
    found = checkpoint.find_generalist(list(places), recipe.arch, recipe.target.name, recipe.output)
    if found is not None:
        progress.log(f"init=auto: training starts from {found}")
        return recipe.model_copy(update={"init": found})
    looked = f"no generalist (a drafter of several domains) of arch {recipe.arch} for target {recipe.target.name} in "
    looked += " or ".join(map(str, places))
    if recipe.lora.enabled:
        raise RecipeError(f"init=auto: {looked}, and an adapter needs one", hint="name a drafter: --init DIR")
    progress.log(f"init=auto: {looked}: training a new head")
    return recipe.model_copy(update={"init": None})


def with_init_arch(recipe: TrainRecipe, init: Path) -> TrainRecipe:
    """Return the recipe with the architecture of its drafter `init`, unless it names one itself."""
    checks.check_directory(str(init))
    from specctl.drafters import checkpoint
    from specctl.families import FAMILIES

    family = checkpoint.family(init)
    if "arch" in recipe.model_fields_set and family != recipe.arch:
        raise CheckpointError(f"{init} has family {family}, not {recipe.arch}", f"use --arch {family}")
    if family not in FAMILIES:
        raise CheckpointError(f"init: {init} is of the unknown family {family!r}", hint=", ".join(FAMILIES))
    return recipe.model_copy().set_family(family)


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
        if held.complete or recipe.distilled is not None:
            return None
        if not recipe.resume or checkpoint.directory(recipe.output).is_dir():  # a resumed training needs the same data
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
    from specctl.decoding.models.identity import adapter_digest
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


def held_out_numbers(recipe: TrainRecipe, asked: dict[Path, list[str] | None]) -> HeldOutNumbers | None:
    """Return the numbers of held-out prompts, if the prompts are known. `asked`: prompts of missing data."""
    from specctl.distillation import store
    from specctl.training.data import held_out_numbers

    ids = [
        asked[source] if source in asked else (record["prompt_id"] for record in store.read(source))
        for source in recipe.data_dirs
    ]
    known = [source for source in ids if source is not None]
    if recipe.corpus is not None or len(known) < len(ids):
        return None
    return held_out_numbers(known, recipe.eval.fraction, 2 * recipe.eval.prompts)


def estimate(
    recipe: TrainRecipe, first: dict[Path, DistillRecipe], asked: dict[Path, list[str] | None]
) -> tuple[list[str], dict[str, Any] | None]:
    """Estimate memory, disk space and time of the training from configurations: in words, and as a document.

    The document is None if there is no estimate, and the words give the reason.
    """
    from specctl.decoding.models.loading import load_config
    from specctl.families import trainable_families
    from specctl.training.estimate import estimate
    from specctl.training.machine import machine_for

    where, machine = checks.local_target(recipe.target), machine_for(recipe)
    if recipe.arch not in trainable_families() or recipe.corpus is not None:
        what = "a corpus" if recipe.corpus is not None else recipe.arch
        return [f"no estimate: not available for {what}"], None
    if where is None:
        cached = f"config.json in the Hugging Face cache (hf download {recipe.target.name} config.json)"
        return [f"no estimate: target {recipe.target.name} needs its {cached}"], None
    if machine is None:
        return ["no estimate: this GPU is not in the table; set resources.gpu to the most similar GPU"], None
    config = load_config(where, trust_remote_code=recipe.target.trust_remote_code)
    expected = estimate(recipe, config, machine, texts(recipe, first, asked))
    return expected.lines, asdict(expected)


def total(estimates: list[dict[str, Any]]) -> str:
    """Return a line with the time of all trainings, which run one after the other."""
    from specctl.training.estimate import duration

    hours = sum(one["hours"] for one in estimates)
    return f"estimate for all {len(estimates)} drafters, one after the other: {duration(hours)}"


def launching(recipe: TrainRecipe) -> list[str]:
    """Return a line about how to start one process per GPU, if the machine has several and no launcher runs."""
    from specctl.families import trainable_families
    from specctl.training.machine import machine_for

    machine = machine_for(recipe)
    told = "WORLD_SIZE" in os.environ or recipe.resources.processes is not None
    if machine is None or machine.processes == 1 or told or recipe.arch not in trainable_families():
        return []
    return [
        f"one process runs; for {machine.processes} GPUs, distil first, and start this command with torchrun "
        f"--nproc-per-node {machine.processes} -m specctl train-drafter … (specctl guide clusters)"
    ]


def texts(recipe: TrainRecipe, first: dict[Path, DistillRecipe], asked: dict[Path, list[str] | None]) -> Texts:
    """Return counts and lengths of the data. Responses still to be distilled count as half of the longest response."""
    from specctl.distillation import store
    from specctl.training.estimate import Texts

    number, responses, prompts = 0, 0.0, 0.0  # number of texts, tokens of responses, tokens of prompts
    for source in recipe.data_dirs:
        if source in first:
            missing, known = first[source], asked[source]
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
    exists = not any(source in first for source in recipe.data_dirs)
    return Texts(number, max(1.0, responses / max(1, number)), prompts / max(1, number), counted=exists)


def steps(
    trainings: list[tuple[TrainRecipe, dict[Path, Author], list[str] | None, HeldOutNumbers | None]],
    first: dict[Path, DistillRecipe],
) -> list[str]:
    """`trainings`: each recipe, with its results of `with_adapters`, `unanswered` and `held_out_numbers`."""
    from specctl.families import trainable_families

    recipes = [recipe for recipe, *_ in trainings]
    plans = [step for missing in first.values() for step in distill.steps(missing)]
    reason = checks.engine_only(recipes[0].target)
    checks.check_made_for(recipes[0].target, [str(recipe.init) for recipe in recipes if recipe.init])
    if reason is not None:
        plans.append(f"target {recipes[0].target.name} is run by an engine only: {reason}")
    elif not first:
        plans.append(checks.check_target(recipes[0].target))
    for recipe, authors, missing_servers, held_out in trainings:
        own = {source: f" ({_shown(author)})" for source, author in authors.items()}
        sources = [f"{source}{own.get(source, '')}" for source in recipe.data_dirs]
        plans.append(f"read distilled data from {', '.join(sources)}")
        served = _served(recipe, authors, missing_servers) if recipe.features.is_served else []
        plans += [line for line in served if line not in plans or not line.startswith(STARTS)]
        trained = recipe.arch in trainable_families()
        plans += _training(recipe, held_out) if trained else _collecting(recipe, reason, held_out)
        plans.append(f"write the drafter to {recipe.output}")
    return plans


def _shown(author: Author) -> str:
    model = f"model {author.model} of the engine" if author.model is not None else ""
    return " as ".join(filter(None, (f"adapter {author.adapter}" if author.adapter else "", model)))


def _collecting(recipe: TrainRecipe, only_engines: str | None, held_out: HeldOutNumbers | None) -> list[str]:
    limit = f"up to {2 * recipe.eval.prompts} held-out prompts"
    chosen = counted(sum(held_out), "held-out prompt") if held_out else limit
    measured = NO_HELD_OUT if held_out == (0, 0) else f"measure mat on {chosen}"
    return [
        "index the responses, without training",
        measured if only_engines is None else "do not measure mat: that needs the target's layers",
    ]


def _training(recipe: TrainRecipe, held_out: HeldOutNumbers | None) -> list[str]:
    lengths = {"epoch": recipe.epochs, "step": recipe.max_steps, "minute": recipe.max_minutes}
    until = " or ".join(counted(length, name) for name, length in lengths.items() if length) or "the default length"
    what = "a LoRA adapter of" if recipe.lora.enabled else "from" if recipe.init else ""
    start = f"{what} {recipe.init} " if recipe.init else ""
    return [
        f"train {recipe.arch} {start}for {until} with {recipe.optimizer_type} and ZeRO stage {recipe.zero_stage}",
        *(
            [f"train texts of more than {recipe.piece_length} tokens in pieces of at most {recipe.piece_length}"]
            if recipe.piece_length
            else []
        ),
        *_checks(recipe, held_out),
    ]


def _checks(recipe: TrainRecipe, held_out: HeldOutNumbers | None) -> list[str]:
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


def _served(recipe: TrainRecipe, authors: dict[Path, Author], silent: list[str] | None) -> list[str]:
    """Return lines about the requests to servers, and about how to start a server.

    The latter need the target's configuration on this machine.
    """
    from specctl.decoding.models.loading import ORIGINAL_NOTE, is_gguf
    from specctl.training import served_features

    server, states = recipe.features.server, _states(recipe, authors)
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


def _states(recipe: TrainRecipe, authors: dict[Path, Author]) -> HiddenStatesSpec | None:
    """Return the states that servers compute; None without the target's configuration on this machine."""
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


def show(document: dict[str, Any], recipe: TrainRecipe) -> Any:
    """Render the result, and say on which prompts its mat was measured: it differs from the mat of `eval`."""
    mat, expected = document.get("mat", math.nan), document.get("expected_mat", math.nan)
    of = "on held-out prompts of the training data; specctl eval measures the test split"
    if not math.isnan(mat):
        document = document | {"mat": f"{text(mat)} ({of})"}
    none = [key for key, value in document.items() if text(value) == text(None) and key != "mat"]
    told = {key: value for key, value in document.items() if "expected" not in key and key not in none}
    if math.isnan(expected) and checks.engine_only(recipe.target) is None:
        named = [*checks.target_flags(recipe.target), "--domain", ",".join(recipe.data.domain), *test_prompts(recipe)]
        drafters = ["--drafter", document["drafter"], "--drafter", "lookup"]
        return with_next(fields(told), ["specctl", "eval", *named, *drafters])
    if math.isnan(expected):
        return fields(told)
    how = "estimated from held-out responses; to measure it, export and serve it, and run specctl eval-server --server"
    return fields(told | {"expected_mat": f"{text(expected)} ({how})"})


def test_prompts(recipe: TrainRecipe) -> list[str]:
    """Return the option of `eval` that names test prompts; an empty list if the data has built-in prompts."""
    from specctl.data_prep import DOMAINS
    from specctl.distillation.card import CARD

    cards: list[dict[str, Any]] = []
    for path in recipe.data_dirs:
        with suppress(OSError, ValueError):  # unfinished data has no card
            cards.append(regular_files.read_json(path / CARD))
    sources = {source for card in cards for source in card.get("sources", ())}
    if sources <= {"auto", "generator", "public"} and DOMAINS.keys() >= set(recipe.data.domain):
        return []
    excluded = cards[0].get("excluded") if len(cards) == 1 else None
    return ["--prompts", excluded or "TEST.jsonl"]


def show_pool(document: dict[str, Any]) -> Any:
    names = ("drafter", "domain", "mat", "steps", "train_tokens", "elapsed_s")
    return table(*names, rows=[[drafter[name] for name in names] for drafter in document["drafters"]])
