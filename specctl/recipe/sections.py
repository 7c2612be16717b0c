"""Sections and bases that several commands' recipes share."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticKnownError, core_schema

from specctl.redaction import redacted

Fraction = Annotated[float, Field(ge=0, le=1)]


PositiveFloat = Annotated[float, Field(gt=0)]


def _named(value: Any) -> Any:
    if value == "":
        raise ValueError("is empty")
    return value


Name = Annotated[str, BeforeValidator(_named)]
"""A model, a file, an address: an option that is given says one."""


LocalPath = Annotated[Path, BeforeValidator(_named), Field(strict=False)]


class OneOf:
    """Metadata of a text that is one of some names, read when they are needed: a `Literal` of a table's keys."""

    def __init__(self, names: Callable[[], Iterable[str]]):
        self.names = names

    def check(self, value: Any) -> str:
        """The value, or the error that a `Literal` gives."""
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


GraphicsCard = Literal["a100-40g", "a100-80g", "h100-80g", "h200", "l40s", "rtx4090"]
Gpu = Literal[GraphicsCard, "cpu"]


def _split(value: Any) -> Any:
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


Names = Annotated[list[str], BeforeValidator(_split)]
"""A list that may be written as one string with commas: `sql,math`."""


class Section(BaseModel):
    """Unknown keys are errors, and nothing is converted silently (YAML is typed)."""

    model_config = ConfigDict(extra="forbid", strict=True, validate_default=True, allow_inf_nan=False)

    @model_serializer(mode="wrap", when_used="json")
    def _without_passwords(self, inner: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """The JSON form, which is shown, kept, and compared with an earlier run's: a new password resumes that, too."""
        return redacted(inner(self))


class TargetRecipe(Section):
    """The model that is accelerated: `builtin`, a Hugging Face id, or a local directory."""

    name: Name = "builtin"
    revision: Name | None = None
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = "auto"
    device_map: Literal["auto", "balanced", "balanced_low_0", "sequential"] | None = None  # over this process' GPUs
    max_memory: Annotated[str, Field(pattern=r"^\d+([KMG]i?)?B$")] | None = None  # with device_map: of each GPU, 60GiB
    tensor_parallel: PositiveInt = 1  # slices, of which each process of torchrun holds one
    trust_remote_code: bool = False
    chat_template_kwargs: dict[str, Any] = {}

    @model_validator(mode="after")
    def _one_device_or_a_map(self) -> TargetRecipe:
        if self.device_map is not None and self.device != "auto":
            raise ValueError("device_map spreads the target over the GPUs of the process: leave device at auto")
        if self.max_memory is not None and self.device_map is None:
            raise ValueError("max_memory needs a device_map")
        if self.device_map is not None and self.tensor_parallel > 1:
            raise ValueError("device_map and tensor_parallel exclude each other: both spread the target")
        return self

    @property
    def loading(self) -> dict[str, Any]:
        """The arguments of `load_target`."""
        return self.model_dump(exclude={"chat_template_kwargs"})

    @property
    def on_gpu(self) -> bool:
        """Whether this process would load the target on a GPU."""
        if self.device != "auto":
            return self.device != "cpu"
        import torch  # here, because a recipe is read by commands that never load it

        return torch.cuda.is_available()

    @property
    def described(self) -> dict[str, Any]:
        """The arguments of `load_target_text`."""
        return self.model_dump(include={"name", "revision", "trust_remote_code"})


def label_of(prompts: str) -> str:
    """The name of a prompts file's domain where none is given: `data/My file.jsonl` → `My-file`, `-` → `stdin`."""
    stem = "stdin" if prompts == "-" else Path(prompts).name.split(".")[0]
    return re.sub(r"[^\w-]+", "-", stem).strip("-_")[:60] or "prompts"


class DataRecipe(Section):
    """Where prompts come from: a file or stdin first, the public data set when asked, else the domain's generator."""

    domain: Annotated[Names, Field(min_length=1)] = ["sql"]  # of a prompts file: its name, unless one is given
    # JSONL file, one per domain with `{domain}` in its name; "-" for stdin; "hub:ID[:CONFIG]" for a data set.
    prompts: Name | None = None
    source: Literal["auto", "generator", "public", "unconditional"] = (
        "auto"  # unconditional: whatever the target writes
    )
    limit: PositiveInt | None = None  # prompts per domain; of a file a sample, of stdin the first
    max_rejected: Fraction = 0.01
    seed: NonNegativeInt = 0

    @model_validator(mode="after")
    def _unconditional(self) -> DataRecipe:
        if self.source == "unconditional":
            if self.prompts is not None:
                raise ValueError("unconditional samples have no prompts")
            self.domain = ["unconditional"]
        elif self.prompts is not None and "{domain}" not in self.prompts and "domain" not in self.model_fields_set:
            self.domain = [label_of(self.prompts)]
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
    keep_above: Fraction | None = None  # leave out candidates of a dynamic tree under this joint probability
    proposal: Literal["deterministic", "sampled"] = "deterministic"
    rule: Literal["token", "block"] = "token"  # of acceptance, for sampled proposals: Leviathan et al., Sun et al.

    @model_validator(mode="after")
    def _rule_of_sampled(self) -> DraftingRecipe:
        if self.rule == "block" and self.proposal != "sampled":
            raise ValueError("rule=block decides about sampled proposals: set proposal=sampled, too")
        return self


class ResourceRecipe(Section):
    """Resources the process may use, and the machine that --dry-run estimates for; None = what this machine has."""

    threads: PositiveInt | None = None
    gpus: PositiveInt | None = None  # of all nodes together
    gpu: Gpu | None = None
    processes: PositiveInt | None = None  # None = one for each GPU, or one in all with target.device_map


class CommandRecipe(Section):
    """Keys that every command's recipe has."""

    target: TargetRecipe = TargetRecipe()
    resources: ResourceRecipe = ResourceRecipe()
    output_dir: LocalPath | None = None

    sliceable: ClassVar[bool] = False
    """Whether several processes can carry it out as one, with a target in slices."""

    @model_validator(mode="after")
    def _slices(self) -> Self:
        """Refuse, where the target is in slices, what several processes would do each for itself."""
        if self.target.tensor_parallel == 1:
            return self
        if not self.sliceable:
            raise ValueError("target.tensor_parallel is for generate, distill, eval, select and train-drafter")
        server, data = getattr(self, "server", None), getattr(self, "data", None)
        alone = {
            "server": server is not None and server.urls,
            "an input on stdin": "-" in (getattr(self, "prompt", None), data and data.prompts),
            "baseline transformers": "transformers" in getattr(self, "baselines", ()),
            "log": isinstance(getattr(self, "log", None), str),  # of responses; trainings log elsewhere
            **{key: getattr(self, key, None) for key in ("record", "replay", "train_router")},
        }
        for key, there in alone.items():
            if there:
                raise ValueError(f"{key} is for one process: leave it out, or target.tensor_parallel")
        return self


class ResumableRecipe(CommandRecipe):
    """A command that can continue where it stopped."""

    resume: bool = False
    overwrite: bool = False

    @model_validator(mode="after")
    def _one_of_resume_and_overwrite(self) -> ResumableRecipe:
        if self.resume and self.overwrite:
            raise ValueError("resume and overwrite exclude each other")
        return self


class RunRecipe(ResumableRecipe):
    """A command whose output_dir is the record of a run; None = the run directory under ./runs."""

    @model_validator(mode="after")
    def _resumed_by_name(self) -> RunRecipe:
        if self.resume and self.output_dir is None:
            raise ValueError("resume needs output_dir, the directory of the run to continue")
        return self


class ConverterRecipe(CommandRecipe):
    """A command that writes one directory from another, in seconds."""

    overwrite: bool = False


class WriterRecipe(ResumableRecipe):
    """A command whose output_dir is what it makes (data, a drafter), not the record of a run."""


def distilled_dir(domains: list[str]) -> Path:
    """Where a domain's distilled data is kept by default: ./distilled/sql, ./distilled/sql+math."""
    return Path("distilled") / "+".join(domains)
