"""Conversations of several turns, as suites have them: the user goes on after the target's own answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from specctl import progress
from specctl.decoding.target import Target
from specctl.decoding.target_text import TargetText
from specctl.distillation.prompts import prompt_id
from specctl.measuring.contenders import Case, decode_turn, ready
from specctl.recipe import EvalRecipe


def next_turn(recipe: EvalRecipe, target: TargetText, case: Case, output_ids: Sequence[int]) -> Case | None:
    """The turn of a conversation that follows the target's answer to `case`; None where it ends there.

    It also ends, and that is logged, where the context has no room for more, or the template refuses it.
    """
    prompt = case.prompt
    if not prompt.later:
        return None
    answer = target.tokenizer.decode(list(output_ids), skip_special_tokens=True)
    said = ({"role": "assistant", "content": answer}, {"role": "user", "content": prompt.later[0]})
    messages = [*prompt.messages, *said]
    turn = replace(
        prompt, id=prompt_id(messages), messages=messages, later=prompt.later[1:], begun=prompt.begun or prompt.id
    )
    following = ready(recipe, target, turn)
    if isinstance(following, str):
        progress.log(f"{prompt.where} ends {len(prompt.later)} turns early: {following}")
        return None
    return following


def spoken(recipe: EvalRecipe, target: Target, cases: Sequence[Case]) -> list[Case]:
    """All turns of conversations in their order, as cases that can be measured in any: each has plain decoding's
    answers, under the first seed, between the user's words. They are decoded here, without a clock.

    Raises Interrupted.
    """
    if not any(case.prompt.later for case in cases):
        return list(cases)
    turns = []
    with progress.track("conversations", total=sum(len(case.prompt.later) for case in cases), unit="turns") as bar:
        for case in cases:
            following: Case | None = case
            while following is not None:
                turns.append(case := following)
                if not case.prompt.later:
                    break
                progress.interrupts.check()
                seed = case.seed(recipe.sampling.seed + recipe.seeds[0])
                (decoded,) = decode_turn(target, recipe.sampling, [case], [seed])
                following = next_turn(recipe, target, case, decoded.output_ids)
                bar.update(1)
    return turns
