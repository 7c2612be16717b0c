"""Learning from the texts that the gateway's own engine serves.

The engine's thread collects finished texts with the states that decoding has computed, and exchanges the drafter
between two steps. A second thread hands the texts to the learner's process, builds a drafter from every new version of
the weights, and writes it to the disk. So no text waits for a lesson.

If a policy chooses among drafters, each drafter with weights learns from the texts of which it drafted most rounds. All
learn in one process, in turns, and the time in which a drafter drafted is the basis of its budget. A single drafter
counts as a pool.
"""

import shutil
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from specctl import progress
from specctl.adaptation.buffer import BufferedText, ReplayBuffer
from specctl.adaptation.online_drafter import OnlineDrafter
from specctl.adaptation.remote import AsyncOnlineDrafter
from specctl.adaptation.stream_learner import Lesson
from specctl.adaptation.updates.watchdog import Acceptance
from specctl.decoding.controllers import Fixed
from specctl.decoding.engine import Engine
from specctl.decoding.protocols import Controller, Drafter
from specctl.decoding.records import Counts, RoundResult
from specctl.decoding.state import DecodeState, per_text
from specctl.decoding.target import Target
from specctl.drafters.hybrid.drafter import Hybrid
from specctl.drafters.tree import CandidateDrafter
from specctl.errors import SpecctlError
from specctl.gateway.choosing import GuardedController
from specctl.gateway.faults import where
from specctl.gateway.metrics import DrafterCounts, LearningCounts, Meter
from specctl.training.feature_files import Features

GIVE_UP = 5  # lessons in a row that did harm or were refused
POLL_S = 0.2  # longest time until a finished lesson is noticed
SHARED_MEMORY = Path("/dev/shm")


class BackgroundOnlineDrafter(AsyncOnlineDrafter):
    """An online drafter with its learner in a process of low priority, which keeps to the time budget."""

    in_background = True

    def hand_over(self, acceptance: Acceptance, decode_s: float) -> None:
        """Hand the texts of the buffer to the learner. Raises SpecctlError if it has failed."""
        if not self._fits_shared_memory():  # a write beyond its end would end this process
            raise SpecctlError(
                f"{SHARED_MEMORY} has no room for {self.buffer.bytes >> 20} MiB of texts", "lower learn.buffer.max_mb"
            )
        self._hand_over(acceptance, decode_s)

    def lessons(self) -> list[Lesson]:
        """Take over new weights, and return the lessons since the last call. Raises SpecctlError if it has failed."""
        known, changed = self._vector, False
        while self.receive(0.0) is not None:
            changed = True
        if changed and not torch.equal(OnlineDrafter.played(self) if known is None else known, self.played()):
            if not self.played().isfinite().all():
                raise SpecctlError("the learned weights are not finite", "lower learn.learner.lr")
            # Never in place: meanwhile the engine's thread drafts with the present weights.
            self.drafter = self.drafter_of(self.played())
        lessons, self._unreported = self._unreported, []
        return lessons

    def _fits_shared_memory(self) -> bool:
        waiting = self.buffer.bytes + sum(chunk.bytes for chunk in self.waiting)
        return not SHARED_MEMORY.is_dir() or shutil.disk_usage(SHARED_MEMORY).free > 2 * waiting


@dataclass(frozen=True)
class ServedTexts:
    """Texts for one lesson, with the acceptance of all texts that ended meanwhile."""

    texts: list[tuple[BufferedText, Features | None]]
    acceptance: Acceptance
    decode_s: float


@dataclass(frozen=True)
class LearningPlan:
    """How a drafter learns.

    Attributes:
        chunk: texts of a lesson.
        longest: most tokens of a text, prompt included. One long text would displace all others.
        place: directory that the drafter is saved in.
        save_s: shortest time between two copies there.
        info: description of the saved drafter.
        name: of the drafter, empty if it drafts everything.
    """

    chunk: int
    longest: int
    place: Path
    save_s: float
    info: dict[str, Any]
    name: str = ""


@dataclass
class DraftedPart:
    """The part of a text that one drafter drafted: rounds, accepted tokens and verified positions."""

    rounds: int = 0
    accepted: int = 0
    verified: int = 0

    def add(self, counts: Counts) -> None:
        """Count a round."""
        self.rounds += 1
        self.accepted += counts.accepted
        self.verified += min(counts.accepted + 1, counts.depth)


class HeadLearner:
    """Lets a drafter learn from the texts of the engine that it drafts for, alone or in hybrids.

    A failure ends its learning, never the serving: it is reported once and counted.

    Args:
        online_drafter: belongs to the thread of the `ServingLearner` once that has started.
        arms: the names of this drafter in the engine.
        report: called in that thread with every lesson and the counts after it.
    """

    def __init__(
        self,
        online_drafter: BackgroundOnlineDrafter,
        arms: Sequence[str],
        plan: LearningPlan,
        meter: Meter,
        report: Callable[[Lesson, LearningCounts], None] = lambda lesson, counts: None,
    ):
        self.online_drafter, self.arms, self.plan = online_drafter, arms, plan
        self.meter, self.report = meter, report
        self.counts = meter.learning[plan.name] = LearningCounts(on=True)
        own = online_drafter.buffer
        self.buffer = ReplayBuffer(own.target, own.taps, max_bytes=own.max_bytes, feedback=own.feedback)
        self._entered = 0  # texts that were not too long, since the last lesson
        self._by_version = {0: DrafterCounts()}
        self._ended: deque[tuple[int, int]] = deque(maxlen=8 * plan.chunk)  # acceptance of texts since the last lesson
        self._decode_s = 0.0  # since the last lesson
        self._handed: ServedTexts | None = None  # from the engine's thread to the other one
        self._built: Drafter | None = None  # in the other direction
        self._newest = self._saved = online_drafter.drafter
        self._bad = 0  # lessons in a row that did harm or were refused
        self._saved_at, self._save_failed = time.monotonic(), False

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Context in which an error ends the learning."""
        try:
            yield
        except Exception as error:
            self.fail(error)

    def add_round(self, counts: Counts) -> None:
        """Count a round that the drafter drafted. Called in the engine's thread, as the next two methods."""
        self._by_version[self.counts.version].add(counts.committed, counts.accepted, counts.depth)

    def end_text(self, part: DraftedPart) -> None:
        """Note the drafter's part of a text that has ended."""
        self._ended.append((part.accepted, part.verified))

    def take_text(self, state: DecodeState, b: int, text: Any) -> None:
        """Take in the finished text in slot b."""
        with self.guarded():
            if len(state.rows[b].ids) > self.plan.longest:
                self.buffer.dropped += 1
            else:
                self._entered += 1
                self.buffer.take_in(state, b, text)

    def after_step(self, engine: Engine, seconds: float) -> None:
        """Hand over texts, and put new weights into the engine. `seconds`: in which the drafter drafted."""
        if not self.counts.on:
            return
        with self.guarded():
            self.counts.serve_s += seconds
            self._decode_s += seconds
            if self._entered >= self.plan.chunk and self._handed is None:
                self._handed = ServedTexts(self.buffer.take(), Acceptance.of(self._ended), self._decode_s)
                self._ended.clear()
                self._decode_s, self._entered = 0.0, 0
            if self._built is not None:
                self._exchange(engine, self._built)

    def _exchange(self, engine: Engine, head: Drafter) -> None:
        """Draft with the new weights from the next round on. The running texts go on: the new drafter reads them."""
        self._built = None
        controller: Controller = engine.controller
        if isinstance(controller, GuardedController):
            old = {arm: controller.drafter(arm) for arm in self.arms}
            controller.selector.exchange({arm: with_head(drafter, head) for arm, drafter in old.items()})
            dropped = [*old.values()]
        else:
            dropped = [cast(Fixed, controller).drafter]  # type: ignore[list-item]
            controller = Fixed.of(with_head(dropped[0], head))
        engine.exchange(controller, [one for drafter in dropped for one in dropped_with(drafter)])
        version = self.counts.version
        for number in self._by_version.keys() - {0, version}:
            del self._by_version[number]
        self._by_version[version + 1] = DrafterCounts()
        self.counts.version = version + 1

    def take_turn(self) -> None:
        """Hand texts to the learner's process, and take its lessons. Called in the thread of the `ServingLearner`."""
        self._count()
        if self._handed is not None:
            for text, features in self._handed.texts:
                self.online_drafter.buffer.add(text, features)
            self.online_drafter.hand_over(self._handed.acceptance, self._handed.decode_s)
            self._handed = None
        self._take_lessons()
        if time.monotonic() - self._saved_at >= self.plan.save_s:
            self.save()

    def _take_lessons(self) -> None:
        """Count new lessons, and offer a drafter to the engine if the weights have changed."""
        counts = self.counts
        for lesson in self.online_drafter.lessons():
            counts.lessons[lesson.outcome.status] += 1
            counts.rollbacks += lesson.ruling == "rollback"
            counts.texts += lesson.texts
            counts.learn_s += lesson.learn_s
            self._count()
            self.report(lesson, counts)
            self._watch(lesson)
        if self.online_drafter.drafter is not self._newest:
            self._newest = self._built = self.online_drafter.drafter

    @property
    def _who(self) -> str:
        """The subject of messages."""
        return f"learning of {self.plan.name}" if self.plan.name else "learning"

    def _watch(self, lesson: Lesson) -> None:
        """Warn of an update that went wrong. Raises SpecctlError after `GIVE_UP` in a row."""
        back, refused = lesson.ruling == "rollback", lesson.outcome.status == "refused"
        if back:
            progress.warn(f"{self._who}: the last update lowered acceptance and was taken back")
        if refused:
            progress.warn(f"{self._who}: a loss or gradient was not finite, so nothing was learned from these texts")
        self._bad = self._bad + 1 if back or refused else 0
        if self._bad == GIVE_UP:
            raise SpecctlError(
                f"{GIVE_UP} lessons in a row did harm, or were not finite", "lower learn.learner.lr, or set clip"
            )

    def _count(self) -> None:
        """Write the counts that are computed from other counts."""
        counts, rounds = self.counts, dict(self._by_version)
        counts.dropped = self.buffer.dropped + self.online_drafter.buffer.dropped
        named = {"first": 0, "last": counts.version - 1, "present": counts.version}
        counts.mat = {name: mat for name, n in named.items() if n in rounds and (mat := rounds[n].mat) is not None}

    def save(self) -> None:
        """Write the newest weights to the disk, if they are not there yet."""
        self._count()
        self._saved_at = time.monotonic()
        if self._saved is self._newest:
            return
        try:
            self.online_drafter.save(self.plan.place, self.plan.info)
            self._saved = self._newest
        except (SpecctlError, OSError) as error:
            self.meter.fault("learner's copy")
            if not self._save_failed:
                progress.warn(f"the learned drafter is not saved: {error}")
            self._save_failed = True

    def fail(self, error: BaseException) -> None:
        """Learning ends, and serving goes on with the present drafter. Called in any thread."""
        if not self.counts.on:
            return
        self.counts.on = False
        self.buffer.clear()
        self.meter.fault("learner")
        told = error.message if isinstance(error, SpecctlError) else where(error)
        progress.warn(f"{self._who} has failed and ends; serving goes on with the present drafter: {told}")


class FinishedTexts(ReplayBuffer):
    """Watches the texts of an engine, and calls `found` with each finished one; it has no room itself."""

    def __init__(self, target: Target, found: Callable[[DecodeState, int, Any], None]):
        super().__init__(target, (), max_bytes=0)
        self.found = found

    def take_in(self, state: DecodeState, b: int, text: Any) -> None:
        self.found(state, b, text)


class ServingLearner:
    """Learning beside an engine: the calls of the engine's thread, and a thread of its own, which hands texts to the
    learners' process. Every drafter with weights learns from the texts of which it drafted most rounds.

    Args:
        members: the learners by name of their drafter, in one process.
    """

    def __init__(self, members: Mapping[str, HeadLearner], target: Target):
        self.members = dict(members)
        self._member_of = {arm: name for name, member in members.items() for arm in member.arms}
        self._texts = FinishedTexts(target, self._end_text)
        self._arms: dict[str, str] = {}  # drafter of the round that is observed next, by query
        self._rounds: Counter[str] = Counter()  # since the last step, by drafter
        self._played: Counter[str] = Counter()  # rounds in all, by drafter
        self._seconds = 0.0  # of steps without a round, since the last one with rounds
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._main, name="learning", daemon=True)

    @property
    def on(self) -> bool:
        """Whether anything learns."""
        return any(member.counts.on for member in self.members.values())

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread and the learners' process, and save the newest weights. A lesson that runs is lost."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(30.0)
        self._close()
        for member in self.members.values():
            member.save()

    def _main(self) -> None:
        try:
            while self.on and not self._stopping.wait(POLL_S):
                for name in sorted(self.members, key=lambda name: -self._played[name]):
                    self._take_turn(self.members[name])
        finally:
            self._close()

    def _take_turn(self, member: HeadLearner) -> None:
        try:
            if member.counts.on and not self._stopping.is_set():
                member.take_turn()
        except Exception as error:
            if not self._stopping.is_set():  # `stop` may have ended the process
                member.fail(error)

    def _close(self) -> None:
        for member in self.members.values():  # of one process
            member.online_drafter.close()

    def note_round(self, query: str, drafter: str) -> None:
        """Note which drafter drafted the round of a text that `observe` gets next. Called in the engine's thread, as
        the next two methods."""
        if self.on:
            self._arms[query] = self._member_of.get(drafter, drafter)

    def observe(self, state: DecodeState, result: RoundResult) -> None:
        """Take in the tokens of a round."""
        if not self.on:
            return
        try:
            parts = self._parts(state)
            for b, counts in result.counts.items():
                label = state.rows[b].request.label
                name = self._arms.get(label.query) if label is not None else None
                if name is None:  # the policy has failed
                    continue
                parts[b].setdefault(name, DraftedPart()).add(counts)
                self._rounds[name] += 1
                if name in self.members:
                    self.members[name].add_round(counts)
            self._texts.observe(state)
        except Exception as error:  # learning must not harm the round
            for member in self.members.values():
                member.fail(error)
        self._arms.clear()

    def _parts(self, state: DecodeState) -> list[dict[str, DraftedPart]]:
        """The parts that drafters had in the texts of a batch, by slot and drafter."""
        return per_text(state, self, dict)

    def _end_text(self, state: DecodeState, b: int, text: Any) -> None:
        parts = self._parts(state)[b]
        for name, part in parts.items():
            if name in self.members:
                self.members[name].end_text(part)
        first = max(parts, key=lambda name: parts[name].rounds, default=None)
        if first in self.members and self.members[first].counts.on:
            self.members[first].take_text(state, b, text)
        parts.clear()  # an idle slot ends no text again

    def after_step(self, engine: Engine, seconds: float) -> None:
        """Hand over texts, and exchange drafters that have new weights."""
        self._seconds += seconds
        total = self._rounds.total()
        shared = self._seconds / total if total else 0.0
        for name, member in self.members.items():
            member.after_step(engine, shared * self._rounds[name])
        if total:
            self._played += self._rounds
            self._rounds.clear()
            self._seconds = 0.0


def with_head(present: Drafter, head: Drafter) -> Drafter:
    """The head, inside a hybrid like the present drafter if that is one."""
    if not isinstance(present, Hybrid):
        return head
    assert isinstance(head, CandidateDrafter)
    return Hybrid(head, present.text, present.costs, present.past, present.quality)


def dropped_with(drafter: Drafter) -> list[Drafter]:
    """A drafter, and its head if it is a hybrid."""
    return [drafter, drafter.head] if isinstance(drafter, Hybrid) else [drafter]
