"""`specctl online`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt, field_validator, model_validator

from specctl.families import DEFAULT, LM, UNTRAINED, learning, mixing
from specctl.recipe.learner import LearnerOptions, LearnerRecipe, rule_and_family
from specctl.recipe.lookahead import LOOKAHEAD_CHUNK, REASONING, LookaheadRecipe, ReasoningMode
from specctl.recipe.sections import (
    DataRecipe,
    DraftingRecipe,
    LocalPath,
    Name,
    Names,
    OneOf,
    PositiveFloat,
    ResumableRecipe,
    SamplingRecipe,
    Section,
)
from specctl.recipe.select import GameRecipe, PolicyRecipe
from specctl.recipe.stream import StreamRecipe
from specctl.recipe.train import CheckpointRecipe

BY_TOKENS = {
    "arch": "the draft model is an LM",
    "init": "name the draft LM by reasoning.draft",
    "pool": "",
    "policy": "",
    "game": "",
    "learner": "set reasoning.learning",
    "buffer": "",
    "target_schedule": "",
    "draft_length": "",
    "draft_cost": "",
    "asynchronous": "",
    "learner_device": "",
    "baselines": "set reasoning.baselines",
    "batch": "",
    "save_outputs": "every text is in traces.jsonl",
}
"""Keys that lookahead reasoning has no use for, and what it has instead."""
ONE = ("temperature", "top_k", "top_p", "seed")
"""Keys of `sampling` that are those of `reasoning`, whichever says them."""


class WarmupRecipe(Section):
    """How the drafter that a stream starts with is trained, where there is none: offline, on one domain."""

    domain: Name | None = None  # None = the stream's first
    prompts: Name | None = None  # file of its prompts, None = the domain's generator: never those of the stream
    responses: PositiveInt = 1000
    minutes: PositiveFloat | None = None  # of training


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


class OnlineRecipe(ResumableRecipe):
    """`specctl online`: drafters that learn along a stream; output_dir None = the run directory under ./runs.

    Every prompt is answered by all `baselines`, and by one drafter of each `algo`.
    """

    data: DataRecipe = DataRecipe()
    stream: StreamRecipe = StreamRecipe()
    sampling: SamplingRecipe = SamplingRecipe()
    drafting: DraftingRecipe = DraftingRecipe()
    algo: Annotated[Names, Field(min_length=1)] = ["ogd"]  # an update rule, or with its family: opt-hydra, ens-eagle3
    arch: Annotated[str, OneOf(learning)] | None = None  # of rules without one; None = init's
    init: LocalPath | None = None  # drafter to start from; None = ./drafters/<domain>-<arch>, warmed up if missing
    warmup: WarmupRecipe = WarmupRecipe()
    pool: LocalPath | None = None  # specialists to choose among: each learns from the texts that it has won
    policy: ChoiceRecipe = ChoiceRecipe()
    game: GameRecipe = GameRecipe()
    reasoning: LookaheadRecipe = LookaheadRecipe()  # of algo lr, osd-lr and online-lr
    learner: LearnerOptions = LearnerOptions()
    buffer: BufferRecipe = BufferRecipe()
    # The target changes along the stream, as in RL: ./step-100:400,./step-200:400 = so many prompts each, the last one
    # to the end. They share vocabulary and sizes; `target` says how they are loaded.
    target_schedule: Names = []
    draft_length: Literal["fixed", "auto"] = "fixed"  # auto: as deep as pays, by running acceptance and cost
    draft_cost: NonNegativeFloat | None = None  # auto: α, a draft token's cost in target steps; None = measured
    asynchronous: bool = False  # a process of its own learns; the decoder takes over its weights between sequences
    # asynchronous: where it learns; several devices share every batch: cuda:1,cuda:2; cpu,cpu = two processes.
    learner_device: Annotated[Names, Field(min_length=1)] = ["auto"]
    # Who answers every prompt, too: plain decoding, the drafter that does not learn, drafters that nobody has to train.
    baselines: list[Annotated[str, OneOf(lambda: ("vanilla", "static", *UNTRAINED))]] = ["vanilla", "static", "lookup"]
    batch: PositiveInt = 1  # sequences at a time
    seeds: Annotated[list[NonNegativeInt], Field(min_length=1)] = [0]  # repeats of the whole stream
    checkpoint: CheckpointRecipe = CheckpointRecipe(every=5)  # in chunks
    save_outputs: bool = False

    @field_validator("algo")
    @classmethod
    def _known(cls, algo: list[str]) -> list[str]:
        steps = [name for name in algo if name in REASONING]
        for name in algo:
            if name not in REASONING:
                rule_and_family(name)
        if 0 < len(steps) < len(algo):
            raise ValueError(f"{', '.join(steps)} drafts steps, the others tokens: they take runs of their own")
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
        for part in schedule:
            name, _, count = part.rpartition(":")
            if not name or not count.isdecimal() or int(count) == 0:
                raise ValueError(f"{part!r} is no part of a schedule such as ./step-100:400,./step-200:400")
        return schedule

    @model_validator(mode="after")
    def _of_one_kind(self) -> OnlineRecipe:
        if not self.reasons:
            if self.reasoning != LookaheadRecipe():
                raise ValueError(f"reasoning is for algo {', '.join(REASONING)}, not for {', '.join(self.algo)}")
            return self
        unused = [name for name in BY_TOKENS if getattr(self, name) != type(self).model_fields[name].default]
        if self.drafting != DraftingRecipe() and self.reasoning.drafter is None:
            unused.append("drafting")
        if unused:
            name, instead = unused[0], BY_TOKENS.get(unused[0], "it shapes the drafts of reasoning.drafter")
            raise ValueError(f"{name} is of learning by tokens, not of {self.algo[0]}" + f": {instead}" * bool(instead))
        sampling = SamplingRecipe()
        if (self.sampling.max_new_tokens, self.sampling.exact) != (sampling.max_new_tokens, sampling.exact):
            raise ValueError(
                f"max_new_tokens and exact are of learning by tokens, not of {self.algo[0]}: "
                "the length of a text is reasoning.budget and reasoning.answer_tokens"
            )
        self._sample_alike()
        self._with_math()
        return self

    def _with_math(self) -> None:
        """Take `math` where no domain is named: other texts have one line, and no steps to speak of."""
        if "domain" not in self.data.model_fields_set and self.data.source != "unconditional":
            self.data = self.data.model_copy(update={"domain": ["math"]})

    def _sample_alike(self) -> None:
        """`--temperature` and `reasoning.temperature` are one; a recipe that was resolved says both."""
        found = {}
        for name in ONE:
            sections = [part for part in (self.sampling, self.reasoning) if name in part.model_fields_set]
            said = {getattr(part, name) for part in sections}
            if len(said) > 1:
                values = " or ".join(map(str, sorted(said)))
                raise ValueError(f"sampling.{name} and reasoning.{name} are one and the same: {values}?")
            found[name] = said.pop() if said else getattr(self.reasoning, name)
        self.sampling = self.sampling.model_copy(update=found)
        self.reasoning = self.reasoning.model_copy(update=found)

    @model_validator(mode="after")
    def _consistent(self) -> OnlineRecipe:
        if self.learner_device != ["auto"] and not self.asynchronous:
            raise ValueError("learner_device is of a process of its own, which asynchronous (--async) makes")
        if self.target_schedule:
            if self.asynchronous:
                raise ValueError(
                    "a learner elsewhere has a target of its own: target_schedule and asynchronous exclude"
                )
            self.target = self.target.model_copy(update={"name": self.target_at(0)})
        if self.resume and self.output_dir is None:
            raise ValueError("resume needs output_dir, the directory of the run to continue")
        if self.learner.combine == "probs":
            others = [name for name in self.algo if self.family_of(name) not in mixing()]
            if others or self.pool is not None or self.asynchronous:
                raise ValueError(
                    f"learner.combine=probs mixes heads of {' and '.join(mixing())}, learnt here: weights or sample"
                )
        if self.pool is not None:
            if self.init is not None:
                raise ValueError("learners of a pool start from its drafters: init and pool exclude each other")
            if self.asynchronous or self.draft_length == "auto":
                raise ValueError("a pool learns synchronously, at the drafters' own depth")
            if any(rule_and_family(name)[1] for name in self.algo):
                raise ValueError("a pool has drafters of its own: name update rules without a family, such as ogd")
            if self.batch > 1 and self.policy.reset == "chunk":
                raise ValueError("a policy that is not reset by query hears of one text at a time: batch must be 1")
        if self.data.prompts == "-" and len(self.seeds) > 1:
            raise ValueError("stdin comes once: one seed")
        if self.data.prompts == "-" and self.stream.shuffle:
            raise ValueError("stdin is answered in its order: stream.shuffle is for files")
        rules = [] if self.reasons else [rule_and_family(name)[0] for name in self.algo]
        if "static" in self.baselines and "static" in rules:
            raise ValueError("the drafter that does not learn is a baseline already: set baselines without static")
        return self

    def target_at(self, prompts: int) -> str:
        """The target that answers the prompt behind so many."""
        for part in self.target_schedule:
            name, _, count = part.rpartition(":")
            prompts -= int(count)
            if prompts < 0:
                return name
        return self.target_schedule[-1].rpartition(":")[0] if self.target_schedule else self.target.name

    @property
    def reasons(self) -> bool:
        """Whether steps are drafted, and not tokens."""
        return self.algo[0] in REASONING

    @property
    def modes(self) -> list[ReasoningMode]:
        """Modes of lookahead reasoning, baselines first."""
        return list(dict.fromkeys([*self.reasoning.baselines, *self.algo]))  # type: ignore[list-item]

    @property
    def draft(self) -> str:
        """The LM that drafts steps."""
        return self.reasoning.draft or str(self.start_of(LM))

    def family_of(self, algo: str) -> str:
        """Family of the drafter that learns by `algo`."""
        if algo in REASONING:
            return LM
        return rule_and_family(algo)[1] or self.arch or DEFAULT

    @property
    def families(self) -> list[str]:
        """Families of the drafters that start from `init` or a warm-up."""
        if self.pool is not None or (self.reasons and self.reasoning.draft is not None):
            return []
        return list(dict.fromkeys(self.family_of(algo) for algo in self.algo))

    def rule_of(self, algo: str) -> LearnerRecipe:
        """The learner that `algo` names; constants of its family are still open."""
        return LearnerRecipe(**self.learner.model_dump(), algo=rule_and_family(algo)[0])

    @property
    def chunk(self) -> int:
        """Prompts between two updates."""
        if self.reasons:
            return self.stream.chunk or LOOKAHEAD_CHUNK
        return max(self.stream.chunk_of(family) for family in self.families or [DEFAULT])

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
        return self.init or Path("drafters") / f"{self.first_domain}-{family}"
