"""Recipe of `specctl online`, and its common keys with `specctl learn-from-server`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveInt, field_validator, model_validator

from specctl.families import DEFAULT, STREAM_RETRIEVAL, TEXT_DRAFTERS, online_families
from specctl.recipe.learner import LearnerOptions, LearnerRecipe, rule_and_family
from specctl.recipe.sections import DraftingRecipe, LocalPath, Names, OneOf, PositiveFloat, Section
from specctl.recipe.select import GameRecipe, PolicyRecipe
from specctl.recipe.stream import LearningRecipe, parse_schedule
from specctl.recipe.train import Tracker

Baseline = Annotated[str, OneOf(lambda: ("vanilla", "static", *TEXT_DRAFTERS, STREAM_RETRIEVAL))]


class BufferRecipe(Section):
    """The replay buffer: results of verification for the texts to learn from."""

    max_mb: PositiveFloat = 512.0  # MiB; with asynchronous also for chunks that wait for the learner
    feedback: Literal["verdict", "rerun"] = "verdict"  # rerun: a second pass of the target, for comparison
    store_tokens: PositiveInt = 1_000_000  # size of the datastore of `retrieval`: the newest tokens, 16 bytes each
    replay: NonNegativeFloat = 0.0  # texts of earlier chunks to learn from again, per text of the chunk

    @property
    def reruns(self) -> bool:
        """Whether learning runs the target's layers, and not only its final norm and vocabulary head."""
        return self.feedback == "rerun"


class PoolPolicyRecipe(Section):
    """With `pool`: the policy that chooses a specialist in every round, by the rules in `game`."""

    name: str = "hedgespec"  # a policy of `specctl select`
    options: PolicyRecipe = PolicyRecipe()
    reset: Literal["query", "chunk"] = "query"  # when the policy starts anew


class DrafterStreamRecipe(LearningRecipe):
    """Common keys of the commands with drafters that learn along a stream, in this process or from servers."""

    algo: Annotated[Names, Field(min_length=1)] = ["ogd"]  # update rules, also with a family: opt-hydra, ens-eagle3
    # Family of update rules without one in their name (None = the family of `init`).
    arch: Annotated[str, OneOf(online_families)] | None = None
    # Drafter to start from. The default is ./drafters/<domain>-<arch>.
    init: LocalPath | None = None
    learner: LearnerOptions = LearnerOptions()
    buffer: BufferRecipe = BufferRecipe()

    @field_validator("algo")
    @classmethod
    def _known(cls, algo: list[str]) -> list[str]:
        for name in algo:
            rule_and_family(name)
        if len(set(algo)) < len(algo):
            raise ValueError("names an algo twice")
        return algo

    @field_validator("drafting")
    @classmethod
    def _without_rescoring(cls, drafting: DraftingRecipe) -> DraftingRecipe:
        if drafting.rescore:
            raise ValueError("rescore needs a head and a datastore that do not learn: leave it out")
        return drafting

    def family_of(self, algo: str) -> str:
        return rule_and_family(algo)[1] or self.arch or DEFAULT

    @property
    def companion(self) -> str | None:
        """Text drafter that drafts in one tree with every head, or None."""
        return None

    @property
    def families(self) -> list[str]:
        """Families of the drafters that start from `init` or a warm-up."""
        return list(dict.fromkeys(self.family_of(algo) for algo in self.algo))

    def learner_of(self, algo: str) -> LearnerRecipe:
        """Return the update rule that `algo` names. The constants of its family are not filled in."""
        return LearnerRecipe(**self.learner.model_dump(), algo=rule_and_family(algo)[0])

    @property
    def chunk(self) -> int:
        """Prompts between two updates."""
        return max(self.stream.chunk_of(family) for family in self.families or [DEFAULT])

    def initial_drafter(self, family: str) -> Path:
        """Return the directory of the drafter from which learners of a family start."""
        return self.init or super().initial_drafter(family)


class OnlineRecipe(DrafterStreamRecipe):
    """`specctl online`: drafters that learn along a stream.

    Every prompt is answered by all `baselines` and with one drafter per `algo`. A missing drafter is warmed up first.
    """

    # Directory of specialists to choose among. Each one learns from the texts of which it drafted the most tokens.
    pool: LocalPath | None = None
    policy: PoolPolicyRecipe = PoolPolicyRecipe()
    game: GameRecipe = GameRecipe()
    # Targets that follow each other along the stream, as in RL: ./step-100:400,./step-200:400 means 400 prompts for
    # each, and the last target stays to the end. They share vocabulary and sizes; `target` says how to load them.
    target_schedule: Names = []
    draft_length: Literal["fixed", "auto"] = "fixed"  # auto: the depth that pays, by acceptance and cost up to now
    # Text drafter that drafts in one tree with every head, whether it learns or not. This hybrid chooses its depth
    # itself. auto: retrieval on a CPU, unless another option sets the depth; none on a GPU, where only a head alone
    # runs in CUDA graphs.
    beside: Annotated[str, OneOf(lambda: ("auto", "none", *TEXT_DRAFTERS, STREAM_RETRIEVAL))] = "auto"
    draft_cost: NonNegativeFloat | None = None  # auto: cost α of a draft token in target steps (None = measured)
    asynchronous: bool = False  # learn in another process; the decoder loads its weights between sequences
    learner_device: Annotated[Names, Field(min_length=1)] = ["auto"]  # asynchronous: device of the learner, one name
    # Further contenders for every prompt: plain decoding, the drafter without learning, drafters without training.
    baselines: list[Baseline] = ["vanilla", "static", "lookup", "retrieval"]
    batch: PositiveInt = 1  # sequences at a time
    save_outputs: bool = False
    log: list[Tracker] = []

    @field_validator("beside", mode="before")
    @classmethod
    def _nothing(cls, beside: Any) -> Any:
        """Read null as none, for recipes from before there was a default."""
        return "none" if beside is None else beside

    @field_validator("learner_device")
    @classmethod
    def _devices(cls, devices: list[str]) -> list[str]:
        if len(devices) > 1:
            raise ValueError(
                f"{','.join(devices)} are several devices, but a learner has one: name one, such as cuda:1"
            )
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", devices[0]):
            raise ValueError(f"{devices[0]!r} is not a device: use auto, cpu, cuda or cuda:N")
        return devices

    @field_validator("target_schedule")
    @classmethod
    def _counts(cls, schedule: list[str]) -> list[str]:
        parse_schedule(schedule, "./step-100:400,./step-200:400")
        return schedule

    @model_validator(mode="after")
    def _consistent(self) -> OnlineRecipe:
        self._check_learner_elsewhere()
        if self.pool is not None:
            self._check_pool()
        self._check_stdin()
        if self.beside not in ("auto", "none") and (self.pool is not None or self.draft_length == "auto"):
            raise ValueError("beside excludes pool and draft_length=auto: a hybrid chooses its draft depth itself")
        if "static" in self.baselines and "static" in (rule_and_family(name)[0] for name in self.algo):
            raise ValueError("static is both an algo and a baseline: set baselines without static")
        return self

    def _check_learner_elsewhere(self) -> None:
        """Check the options of a learner in another process, and make the first target of the schedule the target."""
        if self.learner_device != ["auto"] and not self.asynchronous:
            raise ValueError("learner_device is for a separate learner process: set asynchronous (--async), too")
        if not self.target_schedule:
            return
        if self.asynchronous:
            raise ValueError("target_schedule and asynchronous exclude each other: the learner keeps its target")
        if self.target.adapter is not None:
            raise ValueError("target_schedule and target.adapter exclude each other: schedule merged targets")
        self.target = self.target.model_copy(update={"name": self.target_at(0)})

    def _check_pool(self) -> None:
        """Raise ValueError for options that the learning specialists of a pool do not support."""
        if self.init is not None:
            raise ValueError("init and pool exclude each other: learners of a pool start from its drafters")
        if self.asynchronous or self.draft_length == "auto":
            raise ValueError("pool excludes asynchronous and draft_length=auto: leave them out")
        if any(rule_and_family(name)[1] for name in self.algo):
            raise ValueError("a pool already has drafters: name update rules without a family, such as ogd")
        if self.batch > 1 and self.policy.reset == "chunk":
            raise ValueError("a policy that is not reset by query learns from one text at a time: set batch to 1")

    def target_at(self, prompts: int) -> str:
        """Return the target for the prompt that follows the first `prompts` prompts."""
        parts = parse_schedule(self.target_schedule) or [(self.target.name, 0)]
        for name, count in parts:
            if prompts < count:
                return name
            prompts -= count
        return parts[-1][0]

    @property
    def companion(self) -> str | None:
        """Text drafter that drafts in one tree with every head, or None."""
        if self.beside != "auto":
            return None if self.beside == "none" else self.beside
        own = self.pool is not None or self.draft_length == "auto"
        return None if own or self.drafting.proposal == "sampled" or self.target.on_gpu else STREAM_RETRIEVAL

    @property
    def families(self) -> list[str]:
        """Families of the drafters that start from `init` or a warm-up; none with a pool."""
        return [] if self.pool is not None else super().families
