"""`specctl import`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import PositiveInt

from specctl.errors import UsageError
from specctl.formats.registry import FORMATS
from specctl.recipe.sections import ConverterRecipe, DataRecipe, Fraction, LocalPath, OneOf, Section


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
    def source(self) -> Path:
        """The directory of the head. UsageError where none is named."""
        if self.head is None:
            raise UsageError("import needs a head", hint="specctl import HEAD-DIRECTORY --target MODEL")
        return self.head

    @property
    def output(self) -> Path:
        """Where the drafter goes."""
        return self.output_dir or Path("drafters") / (self.head or Path()).name
