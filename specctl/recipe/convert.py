"""Commands that turn one directory into another: `specctl export` and `specctl import`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import PositiveInt

from specctl.formats.registry import FORMATS, readers
from specctl.recipe.sections import CommandRecipe, DataRecipe, Fraction, LocalPath, OneOf, Section


class ConverterRecipe(CommandRecipe):
    """A command that writes one directory from another, in seconds."""

    overwrite: bool = False


class ExportRecipe(ConverterRecipe):
    """`specctl export`; output_dir None = ./exported/<drafter>-<to>. The target is the drafter's own unless named."""

    drafter: LocalPath | None = None
    to: Annotated[str, OneOf(readers)] = "vllm"
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
    format: Annotated[str, OneOf(lambda: ("auto", *FORMATS))] = "auto"
    data: DataRecipe = DataRecipe()
    probe: ProbeRecipe = ProbeRecipe()

    @property
    def output(self) -> Path:
        """Where the drafter goes."""
        return self.output_dir or Path("drafters") / (self.head or Path()).name
