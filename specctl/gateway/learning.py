"""Learning from the texts that the gateway's own engine serves.

The engine's thread collects finished texts with the states that decoding has computed, and exchanges the drafter
between two steps. A second thread hands the texts to the learner's process, builds a drafter from every new version of
the weights, and writes it to the disk. So no text waits for a lesson.
"""

import shutil
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specctl import progress
from specctl.adaptation.buffer import BufferedText, ReplayBuffer
from specctl.adaptation.online_drafter import OnlineDrafter
from specctl.adaptation.remote import AsyncOnlineDrafter
from specctl.adaptation.stream_learner import Lesson
from specctl.adaptation.updates.watchdog import Acceptance
from specctl.decoding.controllers import Fixed
from specctl.decoding.engine import Engine
from specctl.decoding.protocols import Drafter
from specctl.decoding.records import Event, RoundResult
from specctl.decoding.state import DecodeState
from specctl.drafters.hybrid.drafter import Hybrid
from specctl.drafters.tree import CandidateDrafter
from specctl.errors import SpecctlError
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
                raise SpecctlError("the learnt weights are not finite", "lower learn.learner.lr")
            self._swap()
        lessons, self._unreported = self._unreported, []
        return lessons

    def _fits_shared_memory(self) -> bool:
        waiting = self.buffer.bytes + sum(chunk.bytes for chunk in self.waiting)
        return not SHARED_MEMORY.is_dir() or shutil.disk_usage(SHARED_MEMORY).free > 2 * waiting


class TrafficBuffer(ReplayBuffer):
    """Replay buffer that leaves out texts beyond a length: one long text would displace all others.

    Attributes:
        longest: most tokens of a text, prompt included.
        entered: number of texts that were not too long.
    """

    longest: int
    entered = 0

    def _add(self, state: DecodeState, b: int, text: Any) -> None:
        if len(state.rows[b].ids) > self.longest:
            self.dropped += 1
        else:
            self.entered += 1
            super()._add(state, b, text)


@dataclass(frozen=True)
class ServedTexts:
    """Texts for one lesson, with the acceptance of all texts that ended meanwhile."""

    texts: list[tuple[BufferedText, Features | None]]
    acceptance: Acceptance
    decode_s: float


@dataclass(frozen=True)
class LearningPlan:
    """How a `LiveLearner` learns.

    Attributes:
        chunk: texts of a lesson.
        longest: most tokens of a text.
        place: directory that the drafter is saved in.
        save_s: shortest time between two copies there.
        info: description of the saved drafter.
    """

    chunk: int
    longest: int
    place: Path
    save_s: float
    info: dict[str, Any]


class LiveLearner:
    """Lets a drafter learn from the texts of an engine, which drafts with it.

    A failure ends the learning, never the serving: it is reported once and counted.

    Args:
        online_drafter: belongs to this object's thread from `start` on.
        drafter: the drafter of the engine, with the weights of `online_drafter`: its head, or a hybrid of this head.
        report: called in this object's thread with every lesson and the counts after it.
    """

    def __init__(
        self,
        online_drafter: BackgroundOnlineDrafter,
        drafter: Drafter,
        plan: LearningPlan,
        meter: Meter,
        report: Callable[[Lesson, LearningCounts], None] = lambda lesson, counts: None,
    ):
        self.online_drafter, self.drafter, self.plan = online_drafter, drafter, plan
        self.meter, self.report = meter, report
        self.counts = meter.learning = LearningCounts(on=True)
        own = online_drafter.buffer
        self.buffer = TrafficBuffer(own.target, own.taps, max_bytes=own.max_bytes, feedback=own.feedback)
        self.buffer.longest = plan.longest
        self._by_version = {0: DrafterCounts()}
        self._ended: deque[tuple[int, int]] = deque(maxlen=8 * plan.chunk)  # acceptance of texts since the last lesson
        self._decode_s = 0.0  # since the last lesson
        self._handed: ServedTexts | None = None  # from the engine's thread to this object's thread
        self._built: Drafter | None = None  # in the other direction
        self._newest = online_drafter.drafter
        self._bad = 0  # lessons in a row that did harm or were refused
        self._saved, self._saved_at = 0, time.monotonic()  # lessons in the copy on the disk
        self._updates, self._save_failed = 0, False
        self._wake, self._stopping = threading.Event(), False
        self._thread = threading.Thread(target=self._main, name="learning", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread and the learner's process, and save the newest weights. A lesson that runs is lost."""
        self._stopping = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(30.0)
        self.online_drafter.close()
        self._count()
        self._save()

    def observe(self, state: DecodeState, result: RoundResult) -> None:
        """Take in the tokens of a round. Called in the engine's thread."""
        if not self.counts.on:
            return
        try:
            self.buffer.observe(state)
            rounds = self._by_version[self.counts.version]
            for one in result.counts.values():
                rounds.add(one.committed, one.accepted, one.depth)
        except Exception as error:  # learning must not harm the round
            self._fail(error)

    def after_step(self, engine: Engine, events: list[Event], seconds: float) -> None:
        """Hand over texts, and exchange the drafter if there is a new one. Called in the engine's thread."""
        if not self.counts.on:
            return
        try:
            self.counts.serve_s += seconds
            self._decode_s += seconds
            for event in events:
                if event.ended is not None and event.error is None:
                    self._ended.append((event.ended.accepted, event.ended.accepted + event.ended.rejections))
            if self.buffer.entered >= self.plan.chunk and self._handed is None:
                self._hand_over()
            if self._built is not None:
                self._exchange(engine)
        except Exception as error:
            self._fail(error)

    def _hand_over(self) -> None:
        acceptance = Acceptance.of(self._ended)
        self._handed = ServedTexts(self.buffer.take(), acceptance, self._decode_s)
        self._ended.clear()
        self._decode_s, self.buffer.entered = 0.0, 0
        self._wake.set()

    def _exchange(self, engine: Engine) -> None:
        """Draft with the new weights from the next round on. The running texts go on: the new drafter reads them."""
        new, self._built = self._built, None
        assert new is not None
        old, self.drafter = self.drafter, new
        engine.exchange(Fixed.of(new), [old, old.head] if isinstance(old, Hybrid) else [old])
        version = self.counts.version
        for number in self._by_version.keys() - {0, version}:
            del self._by_version[number]
        self._by_version[version + 1] = DrafterCounts()
        self.counts.version = version + 1

    def _main(self) -> None:
        try:
            while not self._stopping and self.counts.on:
                self._wake.wait(POLL_S)
                self._wake.clear()
                self._count()
                if self._handed is not None:
                    self._teach(self._handed)
                    self._handed = None
                self._take_lessons()
                if time.monotonic() - self._saved_at >= self.plan.save_s:
                    self._save()
        except Exception as error:
            if not self._stopping:
                self._fail(error)
        finally:
            self.online_drafter.close()

    def _teach(self, served: ServedTexts) -> None:
        buffer = self.online_drafter.buffer
        for text, features in served.texts:
            buffer.add(text, features)
        self.online_drafter.hand_over(served.acceptance, served.decode_s)

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
            self._newest = self.online_drafter.drafter
            self._updates += 1
            self._offer(self.online_drafter.drafter)

    def _offer(self, head: Drafter) -> None:
        """Offer new weights to the engine, inside a hybrid if the engine drafts with a hybrid."""
        present = self.drafter
        if isinstance(present, Hybrid):
            assert isinstance(head, CandidateDrafter)
            head = Hybrid(head, present.text, present.costs, present.past)
        self._built = head

    def _watch(self, lesson: Lesson) -> None:
        """Warn of an update that went wrong. Raises SpecctlError after `GIVE_UP` in a row."""
        back, refused = lesson.ruling == "rollback", lesson.outcome.status == "refused"
        if back:
            progress.warn("learning: the last update lowered acceptance and was taken back")
        if refused:
            progress.warn("learning: a loss or gradient was not finite, so nothing was learned from these texts")
        self._bad = self._bad + 1 if back or refused else 0
        if self._bad == GIVE_UP:
            raise SpecctlError(
                f"{GIVE_UP} lessons in a row did harm, or were not finite", "lower learn.learner.lr, or set clip"
            )

    def _count(self) -> None:
        """Write the counts that are computed from others."""
        counts, rounds = self.counts, dict(self._by_version)
        counts.dropped = self.buffer.dropped + self.online_drafter.buffer.dropped
        named = {"first": 0, "last": counts.version - 1, "present": counts.version}
        counts.mat = {name: mat for name, n in named.items() if n in rounds and (mat := rounds[n].mat) is not None}

    def _save(self) -> None:
        """Write the newest weights to the disk, if they are not there yet."""
        self._saved_at = time.monotonic()
        if self._updates == self._saved:
            return
        try:
            self.online_drafter.save(self.plan.place, self.plan.info)
            self._saved = self._updates
        except (SpecctlError, OSError) as error:
            self.meter.fault("learner's copy")
            if not self._save_failed:
                progress.warn(f"the learnt drafter is not saved: {error}")
            self._save_failed = True

    def _fail(self, error: BaseException) -> None:
        """Learning ends, and serving goes on with the present drafter. Called in any thread."""
        if not self.counts.on:
            return
        self.counts.on = False
        self.buffer.clear()
        self.meter.fault("learner")
        told = error.message if isinstance(error, SpecctlError) else where(error)
        progress.warn(f"learning has failed and ends; serving goes on with the present drafter: {told}")
