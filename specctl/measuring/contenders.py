"""Timing contenders side by side: every prompt is answered by all of them before the next one starts.

Fairness: sequences are decoded one at a time; the order of the contenders rotates from prompt to prompt, so that a
machine that slows down slows all of them; each has run before the clock counts; prompts are tokenised before, texts
compared and written after.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedModel

from specctl import progress
from specctl.decoding import metrics
from specctl.decoding.device.rooms import Rooms
from specctl.decoding.loop import decode
from specctl.decoding.protocols import Drafter
from specctl.decoding.records import Decoded
from specctl.decoding.sampling import Sampling
from specctl.decoding.target import Target
from specctl.decoding.target_text import TargetText
from specctl.distillation.prompts import Prompt, Rejections
from specctl.errors import ChatTemplateError, DataError, Interrupted, UsageError
from specctl.measuring.records import Question, Record
from specctl.measuring.transformers import PLAIN, load_generator
from specctl.recipe import BenchRecipe, EvalRecipe, SamplingRecipe, SelectRecipe

VANILLA = "vanilla"
WARMUP_PROMPTS, WARMUP_TOKENS = 2, 16
KEEP_EVERY_S = 300.0  # a run that is killed without a signal loses no more than that


class Case(NamedTuple):
    """A prompt ready to be decoded."""

    prompt: Prompt
    ids: list[int]
    room: int  # new tokens

    def seed(self, repeat: int) -> int:
        """Random streams depend on seed and position only: without the prompt's share all prompts had the same."""
        return int(self.prompt.id[:12], 16) + repeat

    def question(self, seed: int) -> Question:
        return self.prompt.domain, self.prompt.id, seed


Turn = Sequence[Case]
"""Prompts that are answered together."""
Contender = Callable[[Turn, list[int]], list[dict[str, Decoded]]]
"""Answers a turn, each prompt with its seed, under one or several names, the rows of the matrix."""


def prepare(
    recipe: EvalRecipe | BenchRecipe | SelectRecipe,
    target: TargetText,
    prompts: Sequence[Prompt],
    rejections: Rejections,
) -> list[Case]:
    """Prompts as ids; one that the template refuses or the context has no room for is rejected.

    Raises DataError when more than the allowed share is rejected, or all.
    """
    cases = []
    for prompt in prompts:
        progress.interrupts.check()
        case = ready(recipe, target, prompt)
        if isinstance(case, Case):
            cases.append(case)
        else:
            rejections.add(prompt.where, case, prompt.messages[-1]["content"])
    rejections.check()
    if not cases:
        raise DataError(f"target {target.name} can answer none of the prompts", hint="; ".join(rejections.reasons))
    return cases


def ready(recipe: EvalRecipe | BenchRecipe | SelectRecipe, target: TargetText, prompt: Prompt) -> Case | str:
    """A prompt as ids; why not, where the template refuses it or the context has no room for it."""
    try:
        ids = target.render(prompt.messages, **recipe.target.chat_template_kwargs)
    except ChatTemplateError as error:
        return error.message
    if not 0 < len(ids) < target.context_length:
        return f"{len(ids)} tokens do not fit the target's context of {target.context_length}"
    return Case(prompt, ids, min(recipe.sampling.max_new_tokens, target.context_length - len(ids)))


def contenders(
    recipe: EvalRecipe, target: Target, drafters: Mapping[str, Drafter], assistants: Mapping[str, PreTrainedModel]
) -> list[Contender]:
    """Plain decoding, each drafter, and `transformers` in all its modes."""
    competing = [engine(target, recipe.sampling, VANILLA, None)] if VANILLA in recipe.baselines else []
    competing += [engine(target, recipe.sampling, name, drafter) for name, drafter in drafters.items()]
    if PLAIN in recipe.baselines:
        generator = load_generator(recipe.target, target, filters(recipe.sampling), assistants)
        competing.append(
            lambda turn, seeds: [generator.decode(c.ids, c.room, s) for c, s in zip(turn, seeds, strict=True)]
        )
    if not competing:
        raise UsageError("nothing to measure", hint="name a --drafter or a --pool, or keep the baselines")
    return competing


def engine(
    target: Target, sampling: SamplingRecipe, name: str, drafter: Drafter | None, rooms: Rooms | None = None
) -> Contender:
    """Our own decoding loop, with a drafter or (None) without, as fast as it is on the target's device. `rooms`: of an
    earlier contender of this name."""

    options: dict[str, Any] = {"drafter": drafter, "rooms": rooms or Rooms()}

    def answer(turn: Turn, seeds: list[int]) -> list[dict[str, Decoded]]:
        return [{name: decoded} for decoded in decode_turn(target, sampling, turn, seeds, **options)]

    return answer


def decode_turn(
    target: Target, sampling: SamplingRecipe, turn: Turn, seeds: list[int], **options: Any
) -> list[Decoded]:
    """Decode a turn at once; each answer is given its share of the seconds. Options are those of `decode`."""
    decoded = decode(
        target,
        [case.ids for case in turn],
        sampling=filters(sampling),
        max_new_tokens=[case.room for case in turn],
        seeds=seeds,
        exact=sampling.exact,
        **options,
    )
    share = 1 / len(turn)
    return [replace(text, prefill_s=share * text.prefill_s, decode_s=share * text.decode_s) for text in decoded]


def filters(sampling: SamplingRecipe) -> Sampling:
    return Sampling(sampling.temperature, sampling.top_k, sampling.top_p)


def warm_up(turns: Sequence[Turn], competing: Sequence[Contender]) -> None:
    """Ask everyone something before the clock counts: the first calls are slow."""
    for turn, contender in itertools.product(turns[:WARMUP_PROMPTS], competing):
        contender([case._replace(room=min(case.room, WARMUP_TOKENS)) for case in turn], [0] * len(turn))


def measure(
    recipe: EvalRecipe | SelectRecipe,
    turns: Sequence[Turn],
    competing: Sequence[Contender],
    shown: set[str],
    keep: Callable[[Sequence[Record]], Path],
    earlier: Sequence[Record] = (),
    label: str = "eval",
    warm: bool = False,
    resumable: bool = True,
    told: Callable[[Sequence[Record]], None] | None = None,
) -> list[Record]:
    """Every contender's answers to every turn and seed; the bar shows the mat of the drafters named in `shown`.

    What `earlier` records answer is not asked again; every other turn is asked of the contenders in the order that it
    would have had in one go. The records go to `keep` now and then and however it ends, an unfinished turn left out:
    all contenders have answered the same ones. `warm`: a caller has warmed them up. `told` hears the records of every
    turn. Raises Interrupted between two
    turns; its hint is --resume where the caller can go on from the records (`resumable`).
    """
    records, known = list(earlier), {record.question for record in earlier}
    todo = [
        (number, seed, turn)
        for number, (seed, turn) in enumerate(itertools.product(recipe.seeds, turns))
        if any(case.question(seed) not in known for case in turn)
    ]
    if todo and not warm:
        warm_up(turns, competing)
    kept_at = time.monotonic()
    total = sum(len(turn) for _, _, turn in todo)
    try:
        with progress.track(label, total=total, unit="prompts") as bar:
            for number, seed, turn in todo:
                progress.interrupts.check()
                answered = ask(recipe.sampling, turn, seed, rotated(competing, number))
                if told is not None:
                    told(answered)
                records += answered
                bar.update(
                    len(turn), mat=metrics.mat([record.decoded for record in records if record.drafter in shown])
                )
                if time.monotonic() - kept_at > KEEP_EVERY_S:
                    keep(records)
                    kept_at = time.monotonic()
    except Interrupted as stop:
        done = len({record.question for record in records})
        place = keep(records)
        hint = f"continue with --resume --output-dir {place.parent}" if resumable else f"what is done is in {place}"
        whole = len(recipe.seeds) * sum(len(turn) for turn in turns)
        raise Interrupted(f"{stop.message} after {done} of {whole} prompts", hint=hint) from None
    finally:
        keep(records)
    return records


def ask(sampling: SamplingRecipe, turn: Turn, seed: int, competing: Sequence[Contender]) -> list[Record]:
    """Everybody's answers to a turn."""
    seeds = [case.seed(sampling.seed + seed) for case in turn]
    return [
        Record(case.prompt.id, case.prompt.domain, name, seed, sampling.temperature, decoded)
        for contender in competing
        for case, answers in zip(turn, contender(turn, seeds), strict=True)
        for name, decoded in answers.items()
    ]


def rotated(competing: Sequence[Contender], turn: int) -> Sequence[Contender]:
    """The contenders in another order at every turn."""
    first = turn % len(competing)
    return [*competing[first:], *competing[:first]]
