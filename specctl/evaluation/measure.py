"""Timing contenders side by side: every prompt is answered by all of them before the next one starts.

Fairness: sequences are decoded one at a time; the order of the contenders rotates from prompt to prompt, so that a
machine that slows down slows all of them; each has run before the clock counts; prompts are tokenised before, texts
compared and written after.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from jinja2 import TemplateError
from transformers import PreTrainedModel

from specctl import progress
from specctl.decoding.draft import Drafter
from specctl.decoding.loop import Decoded, decode
from specctl.decoding.sampling import Sampling
from specctl.decoding.target import Target
from specctl.distillation.prompts import Prompt, Rejections
from specctl.errors import DataError, Interrupted, UsageError
from specctl.evaluation import metrics
from specctl.evaluation.baselines import PLAIN, load_generator
from specctl.evaluation.records import Question, Record
from specctl.recipe import BenchRecipe, EvalRecipe, SamplingRecipe

VANILLA = "vanilla"
WARMUP_PROMPTS, WARMUP_TOKENS = 2, 16
KEEP_EVERY_S = 300.0  # a run that is killed without a signal loses no more than that

Contender = Callable[[list[int], int, int], dict[str, Decoded]]
"""Answers (prompt ids, new tokens, seed) under one or several names, the rows of the matrix."""


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


def prepare(
    recipe: EvalRecipe | BenchRecipe, target: Target, prompts: Sequence[Prompt], rejections: Rejections
) -> list[Case]:
    """Prompts as ids; one that the template refuses or the context has no room for is rejected.

    Raises DataError when more than the allowed share is rejected, or all.
    """
    cases = []
    for prompt in prompts:
        progress.interrupts.check()
        try:
            ids = target.render(prompt.messages, **recipe.target.chat_template_kwargs)
            reason = f"{len(ids)} tokens do not fit the target's context of {target.context_length}"
        except TemplateError as error:
            ids, reason = [], f"the chat template refuses it: {error}"
        if 0 < len(ids) < target.context_length:
            cases.append(Case(prompt, ids, min(recipe.sampling.max_new_tokens, target.context_length - len(ids))))
        else:
            rejections.add(prompt.where, reason, prompt.messages[-1]["content"])
    rejections.check()
    if not cases:
        raise DataError(f"target {target.name} can answer none of the prompts", hint="; ".join(rejections.reasons))
    return cases


def contenders(
    recipe: EvalRecipe, target: Target, drafters: Mapping[str, Drafter], assistants: Mapping[str, PreTrainedModel]
) -> list[Contender]:
    """Plain decoding, each drafter, and `transformers` in all its modes."""
    found = [engine(target, recipe.sampling, VANILLA, None)] if VANILLA in recipe.baselines else []
    found += [engine(target, recipe.sampling, name, drafter) for name, drafter in drafters.items()]
    if PLAIN in recipe.baselines:
        found.append(load_generator(recipe.target, target, filters(recipe.sampling), assistants).decode)
    if not found:
        raise UsageError("nothing to measure", hint="name a --drafter or a --pool, or keep the baselines")
    return found


def engine(target: Target, sampling: SamplingRecipe, name: str, drafter: Drafter | None) -> Contender:
    """Our own decoding loop, with a drafter or (None) without."""
    parameters = filters(sampling)

    def answer(ids: list[int], room: int, seed: int) -> dict[str, Decoded]:
        (decoded,) = decode(
            target,
            [ids],
            sampling=parameters,
            max_new_tokens=room,
            seeds=[seed],
            drafter=drafter,
            exact=sampling.exact,
        )
        return {name: decoded}

    return answer


def filters(sampling: SamplingRecipe) -> Sampling:
    return Sampling(sampling.temperature, sampling.top_k, sampling.top_p)


def measure(
    recipe: EvalRecipe,
    cases: Sequence[Case],
    found: Sequence[Contender],
    shown: set[str],
    keep: Callable[[Sequence[Record]], Path],
    earlier: Sequence[Record] = (),
) -> list[Record]:
    """Every contender's answer to every prompt and seed; the bar shows the mat of the drafters named in `shown`.

    What `earlier` records answer is not asked again; every other question has the turn it would have had in one go.
    The records go to `keep` now and then and however it ends, an unfinished question left out: all contenders have
    answered the same ones. Raises Interrupted between two prompts.
    """
    records, known = list(earlier), {record.question for record in earlier}
    questions = [(seed, case) for seed in recipe.seeds for case in cases]
    todo = [(turn, seed, case) for turn, (seed, case) in enumerate(questions) if case.question(seed) not in known]
    if todo:
        for case, contender in itertools.product(cases[:WARMUP_PROMPTS], found):
            contender(case.ids, min(case.room, WARMUP_TOKENS), 0)
    kept_at = time.monotonic()
    try:
        with progress.track("eval", total=len(todo), unit="prompts") as bar:
            for turn, seed, case in todo:
                progress.interrupts.check()
                records += _ask(recipe, case, seed, _rotated(found, turn))
                bar.update(mat=metrics.mat([record.decoded for record in records if record.drafter in shown]))
                if time.monotonic() - kept_at > KEEP_EVERY_S:
                    keep(records)
                    kept_at = time.monotonic()
    except Interrupted as stop:
        done = len({record.question for record in records})
        hint = f"continue with --resume --output-dir {keep(records).parent}"
        raise Interrupted(f"{stop.message} after {done} of {len(questions)} prompts", hint=hint) from None
    finally:
        keep(records)
    return records


def _ask(recipe: EvalRecipe, case: Case, seed: int, found: Sequence[Contender]) -> list[Record]:
    records = []
    for contender in found:
        answers = contender(case.ids, case.room, case.seed(recipe.sampling.seed + seed))
        records += [
            Record(case.prompt.id, case.prompt.domain, name, seed, recipe.sampling.temperature, decoded)
            for name, decoded in answers.items()
        ]
    return records


def _rotated(found: Sequence[Contender], turn: int) -> Sequence[Contender]:
    first = turn % len(found)
    return [*found[first:], *found[:first]]
