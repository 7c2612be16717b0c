"""Timing of contenders side by side: every contender answers a prompt before the next prompt starts.

Fairness: sequences are decoded one at a time unless the recipe sets a batch size. The order of the contenders rotates
from prompt to prompt, so a machine that slows down slows every contender. Each contender is warmed up before timing
starts. Prompts are tokenized before timing; answers are compared and written after it.
"""

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from transformers import PreTrainedModel

from specctl import progress
from specctl.decoding import metrics
from specctl.decoding.controllers import Fixed
from specctl.decoding.engine import Engine, EngineOptions
from specctl.decoding.offline import decode
from specctl.decoding.protocols import Drafter
from specctl.decoding.records import Decoded, Label, Request
from specctl.decoding.sampling import Sampling
from specctl.decoding.target import Target
from specctl.decoding.target_text import TargetText
from specctl.distillation.prompts import Prompt, render
from specctl.distillation.rejections import Rejections
from specctl.errors import DataError, Interrupted, UsageError
from specctl.measuring.records import Question, Record
from specctl.measuring.transformers_baseline import PLAIN, load_generator
from specctl.recipe import BenchRecipe, EvalRecipe, EvalServerRecipe, PoolRecipe, SamplingRecipe, SelectRecipe

VANILLA = "vanilla"
WARMUP_PROMPTS, WARMUP_TOKENS = 2, 16
KEEP_EVERY_S = 300.0  # longest time between two writes: a killed run loses no more


class Case(NamedTuple):
    """A prompt ready to be decoded."""

    prompt: Prompt
    ids: list[int]
    max_new_tokens: int  # limit of new tokens

    def seed(self, repeat: int) -> int:
        """Seed of this prompt for one repeat.

        Random streams depend only on seed and position, so the prompt's hash is part of the seed: otherwise all prompts
        would share one random stream.
        """
        return int(self.prompt.id[:12], 16) + repeat

    def question(self, seed: int) -> Question:
        return self.prompt.domain, self.prompt.id, seed


PromptBatch = Sequence[Case]
"""Prompts that are decoded together, as one batch."""
Contender = Callable[[PromptBatch, list[int]], list[dict[str, Decoded]]]
"""Function that answers a turn: (turn, one seed per prompt) → per prompt, answers by contender name."""

PromptedRecipe = EvalRecipe | EvalServerRecipe | BenchRecipe | PoolRecipe
"""Recipes of commands that sample prompts."""


def prepare(
    recipe: PromptedRecipe, target: TargetText, prompts: Sequence[Prompt], rejections: Rejections
) -> list[Case]:
    """Render prompts to token ids. A prompt is rejected if the chat template refuses it or it does not fit the context.

    Raises DataError if more than the allowed share is rejected, or all.
    """
    cases = []
    for prompt in prompts:
        progress.interrupts.check()
        ids = render(target, prompt, rejections, recipe.target.chat_template_kwargs)
        if ids is not None:
            cases.append(case_of(recipe.sampling, target, prompt, ids))
    rejections.check()
    if not cases:
        raise DataError(f"target {target.name} can answer none of the prompts", hint="; ".join(rejections.reasons))
    return cases


def case_of(sampling: SamplingRecipe, target: TargetText, prompt: Prompt, ids: list[int]) -> Case:
    """A prompt with its ids, and with as many new tokens as the recipe and the context allow."""
    return Case(prompt, ids, min(sampling.max_new_tokens, target.context_length - len(ids)))


def contenders(
    recipe: EvalRecipe, target: Target, drafters: Mapping[str, Drafter], assistants: Mapping[str, PreTrainedModel]
) -> list[Contender]:
    """Contenders of `specctl eval`: plain decoding, each drafter, and `transformers` in all its modes."""
    sampling, options = recipe.sampling, EngineOptions(exact=recipe.sampling.exact)
    competing = [engine_contender(VANILLA, Engine(target, options=options), sampling)] * (VANILLA in recipe.baselines)
    competing += [
        engine_contender(name, Engine(target, Fixed.of(drafter), options), sampling)
        for name, drafter in drafters.items()
    ]
    if PLAIN in recipe.baselines:
        generator = load_generator(recipe.target, target, Sampling.of(recipe.sampling), assistants)
        competing.append(
            lambda turn, seeds: [generator.decode(c.ids, c.max_new_tokens, s) for c, s in zip(turn, seeds, strict=True)]
        )
    if not competing:
        raise UsageError("nothing to measure", hint="name a --drafter or a --pool, or keep the baselines")
    return competing


def engine_contender(
    name: str, engine: Engine, sampling: SamplingRecipe, label: Callable[[Case, int], Label | None] = lambda *_: None
) -> Contender:
    """Contender that decodes with an engine. `label`: (prompt, seed) → label of the text for the controller."""

    def answer(turn: PromptBatch, seeds: list[int]) -> list[dict[str, Decoded]]:
        labels = list(map(label, turn, seeds))
        return [{name: decoded} for decoded in decode_batch(engine, sampling, turn, seeds, labels)]

    return answer


def decode_batch(
    engine: Engine,
    sampling: SamplingRecipe,
    turn: PromptBatch,
    seeds: list[int],
    labels: Sequence[Label | None] | None = None,
) -> list[Decoded]:
    """Decode a turn as one batch. Each answer gets an equal share of the seconds."""
    how = Sampling.of(sampling)
    decoded = decode(
        engine,
        [
            Request(case.ids, how, case.max_new_tokens, seed, label=label)
            for case, seed, label in zip(turn, seeds, labels or [None] * len(turn), strict=True)
        ],
    )
    share = 1 / len(turn)
    return [replace(text, prefill_s=share * text.prefill_s, decode_s=share * text.decode_s) for text in decoded]


def warm_up(turns: Sequence[PromptBatch], competing: Sequence[Contender]) -> None:
    """Run every contender on a few short answers before timing starts, because first calls are slow."""
    for turn, contender in itertools.product(turns[:WARMUP_PROMPTS], competing):
        contender(
            [case._replace(max_new_tokens=min(case.max_new_tokens, WARMUP_TOKENS)) for case in turn], [0] * len(turn)
        )


class Shown(NamedTuple):
    """The progress bar of a measurement: its label, and the drafters of which it shows the mat."""

    label: str
    drafters: set[str]


class RecordJournal(NamedTuple):
    """The records of a run.

    Attributes:
        keep: writes all records, and returns their file.
        earlier: records of the run to resume. Turns that these answer are skipped; the remaining turns have the order
            of contenders of an uninterrupted run.
        resumable: whether the kept records can be resumed, so that an interrupted run hints at --resume.
    """

    keep: Callable[[Sequence[Record]], Path]
    earlier: Sequence[Record] = ()
    resumable: bool = True


def measure(
    recipe: EvalRecipe | SelectRecipe,
    turns: Sequence[PromptBatch],
    competing: Sequence[Contender],
    shown: Shown,
    journal: RecordJournal,
    on_answers: Callable[[Sequence[Record]], None] | None = None,
) -> list[Record]:
    """Return every contender's answers to every turn and seed.

    The records are kept every `KEEP_EVERY_S` seconds and at the end, even if the run fails. An unfinished turn is left
    out, so all contenders have answered the same prompts. Without `on_answers`, which is called with the records of
    every turn, the contenders are warmed up first.

    Raises Interrupted, between two turns.
    """
    records, known = list(journal.earlier), {record.question for record in journal.earlier}
    todo = [
        (number, seed, turn)
        for number, (seed, turn) in enumerate(itertools.product(recipe.seeds, turns))
        if any(case.question(seed) not in known for case in turn)
    ]
    if todo and on_answers is None:
        warm_up(turns, competing)
    kept_at = time.monotonic()
    total = sum(len(turn) for _, _, turn in todo)
    try:
        with progress.Progress(shown.label, total=total, unit="prompts") as bar:
            for number, seed, turn in todo:
                progress.interrupts.check()
                answered = answer_batch(recipe.sampling, turn, seed, rotated_order(competing, number))
                if on_answers is not None:
                    on_answers(answered)
                records += answered
                bar.update(
                    len(turn),
                    mat=metrics.mat([record.decoded for record in records if record.drafter in shown.drafters]),
                )
                if time.monotonic() - kept_at > KEEP_EVERY_S:
                    journal.keep(records)
                    kept_at = time.monotonic()
    except Interrupted as stop:
        done = len({record.question for record in records})
        place = journal.keep(records)
        hint = (
            f"continue with --resume --output-dir {place.parent}"
            if journal.resumable
            else f"finished prompts are in {place}"
        )
        whole = len(recipe.seeds) * sum(len(turn) for turn in turns)
        raise Interrupted(f"{stop.message} after {done} of {whole} prompts", hint=hint) from None
    finally:
        journal.keep(records)
    return records


def answer_batch(
    sampling: SamplingRecipe, turn: PromptBatch, seed: int, competing: Sequence[Contender]
) -> list[Record]:
    seeds = [case.seed(sampling.seed + seed) for case in turn]
    return [
        Record(case.prompt.id, case.prompt.domain, name, seed, sampling.temperature, decoded)
        for contender in competing
        for case, answers in zip(turn, contender(turn, seeds), strict=True)
        for name, decoded in answers.items()
    ]


def rotated_order(competing: Sequence[Contender], turn: int) -> Sequence[Contender]:
    first = turn % len(competing)
    return [*competing[first:], *competing[:first]]
