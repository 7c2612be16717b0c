"""The work of a distilling run, laid out before anything is decoded: which responses, which seeds, in which order."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from specctl import progress
from specctl.decoding.target_text import TargetText
from specctl.distillation.prompts import Prompt, Rejections
from specctl.errors import ChatTemplateError, DataError
from specctl.recipe import DistillRecipe

WINDOW_BATCHES = 32  # prompts are sorted by length inside windows of so many batches: dense batches, mixed order


@dataclass(frozen=True)
class Job:
    """One response to generate."""

    id: str
    prompt: Prompt
    prompt_ids: list[int]
    temperature: float
    seed: int
    max_new_tokens: int


def parse_shard(shard: str) -> tuple[int, int]:
    """`i/n` as (i, n)."""
    index, count = map(int, shard.split("/"))
    return index, count


def plan(recipe: DistillRecipe, target: TargetText, prompts: list[Prompt], rejections: Rejections) -> list[Job]:
    """Every response this writer owes, in the order in which it is generated.

    Temperatures are cycled over prompts and repeats. Jobs are sorted by prompt length inside windows, so that batches
    are dense, and the batches of a window are shuffled, so that stopping early does not favour short prompts.
    """
    index, count = parse_shard(recipe.shard)
    jobs: list[Job] = []
    for number, prompt in enumerate(prompts):
        if int(prompt.id, 16) % count != index:
            continue
        progress.interrupts.check()
        prompt_ids = render(target, prompt, rejections, recipe.target.chat_template_kwargs)
        if prompt_ids is not None:
            jobs += _jobs(recipe, target, number, prompt, prompt_ids)
    rejections.check()
    if not jobs:
        raise DataError(
            f"none of the {len(prompts)} prompts can be answered by target {target.identity['name']}",
            hint="; ".join(rejections.reasons) or f"--shard {recipe.shard} holds no prompt: use fewer shards",
        )
    return _ordered(jobs, recipe.batch_size)


def render(target: TargetText, prompt: Prompt, rejections: Rejections, options: dict[str, Any]) -> list[int] | None:
    """Prompt ids, by the chat template with its `options`; None, and a rejection, where the template refuses the
    messages or no room is left for an answer."""
    if not prompt.messages:
        return target.opening()
    try:
        ids = target.render(prompt.messages, **options)
    except ChatTemplateError as error:
        reason = error.message
    else:
        if 0 < len(ids) < target.context_length:
            return ids
        reason = f"{len(ids)} tokens do not fit the target's context of {target.context_length}"
    rejections.add(prompt.where, reason, prompt.messages[-1]["content"])
    return None


def _jobs(
    recipe: DistillRecipe, target: TargetText, number: int, prompt: Prompt, prompt_ids: list[int]
) -> Iterator[Job]:
    cycle = recipe.temperatures
    for repeat in range(recipe.samples_per_prompt):
        temperature = cycle[(number + repeat) % len(cycle)]
        if temperature == 0 and repeat >= len(cycle):
            continue  # the greedy response exists already and would be the same
        id = response_id(prompt.id, temperature, recipe.sampling.seed, repeat, target.identity)
        room = min(recipe.sampling.max_new_tokens, target.context_length - len(prompt_ids))
        yield Job(id, prompt, prompt_ids, temperature, int(id[:15], 16), room)


def response_id(prompt_id: str, temperature: float, seed: int, repeat: int, identity: dict[str, Any]) -> str:
    """Stable id of a response: 32 hex digits over everything that decides its text, given the settings in meta.json."""
    named = {key: value for key, value in identity.items() if key != "weights"}  # which meta.json tells apart
    key = json.dumps([prompt_id, float(temperature), seed, repeat, named], sort_keys=True)
    return hashlib.sha256(key.encode()).hexdigest()[:32]


def _ordered(jobs: list[Job], batch_size: int) -> list[Job]:
    window = WINDOW_BATCHES * batch_size
    ordered: list[Job] = []
    for start in range(0, len(jobs), window):
        dense = sorted(jobs[start : start + window], key=lambda job: (len(job.prompt_ids), job.id))
        batches = [dense[i : i + batch_size] for i in range(0, len(dense), batch_size)]
        ragged = [batches.pop()] if len(batches[-1]) < batch_size else []  # last, or later batches would be cut askew
        random.Random(start).shuffle(batches)
        ordered += [job for batch in batches + ragged for job in batch]
    return ordered
