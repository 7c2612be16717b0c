"""`specctl online`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt, field_validator, model_validator

from specctl.recipe.learner import LearnerOptions, LearnerRecipe, rule_and_family
from specctl.recipe.sections import (
    DataRecipe,
    DraftingRecipe,
    LocalPath,
    Names,
    PositiveFloat,
    ResumableRecipe,
    SamplingRecipe,
    Section,
)
from specctl.recipe.stream import StreamRecipe
from specctl.recipe.train import CheckpointRecipe

FAMILY = "eagle3"  # of an algo that names none


class WarmupRecipe(Section):
    """How the drafter that a stream starts with is trained, where there is none: offline, on one domain."""

    domain: str | None = None  # None = the stream's first
    prompts: str | None = None  # file of its prompts, None = the domain's generator: never those of the stream
    responses: PositiveInt = 1000
    minutes: PositiveFloat | None = None  # of training


class BufferRecipe(Section):
    """The replay buffer: what verification said about the texts to learn from."""

    max_mb: PositiveFloat = 512.0
    feedback: Literal["verdict", "rerun"] = "verdict"  # rerun: a second pass of the target, to compare with
    replay: NonNegativeFloat = 0.0  # texts of earlier chunks that are learnt from again, per text of the chunk


class OnlineRecipe(ResumableRecipe):
    """`specctl online`: drafters that learn along a stream; output_dir None = the run directory under ./runs.

    Every prompt is answered by plain decoding, by the drafter that does not learn, and by one of each `algo`.
    """

    data: DataRecipe = DataRecipe()
    stream: StreamRecipe = StreamRecipe()
    sampling: SamplingRecipe = SamplingRecipe()
    drafting: DraftingRecipe = DraftingRecipe()
    algo: Annotated[Names, Field(min_length=1)] = ["ogd"]  # an update rule, or with its family: opt-hydra, ens-eagle3
    arch: Literal["eagle", "eagle3", "hydra", "medusa", "lm"] | None = None  # of rules without one; None = init's
    init: LocalPath | None = None  # drafter to start from; None = ./drafters/<domain>-<arch>, warmed up if missing
    warmup: WarmupRecipe = WarmupRecipe()
    learner: LearnerOptions = LearnerOptions()
    buffer: BufferRecipe = BufferRecipe()
    asynchronous: bool = False  # a process of its own learns; the decoder takes over its weights between sequences
    learner_device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = "auto"  # asynchronous: where it learns
    baselines: list[Literal["vanilla", "static"]] = ["vanilla", "static"]
    batch: PositiveInt = 1  # sequences at a time
    seeds: Annotated[list[NonNegativeInt], Field(min_length=1)] = [0]  # repeats of the whole stream
    checkpoint: CheckpointRecipe = CheckpointRecipe(every=5)  # in chunks
    save_outputs: bool = False

    @field_validator("algo")
    @classmethod
    def _known(cls, algo: list[str]) -> list[str]:
        for name in algo:
            rule_and_family(name)
        if len(set(algo)) < len(algo):
            raise ValueError("names an algo twice")
        return algo

    @model_validator(mode="after")
    def _consistent(self) -> OnlineRecipe:
        if self.resume and self.output_dir is None:
            raise ValueError("resume needs output_dir, the directory of the run to continue")
        if self.data.prompts == "-" and len(self.seeds) > 1:
            raise ValueError("stdin comes once: one seed")
        if self.data.prompts == "-" and self.stream.shuffle:
            raise ValueError("stdin is answered in its order: stream.shuffle is for files")
        if "static" in self.baselines and any(rule_and_family(name)[0] == "static" for name in self.algo):
            raise ValueError("the drafter that does not learn is a baseline already: set baselines without static")
        if self.learner.combine == "probs":
            raise ValueError("learner.combine: no drafter mixes the members' distributions: use weights or sample")
        return self

    def family_of(self, algo: str) -> str:
        """Of the drafter that learns by `algo`."""
        return rule_and_family(algo)[1] or self.arch or FAMILY

    @property
    def families(self) -> list[str]:
        return list(dict.fromkeys(self.family_of(algo) for algo in self.algo))

    def rule_of(self, algo: str) -> LearnerRecipe:
        """The learner that `algo` names; constants of its family are still open."""
        return LearnerRecipe(**self.learner.model_dump(), algo=rule_and_family(algo)[0])

    @property
    def domains(self) -> list[str]:
        """Of the stream, in the order of their coming."""
        return list(dict.fromkeys(domain for domain, _ in self.stream.segments)) or self.data.domain

    @property
    def first_domain(self) -> str:
        """The domain that warm-up is for."""
        return self.warmup.domain or self.domains[0]

    def start_of(self, family: str) -> Path:
        """The drafter that learners of a family start from."""
        return self.init or Path("drafters") / f"{self.first_domain}-{family}"
