"""`specctl train-drafter`: train a drafter, and first distil the missing data of its domain."""

from __future__ import annotations

import math
import pkgutil
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specctl import progress, regular_files
from specctl.cli import checks, distill
from specctl.cli.command import execute, library_output, recipe_command
from specctl.cli.options import TARGET
from specctl.cli.output import fields, output, table, with_next
from specctl.cli.training_data import check_data, missing_distillations, report_existing_data
from specctl.cli.training_plan import Training, TrainingPlan, silent_servers
from specctl.errors import CheckpointError, RecipeError
from specctl.reporting.tables import blank, text

if TYPE_CHECKING:
    from specctl.recipe import DistillRecipe, TrainRecipe
    from specctl.training.example import Author

AUTO = Path("auto")  # value of `init`: start from a generalist, if there is one
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
    trainings = [
        Training(training, authors, silent_servers(training, authors))
        for training, authors in zip(recipes, adapters, strict=True)
    ]
    if dry_run:
        plan = TrainingPlan(trainings, first)
        estimates = plan.documents
        return checks.show("train-drafter", recipe, plan.lines, estimate=estimates if recipe.each else estimates[-1])
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


def check_target(recipe: TrainRecipe) -> None:
    """Check that a new drafter of the family can be built from the target, with the sizes in the recipe.

    This comes before thousands of responses are distilled. Raises CheckpointError, UsageError.
    """
    from specctl.families import FAMILIES
    from specctl.recipe import DrafterRecipe

    family = FAMILIES[recipe.arch]
    if family.check_target is not None:
        pkgutil.resolve_name(family.check_target)(recipe.target)
    elif family.trainable is not None:
        from specctl.decoding.models.loading import DTYPES
        from specctl.training.target_outline import Outline

        config = checks.target_config(recipe.target)
        projected = hasattr(config, "word_embed_proj_dim")  # OPT may have narrower embeddings
        if config is not None and (projected or recipe.drafter != DrafterRecipe()):
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


def show(document: dict[str, Any], recipe: TrainRecipe) -> Any:
    """Render the result, and say on which prompts its mat was measured: it differs from the mat of `eval`."""
    mat, expected = document.get("mat", math.nan), document.get("expected_mat", math.nan)
    of = "on held-out prompts of the training data; specctl eval measures the test split"
    if not math.isnan(mat):
        document = document | {"mat": f"{text(mat)} ({of})"}
    none = [key for key, value in document.items() if blank(value) and key != "mat"]
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
    cards = [card for card in cards if isinstance(card, dict)]
    sources = {source for card in cards for source in card.get("sources", ())}
    if sources <= {"auto", "generator", "public"} and DOMAINS.keys() >= set(recipe.data.domain):
        return []
    excluded = cards[0].get("excluded") if len(cards) == 1 else None
    return ["--prompts", excluded or "TEST.jsonl"]


def show_pool(document: dict[str, Any]) -> Any:
    names = ("drafter", "domain", "mat", "steps", "train_tokens", "elapsed_s")
    return table(*names, rows=[[drafter[name] for name in names] for drafter in document["drafters"]])
