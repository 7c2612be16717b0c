"""`specctl distill`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PositiveInt, model_validator

from specctl.recipe.sections import DataRecipe, SamplingRecipe, WriterRecipe, distilled_dir
from specctl.recipe.server import ServerRecipe


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
    def _exact_here_only(self) -> DistillRecipe:
        if self.server.urls and self.sampling.exact:
            raise ValueError("sampling.exact is about forwards of this process, a server has its own: leave it out")
        return self

    @property
    def output(self) -> Path:
        """Where the responses go."""
        return self.output_dir or distilled_dir(self.data.domain)
