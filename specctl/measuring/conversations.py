"""Conversations of several turns, as in benchmark suites: the user's next message follows the target's own answer."""

from collections.abc import Sequence
from dataclasses import replace

from specctl import progress
from specctl.decoding.engine import Engine, EngineOptions
from specctl.decoding.target import Target
from specctl.decoding.target_text import TargetText
from specctl.distillation.messages import prompt_id
from specctl.distillation.prompts import prompt_ids
from specctl.measuring.contenders import Case, case_of, decode_batch
from specctl.recipe import EvalRecipe, EvalServerRecipe


def next_turn(
    recipe: EvalRecipe | EvalServerRecipe, target: TargetText, case: Case, output_ids: Sequence[int]
) -> Case | None:
    """Return the turn that follows the target's answer to `case`, or None if the conversation ends there.

    It also ends, with a log message, if the context has no room for more or the chat template refuses the turn.
    """
    prompt = case.prompt
    if not prompt.later_turns:
        return None
    answer = target.tokenizer.decode(list(output_ids), skip_special_tokens=True)
    added = ({"role": "assistant", "content": answer}, {"role": "user", "content": prompt.later_turns[0]})
    messages = [*prompt.messages, *added]
    turn = replace(
        prompt,
        id=prompt_id(messages, prompt.tools, prompt.options),
        messages=messages,
        later_turns=prompt.later_turns[1:],
        first_turn_id=prompt.first_turn_id or prompt.id,
    )
    try:
        ids = prompt_ids(target, turn, recipe.target.chat_template_kwargs)
    except ValueError as error:
        progress.log(f"{prompt.where} ends {len(prompt.later_turns)} turns early: {error}")
        return None
    return case_of(recipe.sampling, target, turn, ids)


def conversation_turns(recipe: EvalRecipe, target: Target, cases: Sequence[Case]) -> list[Case]:
    """Split conversations into independent cases, one per turn, that can be measured in any order.

    Between the user's messages stand plain decoding's answers under the first seed. They are decoded here, outside of
    all timing. Raises Interrupted.
    """
    if not any(case.prompt.later_turns for case in cases):
        return list(cases)
    turns, engine = [], Engine(target, options=EngineOptions(exact=recipe.sampling.exact))
    with progress.Progress(
        "conversations", total=sum(len(case.prompt.later_turns) for case in cases), unit="turns"
    ) as bar:
        for case in cases:
            following: Case | None = case
            while following is not None:
                turns.append(case := following)
                if not case.prompt.later_turns:
                    break
                progress.interrupts.check()
                seed = case.seed(recipe.sampling.seed + recipe.seeds[0])
                (decoded,) = decode_batch(engine, recipe.sampling, [case], [seed])
                following = next_turn(recipe, target, case, decoded.output_ids)
                bar.update(1)
    return turns
