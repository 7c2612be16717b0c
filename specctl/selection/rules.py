"""The rules of the game between a policy and decoding: what it is shown, of which round or token, and when."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from specctl.recipe.select import GameRecipe
from specctl.selection.registry import learns


@dataclass(frozen=True)
class Rules:
    """What is shown to the policy; a `GameRecipe` for one policy of one pool.

    Attributes:
        depth: K, the longest draft; of full information the depths that are looked at.
        reward: of a round, for bandits: tokens = committed; be = accepted/K; bd = mean overlap of all K positions;
            throughput = committed a second, in units of the largest there can be (`costs`) or has been.
        costs: seconds of a round of each arm, declared; empty = as measured.
        loss: of a position, for full information: length = 1 − AL/(K + 1); throughput = the same of AL a second, by
            `costs` or as measured; acceptance = 1 − γ at depth 1.
        estimator: of acceptance in the length: product = γ, realised = hit.
        unit: token = every position is a start; chunk = only those where a round began, known as far as it committed.
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


def rules_for(name: str, recipe: GameRecipe, depth: int, costs: tuple[float, ...] = ()) -> Rules:
    """The rules of a recipe for the policy of this name; `depth`: of the pool's longest draft.

    The reward `paper` is bd for MetaSD's policies, tokens for BanditSpec's. `normalhedge` is `hedgespec` without
    hybrid loss, skipping and forgetting, the ablation; every other learner plays the same game, so that they compare.
    """
    options = recipe.model_dump(exclude={"depth"})
    if learns(name) == "losses":
        depth = min(recipe.depth or depth, depth)
    if options["reward"] == "paper":
        options["reward"] = "bd" if name.startswith("metasd") else "tokens"
    if name == "normalhedge":
        options |= {"hybrid_rounds": 0, "warmup_rounds": 0, "batch_rounds": 1, "batch_growth": 1.0}
        options |= {"tokens_per_update": 1, "score_ends": True, "drift": None}
    return Rules(depth=depth, costs=costs, **options)
