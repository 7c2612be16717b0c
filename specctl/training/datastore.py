"""`specctl train-drafter` for drafters that are collected from distilled data, without gradient steps."""

import math
import os
import time

from specctl.decoding.models.loading import load_config
from specctl.decoding.models.supported import engine_only_reason
from specctl.decoding.target import load_target
from specctl.decoding.target_text import load_target_text
from specctl.drafters import checkpoint
from specctl.drafters.checkpoint import PROMPTS
from specctl.drafters.family import load_family
from specctl.errors import RecipeError, UsageError
from specctl.progress import log
from specctl.recipe import DraftingRecipe, TrainRecipe
from specctl.runs import Run
from specctl.training.adapters import use_all, with_adapters
from specctl.training.data import load_corpus
from specctl.training.outcome import TrainResult, drafter_info, held_out_acceptance, kinds_of, mat_by_prompts


def collect(recipe: TrainRecipe, run: Run) -> TrainResult:
    """Index the responses of `recipe.sources` and write the drafter to `recipe.output`. It is measured on held-out
    prompts unless only an engine can run the target.

    Raises:
        RecipeError, UsageError: the recipe has settings that only trained drafters have; several processes run.
        DataError, CheckpointError: unusable data, a target that does not fit.
    """
    if recipe.objective != "auto" or recipe.init is not None:
        raise RecipeError(f"arch {recipe.arch} has no weights to train", hint="leave out objective and init")
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise UsageError(f"arch {recipe.arch} is built by a single process", hint="run it without torchrun")
    recipe, adapters = with_adapters(recipe)
    family = load_family(recipe.arch)
    config = load_config(**recipe.target.described)
    target = load_target(**recipe.target.loading) if engine_only_reason(config) is None else None
    text = target or load_target_text(**recipe.target.text)
    if adapters:
        use_all(text, recipe, adapters)
    corpus = load_corpus(recipe, text, adapters)
    run.annotate(target=text.identity)
    started = time.perf_counter()
    store = family.collect((list(example.tokens), example.prompt_length) for example in corpus.train)
    seconds = time.perf_counter() - started
    tokens = sum(example.response_length for example in corpus.train)
    mat, acceptance, kinds = math.nan, list[float](), {}
    if target is not None:
        drafter = family.make_drafter(store, target, DraftingRecipe())
        mat, acceptance = held_out_acceptance(recipe, target, corpus.held_out, drafter)
        kinds = {PROMPTS: kinds_of(target, corpus, drafter)}
    else:
        log(f"mat is not measured: only an engine can run target {text.name}")
    run.metrics(step=0, mat=mat, acceptance_by_position=acceptance)
    checkpoint.save(
        recipe.output,
        config=family.checkpoint_config(store, text.identity),
        tensors=family.tensors(store),
        info=drafter_info(recipe, corpus, steps=0, tokens=tokens, mat=mat_by_prompts(corpus, reported=mat)) | kinds,
        overwrite=True,
    )
    return TrainResult(
        arch=recipe.arch,
        domain="+".join(corpus.domains),
        params=0,
        steps=0,
        train_tokens=tokens,
        tokens_per_s=tokens / seconds,
        final_loss=math.nan,
        mat=mat,
        acceptance_by_position=acceptance,
        drafter=str(recipe.output),
    )
