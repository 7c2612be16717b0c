"""The contenders of `specctl online` on one stream: plain decoding, drafters that stay as they are, and pupils."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from specctl import progress
from specctl.adaptation.pupil import Lesson, Pupil
from specctl.adaptation.stream import Arrival
from specctl.adaptation.watchdog import Acceptance
from specctl.decoding.loop import Decoded
from specctl.decoding.target import Target
from specctl.drafters import pool
from specctl.errors import SpecctlError, UsageError
from specctl.evaluation import metrics
from specctl.evaluation.measure import VANILLA, Case, Contender, Turn, ask, decode_turn, engine, rotated, warm_up
from specctl.evaluation.records import Record
from specctl.recipe import OnlineRecipe

STATIC = "static"


@dataclass(frozen=True)
class ChunkRow:
    """A line of `chunks.jsonl`: one learner in one chunk, decoded with the weights from before it.

    `loss` is per token and from before learning; `losses` and `weights` are those of an ensemble's members, `rates` the
    η of the next chunk. `learn_s` is spent on learning, `swap_s` on making a drafter of new weights.
    """

    algo: str
    seed: int
    chunk: int
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
    rates: list[float]
    status: str
    ruling: str
    steps: int
    texts: int
    dropped: int


def static_name(recipe: OnlineRecipe, family: str) -> str:
    """Of the drafter of a family that does not learn."""
    return STATIC if len(recipe.families) == 1 else f"{STATIC}-{family}"


class Stage:
    """Everybody on one pass over a stream, of one seed."""

    def __init__(self, recipe: OnlineRecipe, target: Target, seed: int):
        """Raises CheckpointError where a drafter to start from cannot be used."""
        self.recipe, self.target, self.seed = recipe, target, seed
        self.chunks = self._turns = 0
        self.pupils = {algo: Pupil(recipe, algo, target, seed) for algo in recipe.algo}
        self.fixed = {
            static_name(recipe, family): pool.load_drafter(str(recipe.start_of(family)), target, recipe.drafting)
            for family in (recipe.families if STATIC in recipe.baselines else ())
        }
        twice = {VANILLA, *self.fixed} & {*self.pupils}
        if twice:
            raise UsageError(f"two contenders are called {min(twice)!r}", hint=f"set baselines without {min(twice)}")
        self.refused: Counter[str] = Counter()  # chunks in a row of which nothing was learnt that stayed
        self._warm = False  # in this process: a run that is resumed is as cold as a new one

    def contenders(self, pupil: Callable[[str, Pupil], Contender]) -> list[Contender]:
        sampling = self.recipe.sampling
        found = [engine(self.target, sampling, VANILLA, None)] if VANILLA in self.recipe.baselines else []
        found += [engine(self.target, sampling, name, drafter) for name, drafter in self.fixed.items()]
        return found + [pupil(name, one) for name, one in self.pupils.items()]

    def warm_up(self, turns: Sequence[Turn]) -> None:
        """Ask everyone something before the clock counts, without anybody learning from it."""
        sampling = self.recipe.sampling
        warm_up(turns, self.contenders(lambda name, one: engine(self.target, sampling, name, one.drafter)))

    def _answers(self, name: str, pupil: Pupil) -> Contender:
        def answer(turn: Turn, seeds: list[int]) -> list[dict[str, Decoded]]:
            pupil.buffer.open([case.prompt.id for case in turn])
            decoded = decode_turn(
                self.target,
                self.recipe.sampling,
                turn,
                seeds,
                drafter=pupil.drafter,
                on_round=pupil.buffer.observe,
            )
            return [{name: one} for one in decoded]

        return answer

    def case(self, arrival: Arrival) -> Case:
        room = self.target.context_length - len(arrival.ids)
        return Case(arrival.prompt, arrival.ids, min(self.recipe.sampling.max_new_tokens, room))

    def answer(self, chunk: Sequence[Arrival], done: Callable[[int, list[Record]], None]) -> list[Record]:
        """Everybody's answers to a chunk; `done` is told of every turn. Raises Interrupted between two turns."""
        cases, size = [self.case(arrival) for arrival in chunk], self.recipe.batch
        turns: list[Turn] = [cases[start : start + size] for start in range(0, len(cases), size)]
        if not self._warm:
            self.warm_up(turns)
            self._warm = True
        found, records = self.contenders(self._answers), []
        for turn in turns:
            progress.interrupts.check()
            answers = ask(self.recipe.sampling, turn, self.seed, rotated(found, self._turns))
            self._turns += 1
            records += [replace(record, session=self.chunks) for record in answers]
            done(len(turn), records)
        return records

    def learn(self, chunk: Sequence[Arrival], records: Sequence[Record]) -> list[ChunkRow]:
        """All pupils learn from the chunk that they have just answered.

        Raises SpecctlError where one has not been able to for `GIVE_UP` chunks.
        """
        domains = dict(Counter(arrival.prompt.domain for arrival in chunk))
        rows = []
        for name, pupil in self.pupils.items():
            own = [record.decoded for record in records if record.drafter == name]
            static = static_name(self.recipe, self.recipe.family_of(name))
            accepted = sum(one.accepted for one in own)
            lesson = pupil.learn(Acceptance(accepted, accepted + sum(one.rejections for one in own)))
            self._watch(name, lesson)
            outcome = lesson.outcome
            rows.append(
                ChunkRow(
                    algo=name,
                    seed=self.seed,
                    chunk=self.chunks,
                    domains=domains,
                    prompts=len(own),
                    tokens=sum(one.decoded_tokens for one in own),
                    mat=metrics.mat(own),
                    static_mat=metrics.mat([one.decoded for one in records if one.drafter == static]),
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
                    rates=[*lesson.rates],
                    status=outcome.status,
                    ruling=lesson.ruling,
                    steps=outcome.steps,
                    texts=lesson.texts,
                    dropped=lesson.dropped,
                )
            )
        self.chunks += 1
        return rows

    def _watch(self, name: str, lesson: Lesson) -> None:
        """Say what went wrong; give up where nothing helps."""
        refused = lesson.outcome.status == "refused"
        if lesson.ruling == "rollback":
            progress.warn(f"{name}: the last update did harm and is taken back; η is {_rates(lesson)} now")
        if refused:
            progress.warn(
                f"{name}: a loss or gradient was not finite, nothing was learnt from chunk {self.chunks + 1}; "
                f"η is {_rates(lesson)} now"
            )
        self.refused[name] = self.refused[name] + 1 if refused or lesson.ruling == "rollback" else 0
        if self.refused[name] == GIVE_UP:
            raise SpecctlError(
                f"{name} has learnt nothing for {GIVE_UP} chunks: its updates do harm, or are not finite",
                hint="lower learner.lr, or set learner.clip",
            )

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """(what JSON can say, tensors): all that `restore` needs, between two chunks."""
        facts: dict[str, Any] = {}
        tensors: dict[str, Tensor] = {}
        for name, pupil in self.pupils.items():
            facts[name], found = pupil.state()
            tensors |= {f"{name}/{key}": value for key, value in found.items()}
        return {"chunks": self.chunks, "turns": self._turns, "refused": dict(self.refused), "pupils": facts}, tensors

    def restore(self, facts: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """Go on from what `state` has told."""
        self.chunks, self._turns, self.refused = facts["chunks"], facts["turns"], Counter(facts["refused"])
        for name, pupil in self.pupils.items():
            prefix = f"{name}/"
            own = {key.removeprefix(prefix): x for key, x in tensors.items() if key.startswith(prefix)}
            pupil.restore(facts["pupils"][name], own)


GIVE_UP = 8  # chunks in a row of which a learner could learn nothing; every one of them has lowered its rates


def _rates(lesson: Lesson) -> str:
    return ", ".join(f"{rate:.3g}" for rate in lesson.rates)
