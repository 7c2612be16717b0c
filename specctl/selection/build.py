"""A selector put together: arms, a policy by name, the rules of its game, and who scores idle drafters."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from specctl.decoding.target import Target
from specctl.recipe import GameRecipe
from specctl.selection import registry
from specctl.selection.arms import reach
from specctl.selection.clock import Clock
from specctl.selection.combined import Guarded
from specctl.selection.controller import Round, Selector, Text
from specctl.selection.feedback import Scorer
from specctl.selection.game import Game
from specctl.selection.policy import Arms, Policy, seed_of
from specctl.selection.rules import rules_for


def make_selector(
    target: Target,
    arms: Sequence[Guarded],
    name: str,
    recipe: GameRecipe,
    new_policy: Callable[[Arms, Text], Policy],
    *,
    seed: int,
    within_query: bool,
    on_round: Callable[[Round], None],
) -> Selector:
    """A `Selector` of the policy `name`.

    Args:
        new_policy: a fresh one for the game that begins with this text; `seed` and the text decide its draws.
        within_query: every game is one text.
    """
    rules = rules_for(name, recipe, max(1, *(reach(arm.drafter) for arm in arms)))
    overlap = registry.learns(name) == "reward" and rules.reward == "bd"
    clock = Clock.of(len(arms))
    scorer = None
    if registry.learns(name) == "losses" or overlap:
        drafters = list(dict.fromkeys(arm.drafter for arm in arms))
        scorer = Scorer(target, drafters, rules.depth, overlap=overlap)

    def new_game(text: Text) -> Game:
        own = Arms(len(arms), rules.depth, seed_of(seed + text.seed, text.query))
        return Game(new_policy(own, text), rules, own, clock)

    ends = not within_query and rules.score_ends
    return Selector(arms, new_game, scorer, chosen_only=overlap, ends=ends, on_round=on_round)
