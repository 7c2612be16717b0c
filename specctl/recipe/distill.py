"""Recipe of `specctl distill`."""

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


class FilterRecipe(Section):
    """Filters that leave out prompts and responses.

    A similarity is Jaccard's, over word 5-grams. 0.8 also drops a twentieth of the different questions about one
    database schema.
    """

    # Drop a prompt this similar to one of `exclude` (null = no comparison).
    near_excluded: Annotated[float, Field(gt=0, le=1)] | None = 0.8
    loops: Literal["cut", "drop", "keep"] = "cut"  # an n-gram repeated up to the end of a response of full length
    truncated: Literal["keep", "drop"] = "keep"  # responses that reached the length limit


class DistillRecipe(WriterRecipe):
    """`specctl distill`: sample responses from the target. The default of output_dir is ./distilled/<domain>."""

    sliceable = True

    data: DataRecipe = DataRecipe()
    sampling: SamplingRecipe = SamplingRecipe()
    # Temperatures, mixed over the prompts.
    temperatures: Annotated[list[Annotated[float, Field(ge=0)]], Field(min_length=1)] = [0.0, 0.3, 0.7, 1.0]
    samples_per_prompt: PositiveInt = 1
    batch_size: PositiveInt = 64
    shard: Annotated[str, Field(pattern=r"^\d+/[1-9]\d*$")] = "0/1"  # this job's part of the prompts: i/n
    shard_size: PositiveInt = 1000  # responses per file
    max_response_tokens: PositiveInt | None = None  # stop after this many tokens in total
    log: Name | None = None  # JSONL file with existing responses ("-" = stdin), used instead of new ones
    exclude: LocalPath | None = None  # JSONL file with prompts to leave out, such as a test set
    filters: FilterRecipe = FilterRecipe()
    server: ServerRecipe = ServerRecipe()  # engines that answer; none = load the target here

    @model_validator(mode="after")
    def _consistent(self) -> DistillRecipe:
        if self.data.source == "unconditional" and "temperatures" not in self.model_fields_set:
            self.temperatures = [1.0]  # the target's own distribution: without prompts all greedy texts are the same
        index, count = self.writer
        if index >= count:
            raise ValueError(f"shard {self.shard}: the index runs from 0 to {count - 1}")
        if self.log is not None:
            self._check_log(self.log)
        if self.server.urls and self.sampling.exact:
            raise ValueError("sampling.exact applies only to forwards in this process, not to a server: leave it out")
        return self

    def _check_log(self, log: str) -> None:
        """Raise ValueError for options of new responses, and name the domain of existing ones after their file."""
        unused = {
            "server": bool(self.server.urls),
            "data.prompts": self.data.prompts is not None,
            "data.source": self.data.source != "auto",
            "shard": self.shard != "0/1",
        }
        for key, there in unused.items():
            if there:
                raise ValueError(
                    f"{key} is for new responses, but log (--from-log) has existing ones: leave one of them out"
                )
        if "domain" not in self.data.model_fields_set:
            self.data = self.data.model_copy(update={"domain": [label_of(log)]})
        elif len(self.data.domain) > 1:
            raise ValueError("a log belongs to one domain: name only one")

    @property
    def writer(self) -> tuple[int, int]:
        """Number of this job, and number of jobs."""
        index, count = map(int, self.shard.split("/"))
        return index, count

    @property
    def output(self) -> Path:
        return self.output_dir or distilled_dir(self.data.domain)
