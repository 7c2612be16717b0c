"""`specctl distill`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PositiveInt, model_validator

from specctl.recipe.sections import (
    DataRecipe,
    LocalPath,
    Name,
    SamplingRecipe,
    Section,
    WriterRecipe,
    distilled_dir,
    label_of,
)
from specctl.recipe.server import ServerRecipe

Similarity = Annotated[float, Field(gt=0, le=1)]


class FilterRecipe(Section):
    """Prompts and responses to leave out; similarities are Jaccard's, of word 5-grams, null = no comparison.

    Of 25,000 prompts in nine domains 0.95 drops four, which differ in a full stop or a comma from others; 0.9 drops
    eleven different questions about one database schema, 0.8 a twentieth of those.
    """

    near_prompts: Similarity | None = 0.95  # to an earlier prompt
    near_excluded: Similarity | None = 0.8  # to a prompt of `exclude`: rather one too many
    near_responses: Similarity | None = None  # to an earlier response of this writer
    loops: Literal["cut", "drop", "keep"] = "cut"  # an n-gram repeated to the end of a text that reached its length
    truncated: Literal["keep", "drop"] = "keep"  # responses that reached their length


class DistillRecipe(WriterRecipe):
    """`specctl distill`: responses sampled from the target; output_dir None = ./distilled/<domain>."""

    sliceable = True

    data: DataRecipe = DataRecipe()
    sampling: SamplingRecipe = SamplingRecipe()
    temperatures: Annotated[list[Annotated[float, Field(ge=0)]], Field(min_length=1)] = [0.0, 0.3, 0.7, 1.0]
    samples_per_prompt: PositiveInt = 1
    batch_size: PositiveInt = 64
    shard: Annotated[str, Field(pattern=r"^\d+/[1-9]\d*$")] = "0/1"  # this process' part of the prompts: i/n
    shard_size: PositiveInt = 1000  # responses per file
    format: Literal["jsonl", "parquet"] = "jsonl"
    max_response_tokens: PositiveInt | None = None  # stop after so many in all
    log: Name | None = None  # JSONL of responses that are there already, or "-": they are taken instead of new ones
    exclude: LocalPath | None = None  # JSONL of prompts, such as those to be measured on, which are left out
    filters: FilterRecipe = FilterRecipe()
    server: ServerRecipe = ServerRecipe()  # who answers; without an address the target is loaded here

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

    @model_validator(mode="after")
    def _responses_that_are_there(self) -> DistillRecipe:
        if self.log is None:
            return self
        unused = {
            "server": bool(self.server.urls),
            "data.prompts": self.data.prompts is not None,
            "data.source": self.data.source != "auto",
            "shard": self.shard != "0/1",
        }
        for key, there in unused.items():
            if there:
                raise ValueError(f"{key} is about new responses, log names those that are there: leave one of them out")
        if "domain" not in self.data.model_fields_set:
            self.data = self.data.model_copy(update={"domain": [label_of(self.log)]})
        elif len(self.data.domain) > 1:
            raise ValueError("a log is one domain")
        return self

    @model_validator(mode="after")
    def _exact_here_only(self) -> DistillRecipe:
        if self.server.urls and self.sampling.exact:
            raise ValueError("sampling.exact is about forwards of this process, a server has its own: leave it out")
        return self

    @property
    def output(self) -> Path:
        """Where the responses go."""
        return self.output_dir or distilled_dir(self.data.domain)
