"""Plan of a distilling run, made before anything is decoded: responses, their seeds, and their order."""

import hashlib
import json
import random
from array import array
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple, TypeVar

from specctl import progress
from specctl.decoding.target_text import TargetText
from specctl.distillation.prompts import Prompt, render
from specctl.distillation.rejections import Rejections
from specctl.distillation.select_prompts import Prompts, Spool
from specctl.errors import DataError
from specctl.recipe import DistillRecipe

Row = TypeVar("Row")
WINDOW_BATCHES = 32  # batches per window; prompts are sorted by length inside a window, for dense batches


@dataclass(frozen=True)
class Job:
    """One response to generate."""

    id: str
    prompt: Prompt
    prompt_ids: list[int]
    temperature: float
    seed: int
    max_new_tokens: int


class PlannedResponse(NamedTuple):
    """A planned response, without its prompt."""

    id: str
    prompt: int  # place of the prompt in the plan
    temperature: float


class ResponsePlan:
    """All responses that this writer has to produce. Prompts and their ids wait on disk, with a few bytes each in
    memory."""

    def __init__(self, recipe: DistillRecipe, identity: dict[str, Any], context_length: int, prompts: Prompts):
        self.recipe, self.identity, self.context_length, self.prompts = recipe, identity, context_length, prompts
        self.prompt_tokens = 0
        self._numbers, self._lengths = array("Q"), array("I")
        self._prompt_ids = bytearray()
        self._tokens = Spool()

    def add(self, number: int, prompt: Prompt, tokens: list[int]) -> None:
        self._numbers.append(number)
        self._lengths.append(len(tokens))
        self._prompt_ids += bytes.fromhex(prompt.id)
        self._tokens.append(array("i", tokens).tobytes())
        self.prompt_tokens += len(tokens)

    def __len__(self) -> int:
        """Number of prompts."""
        return len(self._numbers)

    def prompt_id(self, place: int) -> str:
        return self._prompt_ids[16 * place : 16 * place + 16].hex()

    def planned(self) -> Iterator[PlannedResponse]:
        """Yield the planned responses, prompt by prompt. Temperatures cycle over prompts and repeats."""
        cycle = self.recipe.temperatures
        for place, number in enumerate(self._numbers):
            for repeat in range(self.recipe.samples_per_prompt):
                temperature = cycle[(number + repeat) % len(cycle)]
                if temperature == 0 and repeat >= len(cycle):
                    continue  # would repeat the greedy response
                seed = self.recipe.sampling.seed
                id = response_id(self.prompt_id(place), temperature, seed, repeat, self.identity)
                yield PlannedResponse(id, place, temperature)

    def jobs(self, done: Container[str]) -> Iterator[Job]:
        """Yield the responses that are not done yet, in the order of generation.

        Inside a window they are sorted by prompt length, for dense batches. Then the batches of the window are
        shuffled, so that stopping early does not favor short prompts.
        """
        size = self.recipe.batch_size
        for number, window in enumerate(batched(self.planned(), WINDOW_BATCHES * size)):
            dense = sorted(window, key=lambda owed: (self._lengths[owed.prompt], owed.id))
            batches = list(batched(dense, size))
            ragged = [batches.pop()] if len(batches[-1]) < size else []  # stays last: all other batches are full
            random.Random(number * WINDOW_BATCHES * size).shuffle(batches)
            yield from (self._job(owed) for batch in batches + ragged for owed in batch if owed.id not in done)

    def _job(self, owed: PlannedResponse) -> Job:
        tokens = array("i", self._tokens[owed.prompt]).tolist()
        prompt = self.prompts[self._numbers[owed.prompt]]
        room = min(self.recipe.sampling.max_new_tokens, self.context_length - len(tokens))
        return Job(owed.id, prompt, tokens, owed.temperature, int(owed.id[:15], 16), room)


def plan(recipe: DistillRecipe, target: TargetText, prompts: Prompts, rejections: Rejections) -> ResponsePlan:
    """Plan this writer's part of the prompts. DataError if too many prompts, or all, cannot be answered."""
    index, count = recipe.writer
    made = ResponsePlan(recipe, target.identity, target.context_length, prompts)
    with progress.Progress("render prompts", total=len(prompts), unit="prompts") as bar:
        for number, prompt in enumerate(prompts):
            progress.interrupts.check()
            bar.update(1)
            if int(prompt.id, 16) % count != index:
                continue
            tokens = render(target, prompt, rejections, recipe.target.chat_template_kwargs)
            if tokens is not None:
                made.add(number, prompt, tokens)
    rejections.check()
    if not len(made):
        raise DataError(
            f"none of the {len(prompts)} prompts can be answered by target {target.identity['name']}",
            hint="; ".join(rejections.reasons) or f"--shard {recipe.shard} contains no prompt: use fewer shards",
        )
    return made


def response_id(prompt_id: str, temperature: float, seed: int, repeat: int, identity: dict[str, Any]) -> str:
    """Stable id of a response: 32 hex digits over everything that decides its text, given the settings in meta.json."""
    named = {key: value for key, value in identity.items() if key != "weights"}  # meta.json checks the weights
    key = json.dumps([prompt_id, float(temperature), seed, repeat, named], sort_keys=True)
    return hashlib.sha256(key.encode()).hexdigest()[:32]


def batched(rows: Iterable[Row], size: int) -> Iterator[list[Row]]:
    """Lists of `size` rows; the last list may be shorter."""
    source = iter(rows)
    while batch := list(islice(source, size)):
        yield batch
