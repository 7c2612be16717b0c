"""A pupil that learns in a process of its own, on its own core or GPU, while the decoder goes on (OnlineSpec, B.2).

The learner's process loads of the target what its losses need: embedding, final norm and vocabulary head; the layers
only where texts are run again (`buffer.feedback`).

The decoder never waits: it hands over the texts of a chunk with their features, and looks between two sequences whether
there are new weights. Both go through shared memory. What is answered while the learner is at work waits here; then it
learns from all chunks that wait at once. They share the room of the buffer: where a learner is so much slower than the
stream that there is none left, the oldest are dropped. What its own buffer cannot hold is dropped there.

On several devices there is a process for each, which learns from its share of every batch (`adaptation.ranks`).
"""

from __future__ import annotations

import atexit
import fcntl
import os
import queue
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.multiprocessing as multiprocessing
from torch import Tensor

from specctl.adaptation import ranks, worker
from specctl.adaptation.online_drafter import OnlineDrafter
from specctl.adaptation.stream_learner import Lesson
from specctl.adaptation.updates.ensemble import UpdateOutcome
from specctl.adaptation.updates.watchdog import Acceptance
from specctl.adaptation.worker import Chunk, Failed, Learnt, Parcel, Ready, State, WorkerPlace
from specctl.decoding.target import Target
from specctl.decoding.timing import synchronise
from specctl.errors import SpecctlError
from specctl.progress import interrupts, warn
from specctl.recipe import OnlineRecipe
from specctl.training.checkpoint import prefixed, under

PATIENCE_S = 600.0  # for the last chunks of a stream, and for the processes to start


class RemoteOnlineDrafter(OnlineDrafter):
    """An `OnlineDrafter` whose learner lives elsewhere; here are the buffer that feeds it, and the drafter of its last
    weights.

    On a CPU half of this process' threads are the learner's while it runs.
    """

    def __init__(self, recipe: OnlineRecipe, algo: str, target: Target, seed: int, start: Path | None = None):
        """Raises RecipeError where a device is missing, SpecctlError where a process cannot start on it."""
        super().__init__(recipe, algo, target, seed, start)
        self._devices = _devices(recipe, target)
        ranks.check(self._devices)
        self._threads = max(1, torch.get_num_threads() // 2)
        each = max(1, self._threads // len(self._devices))
        context = multiprocessing.get_context("spawn")
        self._meeting, self._kept = meeting_place()
        inboxes, self._outbox = [context.Queue() for _ in self._devices], context.Queue()
        self._inbox = inboxes[0]
        self._processes = []
        for rank in range(len(self._devices)):
            place = WorkerPlace(rank, self._devices, each, Path(self._meeting.name))
            arguments = (place, recipe, algo, seed, start, inboxes, self._outbox)
            self._processes.append(context.Process(target=worker.live, args=arguments, daemon=True))
        self._algo = algo
        self._last: Learnt | None = None
        self._fresh: list[Lesson] = []  # that no chunk's row has told of yet
        self._known: State = super().state()  # of the learner, the newest
        self.sent: list[Chunk] = []  # what it learns from at the moment
        self.waiting: list[Chunk] = []  # what it is sent next
        self._vector: Tensor | None = None  # [P] the newest weights; None = those to start from
        self._swap_s, self._warned = 0.0, False  # since the last chunk; of chunks that were dropped
        atexit.register(self.close)  # multiprocessing would wait for processes that heed no SIGTERM
        try:
            self._start()
            until = time.monotonic() + PATIENCE_S
            while not isinstance(self.receive(1.0), Ready):
                interrupts.check()
                if time.monotonic() > until:
                    raise SpecctlError(f"the process that learns has not started within {PATIENCE_S:.0f} s")
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        """Signals are kept from the processes from the first moment: they inherit what is blocked here."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, worker.UNHEARD)
        try:
            for process in self._processes:
                process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    @contextmanager
    def awake(self) -> Iterator[None]:
        """The processes run only inside of this: while other contenders decode, they may not use the time, and those
        have all threads."""
        threads = torch.get_num_threads()
        if self.target.device.type == "cpu":
            torch.set_num_threads(self._threads)
        self._signal(signal.SIGCONT)
        try:
            self._take()
            yield
            self._make_room()
        finally:
            self._signal(signal.SIGSTOP)
            torch.set_num_threads(threads)

    @property
    def pending(self) -> int:
        """Chunks that were answered and are not learnt from yet."""
        return len(self.sent) + len(self.waiting)

    def sit(self, acceptance: Acceptance, decode_s: float) -> Lesson:
        """Hand over the chunk that was just answered. What is said about learning is the newest that is known."""
        began = time.perf_counter()
        self._hand_over(acceptance)
        fresh, self._fresh = self._fresh, []
        lesson = Lesson("keep", UpdateOutcome("pending"), 0, 0, 0, (), 0.0) if self._last is None else self._last.lesson
        if any(earlier.ruling == "rollback" for earlier in fresh):
            lesson = replace(lesson, ruling="rollback")
        elif not fresh:  # what was said of it a chunk ago happened once
            lesson = replace(lesson, ruling="keep", outcome=replace(lesson.outcome, status="pending"))
        self.chunks += 1
        spent, self._swap_s = self._swap_s, 0.0
        return replace(
            lesson,
            dropped=lesson.dropped + self.buffer.dropped,
            learn_s=time.perf_counter() - began,
            swap_s=spent,
            behind=self.pending,
        )

    def _hand_over(self, acceptance: Acceptance) -> None:
        """Hand the texts of the buffer over to the learner."""
        self.waiting.append(Chunk.of(self.buffer, acceptance))
        self.buffer.clear()
        self._make_room()
        self._send()

    def _send(self) -> None:
        """Send all chunks that wait to a learner that has nothing to do."""
        if self.waiting and not self.sent:
            self.sent, self.waiting = self.waiting, []
            for chunk in self.sent:
                chunk.share()
            self._inbox.put(self.sent)

    def _make_room(self) -> None:
        """Drop the oldest chunks that wait until they and the buffer together hold no more than the buffer may.

        What was sent is the learner's, and cannot be taken back: at most as much again, behind a resumption twice.
        """
        while self.waiting and self.buffer.bytes + sum(chunk.bytes for chunk in self.waiting) > self.buffer.max_bytes:
            self.buffer.dropped += len(self.waiting.pop(0).texts)
            if not self._warned:
                self._warned = True
                warn(
                    f"{self._algo}: the learner is slower than the stream, and what waits for it has no room in "
                    "buffer.max_mb: the oldest chunks are dropped (their texts are counted as `dropped`)"
                )

    def finish(self) -> None:
        """Wait for what was handed over, and take it."""
        with self.awake():
            until = time.monotonic() + PATIENCE_S
            while self.pending and time.monotonic() < until:
                interrupts.check()
                self.receive(1.0)
            self._swap()
        self.close()

    def close(self) -> None:
        """End the processes, whatever they do."""
        atexit.unregister(self.close)
        started = [process for process in self._processes if process.pid is not None]
        for process in started:
            process.kill()
        for process in started:
            process.join()
        self._inbox.cancel_join_thread()  # nobody reads what is still to be sent
        self._meeting.cleanup()
        if self._kept is not None:
            os.close(self._kept)
            self._kept = None

    def played(self) -> Tensor:
        return super().played() if self._vector is None else self._vector

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The learner's behind the last chunk that it is known to have learnt from, and the chunks that wait for it."""
        facts, tensors = self._known
        waiting = [chunk.state() for chunk in [*self.sent, *self.waiting]]
        for place, (_, features) in enumerate(waiting):
            tensors = tensors | prefixed(f"waiting{place}.", features)
        # Texts are numbered here: a number that comes twice would replace a text that the learner replays.
        numbered = facts["buffer"] | {"next": self.buffer.state()[0]["next"]}
        unlearnt = {"waiting": [texts for texts, _ in waiting], "dropped_here": self.buffer.dropped}
        return facts | {"buffer": numbered} | unlearnt, tensors

    def restore(self, facts: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        super().restore(facts, tensors)
        self.buffer.clear()  # the learner replays them, who has its own
        self.buffer.dropped = facts.get("dropped_here", 0)  # a pupil that learns here has no such thing
        self._known = facts, {name: value for name, value in tensors.items() if not name.startswith("waiting")}
        self._inbox.put((facts, Parcel.of(self._known[1])))
        for place, chunk in enumerate(facts.get("waiting", [])):
            self.waiting.append(Chunk.restored(chunk, under(f"waiting{place}.", tensors)))
        self._send()

    def _take(self) -> None:
        """New weights, if there are any."""
        before = self._last
        while self.receive(0.0) is not None:
            pass
        if self._last is not before:
            self._swap()

    def _swap(self) -> None:
        began = time.perf_counter()
        self.drafter = self.drafter_of(self.played())
        synchronise(self.target.device)
        self._swap_s += time.perf_counter() - began

    def receive(self, seconds: float) -> Ready | Learnt | None:
        """The next message, or None. SpecctlError where a process has failed."""
        try:
            message = self._outbox.get(timeout=seconds) if seconds else self._outbox.get_nowait()
        except queue.Empty:
            self._mourn()
            return None
        except (OSError, EOFError) as error:  # its tensors are fetched from the process itself
            self._mourn()
            raise SpecctlError(f"the process that learns did not finish what it said: {error}") from error
        if isinstance(message, Failed):
            for process in self._processes:  # of one that is killed the others hear before its end is known
                process.join(1.0)
            self._mourn()
            raise SpecctlError(f"the process that learns failed: {message.message}", hint="try it without --async")
        if isinstance(message, Learnt):
            self._last, self.sent = message, []
            self._fresh.append(message.lesson)
            self._known = message.facts, message.state.tensors()
            self._vector = message.played.to(self.target.device)
            self._send()
        return message

    def _mourn(self) -> None:
        """Raises SpecctlError where a process was killed. (One that fails says so, and ends with code 0.)"""
        for process, device in zip(self._processes, self._devices, strict=True):
            if process.exitcode:
                raise SpecctlError(f"the process that learns on {device} ended with code {process.exitcode}")

    def _signal(self, number: int) -> None:
        for process in self._processes:
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, number)


def meeting_place() -> tuple[TemporaryDirectory[str], int | None]:
    """A directory that only this process and its learners know, and the descriptor by which it is flocked. Those that
    nobody holds are of killed runs, and removed."""
    for left in Path(tempfile.gettempdir()).glob("specctl-learner-*"):
        with suppress(OSError):
            os.close(_flocked(left))
            shutil.rmtree(left, ignore_errors=True)
    while True:
        place = TemporaryDirectory(prefix="specctl-learner-")
        try:
            return place, _flocked(Path(place.name))
        except (FileNotFoundError, BlockingIOError):  # somebody who removes such directories came between
            continue
        except OSError:  # a file system without flocks
            return place, None


def _flocked(directory: Path) -> int:
    """A descriptor of a directory that nobody else has flocked. OSError otherwise."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.stat(directory)
    except OSError:
        os.close(fd)
        raise
    return fd


def _devices(recipe: OnlineRecipe, target: Target) -> list[str]:
    """Where to learn: on another GPU than the target's, if there is one."""
    if recipe.learner_device != ["auto"]:
        return recipe.learner_device
    if target.device.type == "cpu":
        return ["cpu"]
    others = [n for n in range(torch.cuda.device_count()) if n != target.device.index]
    return [f"cuda:{others[0] if others else target.device.index}"]
