"""Recipe of `specctl train-drafter`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from specctl.families import DEFAULT, FAMILIES, MIN_SLIDING_WINDOW, LayerType, listed
from specctl.recipe.sections import (
    Betas,
    DataRecipe,
    Decay,
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
Tracker = Literal["tensorboard", "wandb", "trackio"]


# Larger numbers are slips: a drafter of such a size would be built for minutes.
Depth = Annotated[int, Field(ge=1, le=64)]
Width = Annotated[int, Field(ge=1, le=2**16)]


class DrafterRecipe(Section):
    """Architecture of a new draft head. A default None is derived from the target."""

    preset: Name | None = None
    base: Name | None = None  # lm: published causal LM to start from, with the target's vocabulary
    hidden_size: Width | None = None
    intermediate_size: Annotated[int, Field(ge=1, le=2**18)] | None = None
    num_heads: Width | None = None
    num_kv_heads: Width | None = None
    # eagle3, peagle, dflash: number of layers (None = 1; dflash: 2); hydra: of each head (None = 4); lm
    num_layers: Depth | None = None
    draft_heads: Depth | None = None  # hydra, medusa: number of heads, one per draft depth (None = 4)
    block_size: Annotated[int, Field(ge=2, le=64)] | None = None  # dflash: number of slots drafted at once (None = 8)
    # dflash: rank of the Markov head, which makes each token of a block depend on the last (0 = none, None = 32)
    markov_rank: Annotated[int, Field(ge=0, le=4096)] | None = None
    # dflash: kernel size of the convolutions around its sublayers (None or 0 = none)
    conv_kernel_size: Annotated[int, Field(ge=0, le=64)] | None = None
    # dflash: rank of DFlash 2's selector, which replaces the Markov head (0 = none)
    selector_rank: Annotated[int, Field(ge=0, le=4096)] | None = None
    # dflash, lm: add a head that predicts a token's acceptance (dflash: for engines; lm: it ends drafts)
    confidence: bool = False
    vocab_size: PositiveInt | None = None
    taps: list[NonNegativeInt] | None = None  # target layers from which the head reads hidden states
    # eagle3, peagle: the norms of EAGLE-3.1
    fc_norm: bool | None = None  # a norm for each tapped state before their fusion (None = unless norm_before_fc)
    norm_before_fc: bool = False  # one norm for all concatenated states instead
    norm_before_residual: bool = False  # start the layer's residual stream after its norm
    norm_output: bool | None = None  # eagle3: pass the state after the final norm to the next draft step (None = yes)
    # eagle3, peagle, dflash: number of positions that a layer attends to (None = all)
    sliding_window: Annotated[int, Field(ge=MIN_SLIDING_WINDOW)] | None = None
    # dflash: sliding_attention or full_attention for each layer (None = all layers have the window, if there is one)
    layer_types: Annotated[list[LayerType], Field(min_length=1)] | None = None
    # dflash: slots of a block see only earlier ones, in all layers (None = in layers with a window)
    is_causal: bool | None = None
    normed_features: bool | None = None  # mtp: read target states after the final norm (None = as vLLM feeds it)

    @model_validator(mode="after")
    def _consistent(self) -> DrafterRecipe:
        if self.fc_norm and self.norm_before_fc:
            raise ValueError("fc_norm and norm_before_fc exclude each other: both are the norm before fc")
        if self.confidence and self.markov_rank == 0:
            raise ValueError("confidence needs a Markov head: leave markov_rank=0 out")
        if self.selector_rank and (self.markov_rank or self.confidence):
            raise ValueError("selector_rank takes the place of a Markov head: leave markov_rank and confidence out")
        return self


class OptimizerRecipe(Section):
    """Optimizer and schedule; `warmup` is a fraction of the steps, `final_lr` a fraction of `lr`."""

    type: Literal["auto", "adamw", "muon"] = "auto"  # auto: muon with ZeRO 0 and without LoRA, else adamw
    lr: PositiveFloat | None = None  # by default the measured rate of the family for the target's width
    momentum: Decay = 0.95  # for muon
    other_lr: PositiveFloat = 0.15  # muon: rate of norms and vocabulary head (by AdamW), as a share of lr
    betas: Betas = [0.9, 0.95]
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    clip: PositiveFloat = 0.5
    warmup: Fraction = 0.015
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    final_lr: Fraction = 0.0


class FeatureRecipe(Section):
    """Target features: kept in memory, kept on disk (`cached`), or recomputed for every batch (`online`).

    `auto` is `memory` if they fit into `budget_gb` per process, else `cached` if `dir` is given and has room, else
    `online`. With `server` an engine computes them, and they are kept on disk as with `cached`.

    With `stream` engines compute them while the drafter trains: at most `ahead` texts ahead, anew in every epoch, and
    none are kept.

    `server` and `stream` can train without the target's layers, and so can `cached` if all features exist already.
    Acceptance is then estimated from held-out responses, not measured.
    """

    mode: Literal["auto", "memory", "cached", "online", "server", "stream"] = "auto"
    budget_gb: PositiveFloat = 2.0
    dir: LocalPath | None = None  # by default next to the distilled data, shared by all runs on that data
    fp8: bool = False  # on disk: one byte per number, with one scale per hidden state
    server: ServerRecipe = ServerRecipe()  # engines that compute features; with an address `auto` is `server`
    servers: LocalPath | None = None  # stream: file with one address per line, read again as engines join and leave
    adapters: dict[Name, Name] = {}  # by name of an engine's model: the adapter that it has, as the data records it
    ahead: PositiveInt = 256  # stream: most texts in flight or waiting, over all processes
    whole_target: bool | None = None  # also load the target's layers (None = if they fit in memory)

    @model_validator(mode="after")
    def _server_where_one_is_named(self) -> FeatureRecipe:
        if self.mode == "auto" and (self.servers or self.server.urls):
            self.mode = "stream" if self.servers else "server"
        if self.server.urls and not self.is_served:
            raise ValueError(f"mode {self.mode} uses no server: leave out server, or mode")
        if self.servers and self.server.urls:
            raise ValueError("servers and server.urls both name engines: leave one of them out")
        for key in ("servers", "ahead"):
            if self.mode != "stream" and getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"{key} is for mode stream (got {self.mode})")
        if self.adapters and not self.is_served:
            raise ValueError(f"adapters is for modes server and stream (got {self.mode})")
        if self.fp8 and self.mode not in ("server", "cached"):
            raise ValueError(f"fp8 is for features on disk: set mode to server or cached (got {self.mode})")
        if self.whole_target is False and not (self.is_served or self.mode == "cached"):
            raise ValueError(
                f"whole_target=false: mode {self.mode} runs the target's layers; use server, stream or cached"
            )
        return self

    @property
    def is_served(self) -> bool:
        """Whether engines compute the features."""
        return self.mode in ("server", "stream")


class HeldOutRecipe(Section):
    """Held-out set: a `fraction` of the prompts, on which acceptance is measured by decoding.

    One half is used during training, to choose the best checkpoint, and the other half at the end.
    """

    every: PositiveInt = 200  # training steps between two measurements
    prompts: PositiveInt = 16  # most prompts per half
    max_new_tokens: PositiveInt = 64
    fraction: Annotated[float, Field(gt=0, lt=1)] = 0.02


class CheckpointRecipe(Section):
    """Checkpoints for --resume."""

    every: PositiveInt = 200  # training steps between two checkpoints
    keep: PositiveInt = 2  # number of checkpoints on disk


class AutoDistillRecipe(Section):
    """Size of the data that is distilled first, if there is none for the domain."""

    responses: PositiveInt = 2000
    max_new_tokens: PositiveInt | None = None  # by default as in `specctl distill`
    prompt_tokens: PositiveInt = 128  # mean length of prompts that are not tokenized yet, for the estimate of --dry-run


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
"""Keys of a DeepSpeed configuration that recipe keys replace, with the advice for each."""


class LoraRecipe(Section):
    """Low-rank fine-tuning of the drafter in `init` (peft): y = W x + (alpha / rank) · B A x with W frozen."""

    enabled: bool = False
    rank: Annotated[int, Field(ge=1, le=4096)] = 32  # rank 32 is 9 % of the bytes of the built-in target's eagle3 head
    alpha: PositiveFloat = 32.0
    modules: Names | None = None  # names of projections (None = all that the family adapts)


class PretrainRecipe(Section):
    """First training stage of an lm, on general text: unconditional samples of the target, or a corpus."""

    responses: PositiveInt | None = None  # number of unconditional samples
    corpus: LocalPath | None = None  # JSONL with `text`, or plain text, instead of samples


class TrainRecipe(WriterRecipe):
    """`specctl train-drafter`: train a drafter.

    The default of output_dir is ./drafters/<domain>-<arch>, with -lora for an adapter. `each` trains one drafter per
    domain; output_dir is then the directory of the pool, by default ./drafters.
    """

    sliceable = True

    data: DataRecipe = DataRecipe()
    arch: Arch = DEFAULT
    each: bool = False
    drafter: DrafterRecipe = DrafterRecipe()
    init: LocalPath | None = None  # drafter to start from, with its sizes and draft vocabulary; auto: a generalist
    lora: LoraRecipe = LoraRecipe()
    distilled: LocalPath | None = None  # directory of distilled data (None = ./distilled/<domain>, of all domains)
    corpus: LocalPath | None = None  # general text to train on (lm) instead of distilled data
    distill: AutoDistillRecipe = AutoDistillRecipe()
    pretrain: PretrainRecipe = PretrainRecipe()
    objective: Literal["auto", "ce", "soft_ce", "kl", "reverse_kl", "tv", "log_tv", "lk_lambda"] = "auto"
    # Tokens in a step's softmax, for soft_ce and kl: the likeliest of the step, and a third drawn at random
    # (0 = the draft vocabulary, None = per device).
    sampled_softmax: NonNegativeInt | None = None
    ttt_steps: Depth = 6  # draft depths of the training-time test, about the depth of drafts (mtp: 3)
    ttt_stride: PositiveInt | None = None  # only every n-th position goes beyond the first step (None = per device)
    ttt_decay: Annotated[float, Field(gt=0, le=1)] = 0.8  # weight of a draft depth relative to the last (mtp: 0.6)
    ttt_weights: Literal["decay"] = "decay"  # of draft depths: ttt_decay (a recipe may still name the only way)
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0  # in hydra heads; the paper has 0.2, for ten epochs at 7B
    optimizer: OptimizerRecipe = OptimizerRecipe()
    epochs: PositiveInt | None = None
    max_steps: PositiveInt | None = None
    max_minutes: PositiveFloat | None = None
    # Response tokens per step over all processes, with at least one text in each (None = per device).
    batch_tokens: PositiveInt | None = None
    max_length: PositiveInt = 2048  # tokens after which a text is cut; the target's context length is a limit, too
    # Most tokens of a process in a step, prompts included; longer texts are trained in pieces (None = no limit).
    piece_length: PositiveInt | None = None
    # Fewest tokens before the trained ones of a piece, to which they attend (None = the head's window, at most half a
    # piece, or a quarter of a piece without a window).
    piece_prefix: PositiveInt | None = None
    gradient_checkpointing: bool = False  # less memory for long samples and large vocabularies, more time
    features: FeatureRecipe = FeatureRecipe()
    eval: HeldOutRecipe = HeldOutRecipe()
    checkpoint: CheckpointRecipe = CheckpointRecipe()
    precision: Literal["auto", "bf16", "fp16", "fp32"] = "auto"  # of matrix products; weights always stay in fp32
    zero_stage: Annotated[int, Field(ge=0, le=3)] = 0  # also set by deepspeed.zero_optimization.stage
    deepspeed: dict[str, Any] = {}  # merged into the engine's configuration
    log: list[Tracker] = []

    @model_validator(mode="after")
    def _one_place_for_each_option_of_the_engine(self) -> TrainRecipe:
        """Refuse a DeepSpeed configuration that contradicts the recipe: recipe keys alone decide the weights."""
        for key, ours in ENGINE_KEYS.items():
            if key in self.deepspeed:
                raise ValueError(f"deepspeed.{key} cannot be set here: {ours}")
        zero = self.deepspeed.get("zero_optimization", {})
        stage = zero.get("stage", self.zero_stage) if isinstance(zero, dict) else None
        if type(stage) is not int or not 0 <= stage <= 3:
            raise ValueError("deepspeed.zero_optimization needs a stage from 0 to 3")
        if "zero_stage" in self.model_fields_set and stage != self.zero_stage:
            raise ValueError(f"zero_stage {self.zero_stage} contradicts deepspeed.zero_optimization.stage {stage}")
        self.zero_stage = stage
        for part in ("offload_optimizer", "offload_param"):
            if isinstance(options := zero.get(part), dict) and options.get("device") == "nvme":
                raise ValueError(
                    f"deepspeed.zero_optimization.{part} cannot be nvme: checkpoints are saved from memory"
                )
        return self

    def set_family(self, arch: str) -> TrainRecipe:
        """Change this recipe to a family, in place, and return it.

        `ttt_steps` and `ttt_decay` become the family's defaults, unless the recipe names them.
        """
        family = FAMILIES[arch]
        defaults = {"arch": arch, "ttt_steps": family.steps, "ttt_decay": family.decay}
        for key, value in defaults.items():
            if key == "arch" or key not in self.model_fields_set:
                vars(self)[key] = value  # does not count as named by the recipe
        return self

    @property
    def resolved_objective(self) -> str:
        """The loss, with `auto` resolved: heads learn the target's distributions, an lm only its samples."""
        return FAMILIES[self.arch].objective if self.objective == "auto" else self.objective

    @property
    def trains_without_layers(self) -> bool:
        """Whether the drafter can be trained without the target's layers: a head, on stored features."""
        family = FAMILIES[self.arch]
        stored = self.features.is_served or self.features.mode == "cached"
        return stored and family.trainable is not None and not family.is_lm

    @property
    def optimizer_type(self) -> str:
        """The optimizer, with `auto` resolved. LoRA uses AdamW: low-rank factors are not matrices in Muon's sense."""
        if self.optimizer.type != "auto":
            return self.optimizer.type
        return "muon" if self.zero_stage == 0 and not self.lora.enabled else "adamw"

    @property
    def output(self) -> Path:
        return self.output_dir or Path("drafters") / self.name

    @property
    def name(self) -> str:
        """Name of the drafter: `sql-eagle3`, `sql+math-eagle3`, `sql-eagle3-lora`."""
        return f"{'+'.join(self.data.domain)}-{self.arch}{'-lora' if self.lora.enabled else ''}"

    @property
    def data_dirs(self) -> list[Path]:
        """Directories of the distilled data: one per domain, or a single one with their mixture."""
        if self.distilled is not None:
            return [self.distilled]
        mixture = distilled_dir(self.data.domain)
        return [mixture] if mixture.is_dir() else [distilled_dir([domain]) for domain in self.data.domain]

    def per_domain(self) -> list[TrainRecipe]:
        """Return one recipe per domain with `each`, else this recipe alone."""
        if not self.each:
            return [self]
        pool = self.output_dir or Path("drafters")
        alone = [
            self.model_copy(update={"each": False, "data": self.data.model_copy(update={"domain": [domain]})})
            for domain in self.data.domain
        ]
        return [recipe.model_copy(update={"output_dir": pool / recipe.name}) for recipe in alone]

    def first_stage(self) -> TrainRecipe | None:
        """Return the recipe of stage `pretrain`, with output ./drafters/general-<arch>, or None without that stage."""
        if self.pretrain == PretrainRecipe():
            return None
        data = DataRecipe(source="unconditional", limit=self.pretrain.responses, seed=self.data.seed)
        changes = {"pretrain": PretrainRecipe(), "corpus": self.pretrain.corpus, "data": data, "each": False}
        return self.model_copy(update={**changes, "output_dir": Path("drafters") / f"general-{self.arch}"})

    def second_stage(self, first: TrainRecipe) -> TrainRecipe:
        """Return this recipe with the drafter of `first` as its start."""
        changes = {"pretrain": PretrainRecipe(), "init": first.output, "drafter": DrafterRecipe()}
        return self.model_copy(update=changes)

    @model_validator(mode="after")
    def _consistent_with_the_family(self) -> TrainRecipe:
        self.set_family(self.arch)
        family = FAMILIES[self.arch]
        # All processes run a target in slices over the same texts, but they train on different texts.
        if self.target.tensor_parallel > 1 and self.features.mode != "cached":
            raise ValueError("target.tensor_parallel computes features before the training: set features.mode=cached")
        if self.piece_prefix is not None and self.piece_prefix >= (self.piece_length or 0):
            raise ValueError("piece_prefix is a part of a piece: set piece_length to more tokens")
        if not family.is_lm and (self.corpus or self.pretrain != PretrainRecipe()):
            free = listed([name for name, other in FAMILIES.items() if other.is_lm])
            raise ValueError(f"{self.arch} learns from the target's responses: corpus and pretrain are for arch {free}")
        options = {key for other in FAMILIES.values() for key in other.options}
        for key in sorted(options - {*family.options}):
            if getattr(self.drafter, key) != DrafterRecipe.model_fields[key].default:
                owners = listed([name for name, other in FAMILIES.items() if key in other.options])
                raise ValueError(f"drafter.{key}: an option of {owners} drafters, not of {self.arch}")
        if self.features.is_served and (family.trainable is None or (self.resolved_objective == "ce" and family.is_lm)):
            raise ValueError(
                f"features.mode={self.features.mode}: {self.arch} with this objective needs no features: use another "
                "mode"
            )
        if self.features.whole_target is False and not self.trains_without_layers:
            able = listed([name for name, other in FAMILIES.items() if other.trainable and not other.is_lm])
            raise ValueError(f"features.whole_target=false: {self.arch} needs the target's layers; {able} do not")
        if self.pretrain != PretrainRecipe() and self.init is not None:
            raise ValueError("init and pretrain exclude each other: a drafter to start from needs no first stage")
        if self.lora.enabled and self.init is None:
            raise ValueError("lora needs init (--init), the drafter to adapt")
        if self.init is not None and self.drafter.model_fields_set:
            given = ", ".join(f"drafter.{name}" for name in sorted(self.drafter.model_fields_set))
            raise ValueError(f"the drafter in init (--init) determines sizes and draft vocabulary: leave out {given}")
        if self.each and self.distilled is not None:
            raise ValueError("each domain has its own data: `distilled` and `each` exclude each other")
        return self

    @property
    def features_dir(self) -> Path:
        """Directory of target features that are kept on disk."""
        data = self.corpus or self.distilled or distilled_dir(self.data.domain)
        return self.features.dir or data.with_name(data.name + ".features")
