"""`specctl train-drafter`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from specctl.families import DEFAULT, FAMILIES, LEAST_WINDOW, listed
from specctl.recipe.sections import (
    DataRecipe,
    Fraction,
    LocalPath,
    Name,
    Names,
    OneOf,
    PositiveFloat,
    Section,
    WriterRecipe,
    distilled_dir,
)
from specctl.recipe.server import ServerRecipe

Arch = Annotated[str, OneOf(lambda: FAMILIES)]


class DrafterRecipe(Section):
    """Size of a new draft head; None = what the architecture derives from the target."""

    preset: Name | None = None
    base: Name | None = None  # lm: a published causal LM with the target's vocabulary to start from
    hidden_size: PositiveInt | None = None
    intermediate_size: PositiveInt | None = None
    num_heads: PositiveInt | None = None
    num_kv_heads: PositiveInt | None = None
    num_layers: PositiveInt | None = None
    draft_heads: PositiveInt | None = None  # hydra, medusa: one for each draft depth; None = 4
    block_size: Annotated[int, Field(ge=2, le=64)] | None = None  # dflash: slots that are drafted at once; None = 8
    # dflash: of the head that ties a block's tokens; 0 = none, None = 32
    markov_rank: Annotated[int, Field(ge=0, le=4096)] | None = None
    conv_kernel_size: NonNegativeInt | None = None  # dflash: taps of convolutions around its sublayers; None, 0 = none
    # dflash: of DFlash 2's selector, in the Markov head's place; 0 = none
    selector_rank: Annotated[int, Field(ge=0, le=4096)] | None = None
    confidence: bool = False  # dflash: a head that says how likely a token is kept; engines read it
    vocab_size: PositiveInt | None = None
    taps: list[NonNegativeInt] | None = None  # target layers whose outputs the head reads
    # eagle3, peagle: the norms of EAGLE-3.1
    fc_norm: bool | None = None  # of every tapped state, before they are fused; None = unless norm_before_fc
    norm_before_fc: bool = False  # of all of them side by side, instead
    norm_before_residual: bool = False  # the layer's residual stream begins behind its norm
    norm_output: bool | None = None  # eagle3: a draft step feeds the next one behind the final norm; None = yes
    sliding_window: Annotated[int, Field(ge=LEAST_WINDOW)] | None = None  # of eagle3, peagle: positions looked back at
    normed_features: bool | None = None  # mtp: reads the target behind its final norm; None = as vLLM feeds it

    @model_validator(mode="after")
    def _one_norm_before_fc(self) -> DrafterRecipe:
        if self.fc_norm and self.norm_before_fc:
            raise ValueError("fc_norm and norm_before_fc exclude each other: both are the norm before fc")
        return self

    @model_validator(mode="after")
    def _confidence_reads_a_markov_head(self) -> DrafterRecipe:
        if self.confidence and self.markov_rank == 0:
            raise ValueError("confidence reads a Markov head: leave markov_rank=0 out")
        return self

    @model_validator(mode="after")
    def _one_thing_ties_a_block(self) -> DrafterRecipe:
        if self.selector_rank and (self.markov_rank or self.confidence):
            raise ValueError("selector_rank takes the place of a Markov head: leave markov_rank and confidence out")
        return self


class OptimizerRecipe(Section):
    """Optimizer and schedule; `warmup` is a fraction of the steps, `final_lr` a fraction of `lr`."""

    type: Literal["auto", "adamw", "muon"] = "auto"  # auto: muon where the matrices are whole (ZeRO 0), else adamw
    lr: PositiveFloat | None = None  # None = the measured rate of the family for the target's width
    momentum: Fraction = 0.95  # of muon
    other_lr: PositiveFloat = 0.15  # under muon: rate of norms and the vocabulary head (AdamW), as a share of lr
    betas: Annotated[list[Fraction], Field(min_length=2, max_length=2)] = [0.9, 0.95]
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    clip: PositiveFloat = 0.5
    warmup: Fraction = 0.015
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    final_lr: Fraction = 0.0


class FeatureRecipe(Section):
    """Target features: kept in memory or on disk (`cached`), or recomputed for every batch (`online`).

    `auto` is memory where they fit into `budget_gb` (of each process), else the disk where `dir` is given and has room.
    `server` keeps them on disk as `cached` does, and an engine computes them. Both can do without the target's layers,
    `cached` where all features are there already: acceptance is then expected from held-out responses, not measured.
    """

    mode: Literal["auto", "memory", "cached", "online", "server"] = "auto"
    budget_gb: PositiveFloat = 2.0
    dir: LocalPath | None = None  # None = beside the distilled data: runs on the same data share them
    fp8: bool = False  # on disk a byte for each number, with a scale for each state
    server: ServerRecipe = ServerRecipe()  # who computes them; with an address `auto` is `server`
    whole_target: bool | None = None  # load the target's layers, too; None = where they fit beside the training

    @model_validator(mode="after")
    def _server_where_one_is_named(self) -> FeatureRecipe:
        if self.server.urls and self.mode == "auto":
            self.mode = "server"
        if self.server.urls and self.mode != "server":
            raise ValueError(f"mode {self.mode} asks no server: leave out server, or mode")
        if self.fp8 and self.mode not in ("server", "cached"):
            raise ValueError(f"fp8: features of mode {self.mode} may not be on disk; of server and cached they are")
        if self.whole_target is False and self.mode not in ("server", "cached"):
            raise ValueError(f"whole_target false: mode {self.mode} runs the target's layers; server and cached do not")
        return self


class HeldOutRecipe(Section):
    """Acceptance measured by the decoding core, on `fraction` of the prompts kept aside: on half of them while training
    goes on, to choose the best checkpoint, and on the other half at its end."""

    every: PositiveInt = 200  # steps
    prompts: PositiveInt = 16  # of each half, at most
    max_new_tokens: PositiveInt = 64
    fraction: Annotated[float, Field(gt=0, lt=1)] = 0.02


class CheckpointRecipe(Section):
    """Checkpoints for --resume."""

    every: PositiveInt = 200  # steps
    keep: PositiveInt = 2


class FirstDataRecipe(Section):
    """How much to distil when there is no data for the domain yet."""

    responses: PositiveInt = 2000
    max_new_tokens: PositiveInt | None = None  # None = the default of `specctl distill`


ENGINE_KEYS = {
    "gradient_clipping": "use optimizer.clip",
    "optimizer": "use the section optimizer",
    "scheduler": "use optimizer.schedule and optimizer.warmup",
    "bf16": "use precision; master weights are fp32",
    "fp16": "use precision; master weights are fp32",
    "train_batch_size": "use batch_tokens",
    "train_micro_batch_size_per_gpu": "use batch_tokens",
    "gradient_accumulation_steps": "use batch_tokens",
}
"""Keys of a DeepSpeed configuration that have their place in the recipe."""


class LoraRecipe(Section):
    """Low-rank fine-tuning of the drafter in `init` (peft): y = W x + (alpha / rank) · B A x with W frozen."""

    enabled: bool = False
    rank: PositiveInt = 32  # 9 % of the bytes of an eagle3 head of the built-in target
    alpha: PositiveFloat = 32.0
    modules: Names | None = None  # names of projections; None = all that the family adapts


class PretrainRecipe(Section):
    """First stage of lm on general text, before the domain: unconditional samples of the target, or a corpus."""

    responses: PositiveInt | None = None  # unconditional samples
    corpus: LocalPath | None = None  # JSONL with `text`, or plain text, instead


class TrainRecipe(WriterRecipe):
    """`specctl train-drafter`; output_dir None = ./drafters/<domain>-<arch>, with -lora for an adapter.

    `each` trains one drafter per domain; output_dir is then the pool's directory, None = ./drafters.
    """

    sliceable = True

    data: DataRecipe = DataRecipe()
    arch: Arch = DEFAULT
    each: bool = False
    drafter: DrafterRecipe = DrafterRecipe()
    init: LocalPath | None = None  # drafter to start from, its sizes and draft vocabulary kept; auto: a generalist
    lora: LoraRecipe = LoraRecipe()
    distilled: LocalPath | None = None  # distilled data; None = ./distilled/<domain>, of several domains all
    corpus: LocalPath | None = None  # general text to train on (lm) instead of distilled data
    distill: FirstDataRecipe = FirstDataRecipe()
    pretrain: PretrainRecipe = PretrainRecipe()
    objective: Literal["auto", "ce", "soft_ce", "kl", "reverse_kl", "tv", "log_tv", "lk_lambda"] = "auto"
    ttt_steps: PositiveInt = 6  # of the training-time test: train about as deep as the drafts are; mtp: 3
    ttt_stride: PositiveInt | None = None  # every how many-th position goes beyond the first step; None = per device
    ttt_decay: Annotated[float, Field(gt=0, le=1)] = 0.8  # weight of a draft depth, as a share of that before; mtp: 0.6
    ttt_weights: Literal["decay", "d-pace"] = "decay"  # of draft depths: ttt_decay, or how often a draft gets so far
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0  # hydra; its paper takes 0.2, for ten epochs at 7B
    optimizer: OptimizerRecipe = OptimizerRecipe()
    epochs: PositiveInt | None = None
    max_steps: PositiveInt | None = None
    max_minutes: PositiveFloat | None = None
    batch_tokens: PositiveInt | None = (
        None  # response tokens a step, over all processes (a text each at least); None = per device
    )
    max_length: PositiveInt = 2048
    gradient_checkpointing: bool = False  # less memory for long samples and large vocabularies, more time
    features: FeatureRecipe = FeatureRecipe()
    eval: HeldOutRecipe = HeldOutRecipe()
    checkpoint: CheckpointRecipe = CheckpointRecipe()
    precision: Literal["auto", "bf16", "fp16", "fp32"] = "auto"  # of matrix products; weights are and stay fp32
    zero_stage: Annotated[int, Field(ge=0, le=3)] = 0  # also set by deepspeed.zero_optimization.stage
    deepspeed: dict[str, Any] = {}  # merged into the engine's configuration
    log: list[Literal["tensorboard", "wandb", "trackio"]] = []

    @model_validator(mode="after")
    def _features_of_slices(self) -> TrainRecipe:
        """All processes run a target in slices over the same texts, but train on texts of their own."""
        if self.target.tensor_parallel > 1 and self.features.mode != "cached":
            raise ValueError("target.tensor_parallel computes features before the training: set features.mode=cached")
        return self

    @model_validator(mode="after")
    def _one_place_for_each_option_of_the_engine(self) -> TrainRecipe:
        """Refuse an engine's own JSON that says otherwise: what decides the weights is a key of the recipe."""
        for key, ours in ENGINE_KEYS.items():
            if key in self.deepspeed:
                raise ValueError(f"deepspeed.{key} is not set here: {ours}")
        zero = self.deepspeed.get("zero_optimization", {})
        stage = zero.get("stage", self.zero_stage) if isinstance(zero, dict) else None
        if type(stage) is not int or not 0 <= stage <= 3:
            raise ValueError("deepspeed.zero_optimization needs a stage from 0 to 3")
        if "zero_stage" in self.model_fields_set and stage != self.zero_stage:
            raise ValueError(f"zero_stage {self.zero_stage} contradicts deepspeed.zero_optimization.stage {stage}")
        self.zero_stage = stage
        for part in ("offload_optimizer", "offload_param"):
            if isinstance(options := zero.get(part), dict) and options.get("device") == "nvme":
                raise ValueError(f"deepspeed.zero_optimization.{part} cannot be nvme: checkpoints are made from memory")
        return self

    @model_validator(mode="after")
    def _unrolled_as_the_family(self) -> TrainRecipe:
        return self.of_family(self.arch)

    def of_family(self, arch: str) -> TrainRecipe:
        """This recipe, changed to a family, whose steps and weights it takes where it names none."""
        family = FAMILIES[arch]
        defaults = {"arch": arch, "ttt_steps": family.steps, "ttt_decay": family.decay}
        for key, value in defaults.items():
            if key == "arch" or key not in self.model_fields_set:
                vars(self)[key] = value  # which leaves it unnamed
        return self

    @property
    def distillation(self) -> str:
        """`objective` with `auto` decided: the target's distributions for heads, its samples alone for lm."""
        if self.objective != "auto":
            return self.objective
        return FAMILIES[self.arch].objective

    @property
    def spares_layers(self) -> bool:
        """Whether the drafter can be trained without the target's layers: a head, on features that are kept."""
        family = FAMILIES[self.arch]
        return self.features.mode in ("server", "cached") and family.trainee is not None and not family.is_lm

    @property
    def paced(self) -> bool:
        """Whether draft depths are weighted by how often a draft gets so far."""
        return self.ttt_weights == "d-pace"

    @property
    def optimizer_type(self) -> str:
        """`optimizer.type` with `auto` decided: factors of a low rank are no matrices in Muon's sense."""
        if self.optimizer.type != "auto":
            return self.optimizer.type
        return "muon" if self.zero_stage == 0 and not self.lora.enabled else "adamw"

    @property
    def output(self) -> Path:
        """Where the drafter goes."""
        return self.output_dir or Path("drafters") / self.name

    @property
    def name(self) -> str:
        """`sql-eagle3`, `sql+math-eagle3`, `sql-eagle3-lora`."""
        return f"{'+'.join(self.data.domain)}-{self.arch}{'-lora' if self.lora.enabled else ''}"

    @property
    def sources(self) -> list[Path]:
        """Where the distilled data is: one directory per domain, or the one that holds their mixture."""
        if self.distilled is not None:
            return [self.distilled]
        mixture = distilled_dir(self.data.domain)
        return [mixture] if mixture.is_dir() else [distilled_dir([domain]) for domain in self.data.domain]

    def one_each(self) -> list[TrainRecipe]:
        """With `each` the recipe of every domain, else this one."""
        if not self.each:
            return [self]
        pool = self.output_dir or Path("drafters")
        alone = [
            self.model_copy(update={"each": False, "data": self.data.model_copy(update={"domain": [domain]})})
            for domain in self.data.domain
        ]
        return [recipe.model_copy(update={"output_dir": pool / recipe.name}) for recipe in alone]

    def first_stage(self) -> TrainRecipe | None:
        """The recipe of `pretrain`: general text, written to ./drafters/general-<arch>; None without it."""
        if self.pretrain == PretrainRecipe():
            return None
        data = DataRecipe(source="unconditional", limit=self.pretrain.responses, seed=self.data.seed)
        changes = {"pretrain": PretrainRecipe(), "corpus": self.pretrain.corpus, "data": data, "each": False}
        return self.model_copy(update={**changes, "output_dir": Path("drafters") / f"general-{self.arch}"})

    def second_stage(self, first: TrainRecipe) -> TrainRecipe:
        """This recipe, started from what `first` writes."""
        changes = {"pretrain": PretrainRecipe(), "init": first.output, "drafter": DrafterRecipe()}
        return self.model_copy(update=changes)

    @model_validator(mode="after")
    def _consistent(self) -> TrainRecipe:
        if not FAMILIES[self.arch].is_lm and (self.corpus or self.pretrain != PretrainRecipe()):
            free = listed([name for name, family in FAMILIES.items() if family.is_lm])
            raise ValueError(f"{self.arch} learns from the target's responses: corpus and pretrain are for arch {free}")
        options = {key for family in FAMILIES.values() for key in family.options}
        for key in sorted(options - {*FAMILIES[self.arch].options}):
            if getattr(self.drafter, key) not in (None, False):
                owners = listed([name for name, family in FAMILIES.items() if key in family.options])
                raise ValueError(f"drafter.{key}: an option of {owners} heads, not of {self.arch}")
        family = FAMILIES[self.arch]
        if self.paced and not family.paces:
            able = listed([name for name, other in FAMILIES.items() if other.paces])
            raise ValueError(f"ttt_weights d-pace: a weighting of {able} heads, not of {self.arch}")
        if self.features.mode == "server" and (family.trainee is None or (self.distillation == "ce" and family.is_lm)):
            raise ValueError(f"features.mode server: {self.arch} under this objective learns from texts alone")
        if self.features.whole_target is False and not self.spares_layers:
            able = listed([name for name, other in FAMILIES.items() if other.trainee and not other.is_lm])
            raise ValueError(f"features.whole_target false: {self.arch} needs the target's layers; {able} do not")
        if self.pretrain != PretrainRecipe() and self.init is not None:
            raise ValueError("a drafter to start from (init) needs no first stage (pretrain)")
        if self.lora.enabled and self.init is None:
            raise ValueError("lora needs `init`, the drafter whose weights it adapts")
        if self.init is not None and self.drafter.model_fields_set:
            given = ", ".join(f"drafter.{name}" for name in sorted(self.drafter.model_fields_set))
            raise ValueError(f"the drafter in `init` has its sizes and its draft vocabulary: leave out {given}")
        if self.each and self.distilled is not None:
            raise ValueError("each domain has its own data: `distilled` and `each` exclude each other")
        return self

    @property
    def features_dir(self) -> Path:
        """Where target features go that are kept on disk."""
        data = self.corpus or self.distilled or distilled_dir(self.data.domain)
        return self.features.dir or data.with_name(data.name + ".features")
