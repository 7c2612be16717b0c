"""How a drafter learns along a stream: the update rule of `specctl online` and its constants."""

from __future__ import annotations

from typing import Annotated, Literal, cast, get_args

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from specctl.errors import did_you_mean
from specctl.families import learning
from specctl.recipe.lookahead import REASONING
from specctl.recipe.sections import Fraction, PositiveFloat, Section

Algo = Literal["static", "ogd", "osd", "optimistic", "momentum", "ensemble", "opt-ensemble"]


SHORT = {"opt": "optimistic", "ens": "ensemble", "opt-ens": "opt-ensemble"}
"""As OnlineSpec writes its algorithms: opt-hydra, ens-eagle3."""


def rule_and_family(name: str) -> tuple[Algo, str | None]:
    """`opt-hydra` as ("optimistic", "hydra"); `ogd` names no family. ValueError for what is neither."""
    family = next((family for family in learning() if name.endswith(f"-{family}")), None)
    rule = name.removesuffix(f"-{family}")
    rule = SHORT.get(rule, rule)
    if rule not in get_args(Algo):
        rules = [*get_args(Algo), *SHORT]
        paired = (f"{one}-{head}" for one in rules for head in learning())
        known = f"there are {', '.join([*get_args(Algo), *REASONING])}, or a family's, such as opt-hydra, ens-eagle3"
        raise ValueError(f"no algo {name!r}: {did_you_mean(name, [*rules, *paired, *REASONING]) or known}")
    return cast(Algo, rule), family


class LearnerOptions(Section):
    """Constants of the update rules; None = the family's (`specctl.families`)."""

    optimizer: Literal["sgd", "adam"] | None = None  # of the inner steps; algo momentum has its own
    lr: PositiveFloat | None = None  # η, of the slowest member of an ensemble
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9  # algo momentum: μ of the heavy ball
    matched: bool = False  # algo momentum: lr is the effective rate η / (1 − μ), to compare with the others
    betas: Annotated[list[Fraction], Field(min_length=2, max_length=2)] = [0.9, 0.95]  # of Adam
    clip: NonNegativeFloat | None = None  # largest norm of a gradient; 0 = none
    epochs: PositiveInt | None = None  # inner loop over a chunk
    # Draft depths that are trained, where a family unrolls them: None = one more than a round yields tokens, at most as
    # many as training has. Deeper ones are hardly ever reached, and cost as much each.
    ttt_steps: PositiveInt | None = None
    step: Literal["batch", "chunk"] = "batch"  # one inner step per batch, or per epoch on the whole chunk's gradient
    dropout: Annotated[float, Field(ge=0, lt=1)] | None = None  # hydra
    # Share of a chunk's texts, the newest, that judge its update: how far to go on the way that the others have led, or
    # back to the weights that the stream began with. They are learnt from with the next chunk. 0 = the papers' rules,
    # which trust every chunk.
    holdout: Annotated[float, Field(ge=0, le=0.5)] = 0.25
    # How often an update that changes nothing is taken all the same, at most: all learners of an ensemble together.
    level: Annotated[float, Field(gt=0, lt=1)] = 0.05
    # Share of the time of decoding that learning may take, where decoding waits for it: neither with `asynchronous` nor
    # for a server. A lesson is saved for, and for twice as long where the last one was in vain; only a fall of
    # acceptance is learnt from at once, and paid for later, unless a datastore grows beside. None = no limit.
    budget: PositiveFloat | None = 0.05
    rest: NonNegativeInt = 3  # chunks not learnt from at most, after some that taught nothing, while acceptance holds
    radius: PositiveFloat | None = None  # D: weights stay within this distance of where they started; None = ∞
    hint: Literal["last", "mean", "none"] = "last"  # optimistic, opt-ensemble: h_t, from the gradients before it
    members: Annotated[int, Field(ge=2)] = 3  # ensemble: N
    spacing: Annotated[float, Field(gt=1)] = 2.0  # ensemble: the members' rates are η · spacing^i, i < N
    epsilon: PositiveFloat = 10.0  # ensemble: ε, rate of Hedge
    # ensemble: f_s on the first batch of the chunk, before any step (free, a sample); on the whole chunk before any
    # step (a pass of its own, a ninth to a third of an update); or on each batch just before the step on it (free, but
    # of weights that were not played: it flatters members that learn fast within a chunk).
    measure: Literal["first", "chunk", "batch"] = "first"
    discount: Annotated[float, Field(gt=0, le=1)] = 1.0  # ensemble: of the members' past losses, per chunk
    resync: NonNegativeInt = 0  # ensemble: every so many chunks the members restart from their mean; 0 = never
    combine: Literal["weights", "probs", "sample"] = "weights"  # ensemble: what is averaged, or one member drawn
    rollback: bool = True  # take back an update that lowers acceptance
    tolerance: Fraction = 0.1  # share of the acceptance rate that may go before an update is suspected
    backoff: Annotated[float, Field(gt=0, le=1)] = 0.5  # factor of η after an update was taken back


class LearnerRecipe(LearnerOptions):
    """An update rule with its constants; `resolved` fills in the family's."""

    algo: Algo = "optimistic"

    def resolved(self, family: str, hidden_size: int) -> LearnerRecipe:
        """With the settings of a drafter family, for heads of this width, where the recipe names none."""
        own = learning()[family]
        optimizer = self.optimizer or own.optimizer
        sgd = optimizer == "sgd" or self.algo == "momentum"
        found = {
            "optimizer": optimizer,
            # That of the second member of an ensemble.
            "lr": (own.sgd if sgd else own.adam * 4096 / hidden_size)
            / (self.spacing if "ensemble" in self.algo else 1),
            "clip": own.clip,
            "epochs": own.epochs,
            "dropout": own.dropout,
        }
        return self.model_copy(update={name: value for name, value in found.items() if getattr(self, name) is None})
