"""Update rules of online drafters (`specctl online`), and their constants."""

from __future__ import annotations

from typing import Annotated, Literal, cast, get_args

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from specctl.errors import did_you_mean
from specctl.families import FAMILIES, online_families
from specctl.recipe.sections import Betas, Decay, Fraction, PositiveFloat, Section

Algo = Literal["static", "ogd", "osd", "optimistic", "momentum", "ensemble", "opt-ensemble"]

STEP_ALGOS = ("lr", "osd-lr", "online-lr")
"""Algorithms of `specctl reason`, which drafts whole steps."""

SHORT = {"opt": "optimistic", "ens": "ensemble", "opt-ens": "opt-ensemble"}
"""Short names of update rules, as in OnlineSpec: opt-hydra, ens-eagle3."""


def rule_and_family(name: str) -> tuple[Algo, str | None]:
    """Split `opt-hydra` into ("optimistic", "hydra"); `ogd` names no family. Raises ValueError for an unknown name."""
    family = next((family for family in online_families() if name.endswith(f"-{family}")), None)
    rule = name.removesuffix(f"-{family}")
    rule = SHORT.get(rule, rule)
    if name in STEP_ALGOS:
        raise ValueError(f"{name} drafts whole steps: use specctl reason")
    if rule not in get_args(Algo):
        rules = [*get_args(Algo), *SHORT]
        paired = (f"{one}-{head}" for one in rules for head in online_families())
        known = f"use {', '.join(get_args(Algo))}, or one with a family, such as opt-hydra, ens-eagle3"
        raise ValueError(f"no algo {name!r}: {did_you_mean(name, [*rules, *paired, *STEP_ALGOS]) or known}")
    return cast(Algo, rule), family


class LearnerOptions(Section):
    """Constants of the update rules. For most, None stands for the value of the family (`specctl.families`)."""

    # Optimizer of the inner steps; algo momentum has heavy-ball SGD instead. muon is for matrices that have no row per
    # token; norms learn by Adam, and vocabulary matrices do not learn.
    optimizer: Literal["sgd", "adam", "muon"] | None = None
    lr: PositiveFloat | None = None  # learning rate η; in an ensemble the smallest rate
    momentum: Decay = 0.9  # algo momentum: μ of the heavy ball
    matched: bool = False  # algo momentum: lr is the effective rate η / (1 − μ), to compare rules
    betas: Betas = [0.9, 0.95]  # of Adam
    clip: NonNegativeFloat | None = None  # largest gradient norm; 0 = no clipping
    epochs: PositiveInt | None = None  # passes over a chunk per update
    # Number of draft depths that are trained, if the family unrolls them. By default it is the tokens per round, at
    # least 2, and at most the number in offline training: deeper ones are rarely reached, and each costs as much.
    ttt_steps: PositiveInt | None = None
    step: Literal["batch", "chunk"] = "batch"  # one inner step per batch, or one per epoch with the chunk's gradient
    dropout: Annotated[float, Field(ge=0, lt=1)] | None = None  # in hydra heads
    # Share of a chunk's texts, taken from the newest, that judge the update learned from its other texts. The update is
    # applied in full, by half, or not at all, or the weights return to their values at the start of the stream. The
    # judging texts are learned from with the next chunk. 0 = no judging, as in the papers, which trust every chunk.
    holdout: Annotated[float, Field(ge=0, le=0.5)] = 0.25
    # Significance level of that judgment: an update without effect is applied in at most this share of the chunks,
    # counting all learners of an ensemble.
    level: Annotated[float, Field(gt=0, lt=1)] = 0.05
    # Share of the decoding time that learning may take. It applies if decoding waits for learning, so neither with
    # `asynchronous` nor with a server. Time is saved up for every update, and twice as much if the last update improved
    # nothing. While updates help, the share is twice as large. After a fall of acceptance the drafter learns at once
    # and pays later, unless a growing datastore helps it (`beside`). null = no limit.
    budget: PositiveFloat | None = 0.05
    # After updates that improved nothing, learning skips at most this many chunks, unless acceptance falls.
    rest: NonNegativeInt = 3
    radius: PositiveFloat | None = None  # D: largest distance of the weights from their start (None = ∞)
    hint: Literal["last", "mean", "none"] = "last"  # optimistic, opt-ensemble: h_t, from earlier gradients
    members: Annotated[int, Field(ge=2)] = 3  # ensemble: number N of learners
    spacing: Annotated[float, Field(gt=1)] = 2.0  # ensemble: the learners' rates are η · spacing^i, i < N
    epsilon: PositiveFloat = 10.0  # ensemble: rate ε of Hedge
    # ensemble: texts on which the loss f_s of a learner is measured. first: the first batch of the chunk, before any
    # step; free, but a sample. chunk: the whole chunk before any step; an extra pass, which costs a ninth to a third of
    # an update. batch: each batch just before the step on it; free, but with weights that have not drafted, which
    # overrates learners that learn fast within a chunk.
    measure: Literal["first", "chunk", "batch"] = "first"
    discount: Annotated[float, Field(gt=0, le=1)] = 1.0  # ensemble: factor on the learners' past losses, per chunk
    resync: NonNegativeInt = 0  # ensemble: chunks after which all learners restart from their mean; 0 = never
    combine: Literal["weights"] = "weights"  # ensemble: average these (a recipe may still name the only way)
    rollback: bool = True  # take back an update that lowers acceptance
    tolerance: Fraction = 0.1  # relative fall of the acceptance rate from which an update is suspected
    backoff: Annotated[float, Field(gt=0, le=1)] = 0.5  # factor on η after an update was taken back


class LearnerRecipe(LearnerOptions):
    """An update rule with its constants; `resolved` fills in the constants of a family."""

    algo: Algo = "optimistic"

    def resolved(self, family: str, hidden_size: int) -> LearnerRecipe:
        """Return this recipe with the settings of a drafter family for heads of this width, unless it names its own."""
        own = online_families()[family]
        optimizer = self.optimizer or own.optimizer
        sgd = optimizer == "sgd" or self.algo == "momentum"
        wide = FAMILIES[family].rates["muon"] if optimizer == "muon" else own.adam  # for hidden size 4,096
        rate = own.sgd if sgd else wide * 4096 / hidden_size
        found = {
            "optimizer": optimizer,
            # In an ensemble the second learner gets the rate of the family.
            "lr": rate / (self.spacing if "ensemble" in self.algo else 1),
            "clip": own.clip,
            "epochs": own.epochs,
            "dropout": own.dropout,
        }
        return self.model_copy(update={name: value for name, value in found.items() if getattr(self, name) is None})
