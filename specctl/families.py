"""Table of drafter families. A row holds everything that code outside a family's modules knows about the family.

This module imports no other module of specctl, because help texts and recipes read it. It names functions by their
path, `module:name`, for `pkgutil.resolve_name`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class OnlineDefaults:
    """Default settings of a family's online learning.

    Epochs, clipping and dropout come from OnlineSpec; medusa uses hydra's, and lm uses common settings of fine-tuning.

    Muon has the family's rate of offline training. Constants of eagle3: `python -m tests.benchmarks.online_steps`.

    Adam's learning rates are for hidden size 4,096; narrower heads take larger steps. The rates of eagle3 and hydra
    were measured at width 256 and scaled to 4,096. The paper uses 1e-4 for eagle3, and SGD at 0.1 for hydra, with which
    hydra hardly changes.
    """

    adam: float  # learning rate η of Adam
    epochs: int
    clip: float  # largest gradient norm; 0 = no clipping
    dropout: float = 0.0
    sgd: float = 0.1  # learning rate η of SGD and of heavy-ball momentum
    optimizer: Literal["sgd", "adam", "muon"] = "adam"
    chunk: int = 40  # prompts between two updates


@dataclass(frozen=True)
class Family:
    """A drafter family: drafters of one architecture, each kept in a directory.

    Attributes:
        implementation: path of the family's `drafters.family.DrafterFamily`, imported when a drafter is loaded.
        trainable: path of the class that trains its drafters, a `training.trainable.TrainableDrafter`, or None if a
            drafter is built from data without gradient steps.
        epochs: default number of passes over the training data.
        rates: default peak learning rate by optimizer, at hidden size 4,096; narrower heads take larger steps. The
            rates of AdamW are from the papers, the rates of Muon were measured at hidden size 256.
        cpu_tokens: number of response tokens after which training on a CPU ends, for any size of the data, or None
            to train for `epochs`.
        unrolls_steps: whether training runs several draft steps one after the other (training-time test).
        steps, decay: defaults of the recipe keys `ttt_steps` and `ttt_decay`.
        check_target: path of a function of a `TargetRecipe` that raises if the target lacks the parts from which the
            family is built, or None if the family fits any target. It checks only files on this machine.
        supports_stride: whether draft steps beyond the first may skip positions, because they have no separate weights.
        objective: the loss that the recipe's `auto` stands for.
        is_lm: whether a drafter is a complete language model. It then also learns from any text, and writes whole
            reasoning steps.
        lora_modules: projections of the module that a LoRA adapter may update.
        options: keys of the recipe section `drafter` that only some families have.
        learning: defaults for online learning, or None if the family does not learn along a stream.
    """

    implementation: str
    trainable: str | None = "specctl.training.trainable:TrainableHead"
    epochs: int = 5
    rates: Mapping[str, float] = field(default_factory=dict)
    cpu_tokens: int | None = 700_000  # enough for heads of the built-in target: 6 minutes on 2 cores
    unrolls_steps: bool = False
    steps: int = 6
    decay: float = 0.8
    check_target: str | None = None
    supports_stride: bool = True
    objective: str = "soft_ce"
    is_lm: bool = False
    lora_modules: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    learning: OnlineDefaults | None = None


NORMS = ("fc_norm", "norm_before_fc", "norm_before_residual", "sliding_window")
SLIDING, FULL = "sliding_attention", "full_attention"
LayerType = Literal["sliding_attention", "full_attention"]
"""Attention of a layer, under the names of `layer_types` in published configurations."""
ONE_LAYER = {"adamw": 1e-4, "muon": 2.5e-4}
LAYER = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SIZES = ("intermediate_size", "num_heads", "num_kv_heads")

FAMILIES: dict[str, Family] = {
    "eagle": Family(
        "specctl.drafters.eagle.drafter:FAMILY",
        rates=ONE_LAYER,
        lora_modules=LAYER,  # without the fusion layer: a table replaces half of it when drafting
        options=(*SIZES, "vocab_size"),
        learning=OnlineDefaults(adam=3e-5, epochs=5, clip=0.5),
    ),
    "eagle3": Family(
        "specctl.drafters.eagle3.drafter:FAMILY",
        rates=ONE_LAYER,
        unrolls_steps=True,
        lora_modules=("fc", *LAYER, "lm_head"),
        options=(*SIZES, "vocab_size", "taps", *NORMS, "norm_output", "num_layers"),
        learning=OnlineDefaults(adam=6e-5, epochs=1, clip=0.5, optimizer="muon"),
    ),
    "peagle": Family(
        "specctl.drafters.peagle.drafter:FAMILY",
        rates=ONE_LAYER,
        supports_stride=False,  # the family decides itself how many positions continue to each depth
        lora_modules=("fc", *LAYER, "lm_head"),
        options=(*SIZES, "vocab_size", "taps", *NORMS, "num_layers"),
        learning=OnlineDefaults(adam=6e-5, epochs=2, clip=0.5),
    ),
    "dflash": Family(
        "specctl.drafters.dflash.drafter:FAMILY",
        rates=ONE_LAYER,
        lora_modules=("fc", *LAYER),
        options=(
            *(*SIZES, "vocab_size", "taps"),
            *("block_size", "markov_rank", "confidence", "conv_kernel_size", "selector_rank"),
            *("num_layers", "sliding_window", "layer_types", "is_causal"),
        ),
        learning=OnlineDefaults(adam=6e-5, epochs=2, clip=0.5),
    ),
    "mtp": Family(
        "specctl.drafters.mtp.drafter:FAMILY",
        epochs=3,
        rates={"adamw": 5e-5, "muon": 1.25e-4},  # FastMTP's; half of a new layer's, as the layer is trained already
        cpu_tokens=None,
        unrolls_steps=True,
        steps=3,  # FastMTP's, like the decay
        decay=0.6,
        check_target="specctl.drafters.mtp.layouts:check",
        lora_modules=("fc", *LAYER),
        options=("normed_features",),
        learning=OnlineDefaults(adam=3e-5, epochs=2, clip=0.5),
    ),
    "hydra": Family(
        "specctl.drafters.hydra.drafter:FAMILY",
        epochs=10,
        rates={"adamw": 5e-4, "muon": 5e-4},
        supports_stride=False,
        lora_modules=(*LAYER, "linear"),
        options=(*SIZES, "vocab_size", "draft_heads", "num_layers"),
        learning=OnlineDefaults(adam=1.5e-4, epochs=1, clip=0.0, dropout=0.1, chunk=80),
    ),
    "medusa": Family(
        "specctl.drafters.medusa.drafter:FAMILY",
        rates={"adamw": 1e-3, "muon": 1e-3},
        supports_stride=False,
        options=("vocab_size", "draft_heads"),
        learning=OnlineDefaults(adam=1.5e-4, epochs=1, clip=0.0, chunk=80),
    ),
    "lm": Family(
        "specctl.drafters.lm.drafter:FAMILY",
        trainable="specctl.training.trainable:TrainableLM",
        epochs=3,
        rates=ONE_LAYER,
        cpu_tokens=None,
        objective="ce",
        is_lm=True,
        lora_modules=LAYER,
        options=(*SIZES, "vocab_size", "preset", "base", "hidden_size", "num_layers", "confidence"),
        learning=OnlineDefaults(adam=2e-5, epochs=1, clip=1.0),
    ),
    "retrieval": Family("specctl.drafters.retrieval.drafter:FAMILY", trainable=None),
}
DEFAULT = "eagle3"
MIN_SLIDING_WINDOW = 64  # smallest sliding window of a head: drafts are shorter, so only committed tokens leave it
LM = "lm"  # the family of the draft models of lookahead reasoning
TEXT_DRAFTERS = {
    "lookup": "specctl.drafters.text.lookup:make_drafter",
    "suffix": "specctl.drafters.text.suffix:make_drafter",
}
"""Drafters without weights, requested by name: path of a function from a `DraftingRecipe` to the drafter."""
STREAM_RETRIEVAL = "retrieval"
"""Name of the text drafter that, in `online` and `select`, also retrieves from all earlier texts of the stream."""
WEIGHTLESS_DRAFTERS = {
    "none": "specctl.decoding.controllers:make_drafter",
    **TEXT_DRAFTERS,
    "lookahead": "specctl.drafters.text.lookahead:make_drafter",  # no part of a hybrid: its window needs its own rows
}


def trainable_families() -> list[str]:
    return [name for name, family in FAMILIES.items() if family.trainable is not None]


def online_families() -> dict[str, OnlineDefaults]:
    """Families that learn along a stream, with their settings."""
    return {name: family.learning for name, family in FAMILIES.items() if family.learning is not None}


def listed(names: list[str]) -> str:
    """Join names for help texts, with the default family first: `eagle3, hydra or lm`."""
    *first, end = sorted(names, key=lambda name: name != DEFAULT)
    return f"{', '.join(first)} or {end}" if first else end
