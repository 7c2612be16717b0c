"""Recipe of `specctl import`."""

from pathlib import Path
from typing import Annotated

from pydantic import PositiveInt

from specctl.errors import UsageError
from specctl.formats.registry import FORMATS
from specctl.recipe.sections import ConverterRecipe, DataRecipe, Fraction, LocalPath, OneOf, Section


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
