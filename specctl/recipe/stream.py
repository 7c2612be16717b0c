"""The stream of prompts of `specctl online`."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveInt, field_validator

from specctl.families import learning
from specctl.recipe.sections import Names, Section

Kind = Literal["abrupt", "mix", "drift"]


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
        for part in schedule:
            domain, _, count = part.rpartition(":")
            if not domain or not count.isdecimal() or int(count) == 0:
                raise ValueError(f"{part!r} is no part of a schedule such as sql:400,math:400,code:400")
        return schedule

    @property
    def segments(self) -> list[tuple[str, int]]:
        """The schedule as (domain, prompts); a domain that comes twice goes on where it stopped."""
        return [(domain, int(count)) for domain, _, count in (part.rpartition(":") for part in self.schedule)]

    def chunk_of(self, family: str) -> int:
        """Prompts in a chunk for a drafter of this family."""
        return self.chunk or learning()[family].chunk
