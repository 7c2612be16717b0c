"""`specctl online`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveInt, field_validator, model_validator

from specctl.families import DEFAULT, UNTRAINED, learning, mixing
from specctl.recipe.learner import LearnerOptions, LearnerRecipe, rule_and_family
from specctl.recipe.lookahead import REASONING, LookaheadRecipe
from specctl.recipe.sections import LocalPath, Names, OneOf, PositiveFloat, Section
from specctl.recipe.select import GameRecipe, PolicyRecipe
from specctl.recipe.stream import LearningRecipe, counted


class BufferRecipe(Section):
    """The replay buffer: what verification said about the texts to learn from."""

    max_mb: PositiveFloat = 512.0  # asynchronous: also of the chunks that wait for the learner
    feedback: Literal["verdict", "rerun"] = "verdict"  # rerun: a second pass of the target, to compare with
    replay: NonNegativeFloat = 0.0  # texts of earlier chunks that are learnt from again, per text of the chunk


class ChoiceRecipe(Section):
    """Learning while selecting: how a specialist of `pool` is chosen, every round. Its rules are those of `game`."""

    name: str = "hedgespec"  # one of the policies of `specctl select`
    options: PolicyRecipe = PolicyRecipe()
    reset: Literal["query", "chunk"] = "query"  # when it forgets


class OnlineRecipe(LearningRecipe):
    """`specctl online`: drafters that learn along a stream.

    Every prompt is answered by all `baselines`, and by one drafter of each `algo`.
    """

    algo: Annotated[Names, Field(min_length=1)] = ["ogd"]  # an update rule, or with its family: opt-hydra, ens-eagle3
    arch: Annotated[str, OneOf(learning)] | None = None  # of rules without one; None = init's
    init: LocalPath | None = None  # drafter to start from; None = ./drafters/<domain>-<arch>, warmed up if missing
    pool: LocalPath | None = None  # specialists to choose among: each learns from the texts that it has won
    policy: ChoiceRecipe = ChoiceRecipe()
    game: GameRecipe = GameRecipe()
    reasoning: LookaheadRecipe = LookaheadRecipe()  # of algo lr, osd-lr and online-lr, which make a `ReasonRecipe`
    learner: LearnerOptions = LearnerOptions()
    buffer: BufferRecipe = BufferRecipe()
    # The target changes along the stream, as in RL: ./step-100:400,./step-200:400 = so many prompts each, the last one
    # to the end. They share vocabulary and sizes; `target` says how they are loaded.
    target_schedule: Names = []
    draft_length: Literal["fixed", "auto"] = "fixed"  # auto: as deep as pays, by running acceptance and cost
    # A text drafter that every head drafts with in one tree, learner or not (a hybrid); it decides how deep.
    beside: Annotated[str, OneOf(lambda: UNTRAINED)] | None = None
    draft_cost: NonNegativeFloat | None = None  # auto: α, a draft token's cost in target steps; None = measured
    asynchronous: bool = False  # a process of its own learns; the decoder takes over its weights between sequences
    # asynchronous: where it learns; several devices share every batch: cuda:1,cuda:2; cpu,cpu = two processes.
    learner_device: Annotated[Names, Field(min_length=1)] = ["auto"]
    # Who answers every prompt, too: plain decoding, the drafter that does not learn, drafters that nobody has to train.
    baselines: list[Annotated[str, OneOf(lambda: ("vanilla", "static", *UNTRAINED))]] = ["vanilla", "static", "lookup"]
    batch: PositiveInt = 1  # sequences at a time
    save_outputs: bool = False

    @field_validator("algo")
    @classmethod
    def _known(cls, algo: list[str]) -> list[str]:
        for name in algo:
            if name in REASONING:
                raise ValueError(f"{name} drafts steps: it takes a ReasonRecipe")
            rule_and_family(name)
        if len(set(algo)) < len(algo):
            raise ValueError("names an algo twice")
        return algo

    @field_validator("learner_device")
    @classmethod
    def _devices(cls, devices: list[str]) -> list[str]:
        for name in devices:
            if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", name):
                raise ValueError(f"{name!r} is no device: auto, cpu, cuda or cuda:N, or several such as cuda:1,cuda:2")
        if len(devices) > 1 and set(devices) != {"cpu"}:
            if not all(name.startswith("cuda:") for name in devices):
                raise ValueError(
                    f"{','.join(devices)}: several are GPUs with their numbers, such as cuda:1,cuda:2, or all cpu"
                )
            if len(set(devices)) < len(devices):
                raise ValueError(f"{','.join(devices)} names a GPU twice: it takes one process")
        return devices

    @field_validator("target_schedule")
    @classmethod
    def _counts(cls, schedule: list[str]) -> list[str]:
        counted(schedule, "./step-100:400,./step-200:400")
        return schedule

    @model_validator(mode="after")
    def _consistent(self) -> OnlineRecipe:
        if self.reasoning != LookaheadRecipe():
            raise ValueError(f"reasoning is for algo {', '.join(REASONING)}, not for {', '.join(self.algo)}")
        self._of_learner_elsewhere()
        if self.learner.combine == "probs":
            self._of_mixture()
        if self.pool is not None:
            self._of_pool()
        self._of_stdin()
        if self.beside is not None and (self.pool is not None or self.draft_length == "auto"):
            raise ValueError("beside: a hybrid decides itself how deep it drafts, and specialists of a pool have none")
        if "static" in self.baselines and "static" in (rule_and_family(name)[0] for name in self.algo):
            raise ValueError("the drafter that does not learn is a baseline already: set baselines without static")
        return self

    def _of_learner_elsewhere(self) -> None:
        """The schedule's first target is the target; a learner in another process has one for itself."""
        if self.learner_device != ["auto"] and not self.asynchronous:
            raise ValueError("learner_device is of a process of its own, which asynchronous (--async) makes")
        if not self.target_schedule:
            return
        if self.asynchronous:
            raise ValueError("a learner elsewhere has a target of its own: target_schedule and asynchronous exclude")
        self.target = self.target.model_copy(update={"name": self.target_at(0)})

    def _of_mixture(self) -> None:
        """ValueError where the members of an ensemble cannot draft as one."""
        others = [name for name in self.algo if self.family_of(name) not in mixing()]
        if others or self.pool is not None or self.asynchronous:
            raise ValueError(
                f"learner.combine=probs mixes heads of {' and '.join(mixing())}, learnt here: weights or sample"
            )

    def _of_pool(self) -> None:
        """ValueError for what specialists cannot do that learn while they are chosen among."""
        if self.init is not None:
            raise ValueError("learners of a pool start from its drafters: init and pool exclude each other")
        if self.asynchronous or self.draft_length == "auto":
            raise ValueError("a pool learns synchronously, at the drafters' own depth")
        if any(rule_and_family(name)[1] for name in self.algo):
            raise ValueError("a pool has drafters of its own: name update rules without a family, such as ogd")
        if self.batch > 1 and self.policy.reset == "chunk":
            raise ValueError("a policy that is not reset by query hears of one text at a time: batch must be 1")

    def target_at(self, prompts: int) -> str:
        """The target that answers the prompt behind so many."""
        parts = counted(self.target_schedule) or [(self.target.name, 0)]
        for name, count in parts:
            if prompts < count:
                return name
            prompts -= count
        return parts[-1][0]

    def family_of(self, algo: str) -> str:
        """Family of the drafter that learns by `algo`."""
        return rule_and_family(algo)[1] or self.arch or DEFAULT

    @property
    def families(self) -> list[str]:
        """Families of the drafters that start from `init` or a warm-up."""
        if self.pool is not None:
            return []
        return list(dict.fromkeys(self.family_of(algo) for algo in self.algo))

    def rule_of(self, algo: str) -> LearnerRecipe:
        """The learner that `algo` names; constants of its family are still open."""
        return LearnerRecipe(**self.learner.model_dump(), algo=rule_and_family(algo)[0])

    @property
    def chunk(self) -> int:
        """Prompts between two updates."""
        return max(self.stream.chunk_of(family) for family in self.families or [DEFAULT])

    def start_of(self, family: str) -> Path:
        """The drafter that learners of a family start from."""
        return self.init or super().start_of(family)
