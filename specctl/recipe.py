"""The typed recipe: everything a command can be told, each default declared once, here.

A field that is None is decided by the library (a measured default of the drafter family and device, a path derived from
the domain). Loading, overrides and error reports are in `specctl.recipe_io`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, NonNegativeInt, PositiveInt, model_validator

Fraction = Annotated[float, Field(ge=0, le=1)]
PositiveFloat = Annotated[float, Field(gt=0)]
LocalPath = Annotated[Path, Field(strict=False)]
Arch = Literal["eagle", "eagle3", "hydra", "medusa", "lm", "retrieval"]

Gpu = Literal["a100-40g", "a100-80g", "h100-80g", "h200", "l40s", "rtx4090", "cpu"]


def _split(value: Any) -> Any:
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


Names = Annotated[list[str], BeforeValidator(_split)]
"""A list that may be written as one string with commas: `sql,math`."""


class Section(BaseModel):
    """Unknown keys are errors, and nothing is converted silently (YAML is typed)."""

    model_config = ConfigDict(extra="forbid", strict=True, validate_default=True)


class TargetRecipe(Section):
    """The model that is accelerated: `builtin`, a Hugging Face id, or a local directory."""

    name: str = "builtin"
    revision: str | None = None
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = "auto"
    device_map: Literal["auto", "balanced", "balanced_low_0", "sequential"] | None = None  # over this process' GPUs
    max_memory: Annotated[str, Field(pattern=r"^\d+([KMG]i?)?B$")] | None = None  # with device_map: of each GPU, 60GiB
    trust_remote_code: bool = False
    chat_template_kwargs: dict[str, Any] = {}

    @model_validator(mode="after")
    def _one_device_or_a_map(self) -> TargetRecipe:
        if self.device_map is not None and self.device != "auto":
            raise ValueError("device_map spreads the target over the GPUs of the process: leave device at auto")
        if self.max_memory is not None and self.device_map is None:
            raise ValueError("max_memory needs a device_map")
        return self

    @property
    def loading(self) -> dict[str, Any]:
        """The arguments of `load_target`."""
        return self.model_dump(exclude={"chat_template_kwargs"})


class DataRecipe(Section):
    """Where prompts come from: a file or stdin first, the public data set when asked, else the domain's generator."""

    domain: Annotated[Names, Field(min_length=1)] = ["sql"]
    prompts: str | None = None  # JSONL file, one per domain with `{domain}` in its name, or "-" for stdin
    source: Literal["auto", "generator", "public", "unconditional"] = (
        "auto"  # unconditional: whatever the target writes
    )
    limit: PositiveInt | None = None  # prompts per domain
    max_rejected: Fraction = 0.01
    seed: NonNegativeInt = 0

    @model_validator(mode="after")
    def _unconditional(self) -> DataRecipe:
        if self.source == "unconditional":
            if self.prompts is not None:
                raise ValueError("unconditional samples have no prompts")
            self.domain = ["unconditional"]
        return self

    def prompts_of(self, domain: str) -> str | None:
        """The prompts file of one domain."""
        return self.prompts and self.prompts.replace("{domain}", domain)


class SamplingRecipe(Section):
    """How the target samples. `exact` runs every forward in one fixed shape, so that text equals plain decoding's."""

    temperature: Annotated[float, Field(ge=0)] = 0.0
    top_k: NonNegativeInt = 0  # 0 = off
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    max_new_tokens: PositiveInt = 128
    seed: NonNegativeInt = 0
    exact: bool = False


class DraftingRecipe(Section):
    """Shape of the draft tree; None = the measured default of the drafter's family on this device."""

    depth: PositiveInt | None = None
    width: PositiveInt | None = None
    nodes: PositiveInt | None = None
    children: PositiveInt | None = None
    stop_below: Fraction | None = None  # stop drafting under this joint probability
    proposal: Literal["deterministic", "sampled"] = "deterministic"


class ResourceRecipe(Section):
    """What the process may use, and the machine that --dry-run estimates for; None = what this machine has."""

    threads: PositiveInt | None = None
    gpus: PositiveInt | None = None  # of all nodes together
    gpu: Gpu | None = None
    processes: PositiveInt | None = None  # None = one for each GPU, or one in all with target.device_map


class CommandRecipe(Section):
    """What every command's recipe has."""

    target: TargetRecipe = TargetRecipe()
    resources: ResourceRecipe = ResourceRecipe()
    output_dir: LocalPath | None = None


class ResumableRecipe(CommandRecipe):
    """A command that can continue where it stopped."""

    resume: bool = False
    overwrite: bool = False

    @model_validator(mode="after")
    def _one_of_resume_and_overwrite(self) -> ResumableRecipe:
        if self.resume and self.overwrite:
            raise ValueError("resume and overwrite exclude each other")
        return self


class WriterRecipe(ResumableRecipe):
    """A command whose output_dir is what it makes (data, a drafter), not the record of a run."""


def distilled_dir(domains: list[str]) -> Path:
    """Where a domain's distilled data is kept by default: ./distilled/sql, ./distilled/sql+math."""
    return Path("distilled") / "+".join(domains)


class DistillRecipe(WriterRecipe):
    """`specctl distill`: responses sampled from the target; output_dir None = ./distilled/<domain>."""

    data: DataRecipe = DataRecipe()
    sampling: SamplingRecipe = SamplingRecipe()
    temperatures: Annotated[list[Annotated[float, Field(ge=0)]], Field(min_length=1)] = [0.0, 0.3, 0.7, 1.0]
    samples_per_prompt: PositiveInt = 1
    batch_size: PositiveInt = 64
    shard: Annotated[str, Field(pattern=r"^\d+/[1-9]\d*$")] = "0/1"  # this process' part of the prompts: i/n
    shard_size: PositiveInt = 1000  # responses per file
    format: Literal["jsonl", "parquet"] = "jsonl"
    max_response_tokens: PositiveInt | None = None  # stop after so many in all

    @model_validator(mode="after")
    def _unconditional(self) -> DistillRecipe:
        """Without a prompt every greedy text is the same; the target's own distribution is that of temperature 1."""
        if self.data.source == "unconditional" and "temperatures" not in self.model_fields_set:
            self.temperatures = [1.0]
        return self

    @model_validator(mode="after")
    def _shard_in_range(self) -> DistillRecipe:
        index, count = map(int, self.shard.split("/"))
        if index >= count:
            raise ValueError(f"shard {self.shard}: the index runs from 0 to {count - 1}")
        return self

    @property
    def output(self) -> Path:
        """Where the responses go."""
        return self.output_dir or distilled_dir(self.data.domain)


class DrafterRecipe(Section):
    """Size of a new draft head; None = what the architecture derives from the target."""

    preset: str | None = None
    base: str | None = None  # lm: a published causal LM with the target's vocabulary to start from
    hidden_size: PositiveInt | None = None
    intermediate_size: PositiveInt | None = None
    num_heads: PositiveInt | None = None
    num_kv_heads: PositiveInt | None = None
    num_layers: PositiveInt | None = None
    draft_heads: PositiveInt | None = None  # hydra, medusa: one for each draft depth; None = 4
    vocab_size: PositiveInt | None = None
    taps: list[NonNegativeInt] | None = None  # target layers whose outputs the head reads


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
    """

    mode: Literal["auto", "memory", "cached", "online"] = "auto"
    budget_gb: PositiveFloat = 2.0
    dir: LocalPath | None = None  # None = beside the distilled data: runs on the same data share them


class HeldOutRecipe(Section):
    """Acceptance measured by the decoding core during training, on `fraction` of the prompts kept aside."""

    every: PositiveInt = 200  # steps
    prompts: PositiveInt = 16
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
    rank: PositiveInt = 8
    alpha: PositiveFloat = 16.0
    modules: Names | None = None  # names of projections; None = all that the family adapts


class PretrainRecipe(Section):
    """First stage of lm on general text, before the domain: unconditional samples of the target, or a corpus."""

    responses: PositiveInt | None = None  # unconditional samples
    corpus: LocalPath | None = None  # JSONL with `text`, or plain text, instead


class TrainRecipe(WriterRecipe):
    """`specctl train-drafter`; output_dir None = ./drafters/<domain>-<arch>, with -lora for an adapter.

    `each` trains one drafter per domain; output_dir is then the pool's directory, None = ./drafters.
    """

    data: DataRecipe = DataRecipe()
    arch: Arch = "eagle3"
    each: bool = False
    drafter: DrafterRecipe = DrafterRecipe()
    init: LocalPath | None = None  # drafter directory to start from; its sizes and draft vocabulary are kept
    lora: LoraRecipe = LoraRecipe()
    distilled: LocalPath | None = None  # distilled data; None = ./distilled/<domain>, of several domains all
    corpus: LocalPath | None = None  # general text to train on (lm) instead of distilled data
    distill: FirstDataRecipe = FirstDataRecipe()
    pretrain: PretrainRecipe = PretrainRecipe()
    objective: Literal["auto", "ce", "soft_ce", "kl", "reverse_kl", "tv", "log_tv"] = "auto"
    ttt_steps: PositiveInt = 6  # steps of the training-time test: train about as deep as the drafts are
    ttt_stride: PositiveInt | None = None  # every how many-th position goes beyond the first step; None = per device
    ttt_decay: Annotated[float, Field(gt=0, le=1)] = 0.8  # weight of a draft depth, as a share of the one before it
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0  # hydra; its paper takes 0.2, for ten epochs at 7B
    optimizer: OptimizerRecipe = OptimizerRecipe()
    epochs: PositiveInt | None = None
    max_steps: PositiveInt | None = None
    max_minutes: PositiveFloat | None = None
    batch_tokens: PositiveInt | None = None  # response tokens a step, over all processes; None = measured per device
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
    def _one_place_for_each_option_of_the_engine(self) -> TrainRecipe:
        """What decides the weights is a key of the recipe; the engine's own JSON may not say something else."""
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
        return self

    @property
    def distillation(self) -> str:
        """`objective` with `auto` decided: the target's distributions for heads, its samples alone for lm."""
        if self.objective != "auto":
            return self.objective
        return "ce" if self.arch == "lm" else "soft_ce"

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
        if self.arch != "lm" and (self.corpus or self.pretrain != PretrainRecipe()):
            raise ValueError(f"{self.arch} learns from the target's responses: corpus and pretrain are for arch lm")
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


class EvalRecipe(ResumableRecipe):
    """`specctl eval`: one row per drafter × domain; output_dir None = the run directory under ./runs.

    `matrix` asks for the table of `metric` over pool × domains, its picture, and the test of the diagonal; the domains
    are then those that the drafters were made for, unless `data.domain` is given.
    """

    data: DataRecipe = DataRecipe()
    sampling: SamplingRecipe = SamplingRecipe()
    drafting: DraftingRecipe = DraftingRecipe()
    drafters: list[str] = []  # drafter directories, or the name of a family without weights: lookup, suffix
    pool: LocalPath | None = None  # directory of drafter directories
    matrix: bool = False
    metric: Literal["mat", "speedup", "accept_rate"] = "mat"  # in the cells of the matrix
    baselines: list[Literal["vanilla", "transformers"]] = ["vanilla", "transformers"]
    split: Literal["train", "test"] = "test"
    limit: PositiveInt | None = 100  # prompts per domain; of a file with more, a sample
    seeds: Annotated[list[NonNegativeInt], Field(min_length=1)] = [0]
    save_outputs: bool = False

    @model_validator(mode="after")
    def _consistent(self) -> EvalRecipe:
        if self.data.limit is not None:
            raise ValueError("use `limit`, not `data.limit`")
        if self.matrix and not self.drafters and self.pool is None:
            raise ValueError("a matrix needs drafters: name a pool")
        if self.matrix and self.metric == "speedup" and "vanilla" not in self.baselines:
            raise ValueError("a matrix of speedup needs the vanilla baseline")
        if self.resume and self.output_dir is None:
            raise ValueError("resume needs output_dir, the directory of the run to continue")
        return self


class GenerateRecipe(CommandRecipe):
    """`specctl generate`: one prompt with and without a drafter."""

    sampling: SamplingRecipe = SamplingRecipe()
    drafting: DraftingRecipe = DraftingRecipe()
    prompt: str | None = None
    drafter: str | None = None
    save_outputs: bool = False
    overwrite: bool = False


class ConverterRecipe(CommandRecipe):
    """A command that writes one directory from another, in seconds."""

    overwrite: bool = False


class ExportRecipe(ConverterRecipe):
    """`specctl export`; output_dir None = ./exported/<drafter>-<to>. The target is the drafter's own unless named."""

    drafter: LocalPath | None = None
    to: Literal["vllm", "sglang", "speculators", "hf", "eagle", "hydra", "medusa"] = "vllm"
    tokens: PositiveInt = 3  # drafted a round, in the commands shown and, for speculators, in the configuration
    check: bool = False  # read the result back and compare logits at draft steps 1 … tokens

    @property
    def output(self) -> Path:
        """Where the directory goes."""
        return self.output_dir or Path("exported") / f"{(self.drafter or Path()).name}-{self.to}"


class ProbeRecipe(Section):
    """The short run of an imported head on a few prompts: wrong layers or RoPE show as an acceptance of nothing."""

    enabled: bool = True
    prompts: PositiveInt = 4
    max_new_tokens: PositiveInt = 32
    suspicious: Fraction = 0.05  # accepted share of the drafted tokens under which it warns


class ImportRecipe(ConverterRecipe):
    """`specctl import`; output_dir None = ./drafters/<head>. The probe reads the prompts or the domain of `data`."""

    head: LocalPath | None = None
    format: Literal["auto", "speculators", "hydra", "medusa", "eagle3", "eagle", "hf"] = "auto"
    data: DataRecipe = DataRecipe()
    probe: ProbeRecipe = ProbeRecipe()

    @property
    def output(self) -> Path:
        """Where the drafter goes."""
        return self.output_dir or Path("drafters") / (self.head or Path()).name


RECIPES: dict[str, type[CommandRecipe]] = {
    "generate": GenerateRecipe,
    "distill": DistillRecipe,
    "train-drafter": TrainRecipe,
    "eval": EvalRecipe,
    "export": ExportRecipe,
    "import": ImportRecipe,
}
"""The recipe model of each command."""
