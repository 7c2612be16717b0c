"""`specctl online`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt, field_validator, model_validator

from specctl.families import DEFAULT, GROWING, UNTRAINED, learning, mixing
from specctl.recipe.learner import LearnerOptions, LearnerRecipe, rule_and_family
from specctl.recipe.lookahead import REASONING, LookaheadRecipe
from specctl.recipe.sections import LocalPath, Names, OneOf, PositiveFloat, Section
from specctl.recipe.select import GameRecipe, PolicyRecipe
from specctl.recipe.server import Listen, ServerRecipe
from specctl.recipe.stream import LearningRecipe, counted

Rival = Annotated[str, OneOf(lambda: ("vanilla", "static", *UNTRAINED, GROWING))]


class BufferRecipe(Section):
    """The replay buffer: what verification said about the texts to learn from."""

    max_mb: PositiveFloat = 512.0  # asynchronous: also of the chunks that wait for the learner
    feedback: Literal["verdict", "rerun"] = "verdict"  # rerun: a second pass of the target, to compare with
    store_tokens: PositiveInt = 1_000_000  # of the newest texts that `retrieval` reads, 16 bytes each
    replay: NonNegativeFloat = 0.0  # texts of earlier chunks that are learnt from again, per text of the chunk

    @property
    def reruns(self) -> bool:
        """Whether learning runs the target, and not only what is behind its layers."""
        return self.feedback == "rerun"


class ChoiceRecipe(Section):
    """Learning while selecting: how a specialist of `pool` is chosen, every round. Its rules are those of `game`."""

    name: str = "hedgespec"  # one of the policies of `specctl select`
    options: PolicyRecipe = PolicyRecipe()
    reset: Literal["query", "chunk"] = "query"  # when it forgets


class PublicationRecipe(Section):
    """With `server`: how what is learnt gets into the running engines, and how it proves itself there."""

    enabled: bool = True  # False = learn, and change nothing in the engines
    # Prompts that are asked for before and after: of the newest texts, those that learner.holdout keeps from the update
    # where there are any; 0 = trust the learner.
    probes: NonNegativeInt = 8
    tokens: PositiveInt = 64  # of the answer to each, at most
    level: Annotated[float, Field(gt=0, lt=1)] = (
        0.05  # how often a version that is no worse may be put back all the same
    )
    keep: PositiveInt = 3  # versions on the disk
    dir: LocalPath | None = None  # of the versions, readable by the engines; None = in the run directory


class TrafficRecipe(Section):
    """With `server`: where the texts come from. Without an entry the prompts of the stream are asked for."""

    listen: Listen | None = None  # a proxy to the servers
    log: LocalPath | None = None  # requests with their responses, a line each, as they come
    follow: bool = True  # wait for more lines of the log
    max_log_mb: PositiveFloat = 256.0  # of the proxy's log, which is then put aside, once


class OnlineRecipe(LearningRecipe):
    """`specctl online`: drafters that learn along a stream.

    Every prompt is answered by all `baselines`, and by one drafter of each `algo`; or, with `server`, by the engines
    there, which draft with what one `algo` has learnt.
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
    # A text drafter that every head drafts with in one tree, learner or not (a hybrid); it decides how deep. auto:
    # retrieval on a CPU, where nothing else decides that; none on a GPU, where a head alone runs in CUDA graphs.
    beside: Annotated[str, OneOf(lambda: ("auto", "none", *UNTRAINED, GROWING))] = "auto"
    draft_cost: NonNegativeFloat | None = None  # auto: α, a draft token's cost in target steps; None = measured
    asynchronous: bool = False  # a process of its own learns; the decoder takes over its weights between sequences
    # asynchronous: where it learns; several devices share every batch: cuda:1,cuda:2; cpu,cpu = two processes.
    learner_device: Annotated[Names, Field(min_length=1)] = ["auto"]
    # Who answers every prompt, too: plain decoding, the drafter that does not learn, drafters that nobody has to train.
    baselines: list[Rival] = ["vanilla", "static", "lookup", "retrieval"]
    batch: PositiveInt = 1  # sequences at a time
    save_outputs: bool = False
    server: ServerRecipe = ServerRecipe()  # engines of the target, which draft with what is learnt here
    baseline_server: ServerRecipe = ServerRecipe()  # one that keeps its drafter, asked the same prompts of the stream
    traffic: TrafficRecipe = TrafficRecipe()
    publication: PublicationRecipe = PublicationRecipe()

    @field_validator("beside", mode="before")
    @classmethod
    def _nothing(cls, beside: Any) -> Any:
        """Recipes of before there was a default say null."""
        return "none" if beside is None else beside

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
        self._of_server()
        self._of_learner_elsewhere()
        if self.learner.combine == "probs":
            self._of_mixture()
        if self.pool is not None:
            self._of_pool()
        self._of_stdin()
        if self.beside not in ("auto", "none") and (self.pool is not None or self.draft_length == "auto"):
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

    def _of_server(self) -> None:
        """ValueError for what engines cannot do, or what is about engines where there are none."""
        live = self.traffic.listen is not None or self.traffic.log is not None
        if not self.server.urls:
            if live or self.baseline_server.urls:
                raise ValueError("traffic and baseline_server are about a server's texts: name it with --server")
            return
        if self.traffic.listen is not None and self.traffic.log is not None:
            raise ValueError("traffic comes through the proxy (listen) or from a log that is there: leave one out")
        if live and self.baseline_server.urls:
            raise ValueError("baseline_server is asked for the prompts of the stream, which traffic has none of")
        here = {
            "pool": self.pool is not None,
            "asynchronous": self.asynchronous,
            "target_schedule": bool(self.target_schedule),
            "beside": self.beside not in ("auto", "none"),
            "draft_length": self.draft_length == "auto",
            "sampling.exact": self.sampling.exact,
            "save_outputs": self.save_outputs,
            "learner.combine": self.learner.combine == "probs",
        }
        for key, there in here.items():
            if there:
                raise ValueError(f"{key} is about drafting in this process, a server drafts by itself: leave it out")
        if len(self.algo) > 1 or len(self.seeds) > 1:
            raise ValueError("a server drafts with what one algo learns, under one seed")
        if rule_and_family(self.algo[0])[0] in ("osd", "static"):
            raise ValueError("osd learns where drafts are rejected, which no server tells; static learns nothing")

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
    def served(self) -> bool:
        """Whether engines answer, and not this process."""
        return bool(self.server.urls)

    @property
    def companion(self) -> str | None:
        """The text drafter that every head drafts with."""
        if self.beside != "auto":
            return None if self.beside == "none" else self.beside
        own = self.served or self.pool is not None or self.draft_length == "auto"
        return None if own or self.drafting.proposal == "sampled" or self.target.on_gpu else GROWING

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
