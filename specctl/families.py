"""The table of drafter families: a row is all that is known of one outside of its own modules.

Nothing is imported here, as help texts and recipes read it, too: functions are named by their path, `module:name`, for
`pkgutil.resolve_name`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Learning:
    """How a family learns along a stream; epochs, clipping and dropout are OnlineSpec's, medusa as hydra, lm as it is
    fine-tuned.

    Adam's rates are for hidden size 4,096: narrower heads take larger steps. Those of eagle3 and hydra were measured at
    width 256 and scaled back; the paper has 1e-4 for eagle3, and SGD at 0.1 for hydra, which hardly moves there.
    """

    adam: float  # η of Adam
    epochs: int
    clip: float  # 0 = none
    dropout: float = 0.0
    sgd: float = 0.1  # η of SGD and of the heavy ball
    optimizer: Literal["sgd", "adam"] = "adam"
    chunk: int = 40  # prompts between two updates
    mixes: bool = False  # several of its drafters can draft as one, by the mean of their probabilities


@dataclass(frozen=True)
class Family:
    """Drafters that are kept in directories.

    Attributes:
        module: the `drafters.pool.FamilyModule`, imported when a drafter is loaded.
        trainee: the class that trains them, a `training.trainees.Trainee`; None = collected without gradient steps.
        rates: peak learning rate by optimizer, at hidden size 4,096. AdamW: the papers'; narrower heads take larger
            steps. Muon: measured at hidden size 256.
        cpu_tokens: response tokens after which training on a CPU ends, whatever the size of the data; None = `epochs`.
        unrolls: training runs several draft steps one after the other (training-time test).
        steps, decay: of these, where the recipe names none (`ttt_steps`, `ttt_decay`).
        paces: they may be weighted by how often a draft gets so far (`ttt_weights`).
        requires: a function of a `TargetRecipe` that raises where the target lacks what the family is made of, as far
            as its files are on this machine; None = it is made for any target.
        strides: whether the steps beyond the first leave positions out, as they have no weights of their own to learn.
        objective: what the recipe's `auto` is.
        is_lm: a language model by itself: it also learns from any text, and writes whole steps of reasoning.
        adaptable: projections of its module that a LoRA adapter may update.
        options: keys of the recipe's section `drafter` that not every family has.
        learning: None = it does not learn along a stream.
    """

    module: str
    trainee: str | None = "specctl.training.trainees:FeatureTrainee"
    epochs: int = 5
    rates: Mapping[str, float] = field(default_factory=dict)
    cpu_tokens: int | None = 700_000  # what heads of the built-in target need: 6 minutes on 2 cores
    unrolls: bool = False
    steps: int = 6
    decay: float = 0.8
    paces: bool = False
    requires: str | None = None
    strides: bool = True
    objective: str = "soft_ce"
    is_lm: bool = False
    adaptable: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    learning: Learning | None = None


NORMS = ("fc_norm", "norm_before_fc", "norm_before_residual", "sliding_window")
ONE_LAYER = {"adamw": 1e-4, "muon": 2.5e-4}
LAYER = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

FAMILIES: dict[str, Family] = {
    "eagle": Family(
        "specctl.drafters.eagle.drafter",
        rates=ONE_LAYER,
        adaptable=LAYER,  # not the fusion, half of which is tabulated
        learning=Learning(adam=3e-5, epochs=5, clip=0.5, mixes=True),
    ),
    "eagle3": Family(
        "specctl.drafters.eagle3.drafter",
        rates=ONE_LAYER,
        unrolls=True,
        paces=True,
        adaptable=("fc", *LAYER, "lm_head"),
        options=(*NORMS, "norm_output"),
        learning=Learning(adam=6e-5, epochs=2, clip=0.5, mixes=True),
    ),
    "peagle": Family(
        "specctl.drafters.peagle.drafter",
        rates=ONE_LAYER,
        strides=False,  # how many positions go on to each depth is the family's own
        paces=True,
        adaptable=("fc", *LAYER, "lm_head"),
        options=NORMS,
        learning=Learning(adam=6e-5, epochs=2, clip=0.5),
    ),
    "dflash": Family(
        "specctl.drafters.dflash.drafter",
        rates=ONE_LAYER,
        paces=True,
        adaptable=("fc", *LAYER),
        options=("block_size", "markov_rank", "confidence", "conv_kernel_size", "selector_rank"),
        learning=Learning(adam=6e-5, epochs=2, clip=0.5),
    ),
    "mtp": Family(
        "specctl.drafters.mtp.drafter",
        epochs=3,
        rates={"adamw": 5e-5, "muon": 1.25e-4},  # FastMTP's, and half of a new layer's: this one has been trained
        cpu_tokens=None,
        unrolls=True,
        steps=3,  # FastMTP's, and its weights
        decay=0.6,
        requires="specctl.drafters.mtp.layouts:check",
        paces=True,
        adaptable=("fc", *LAYER),
        options=("normed_features",),
        learning=Learning(adam=3e-5, epochs=2, clip=0.5, mixes=True),
    ),
    "hydra": Family(
        "specctl.drafters.hydra.drafter",
        epochs=10,
        rates={"adamw": 5e-4, "muon": 5e-4},
        strides=False,
        adaptable=(*LAYER, "linear"),
        learning=Learning(adam=1.5e-4, epochs=1, clip=0.0, dropout=0.1, chunk=80),
    ),
    "medusa": Family(
        "specctl.drafters.medusa.drafter",
        rates={"adamw": 1e-3, "muon": 1e-3},
        strides=False,
        learning=Learning(adam=1.5e-4, epochs=1, clip=0.0, chunk=80),
    ),
    "lm": Family(
        "specctl.drafters.lm.drafter",
        trainee="specctl.training.trainees:LMTrainee",
        epochs=3,
        rates=ONE_LAYER,
        cpu_tokens=None,
        objective="ce",
        is_lm=True,
        adaptable=LAYER,
        learning=Learning(adam=2e-5, epochs=1, clip=1.0),
    ),
    "retrieval": Family("specctl.drafters.retrieval.drafter", trainee=None),
}
DEFAULT = "eagle3"
LEAST_WINDOW = 64  # a head's sliding window: no draft is as deep, so only committed tokens ever leave it
LM = "lm"  # that lookahead reasoning trains
UNTRAINED = {"lookup": "specctl.drafters.text.lookup:drafter", "suffix": "specctl.drafters.text.suffix:drafter"}
"""Drafters that a name is enough for: function of a `DraftingRecipe` → drafter."""
GROWING = "retrieval"
"""In `online`, a text drafter that reads all texts of the stream so far, too."""
NAMED = {"none": "specctl.decoding.plain:drafter", **UNTRAINED}


def trained() -> list[str]:
    """Families that learn by gradients."""
    return [name for name, family in FAMILIES.items() if family.trainee is not None]


def learning() -> dict[str, Learning]:
    """Families that learn along a stream, and how."""
    return {name: family.learning for name, family in FAMILIES.items() if family.learning is not None}


def mixing() -> list[str]:
    """Families whose drafters can draft as one."""
    return [name for name, how in learning().items() if how.mixes]


def listed(names: list[str]) -> str:
    """`eagle3, hydra or lm`: the names as help texts say them, the default family first."""
    *first, end = sorted(names, key=lambda name: name != DEFAULT)
    return f"{', '.join(first)} or {end}" if first else end
