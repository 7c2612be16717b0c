"""Keys of `specctl select`: the constants of the policies and of the game that they play."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from specctl.recipe.sections import PositiveFloat, Section


class PolicyRecipe(Section):
    """Constants of all policies, with the values of their papers; each policy reads its own."""

    play: Literal["sample", "argmax"] = "sample"  # how an arm is drawn from weights
    arm: NonNegativeInt = 0  # fixed: the one it plays
    delta: Annotated[float, Field(gt=0, lt=1)] = 0.1  # ucbspec: δ, probability that a radius does not hold
    radius_scale: NonNegativeFloat = 1.0  # ucbspec: 1 is literal, 0.1 practical
    eta: PositiveFloat | None = None  # exp3spec, hedge: a constant rate η instead of the papers' schedules
    beta: NonNegativeFloat = 0.01  # metasd-ucb, -ducb, -swucb: β, scale of the radius
    mix: Annotated[float, Field(gt=0, le=1)] = 0.4  # metasd-exp3: γ, share of uniform exploration
    literal: bool = False  # metasd-sh, -petc: halve as the printed pseudo-code does, keeping the worse half
    period: PositiveInt = 1  # metasd-sh: pulls of each surviving arm before a halving
    # metasd-petc: halving takes about B0 = c ln B rounds; None = 2N. The paper names no c. Of seven arms and 128 tokens
    # 2 has committed to one after 13 rounds; 2N explores for 63, which is more than 128 tokens take.
    petc_c: PositiveFloat | None = 2.0
    horizon: Annotated[int, Field(ge=2)] = 128  # metasd-petc: B, tokens that are expected until a reset
    discount: Annotated[float, Field(gt=0, le=1)] = 0.99  # metasd-ducb: λ (not in the paper)
    window: PositiveInt = 100  # metasd-swucb: rounds that count (not in the paper)


class CatchUpRecipe(Section):
    """The text read by drafters that miss much of it, when they are chosen or scored: everything (`recompute`), or the
    first `sink` and the last `window` tokens (`streaming`, MetaSD F.11)."""

    name: Literal["recompute", "streaming"] = "recompute"
    sink: PositiveInt = 4
    window: PositiveInt = 512


class GameRecipe(Section):
    """The policies' view of a game. The skipping and the hybrid loss are HedgeSpec's, for full information only."""

    # Draft depths of idle drafters that are looked at; None = the longest draft, as in HedgeSpec. On development
    # prompts one chose as well as two or three, at the least cost.
    depth: PositiveInt | None = 1
    reward: Literal["paper", "tokens", "be", "bd", "throughput"] = "paper"  # of bandits; paper = tokens or bd
    # Of full information: expected length (HedgeSpec), that a second of a round, or 1 - γ at depth 1. In a pool of
    # heads the first two choose alike; beside drafters that cost nothing only seconds tell what is worth playing.
    loss: Literal["length", "throughput", "acceptance"] = "throughput"
    # Of the expected length. realised is noisier, and unbiased but for what a draft leaves out because it is unlikely
    # (stop_below, the nodes of a dynamic tree, expansions of one wider than 1): that both count as if it were there.
    estimator: Literal["product", "realised"] = "product"
    unit: Literal["token", "chunk"] = "token"
    hybrid_rounds: NonNegativeInt = 3  # first loss vectors that are 1 - γ, without delay
    # Rounds that are all scored: 6 in HedgeSpec. After one the choice is as good as after two, which score more.
    warmup_rounds: NonNegativeInt = 1
    batch_rounds: PositiveInt = 12  # rounds between two scorings afterwards
    batch_growth: Annotated[float, Field(ge=1)] = 2.0  # from scoring to scoring; 1 is HedgeSpec's, and costs more
    # Threshold of Page's test for an arm that accepts less than it did: forget, score now and often again. 5 alarms
    # after about 4 rounds that are two standard deviations worse, 10 one worse, 400 as ever. null = HedgeSpec's: never.
    drift: PositiveFloat | None = 5.0
    # Of a text that ends within a game, also score the tokens that no scoring has reached; else they are forgotten. A
    # text that is scored at all costs a prefill of each idle drafter.
    score_ends: bool = False
    tokens_per_update: PositiveInt = 6  # afterwards: the mean of so many vectors is one update

    @property
    def yardstick(self) -> Literal["mat", "throughput"]:
        """The measure of a game's best arm: tokens a second where these are played for, else mat."""
        return "throughput" if "throughput" in (self.loss, self.reward) else "mat"


GAMES: dict[str, dict[str, Any]] = {
    "normalhedge": {
        "depth": None,
        "loss": "length",
        "hybrid_rounds": 0,
        "warmup_rounds": 0,
        "batch_rounds": 1,
        "batch_growth": 1.0,
        "drift": None,
        "score_ends": True,
        "tokens_per_update": 1,
    }
}
"""Policies with a game of their own: there these are the defaults. NormalHedge alone is HedgeSpec without its savings:
every token is scored at all depths, at once, and is an update."""
