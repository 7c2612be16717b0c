"""Asynchronous online drafter: it learns during decoding, in a process on another core or GPU (OnlineSpec, B.2).

The learner's process loads only the parts of the target that its losses need: embedding, final norm and vocabulary
head. It loads the layers only if texts are run again (`buffer.feedback`).

The decoder never waits. It hands over the texts of a chunk with their features, and checks for new weights between two
sequences. Both go through shared memory. Chunks that are answered while the learner is at work wait here; then it
learns from all waiting chunks at once. The waiting chunks share the room of the buffer. If the learner is so slow that
no room is left, the oldest chunks are dropped. The learner also drops the texts that its own buffer cannot hold.

Several drafters can learn in one process (`start_process`): they share its copy of the target, and learn in turns.
"""

import atexit
import os
import queue
import signal
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import util
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as multiprocessing
from torch import Tensor

from specctl.adaptation import worker
from specctl.adaptation.online_drafter import OnlineDrafter
from specctl.adaptation.stream_learner import Lesson
from specctl.adaptation.updates.ensemble import UpdateOutcome
from specctl.adaptation.updates.watchdog import Acceptance
from specctl.adaptation.worker import Chunk, Failed, LearnerResult, PackedTensors, Ready, State, WorkerLearner
from specctl.decoding.target import Target
from specctl.errors import SpecctlError
from specctl.progress import interrupts, warn
from specctl.recipe import OnlineRecipe
from specctl.training.checkpoint import add_prefix, strip_prefix

TIMEOUT_S = 600.0  # timeout for the last chunks of a stream, and for starting the processes


class LearnerProcess:
    """A process in which learners take turns, with its queues of messages."""

    def __init__(self, learners: Sequence[WorkerLearner]):
        context = multiprocessing.get_context("spawn")
        self._inbox, self._outbox = context.Queue(), context.Queue()
        arguments = ([*learners], self._inbox, self._outbox)
        util.get_temp_dir()  # the worker uses the same one, since it is killed and cannot remove its own
        self._process = context.Process(target=worker.run_worker, args=arguments, daemon=True)
        self._answers: dict[str, deque[LearnerResult | Failed]] = defaultdict(deque)  # by learner
        atexit.register(self.close)  # multiprocessing would wait for workers, which ignore SIGTERM

    def start(self) -> None:
        """Start the process, and wait until it is ready. Raises SpecctlError if it cannot start."""
        # Block signals before starting the worker: it inherits the mask.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, worker.IGNORED_SIGNALS)
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        until = time.monotonic() + TIMEOUT_S
        while not isinstance(message := self._next(1.0), Ready):
            if message is not None:
                raise _error(message)
            interrupts.check()
            if time.monotonic() > until:
                raise SpecctlError(f"the learner process did not start within {TIMEOUT_S:.0f} s")

    def send(self, message: list[Chunk] | tuple[dict[str, Any], PackedTensors]) -> None:
        """Send the chunks of one learner, or a state for the only learner."""
        self._inbox.put(message)

    def receive(self, learner: str, seconds: float) -> LearnerResult | None:
        """The next answer of a learner, or None. Raises SpecctlError if it has failed."""
        answers = self._answers[learner]
        while not answers and (message := self._next(seconds)) is not None:
            self._answers[message.learner].append(message)
        answer = answers.popleft() if answers else None
        if isinstance(answer, Failed):
            raise _error(answer)
        return answer

    def _next(self, seconds: float) -> Any:
        """The next message of the process, or None."""
        try:
            return self._outbox.get(timeout=seconds) if seconds else self._outbox.get_nowait()
        except queue.Empty:
            self._check_alive()
            return None
        except (OSError, EOFError) as error:  # the process died while its tensors were fetched
            self._check_alive()
            raise SpecctlError(f"the learner process ended while it sent a message: {error}") from error

    def _check_alive(self) -> None:
        """Raise SpecctlError if the process was killed. (If it fails it says so, and ends with code 0.)"""
        if self._process.exitcode:
            raise SpecctlError(f"the learner process ended with code {self._process.exitcode}")

    def signal(self, number: int) -> None:
        """Send a signal, if the process runs."""
        if self._process.is_alive() and self._process.pid is not None:
            os.kill(self._process.pid, number)

    def close(self) -> None:
        """Kill the process, also in the middle of an update."""
        atexit.unregister(self.close)
        if self._process.pid is not None:
            self._process.kill()
            self._process.join()
        self._inbox.cancel_join_thread()  # unsent messages have no reader any more


def _error(failed: Failed) -> SpecctlError:
    return SpecctlError(f"the learner process failed: {failed.message}", hint="try it without --async")


class AsyncOnlineDrafter(OnlineDrafter):
    """An `OnlineDrafter` with its learner in another process. This process has the buffer that feeds the learner, and
    the drafter with its newest weights.

    On a CPU, the learner has half of this process' threads while it runs.

    Attributes:
        name: of the learner in its process.
        process: the process, which `start_process` sets.
    """

    recipe: OnlineRecipe
    name = ""
    process: LearnerProcess
    in_background = False  # whether the worker gives way to other processes, and sends weights without a state
    _vector: Tensor | None = None  # [P] the newest weights, or None before the first update

    def __init__(self, recipe: OnlineRecipe, algo: str, target: Target, seed: int, start: Path | None = None):
        """Raises SpecctlError if the worker cannot start. A learner in the background waits for `start_process`."""
        super().__init__(recipe, algo, target, seed, start)
        self._threads = max(1, torch.get_num_threads() // 2)
        self._algo, self._start = algo, start
        self._last: LearnerResult | None = None
        self._unreported: list[Lesson] = []  # lessons that no chunk's row has reported yet
        self._learner_state: State = super().state()  # the learner's newest state
        self.sent: list[Chunk] = []  # chunks that the learner has at the moment
        self.waiting: list[Chunk] = []  # chunks to send next
        self._swap_s, self._warned = 0.0, False  # since the last chunk; whether drops were reported
        if not self.in_background:
            start_process([self])

    def in_worker(self) -> WorkerLearner:
        device = _device(self.recipe, self.target)
        options = device, self._threads, self.in_background, self.name
        return WorkerLearner(self.recipe, self._algo, self.seed, self._start, *options)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Context in which the worker runs. It stops while other contenders decode, and leaves them all threads."""
        threads = torch.get_num_threads()
        if self.target.device.type == "cpu":
            torch.set_num_threads(self._threads)
        self.process.signal(signal.SIGCONT)
        try:
            self._take()
            yield
            self._make_room()
        finally:
            self.process.signal(signal.SIGSTOP)
            torch.set_num_threads(threads)

    @property
    def pending(self) -> int:
        """Number of chunks that were answered and are not learned from yet."""
        return len(self.sent) + len(self.waiting)

    def learn_chunk(self, acceptance: Acceptance, decode_s: float) -> Lesson:
        """Hand over the chunk that was just answered. The lesson that is returned is the newest known one."""
        began = time.perf_counter()
        self._hand_over(acceptance)
        fresh, self._unreported = self._unreported, []
        lesson = Lesson("keep", UpdateOutcome("pending"), 0, 0, 0, (), 0.0) if self._last is None else self._last.lesson
        if any(earlier.ruling == "rollback" for earlier in fresh):
            lesson = replace(lesson, ruling="rollback")
        elif not fresh:  # the last lesson was reported a chunk ago: report no event twice
            lesson = replace(lesson, ruling="keep", outcome=replace(lesson.outcome, status="pending"))
        self.chunks += 1
        spent, self._swap_s = self._swap_s, 0.0
        return replace(
            lesson,
            dropped=lesson.dropped + self.buffer.dropped,
            learn_s=time.perf_counter() - began,
            swap_s=spent,
            lag_chunks=self.pending,
        )

    def _hand_over(self, acceptance: Acceptance, decode_s: float | None = None) -> None:
        """Hand the texts of the buffer over to the learner. With `decode_s` it keeps to the time budget."""
        self.waiting.append(replace(Chunk.of(self.buffer, acceptance), decode_s=decode_s, learner=self.name))
        self.buffer.clear()
        self._make_room()
        self._send()

    def _send(self) -> None:
        """Send all waiting chunks to the learner if it is idle."""
        if self.waiting and not self.sent:
            self.sent, self.waiting = self.waiting, []
            for chunk in self.sent:
                chunk.share()
            self.process.send(self.sent)

    def _make_room(self) -> None:
        """Drop the oldest waiting chunks until they and the buffer together hold no more than the buffer may.

        Chunks that were sent belong to the learner and cannot be taken back. They hold at most as much again, after a
        resumption twice as much.
        """
        while self.waiting and self.buffer.bytes + sum(chunk.bytes for chunk in self.waiting) > self.buffer.max_bytes:
            self.buffer.dropped += len(self.waiting.pop(0).texts)
            if not self._warned:
                self._warned = True
                warn(
                    f"{self._algo}: the learner is slower than the stream, and the chunks that wait for it exceed "
                    "buffer.max_mb: the oldest chunks are dropped (their sequences are counted as `dropped`)"
                )

    def finish(self) -> None:
        """Wait until the learner has finished the chunks handed over, and take its weights."""
        with self.active():
            until = time.monotonic() + TIMEOUT_S
            while self.pending and time.monotonic() < until:
                interrupts.check()
                self.receive(1.0)
            self._swap_s += self._swap()
        self.close()

    def close(self) -> None:
        """Kill the worker, also in the middle of an update."""
        self.process.close()

    def played(self) -> Tensor:
        return super().played() if self._vector is None else self._vector

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The learner's state after the last chunk known to be learned from, and the chunks that still wait."""
        facts, tensors = self._learner_state
        waiting = [chunk.state() for chunk in [*self.sent, *self.waiting]]
        for place, (_, features) in enumerate(waiting):
            tensors = tensors | add_prefix(f"waiting{place}.", features)
        # Texts are numbered in this process. A number that is used twice would replace a text that the learner replays.
        numbered = facts["buffer"] | {"next": self.buffer.state()[0]["next"]}
        unlearnt = {"waiting": [texts for texts, _ in waiting], "dropped_here": self.buffer.dropped}
        return facts | {"buffer": numbered} | unlearnt, tensors

    def restore(self, facts: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        super().restore(facts, tensors)
        self.buffer.clear()  # the learner replays them from its own buffer
        self.buffer.dropped = facts.get("dropped_here", 0)  # missing in the state of an `OnlineDrafter`
        self._learner_state = facts, {name: value for name, value in tensors.items() if not name.startswith("waiting")}
        self.process.send((facts, PackedTensors.of(self._learner_state[1])))
        for place, chunk in enumerate(facts.get("waiting", [])):
            self.waiting.append(Chunk.restored(chunk, strip_prefix(f"waiting{place}.", tensors)))
        self._send()

    def _take(self) -> None:
        """Take over new weights, if there are any."""
        before = self._last
        while self.receive(0.0) is not None:
            pass
        if self._last is not before:
            self._swap_s += self._swap()

    def receive(self, seconds: float) -> LearnerResult | None:
        """The next result of the learner, or None. Raises SpecctlError if it has failed."""
        result = self.process.receive(self.name, seconds)
        if result is not None:
            self._last, self.sent = result, []
            self._unreported.append(result.lesson)
            self._learner_state = result.facts, result.state.tensors()
            self._vector = result.played.to(self.target.device)
            self._send()
        return result


def start_process(drafters: Sequence[AsyncOnlineDrafter]) -> None:
    """Start one process in which all of these drafters learn. Raises SpecctlError if it cannot start."""
    process = LearnerProcess([drafter.in_worker() for drafter in drafters])
    for drafter in drafters:
        drafter.process = process
    try:
        process.start()
    except BaseException:
        process.close()
        raise


def _device(recipe: OnlineRecipe, target: Target) -> str:
    """The device to learn on; by default another GPU than the target's, if there is one."""
    if recipe.learner_device != ["auto"]:
        return recipe.learner_device[0]
    if target.device.type == "cpu":
        return "cpu"
    others = [n for n in range(torch.cuda.device_count()) if n != target.device.index]
    return f"cuda:{others[0] if others else target.device.index}"
