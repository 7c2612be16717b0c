"""Recipes of `specctl export` and `specctl import`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, PositiveInt, model_validator

from specctl.errors import UsageError
from specctl.formats.registry import FORMATS, readers
from specctl.recipe.sections import ConverterRecipe, DataRecipe, Fraction, LocalPath, OneOf, Section
from specctl.recipe.server import ServerRecipe


def _repository(name: str) -> str:
    if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name, re.ASCII):
        raise ValueError("names no repository of the Hugging Face hub: use OWNER/NAME")
    return name


class ExportRecipe(ConverterRecipe):
    """`specctl export`: write a drafter in the format of another engine.

    The default of output_dir is ./exported/<drafter>-<to>. The default target is the target of the drafter.
    """

    drafter: LocalPath | None = None
    to: Annotated[str, OneOf(readers)] = "vllm"
    tokens: PositiveInt = 3  # draft tokens per round, in the commands shown and in the speculators configuration
    # Result or run directory of `eval-server`: derive draft lengths by load from that, in place of `tokens`.
    tune: LocalPath | None = None
    check: bool = False  # read the result back and compare its weights
    # Repository of the Hugging Face hub that gets the files, with a model card.
    push: Annotated[str, AfterValidator(_repository)] | None = None
    private: bool = False  # create that repository as a private one
    server: ServerRecipe = ServerRecipe()  # running SGLang servers that take a datastore; then nothing is written

    @model_validator(mode="after")
    def _consistent(self) -> ExportRecipe:
        if self.tune is not None and "tokens" in self.model_fields_set:
            raise ValueError("tune derives the draft lengths from a sweep: leave tokens out")
        if self.private and self.push is None:
            raise ValueError("private needs push (--push OWNER/NAME), the repository")
        if self.server.urls and self.to != "sglang":
            raise ValueError("server publishes to running servers, which only SGLang supports: set to=sglang")
        return self

    @property
    def source(self) -> Path:
        """Directory of the drafter. Raises UsageError if none is named."""
        if self.drafter is None:
            raise UsageError("export needs a drafter", hint="specctl export drafters/sql-eagle3 --to vllm")
        return self.drafter

    @property
    def output(self) -> Path:
        return self.output_dir or Path("exported") / f"{(self.drafter or Path()).name}-{self.to}"


class ProbeRecipe(Section):
    """Short test of an imported head on a few prompts: with wrong layers or RoPE hardly any draft is accepted."""

    enabled: bool = True
    prompts: PositiveInt = 4
    max_new_tokens: PositiveInt = 32
    suspicious: Fraction = 0.05  # warn if a smaller share of the draft tokens is accepted


class ImportRecipe(ConverterRecipe):
    """`specctl import`: convert a published head into a drafter.

    The default of output_dir is ./drafters/<head>. The probe uses the prompts or the domain of `data`.
    """

    head: LocalPath | None = None
    format: Annotated[str, OneOf(lambda: ("auto", *FORMATS))] = "auto"
    data: DataRecipe = DataRecipe()
    probe: ProbeRecipe = ProbeRecipe()

    @property
    def source(self) -> Path:
        """Directory or GGUF file of the published head. Raises UsageError if none is named."""
        if self.head is None:
            raise UsageError("import needs a head", hint="specctl import HEAD-DIRECTORY --target MODEL")
        return self.head

    @property
    def output(self) -> Path:
        head = self.head or Path()
        return self.output_dir or Path("drafters") / (head.stem if head.suffix == ".gguf" else head.name)
