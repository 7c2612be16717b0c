"""Commands along a stream of prompts: the order of the stream, the warm-up, and what they have in common."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator

from specctl.families import learning
from specctl.recipe.sections import (
    DataRecipe,
    DraftingRecipe,
    Name,
    Names,
    PositiveFloat,
    RunRecipe,
    SamplingRecipe,
    Section,
)
from specctl.recipe.train import CheckpointRecipe

Kind = Literal["abrupt", "mix", "drift"]


def counted(schedule: list[str], example: str = "") -> list[tuple[str, int]]:
    """`["sql:400", "math:400"]` as (name, prompts). ValueError for a part that is none of a schedule, such as
    `example`."""
    found = []
    for part in schedule:
        name, _, count = part.rpartition(":")
        if not name or not count.isdecimal() or int(count) == 0:
            raise ValueError(f"{part!r} is no part of a schedule such as {example}")
        found.append((name, int(count)))
    return found


class StreamRecipe(Section):
    """The order of the prompts, and how many prompts are answered between two updates."""

    # sql:400,math:400 = so many prompts of each; empty = those of data.domain, the first data.limit of each.
    schedule: Names = []
    shuffle: bool = False  # the prompts of each file in an order of the seed's; without, in that of the file
    # Of several domains: one after the other; shuffled; or the mixture moves linearly from each to the next. The
    # prompts of one domain keep their order.
    kind: Kind = "abrupt"
    chunk: PositiveInt | None = None  # None = that of the drafter's family
    split: Literal["train", "test"] = "test"  # of generators and public data sets

    @field_validator("schedule")
    @classmethod
    def _counts(cls, schedule: list[str]) -> list[str]:
        counted(schedule, "sql:400,math:400,code:400")
        return schedule

    @property
    def segments(self) -> list[tuple[str, int]]:
        """The schedule as (domain, prompts); a domain that comes twice goes on where it stopped."""
        return counted(self.schedule)

    def chunk_of(self, family: str) -> int:
        """Prompts in a chunk for a drafter of this family."""
        return self.chunk or learning()[family].chunk


class WarmupRecipe(Section):
    """How the drafter that a stream starts with is trained, where there is none: offline, on one domain."""

    domain: Name | None = None  # None = the stream's first
    prompts: Name | None = None  # file of its prompts, None = the domain's generator: never those of the stream
    responses: PositiveInt = 1000
    minutes: PositiveFloat | None = None  # of training


class LearningRecipe(RunRecipe):
    """The common part of the recipes of `specctl online`, whether tokens are drafted or steps."""

    data: DataRecipe = DataRecipe()
    stream: StreamRecipe = StreamRecipe()
    sampling: SamplingRecipe = SamplingRecipe()
    drafting: DraftingRecipe = DraftingRecipe()
    algo: Annotated[Names, Field(min_length=1)]
    warmup: WarmupRecipe = WarmupRecipe()
    seeds: Annotated[list[NonNegativeInt], Field(min_length=1)] = [0]  # repeats of the whole stream
    checkpoint: CheckpointRecipe = CheckpointRecipe(every=5)  # in chunks

    @property
    @abstractmethod
    def families(self) -> list[str]:
        """Families of the drafters that a stream starts with, warmed up where they are missing."""

    @property
    @abstractmethod
    def chunk(self) -> int:
        """Prompts between two updates."""

    @property
    def first_domain(self) -> str:
        """The domain that warm-up is for."""
        return self.warmup.domain or self.stream_domains[0]

    @property
    def stream_domains(self) -> list[str]:
        """In the order in which they come first."""
        return list(dict.fromkeys(domain for domain, _ in self.stream.segments)) or self.data.domain

    def start_of(self, family: str) -> Path:
        """The drafter that learners of a family start from."""
        return Path("drafters") / f"{self.first_domain}-{family}"

    def _of_stdin(self) -> None:
        """Raise ValueError for what stdin, which comes once, cannot do."""
        if self.data.prompts == "-" and len(self.seeds) > 1:
            raise ValueError("stdin comes once: one seed")
        if self.data.prompts == "-" and self.stream.shuffle:
            raise ValueError("stdin is answered in its order: stream.shuffle is for files")
