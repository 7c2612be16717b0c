"""Recipe sections of online learning: order of the stream, warm-up, and common keys of `specctl online`."""

from abc import abstractmethod
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PositiveInt, field_validator

from specctl.families import online_families
from specctl.recipe.sections import (
    DataRecipe,
    DraftingRecipe,
    Name,
    Names,
    PositiveFloat,
    RunRecipe,
    SamplingRecipe,
    Section,
    Seeds,
)
from specctl.recipe.train import CheckpointRecipe

Kind = Literal["abrupt", "mix", "drift"]


def parse_schedule(schedule: list[str], example: str = "") -> list[tuple[str, int]]:
    """Parse `["sql:400", "math:400"]` into (name, prompts) pairs.

    Raises ValueError for a malformed part; the message shows `example`.
    """
    found = []
    for part in schedule:
        name, _, count = part.rpartition(":")
        if not name or not count.isdecimal() or int(count) == 0:
            raise ValueError(f"{part!r} is not NAME:PROMPTS, as in {example}")
        found.append((name, int(count)))
    return found


class StreamRecipe(Section):
    """Order of the prompts, and number of prompts between two updates."""

    # Domains in turn: sql:400,math:400 means 400 prompts of each. Empty = the first data.limit prompts of every domain
    # in data.domain.
    schedule: Names = []
    shuffle: bool = False  # shuffle the prompts of each file by the seed; false = keep their order
    # Order of several domains. abrupt: one after the other. mix: shuffled. drift: the mixture moves linearly from each
    # domain to the next. The prompts of one domain keep their order.
    kind: Kind = "abrupt"
    chunk: PositiveInt | None = None  # prompts per chunk (None = the default of the drafter's family)
    split: Literal["train", "test"] = "test"  # for generators and public data sets

    @field_validator("schedule")
    @classmethod
    def _counts(cls, schedule: list[str]) -> list[str]:
        parse_schedule(schedule, "sql:400,math:400,code:400")
        return schedule

    @property
    def segments(self) -> list[tuple[str, int]]:
        """The schedule as (domain, prompts). A domain that occurs twice continues where it stopped."""
        return parse_schedule(self.schedule)

    def chunk_of(self, family: str) -> int:
        return self.chunk or online_families()[family].chunk


class WarmupRecipe(Section):
    """Offline training, on one domain, of the drafter with which a stream starts, if it does not exist."""

    domain: Name | None = None  # by default the first domain of the stream
    prompts: Name | None = None  # file of prompts, never the stream's (None = the domain's generator)
    responses: PositiveInt = 1000  # number of responses to distil
    minutes: PositiveFloat | None = None  # limit of the training time


class LearningRecipe(RunRecipe):
    """Common keys of the recipes of `specctl online`, for drafting tokens and for drafting reasoning steps."""

    data: DataRecipe = DataRecipe()
    stream: StreamRecipe = StreamRecipe()
    sampling: SamplingRecipe = SamplingRecipe()
    drafting: DraftingRecipe = DraftingRecipe()
    algo: Annotated[Names, Field(min_length=1)]
    warmup: WarmupRecipe = WarmupRecipe()
    seeds: Seeds = [0]  # one pass over the whole stream for each seed
    checkpoint: CheckpointRecipe = CheckpointRecipe(every=5)  # counted in chunks

    @property
    @abstractmethod
    def families(self) -> list[str]:
        """Families of the drafters with which a stream starts; missing drafters are warmed up."""

    @property
    @abstractmethod
    def chunk(self) -> int:
        """Prompts between two updates."""

    @property
    def first_domain(self) -> str:
        """Domain of the warm-up."""
        return self.warmup.domain or self.stream_domains[0]

    @property
    def stream_domains(self) -> list[str]:
        """Domains of the stream, in order of their first prompt."""
        return list(dict.fromkeys(domain for domain, _ in self.stream.segments)) or self.data.domain

    def initial_drafter(self, family: str) -> Path:
        """Return the directory of the drafter from which learners of a family start."""
        return Path("drafters") / f"{self.first_domain}-{family}"

    def _check_stdin(self) -> None:
        """Raise ValueError for options that need to read or order stdin again."""
        if self.data.prompts == "-" and len(self.seeds) > 1:
            raise ValueError("stdin can be read only once: name one seed")
        if self.data.prompts == "-" and self.stream.shuffle:
            raise ValueError("stdin is answered in its order: stream.shuffle works only with files")
