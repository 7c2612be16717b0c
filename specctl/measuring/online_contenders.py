"""Contenders of `specctl online` on one stream: plain decoding, fixed drafters, and learners."""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from operator import index
from typing import Any

from torch import Tensor

from specctl import progress
from specctl.adaptation.draft_length import AutoLength
from specctl.adaptation.online_drafter import OnlineDrafter
from specctl.adaptation.remote import AsyncOnlineDrafter
from specctl.adaptation.specialists import Specialists
from specctl.adaptation.stream import EncodedPrompt
from specctl.adaptation.stream_learner import Lesson, StreamLearner
from specctl.adaptation.updates.watchdog import Acceptance
from specctl.decoding import metrics
from specctl.decoding.controllers import PLAIN, Fixed
from specctl.decoding.device import rounds as device_rounds
from specctl.decoding.engine import Engine, EngineOptions
from specctl.decoding.protocols import Controller, Drafter
from specctl.decoding.records import Decoded, Label
from specctl.decoding.target import Target
from specctl.drafters import pool
from specctl.drafters.hybrid.gate import GateStatistics
from specctl.drafters.retrieval.datastore import GrowingDatastore
from specctl.errors import SpecctlError, UsageError
from specctl.families import STREAM_RETRIEVAL, TEXT_DRAFTERS
from specctl.measuring.contenders import (
    VANILLA,
    Contender,
    PromptBatch,
    answer_batch,
    case_of,
    decode_batch,
    engine_contender,
    rotated_order,
    warm_up,
)
from specctl.measuring.records import Record
from specctl.recipe import OnlineRecipe
from specctl.selection.arms import Companion
from specctl.training.checkpoint import add_prefix, strip_prefix

STATIC = "static"


@dataclass(frozen=True)
class ChunkRow:
    """A line of `chunks.jsonl`: one learner in one chunk, which was decoded with the weights from before the chunk.

    With asynchronous learning, the fields of the update describe the last one that is known.

    Attributes:
        static_mat: mat of the same drafter without learning.
        learn_s: seconds spent on learning; asynchronous: on handing over the chunk.
        swap_s: seconds spent on building a drafter from new weights.
        loss: mean per token, before learning from the chunk.
        losses, weights: one per expert of an ensemble.
        rates: learning rates η for the next chunk.
        texts: number of texts that the update learned from.
        dropped: texts that the replay buffer had no room for, up to now.
        behind: lag in chunks: answered, but not yet learned from.
        draft_length: mean k of the chunk's rounds, if the learner chooses it.
        untrained_mat: mat of lookup, suffix and retrieval.
        store_s: seconds spent on adding the chunk's texts to the store of `retrieval`; part of `learn_s` if learners
            draft together with `retrieval`.
    """

    algo: str
    seed: int
    chunk: int
    target: str
    domains: dict[str, int]
    prompts: int
    tokens: int
    mat: float | None
    static_mat: float | None
    accept_rate: float | None
    tokens_per_s: float | None
    decode_s: float
    learn_s: float
    swap_s: float
    loss: float | None
    losses: list[float]
    weights: list[float]
    effective: float
    collapsed: bool
    scales: list[float | None]
    rates: list[float]
    status: str
    ruling: str
    steps: int
    texts: int
    dropped: int
    behind: int
    draft_length: float | None
    untrained_mat: dict[str, float | None] = field(default_factory=dict)
    store_s: float = 0.0


def static_name(recipe: OnlineRecipe, algo: str) -> str:
    """Name of the contender with the drafter that `algo` starts from, without learning."""
    return STATIC if len(recipe.families) < 2 else f"{STATIC}-{recipe.family_of(algo)}"


class OnlineContenders:
    """All contenders on one pass over a stream, for one seed."""

    def __init__(self, recipe: OnlineRecipe, target: Target, seed: int):
        """Raises CheckpointError if an initial drafter cannot be used."""
        self.recipe, self.target, self.seed = recipe, target, seed
        self.chunks = self._turns = 0
        kind = Specialists if recipe.pool else AsyncOnlineDrafter if recipe.asynchronous else OnlineDrafter
        self.learners: dict[str, StreamLearner] = {algo: kind(recipe, algo, target, seed) for algo in recipe.algo}
        static = STATIC in recipe.baselines
        self.fixed = self._load_fixed() if static and not recipe.pool else {}
        self.fixed_pool = Specialists(recipe, STATIC, target, seed) if static and recipe.pool else None
        # One store for all contenders, because they write the same texts.
        self.companion = self._companion(GrowingDatastore(recipe.buffer.store_tokens))
        self.untrained = self._load_untrained()
        twice = {VANILLA, *self.fixed, *([STATIC] if self.fixed_pool else [])} & {*self.learners}
        if twice:
            raise UsageError(f"two contenders are called {min(twice)!r}", hint=f"set baselines without {min(twice)}")
        self.lengths: dict[str, AutoLength] = {}
        # Hybrids' statistics of earlier texts, by contender.
        self.gate_statistics: defaultdict[str, GateStatistics] = defaultdict(GateStatistics)
        self.engines: dict[str, Engine] = {}  # by contender
        self.failed_chunks: Counter[str] = Counter()  # chunks in a row without an update that was kept
        self._warm = False  # whether this process has warmed up with the present target

    def _learners(self) -> list[StreamLearner]:
        """The learners, and the pool that does not learn, if there is one."""
        return [*self.learners.values(), *([self.fixed_pool] if self.fixed_pool else [])]

    def _load_fixed(self) -> dict[str, Drafter]:
        starts = {
            static_name(self.recipe, algo): self.recipe.initial_drafter(self.recipe.family_of(algo))
            for algo in self.learners
        }
        return {name: pool.load_drafter(str(at), self.target, self.recipe.drafting) for name, at in starts.items()}

    def _load_untrained(self) -> dict[str, Drafter]:
        named = [name for name in (*TEXT_DRAFTERS, STREAM_RETRIEVAL) if name in self.recipe.baselines]
        return {name: self.companion.text_drafter(name) for name in named}

    def retarget(self, target: Target) -> None:
        """Switch to another target. Raises CheckpointError if a drafter does not fit."""
        self.target, self._warm = target, False
        self.engines.clear()
        self.companion = self._companion(self.companion.store)
        self.untrained = self._load_untrained()
        for learner in self._learners():
            learner.retarget(target)
        self.fixed = self._load_fixed() if self.fixed else {}

    @property
    def rounds_on_host(self) -> bool:
        """Whether the rounds of drafting contenders run on the host.

        If one contender needs the host, all use it, because their speeds are compared. Plain decoding, the reference of
        all, always runs as fast as the device allows.
        """
        recipe = self.recipe
        if not device_rounds.possible(self.target):
            return True
        if recipe.pool is not None or recipe.draft_length != "fixed":
            return True
        learning = [learner.drafter for learner in self.learners.values() if isinstance(learner, OnlineDrafter)]
        drafters = [*self.fixed.values(), *self.untrained.values(), *learning]
        return not all(drafter.fixed_shape for drafter in drafters)

    def contenders(self) -> list[Contender]:
        """All contenders: baselines, fixed drafters, learners."""
        sampling = self.recipe.sampling

        def alone(name: str, controller: Controller, on_host: bool = False) -> Contender:
            return engine_contender(name, self._engine(name, controller, on_host=on_host), sampling)

        competing = [alone(VANILLA, Fixed(PLAIN))] if VANILLA in self.recipe.baselines else []
        for name, drafter in self.fixed.items():
            competing.append(alone(name, self._controller(name, drafter), self.rounds_on_host))
        competing += [self._answers(STATIC, self.fixed_pool)] if self.fixed_pool is not None else []
        competing += [alone(name, Fixed.of(drafter)) for name, drafter in self.untrained.items()]
        return competing + [self._answers(name, learner) for name, learner in self.learners.items()]

    def _engine(
        self, name: str, controller: Controller, *, on_host: bool, learner: StreamLearner | None = None
    ) -> Engine:
        """The engine of a contender: the present one, as long as it drafts with the same controller or drafter."""
        engine = self.engines.get(name)
        if engine is not None and _same(engine.controller, controller):
            return engine
        options = EngineOptions(
            exact=self.recipe.sampling.exact, keeps_hidden=learner is not None and learner.keeps_hidden, on_host=on_host
        )
        on_round = learner.observe if learner is not None else None
        self.engines[name] = Engine(self.target, controller, options, on_round)
        return self.engines[name]

    def warm_up(self, turns: Sequence[PromptBatch]) -> None:
        """Run every contender before timing starts. Learned and restored state is left unchanged."""
        known = {name: length.state() for name, length in self.lengths.items()}
        pasts = {name: past.state() for name, past in self.gate_statistics.items()}
        with ExitStack() as stack:
            for learner in self._learners():
                stack.enter_context(learner.warming_up())
            warm_up(turns, self.contenders())
        for name, length in self.lengths.items():
            length.forget()
            if name in known:
                length.restore(known[name])
        self.gate_statistics.clear()
        self._restore_gate_statistics(pasts)
        self._warm = True

    def _restore_gate_statistics(self, pasts: Mapping[str, dict[str, Any]]) -> None:
        for name, state in pasts.items():
            self.gate_statistics[name].restore(state)

    def _answers(self, name: str, learner: StreamLearner) -> Contender:
        def answer(turn: PromptBatch, seeds: list[int]) -> list[dict[str, Decoded]]:
            with learner.active():
                controller = learner.controller
                if isinstance(learner, OnlineDrafter):
                    controller = self._controller(name, learner.drafter)
                engine = self._engine(name, controller, on_host=self.rounds_on_host, learner=learner)
                labels = learner.labels([Label(case.prompt.id, case.prompt.domain) for case in turn])
                decoded = decode_batch(engine, self.recipe.sampling, turn, seeds, labels)
            return [{name: text} for text in decoded]

        return answer

    def _controller(self, name: str, drafter: Drafter) -> Controller:
        """Controller of a drafter: at its fixed depth, at the depth that pays, or as a hybrid."""
        if self.recipe.companion is not None:
            return Fixed.of(self._hybrid(name, drafter))
        if self.recipe.draft_length == "fixed":
            return Fixed.of(drafter)
        length = self.lengths.setdefault(name, AutoLength(drafter, self.recipe.draft_cost))
        if length.drafter is not drafter:
            length.use(drafter)
        return length

    def _hybrid(self, name: str, head: Drafter) -> Drafter:
        algo = next(algo for algo in self.learners if name in (algo, static_name(self.recipe, algo)))
        start = str(self.recipe.initial_drafter(self.recipe.family_of(algo)))
        return self.companion.hybrid(start, head, self.gate_statistics[name])

    def _companion(self, store: GrowingDatastore) -> Companion:
        return Companion(self.recipe.companion, self.target, self.recipe.drafting, store)

    def answer(self, chunk: Sequence[EncodedPrompt], done: Callable[[int, list[Record]], None]) -> list[Record]:
        """Return all contenders' answers to a chunk.

        `done` is called after every turn, with the size of the turn and the chunk's records up to then. Raises
        Interrupted between two turns.
        """
        cases = [case_of(self.recipe.sampling, self.target, arrival.prompt, arrival.ids) for arrival in chunk]
        size = self.recipe.batch
        turns: list[PromptBatch] = [cases[start : start + size] for start in range(0, len(cases), size)]
        if not self._warm:
            self.warm_up(turns)
        competing, records = self.contenders(), []
        for turn in turns:
            progress.interrupts.check()
            answers = answer_batch(self.recipe.sampling, turn, self.seed, rotated_order(competing, self._turns))
            self._turns += 1
            records += [replace(record, session=self.chunks) for record in answers]
            done(len(turn), records)
        return records

    def learn(self, chunk: Sequence[EncodedPrompt], records: Sequence[Record]) -> list[ChunkRow]:
        """Let all learners learn from the chunk that was just answered; return a row for each.

        Raises SpecctlError if a learner has failed to learn for `GIVE_UP` chunks in a row.
        """
        domains = dict(Counter(arrival.prompt.domain for arrival in chunk))
        rows, store_s = [], self._add_to_store([record for record in records if record.drafter == self.recipe.algo[0]])
        for name, learner in self.learners.items():
            answers = [record.decoded for record in records if record.drafter == name]
            lesson = learner.learn_chunk(
                Acceptance.of((answer.accepted, answer.accepted + answer.rejections) for answer in answers),
                sum(answer.decode_s for answer in answers),
            )
            self._warn_of_failures(name, lesson)
            if self.recipe.companion == STREAM_RETRIEVAL:
                lesson = replace(lesson, learn_s=lesson.learn_s + store_s)
            rows.append(replace(self._row(name, lesson, domains, answers, records), store_s=store_s))
        self.chunks += 1
        if self.fixed_pool is not None:  # resets its policy for the next chunk, as the learners do
            self.fixed_pool.learn_chunk(Acceptance(), 0.0)
        return rows

    def _add_to_store(self, records: Sequence[Record]) -> float:
        """Add the texts of a chunk to the store, if a contender reads the store. Returns the seconds spent."""
        if STREAM_RETRIEVAL not in (self.recipe.companion, *self.recipe.baselines):
            return 0.0
        return self.companion.add_to_store(record.decoded for record in records)

    def _row(
        self, name: str, lesson: Lesson, domains: dict[str, int], own: Sequence[Decoded], records: Sequence[Record]
    ) -> ChunkRow:
        """Build the row of a learner from its `own` answers, the `records` of all contenders, and the update."""
        outcome = lesson.outcome
        return ChunkRow(
            algo=name,
            seed=self.seed,
            chunk=self.chunks,
            target=self.target.name,
            domains=domains,
            prompts=len(own),
            tokens=sum(one.decoded_tokens for one in own),
            mat=metrics.mat(own),
            static_mat=_mat(records, static_name(self.recipe, name)),
            accept_rate=metrics.accept_rate(own),
            tokens_per_s=metrics.tokens_per_s(own),
            decode_s=sum(one.decode_s for one in own),
            learn_s=lesson.learn_s,
            swap_s=lesson.swap_s,
            loss=outcome.loss,
            losses=[*outcome.losses],
            weights=[*outcome.weights],
            effective=outcome.effective,
            collapsed=outcome.collapsed,
            scales=[*outcome.scales],
            rates=[*lesson.rates],
            status=outcome.status,
            ruling=lesson.ruling,
            steps=outcome.steps,
            texts=lesson.texts,
            dropped=lesson.dropped,
            behind=lesson.lag_chunks,
            draft_length=self.lengths[name].pop_mean_length() if name in self.lengths else None,
            untrained_mat={name: _mat(records, name) for name in self.untrained},
        )

    def _warn_of_failures(self, name: str, lesson: Lesson) -> None:
        """Warn of updates that failed; raise SpecctlError if they keep failing."""
        refused = lesson.outcome.status == "refused"
        if lesson.ruling == "rollback":
            progress.warn(f"{name}: the last update lowered acceptance and was taken back; η is now {_rates(lesson)}")
        if refused:
            progress.warn(
                f"{name}: a loss or gradient was not finite, so nothing was learned from chunk {self.chunks + 1}; "
                f"η is now {_rates(lesson)}"
            )
        harmed = lesson.ruling == "rollback" and self.recipe.pool is None  # in a pool it may be one specialist only
        self.failed_chunks[name] = self.failed_chunks[name] + 1 if refused or harmed else 0
        if self.failed_chunks[name] == GIVE_UP:
            raise SpecctlError(
                f"{name} has learned nothing for {GIVE_UP} chunks: its updates lower acceptance, or are not finite",
                hint="lower learner.lr, or set learner.clip",
            )

    def finish(self) -> None:
        """Wait for asynchronous learners, after the end of the stream."""
        for learner in self.learners.values():
            learner.finish()

    def close(self) -> None:
        """Stop the processes of asynchronous learners."""
        for learner in self.learners.values():
            learner.close()

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """All that `restore` needs, between two chunks: (JSON-able facts, tensors)."""
        facts: dict[str, Any] = {}
        tensors: dict[str, Tensor] = {}
        for name, learner in self.learners.items():
            facts[name], found = learner.state()
            tensors |= add_prefix(f"{name}/", found)
        tensors |= add_prefix("store/", self.companion.store.state())
        lengths = {name: length.state() for name, length in self.lengths.items()}
        position = {
            "target": self.target.name,
            "chunks": self.chunks,
            "turns": self._turns,
            "refused": dict(self.failed_chunks),
            "lengths": lengths,
            "pasts": {name: past.state() for name, past in self.gate_statistics.items()},
        }
        return {**position, "pupils": facts}, tensors

    def restore(self, facts: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        self.chunks, self._turns = index(facts["chunks"]), index(facts["turns"])
        self.failed_chunks = Counter(facts["refused"])
        self._restore_gate_statistics(facts.get("pasts", {}))  # states of older versions have none
        if stored := strip_prefix("store/", tensors):  # states of older versions have none
            self.companion.store.restore(stored)
        for name, learner in self.learners.items():
            learner.restore(facts["pupils"][name], strip_prefix(f"{name}/", tensors))
        drafters = self.fixed | {
            name: learner.drafter for name, learner in self.learners.items() if isinstance(learner, OnlineDrafter)
        }
        for name, kept in facts["lengths"].items():
            controller = self._controller(name, drafters[name])
            assert isinstance(controller, AutoLength)
            controller.restore(kept)


def _same(one: Controller, other: Controller) -> bool:
    """Whether two controllers are one, or draft with one drafter."""
    if isinstance(one, Fixed) and isinstance(other, Fixed):
        return one.drafter is other.drafter
    return one is other


GIVE_UP = 8  # chunks in a row without a kept update; each lowers the learning rates


def _mat(records: Sequence[Record], name: str) -> float | None:
    return metrics.mat([record.decoded for record in records if record.drafter == name])


def _rates(lesson: Lesson) -> str:
    return ", ".join(f"{rate:.3g}" for rate in lesson.rates)
