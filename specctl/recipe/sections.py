"""Recipe sections and base classes that several commands share."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticKnownError, core_schema

from specctl.errors import redacted

Fraction = Annotated[float, Field(ge=0, le=1)]


PositiveFloat = Annotated[float, Field(gt=0)]


Decay = Annotated[float, Field(ge=0, lt=1)]
"""Weight of the past in a moving average. With 1 the average would never change, and Adam would divide by 0."""
Betas = Annotated[list[Decay], Field(min_length=2, max_length=2)]
"""Decays of Adam's two moments."""


def _not_empty(value: Any) -> Any:
    if value == "":
        raise ValueError("is empty")
    return value


Name = Annotated[str, BeforeValidator(_not_empty)]
"""A text that is not empty: the name of a model, a file or an address."""


def _at_home(path: Path) -> Path:
    """Replace a leading `~`, which no shell does in `--output-dir=~/x` or in a recipe."""
    return Path(os.path.expanduser(path))


LocalPath = Annotated[Path, BeforeValidator(_not_empty), AfterValidator(_at_home), Field(strict=False)]


Device = Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")]


class OneOf:
    """Pydantic metadata of a text that is one of some names, like a `Literal`, but read from a table when needed."""

    def __init__(self, names: Callable[[], Iterable[str]]):
        self.names = names

    def check(self, value: Any) -> str:
        """Return the value, or raise the error of a `Literal`."""
        names = list(self.names())
        if value not in names:
            *first, last = map(repr, names)
            expected = f"{', '.join(first)} or {last}" if first else last
            raise PydanticKnownError("literal_error", {"expected": expected})
        return str(value)

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self.check)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: Any) -> JsonSchemaValue:
        return {"enum": list(self.names()), "type": "string"}


Gpu = Literal["a100-40g", "a100-80g", "h100-80g", "h200", "l40s", "rtx4090", "cpu"]


def _split_commas(value: Any) -> Any:
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


Names = Annotated[list[str], BeforeValidator(_split_commas)]
"""A list that may be written as one string with commas: `sql,math`."""


def _each_once(values: list[Any]) -> list[Any]:
    """Leave out repetitions: a seed that counted twice would make an interval too narrow."""
    return [*dict.fromkeys(values)]


Seeds = Annotated[list[NonNegativeInt], Field(min_length=1), AfterValidator(_each_once)]
"""Numbers of repeats with other draws."""


class Section(BaseModel):
    """Base class of recipe sections. Unknown keys are errors, and no value is converted silently (YAML is typed)."""

    model_config = ConfigDict(extra="forbid", strict=True, validate_default=True, allow_inf_nan=False)

    @model_serializer(mode="wrap", when_used="json")
    def _without_passwords(self, inner: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Return the JSON form with passwords replaced.

        It is shown, stored, and compared with the recipe of a run to resume, which may have had another password.
        """
        return redacted(inner(self))


class TargetRecipe(Section):
    """The target, the model to accelerate: `builtin`, a Hugging Face id, or a local directory."""

    name: Name = "builtin"
    revision: Name | None = None
    adapter: Name | None = None  # directory of a LoRA adapter of the target (peft), merged into the weights
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    device: Device = "auto"
    device_map: Literal["auto", "balanced", "balanced_low_0", "sequential"] | None = None  # over this process's GPUs
    max_memory: Annotated[str, Field(pattern=r"^\d+([KMG]i?)?B$")] | None = None  # with device_map: per GPU, as 60GiB
    tensor_parallel: PositiveInt = 1  # number of slices; each process of torchrun holds one
    trust_remote_code: bool = False
    chat_template_kwargs: dict[str, Any] = {}

    @field_validator("chat_template_kwargs")
    @classmethod
    def _no_words_for_booleans(cls, options: dict[str, Any]) -> dict[str, Any]:
        """Refuse `enable_thinking: no`: in YAML 1.2 it is a text, and a template takes every text for true."""
        for name, value in options.items():
            if str(value).lower() in ("yes", "no", "on", "off"):
                raise ValueError(f"{name}: {value!r} is a text that templates take for true: write true or false")
        return options

    @model_validator(mode="after")
    def _one_device_or_a_map(self) -> TargetRecipe:
        if self.device_map is not None and self.device != "auto":
            raise ValueError("device_map spreads the target over the GPUs of the process: leave device at auto")
        if self.max_memory is not None and self.device_map is None:
            raise ValueError("max_memory needs a device_map")
        if self.device_map is not None and self.tensor_parallel > 1:
            raise ValueError("device_map and tensor_parallel exclude each other: both spread the target")
        if self.adapter is not None and self.tensor_parallel > 1:
            raise ValueError("adapter and tensor_parallel exclude each other: save the target with the adapter merged")
        return self

    @property
    def loading(self) -> dict[str, Any]:
        """Arguments for `load_target`."""
        return self.model_dump(exclude={"chat_template_kwargs"})

    @property
    def on_gpu(self) -> bool:
        """Whether this process would load the target on a GPU."""
        if self.device != "auto":
            return self.device != "cpu"
        import torch  # imported here: commands that never need torch read recipes, too

        return torch.cuda.is_available()

    @property
    def described(self) -> dict[str, Any]:
        """Arguments for `load_config`."""
        return self.model_dump(include={"name", "revision", "trust_remote_code"})

    @property
    def text(self) -> dict[str, Any]:
        """Arguments for `load_target_text`."""
        return self.described | {"adapter": self.adapter}


def label_of(prompts: str) -> str:
    """Return the default domain name of a prompts file: `data/My file.jsonl` → `My-file`, `-` → `stdin`."""
    stem = "stdin" if prompts == "-" else Path(prompts).name.split(".")[0]
    return re.sub(r"[^\w-]+", "-", stem).strip("-_")[:60] or "prompts"


class DataRecipe(Section):
    """Source of the prompts: a file or stdin if given, the public data set on request, else the domain's generator."""

    # By default the name of a prompts file.
    domain: Annotated[Names, Field(min_length=1), AfterValidator(_each_once)] = ["sql"]
    # JSONL, .csv, .parquet or .txt file (one per domain with `{domain}` in its name), "-" for stdin, or
    # "hub:ID[:CONFIG]" for a data set.
    prompts: Name | None = None
    # unconditional: the target writes without prompts.
    source: Literal["auto", "generator", "public", "unconditional"] = "auto"
    limit: PositiveInt | None = None  # prompts per domain: a sample of a file, the first of stdin
    max_rejected: Fraction = 0.01  # largest share of prompts that may be rejected
    seed: NonNegativeInt = 0

    @model_validator(mode="after")
    def _unconditional(self) -> DataRecipe:
        if self.source == "unconditional":
            if self.prompts is not None:
                raise ValueError("unconditional samples have no prompts: leave prompts out")
            self.domain = ["unconditional"]
        elif self.prompts is not None and "{domain}" not in self.prompts and "domain" not in self.model_fields_set:
            self.domain = [label_of(self.prompts)]
        return self

    def prompts_of(self, domain: str) -> str | None:
        """Return the prompts file of one domain, or None."""
        return self.prompts and os.path.expanduser(self.prompts.replace("{domain}", domain))


class SamplingRecipe(Section):
    """Sampling of the target.

    `exact` runs every forward in one fixed shape, so that texts equal the texts of plain decoding.
    """

    temperature: Annotated[float, Field(ge=0)] = 0.0
    top_k: NonNegativeInt = 0  # 0 = off
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    max_new_tokens: PositiveInt = 128
    seed: NonNegativeInt = 0
    exact: bool = False


MOST_NODES = 62  # draft nodes of a step of the target: ancestor bitmasks are signed int64, with a bit for the root
# A draft never has more levels or siblings than nodes. Larger numbers would only cost time and memory.
TreeSize = Annotated[PositiveInt, AfterValidator(partial(min, MOST_NODES))]


class DraftingRecipe(Section):
    """Shape of the draft tree. A default None is the measured default of the drafter's family on this device.

    Sizes above `MOST_NODES` count as `MOST_NODES`.
    """

    depth: TreeSize | None = None  # most levels of the tree
    width: TreeSize | None = None  # nodes per level that are expanded
    nodes: TreeSize | None = None  # draft tokens to verify
    children: TreeSize | None = None  # candidates per expanded node
    stop_below: Fraction | None = None  # stop drafting if the best joint probability of a level is lower
    keep_above: Fraction | None = None  # leave out candidates of a dynamic tree with a lower joint probability
    proposal: Literal["deterministic", "sampled"] = "deterministic"
    rule: Literal["token", "block"] = "token"  # acceptance of sampled proposals: Leviathan et al., or Sun et al.
    rescore: bool = False  # DIR+STORE orders a medusa head's candidates by the store's n-grams, and is no hybrid

    @model_validator(mode="after")
    def _rule_of_sampled(self) -> DraftingRecipe:
        if self.rule == "block" and self.proposal != "sampled":
            raise ValueError("rule=block needs sampled proposals: set proposal=sampled, too")
        return self


class ResourceRecipe(Section):
    """Resources that the process may use, and the machine for which --dry-run estimates.

    A default None is the value of this machine.
    """

    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    gpus: PositiveInt | None = None  # over all nodes
    gpu: Gpu | None = None
    processes: PositiveInt | None = None  # by default one per GPU, or a single one with target.device_map


class CommandRecipe(Section):
    """Recipe of a command; these keys are common to all."""

    target: TargetRecipe = TargetRecipe()
    resources: ResourceRecipe = ResourceRecipe()
    output_dir: LocalPath | None = None

    sliceable: ClassVar[bool] = False
    """Whether several processes can run the command together, with a target in slices."""

    @model_validator(mode="after")
    def _served_adapter(self) -> Self:
        """Require the name of a served model with the target's adapter: engines list the model without it first."""
        for key, section in (("server", self), ("features.server", getattr(self, "features", None))):
            server: Any = getattr(section, "server", None)
            named = server is not None and (server.urls or getattr(section, "servers", None))
            if self.target.adapter is not None and named and server.model is None:
                raise ValueError(f"target.adapter: name the engine's model that has the adapter: {key}.model=NAME")
        return self

    @model_validator(mode="after")
    def _slices(self) -> Self:
        """Refuse options that do not work with a target in slices, because every process would act on them alone."""
        if self.target.tensor_parallel == 1:
            return self
        if not self.sliceable:
            raise ValueError("target.tensor_parallel is for generate, distill, eval, select and train-drafter")
        server, data = getattr(self, "server", None), getattr(self, "data", None)
        alone = {
            "server": server is not None and server.urls,
            "an input on stdin": "-" in (getattr(self, "prompt", None), data and data.prompts),
            "baseline transformers": "transformers" in getattr(self, "baselines", ()),
            "log": isinstance(getattr(self, "log", None), str),  # of responses, unlike the `log` of train-drafter
        }
        for key, there in alone.items():
            if there:
                raise ValueError(f"{key} works only in one process: leave it out, or target.tensor_parallel")
        return self


class ResumableRecipe(CommandRecipe):
    """Recipe of a command that can resume where it stopped."""

    resume: bool = False
    overwrite: bool = False

    @model_validator(mode="after")
    def _one_of_resume_and_overwrite(self) -> ResumableRecipe:
        if self.resume and self.overwrite:
            raise ValueError("resume and overwrite exclude each other")
        return self


class RunRecipe(ResumableRecipe):
    """Recipe of a resumable command with output_dir as its run directory (None = a new directory under ./runs)."""

    @model_validator(mode="after")
    def _resumed_by_name(self) -> RunRecipe:
        if self.resume and self.output_dir is None:
            raise ValueError("resume needs output_dir (--output-dir), the directory of the run to continue")
        return self


class SampledRecipe(CommandRecipe):
    """Recipe of a command that measures on a sample of the prompts."""

    data: DataRecipe = DataRecipe()
    sampling: SamplingRecipe = SamplingRecipe()
    split: Literal["train", "test"] = "test"
    limit: PositiveInt | None = 100  # prompts per domain; a sample if a file has more

    @model_validator(mode="after")
    def _limit_of_the_command(self) -> Self:
        if self.data.limit is not None:
            raise ValueError("use `limit`, not `data.limit`")
        return self


class ConverterRecipe(CommandRecipe):
    """Recipe of a command that converts one directory into another within seconds."""

    overwrite: bool = False


class WriterRecipe(ResumableRecipe):
    """Recipe of a resumable command with output_dir as its product (data, a drafter), not as its run directory."""


def distilled_dir(domains: list[str]) -> Path:
    """Return the default directory of distilled data: ./distilled/sql, ./distilled/sql+math."""
    return Path("distilled") / "+".join(domains)
