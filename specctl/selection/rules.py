"""The rules of the game between a policy and decoding: what it is shown, of which round or token, and when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from specctl.recipe.select import GAMES, GameRecipe
from specctl.selection.registry import learns


@dataclass(frozen=True)
class Rules:
    """What is shown to the policy; a `GameRecipe` for one policy of one pool.

    Attributes:
        depth: K, the longest draft of the arms that play; of full information the depths that are looked at.
        reward: of a round, for bandits: tokens = committed; be = accepted/K; bd = mean overlap of all K positions of
            its draft; throughput = committed a second, in units of K + 1 tokens in a plain `step`.
        costs: seconds of a round of each arm by a table's cost model, for its yardsticks; a game measures, also in a
            replay, and knows the seconds of an arm once it has played.
        step: seconds of a step of plain decoding, a text; for throughput alone.
        loss: of a position, for full information: length = 1 − AL/(K + 1); throughput = the same of AL a second;
            acceptance = 1 − γ at depth 1.
        estimator: of acceptance in the length: product = γ, realised = hit.
        unit: token = every position is a start; chunk = only those where a round began, known as far as it committed:
            its k tokens in place of K, and their mean acceptance (HedgeSpec, B.3).
        hybrid_rounds: so many vectors first have the loss `acceptance`, which is known at once.
        warmup_rounds, batch_rounds: rounds that are all scored; afterwards once every so many, which grow by the factor
            `batch_growth` with every scoring: the longer a game, the less is still to be learnt.
        score_ends: of a text that ends within a game, the tokens that no scoring has reached are scored, too.
        tokens_per_update: after the warm-up, mean of so many vectors that is one update.
        drift: threshold of the test (`drift.py`) for a game that has changed: its learner forgets, all is scored, and
            the rounds between two scorings are `batch_rounds` again. None: never.
    """

    depth: int
    reward: Literal["tokens", "be", "bd", "throughput"]
    loss: Literal["length", "throughput", "acceptance"]
    estimator: Literal["product", "realised"]
    unit: Literal["token", "chunk"]
    hybrid_rounds: int
    warmup_rounds: int
    batch_rounds: int
    batch_growth: float
    score_ends: bool
    tokens_per_update: int
    drift: float | None
    costs: tuple[float, ...] = ()
    step: float | None = None


def rules_for(
    name: str, recipe: GameRecipe, depth: int, costs: tuple[float, ...] = (), step: float | None = None
) -> Rules:
    """The rules of a recipe for the policy of this name; `depth`: of the pool's longest draft.

    The reward `paper` is bd for MetaSD's policies, tokens for BanditSpec's. A policy with a game of its own (`GAMES`)
    plays that, but for what the recipe says otherwise; every other learner plays the same game, so that they compare.
    """
    options = recipe.model_dump()
    own = GAMES.get(name, {})
    options |= {key: value for key, value in own.items() if options[key] == _default(key)}
    longest = options.pop("depth")
    if learns(name) == "losses":
        depth = min(longest or depth, depth)
    if options["reward"] == "paper":
        options["reward"] = "bd" if name.startswith("metasd") else "tokens"
    return Rules(depth=depth, costs=costs, step=step, **options)


def overruled(names: Sequence[str], recipe: GameRecipe) -> list[str]:
    """A line for every policy whose own game takes the place of options that were set, if only to their defaults."""
    found = []
    for name in names:
        keys = [key for key, value in GAMES.get(name, {}).items() if _default(key) == getattr(recipe, key) != value]
        own = ", ".join(f"game.{key}={GAMES[name][key]}" for key in keys if key in recipe.model_fields_set)
        if own:
            found.append(f"{name} plays a game of its own: {own}; another value than the default is obeyed")
    return found


def _default(key: str) -> object:
    return GameRecipe.model_fields[key].default
