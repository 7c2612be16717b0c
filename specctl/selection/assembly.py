"""A selector put together: arms, a policy by name, the rules of its game, and who scores idle drafters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from specctl.decoding.records import Label
from specctl.decoding.target import Target
from specctl.recipe import GameRecipe
from specctl.selection.arms import reach
from specctl.selection.controller import RoundLine, Selector
from specctl.selection.feedback import Scorer
from specctl.selection.game.clock import ArmClock
from specctl.selection.game.game import Game
from specctl.selection.game.rules import rules_for
from specctl.selection.guarded import Guarded
from specctl.selection.policies import registry
from specctl.selection.policies.policy import Arms, Policy, seed_of
from specctl.selection.prompt_memory import PromptMemory
from specctl.selection.recorded.recorder import step_seconds


def make_selector(
    target: Target,
    arms: Sequence[Guarded],
    name: str,
    recipe: GameRecipe,
    new_policy: Callable[[Arms, Label], Policy],
    *,
    batch: int = 1,
    step: Callable[[], float],
    seed: int,
    within_query: bool,
    on_round: Callable[[RoundLine], None],
) -> Selector:
    """A `Selector` of the policy `name`.

    Args:
        new_policy: a fresh one for the game that begins with this text; `seed` and the text decide its draws.
        batch: texts that are decoded at a time.
        step: `plain_step` of such a batch, asked where tokens a second are played for. All selectors of a run are given
            the same figure, so that they play for one unit.
        within_query: every game is one text.
    """
    learns = registry.learns(name)
    rules = rules_for(name, recipe, max(1, *map(_reach, arms)))
    if any(arm.scored is not arm.drafter for arm in arms) and "loss" not in recipe.model_fields_set:
        # A bad head of a hybrid is seldom asked: by its seconds it would be the best.
        rules = replace(rules, loss="length" if rules.loss == "throughput" else rules.loss)
    if {"reward": rules.reward, "losses": rules.loss}.get(learns) == "throughput":
        rules = replace(rules, step=step())
    clock = ArmClock.of(len(arms))
    drafters = list(dict.fromkeys(arm.scored for arm in arms))
    scorer = Scorer(target, drafters, rules.depth) if learns == "losses" else None

    def new_game(text: Label) -> Game:
        seeded = Arms(len(arms), rules.depth, seed_of(seed + text.seed, text.query))
        return Game(new_policy(seeded, text), rules, seeded, clock)

    ends = not within_query and rules.score_ends
    overlaps = learns == "reward" and rules.reward == "bd"
    reads = registry.contextual(name)
    return Selector(
        arms,
        new_game,
        scorer,
        clock,
        overlaps=overlaps,
        ends=ends,
        memory=PromptMemory(len(arms)) if reads else None,
        taps=(target.num_layers,) if reads else (),
        on_round=on_round,
    )


def plain_step(target: Target, batch: int) -> float:
    """Seconds of a step of plain decoding for each text of a batch: the unit of throughput."""
    return step_seconds(target, [1], batch)[0] / batch


def _reach(arm: Guarded) -> int:
    """The longest draft of an arm, in tokens."""
    deep = reach(arm.drafter)
    return deep if arm.nodes is None else min(deep, arm.nodes)
