"""A pupil that learns in a process of its own, on its own core or GPU, while the decoder goes on (OnlineSpec, B.2).

The decoder never waits: it hands over the texts of a chunk with their features, and looks between two sequences whether
there are new weights. Both go through shared memory. Where the learner is slower than the stream, it learns from all
chunks that wait at once; what its buffer cannot hold is dropped.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import queue
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as multiprocessing
from torch import Tensor

from specctl.adaptation.buffer import ReplayBuffer, Text
from specctl.adaptation.ensemble import Outcome
from specctl.adaptation.pupil import Lesson, Pupil
from specctl.adaptation.watchdog import Acceptance
from specctl.decoding.target import Target, load_target
from specctl.decoding.timing import synchronise
from specctl.errors import SpecctlError
from specctl.recipe import OnlineRecipe
from specctl.training.feature_files import Features

State = tuple[dict[str, Any], dict[str, Tensor]]
"""What JSON can say, and tensors."""
PATIENCE_S = 600.0  # for the last chunks of a stream
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Chunk:
    """What the decoder hands over; features of all texts one behind the other, as every tensor is an open file."""

    texts: list[Text]
    features: Features | None
    acceptance: Acceptance

    @classmethod
    def of(cls, buffer: ReplayBuffer, acceptance: Acceptance) -> Chunk:
        """All that a buffer holds; without features where the target is to be run again."""
        kept = [buffer.kept[index] for index in buffer.texts if index in buffer.kept]
        if not kept:
            return cls(list(buffer.texts.values()), None, acceptance)
        joined = (torch.cat(parts) for parts in zip(*(vars(one).values() for one in kept), strict=True))
        return cls(list(buffer.texts.values()), Features(*joined), acceptance)

    def into(self, buffer: ReplayBuffer) -> None:
        """Take all texts into a buffer."""
        if self.features is None:
            parts: list[Features | None] = [None] * len(self.texts)
        else:
            slots = [len(text.example.tokens) - 2 for text in self.texts]
            asked = [text.example.response_length - 1 for text in self.texts]
            sizes = (slots, asked, asked)
            split = (x.split(size) for x, size in zip(vars(self.features).values(), sizes, strict=True))
            parts = [Features(*part) for part in zip(*split, strict=True)]
        for text, features in zip(self.texts, parts, strict=True):
            buffer.take(text, features)


@dataclass(frozen=True)
class Learnt:
    """What the learner gives back: after so many chunks, what is played [P], and its state for a checkpoint."""

    chunks: int
    lesson: Lesson
    played: Tensor
    facts: dict[str, Any]
    state: dict[str, Tensor]


@dataclass(frozen=True)
class Failed:
    """The learner's last words."""

    message: str


class RemotePupil(Pupil):
    """A `Pupil` whose learner lives elsewhere; here are the buffer that feeds it, and the drafter of its last weights.

    On a CPU the two processes share the threads that this one had.
    """

    def __init__(self, recipe: OnlineRecipe, algo: str, target: Target, seed: int, start: Path | None = None):
        super().__init__(recipe, algo, target, seed, start)
        threads = max(1, torch.get_num_threads() // 2)
        if target.device.type == "cpu":
            torch.set_num_threads(threads)
        context = multiprocessing.get_context("spawn")
        self._inbox, self._outbox = context.Queue(), context.Queue()
        arguments = (recipe, algo, seed, start, _device(recipe, target), threads, self._inbox, self._outbox)
        self._process = context.Process(target=_live, args=arguments, daemon=True)
        self._process.start()
        atexit.register(self._process.kill)  # Python would wait for it after a SIGTERM, which it leaves to us
        self._handed = self._learnt = 0
        self._last: Learnt | None = None
        self._known: State = super().state()  # of the learner, the newest
        self._waiting: list[tuple[State, Acceptance]] = []  # chunks that are handed over and not learnt from yet
        message = self._receive(PATIENCE_S)
        assert message is None, "the first message says that it is ready"

    @contextmanager
    def awake(self) -> Iterator[None]:
        """The process runs only inside of this: while other contenders decode, it may not use the time."""
        self._signal(signal.SIGCONT)
        try:
            self._take()
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def sit(self, acceptance: Acceptance) -> Lesson:
        """Hand over the chunk that was just answered. What is said about learning is the newest that is known."""
        began = time.perf_counter()
        self._hand_over(acceptance)
        known = self._last
        lesson = Lesson("keep", Outcome("pending"), 0, 0, 0, (), 0.0) if known is None else known.lesson
        if known is not None and known is self._told:  # what was said of it a chunk ago happened once
            lesson = replace(lesson, ruling="keep", outcome=replace(lesson.outcome, status="pending"))
        self._told = known
        self.chunks += 1
        behind = self._handed - self._learnt
        spent, self._swap_s = self._swap_s, 0.0
        return replace(lesson, learn_s=time.perf_counter() - began, swap_s=spent, behind=behind)

    def _hand_over(self, acceptance: Acceptance) -> None:
        """What the buffer holds is the learner's."""
        self._inbox.put(Chunk.of(self.buffer, acceptance))
        self._waiting.append((self.buffer.state(), acceptance))
        self._handed += 1
        self.buffer.clear()

    _told: Learnt | None = None  # the last lesson that a chunk's row has told of
    _swap_s = 0.0  # since the last chunk
    _vector: Tensor | None = None  # [P] the newest weights; None = those to start from

    def finish(self) -> None:
        """Wait for what was handed over, and take it."""
        with self.awake():
            until = time.monotonic() + PATIENCE_S
            while self._learnt < self._handed and time.monotonic() < until:
                self._receive(1.0)
            self._swap()
        self.close()

    def close(self) -> None:
        """End the process, whatever it does."""
        if self._process.is_alive():
            self._process.kill()

    def played(self) -> Tensor:
        return super().played() if self._vector is None else self._vector

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The learner's behind the last chunk that it is known to have learnt from, and the chunks that wait for it."""
        facts, tensors = self._known
        waiting = [{"buffer": texts, "acceptance": vars(one)} for (texts, _), one in self._waiting]
        for place, ((_, features), _) in enumerate(self._waiting):
            tensors = tensors | {f"waiting{place}.{name}": value for name, value in features.items()}
        # Texts are numbered here: a number that comes twice would replace a text that the learner replays.
        numbered = facts["buffer"] | {"next": self.buffer.state()[0]["next"]}
        return facts | {"buffer": numbered, "waiting": waiting}, tensors

    def restore(self, facts: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        super().restore(facts, tensors)
        self.buffer.clear()  # the learner replays them, who has its own
        self._known = facts, {name: value for name, value in tensors.items() if not name.startswith("waiting")}
        self._inbox.put(self._known)
        for place, one in enumerate(facts["waiting"]):
            prefix = f"waiting{place}."
            own = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
            self.buffer.restore(one["buffer"], own)
            self._hand_over(Acceptance(**one["acceptance"]))

    def _take(self) -> None:
        """New weights, if there are any."""
        before = self._learnt
        while self._receive(0.0) is not None:
            pass
        if self._learnt > before:
            self._swap()

    def _swap(self) -> None:
        began = time.perf_counter()
        self.drafter = self.drafter_of(self.played())
        synchronise(self.target.device)
        self._swap_s += time.perf_counter() - began

    def _receive(self, seconds: float) -> Learnt | None:
        """The next message, or None. SpecctlError where the process has failed."""
        try:
            message = self._outbox.get(timeout=seconds) if seconds else self._outbox.get_nowait()
        except queue.Empty:
            if not self._process.is_alive():
                raise SpecctlError(f"the process that learns ended with code {self._process.exitcode}") from None
            return None
        if isinstance(message, Failed):
            raise SpecctlError(f"the process that learns failed: {message.message}", hint="try it without --async")
        if message is not None:
            del self._waiting[: message.chunks - self._learnt]
            self._last, self._learnt = message, message.chunks
            self._known = message.facts, message.state
            self._vector = message.played.to(self.target.device)
        return message

    def _signal(self, number: int) -> None:
        if self._process.is_alive() and self._process.pid is not None:
            os.kill(self._process.pid, number)


def _device(recipe: OnlineRecipe, target: Target) -> str:
    """Where to learn: on another GPU than the target's, if there is one."""
    if recipe.learner_device != "auto":
        return recipe.learner_device
    if target.device.type == "cpu":
        return "cpu"
    others = [n for n in range(torch.cuda.device_count()) if n != target.device.index]
    return f"cuda:{others[0] if others else target.device.index}"


def _live(
    recipe: OnlineRecipe, algo: str, seed: int, start: Path | None, device: str, threads: int, inbox: Any, outbox: Any
) -> None:
    """The process: learns from what comes, until it is killed."""
    _outlive_nobody()
    try:
        torch.set_num_threads(threads)
        loading = recipe.target.loading | {"device": device, "device_map": None, "max_memory": None}
        pupil = Pupil(recipe, algo, load_target(**loading), seed, start)
        outbox.put(None)
        chunks = 0
        while True:
            message = inbox.get()
            if not isinstance(message, Chunk):
                pupil.restore(*message)
                continue
            waiting = [message]
            while not inbox.empty():
                waiting.append(inbox.get())
            chunks += len(waiting)
            for one in waiting:
                one.into(pupil.buffer)
            accepted = sum(one.acceptance.accepted for one in waiting)
            lesson = pupil.learn(Acceptance(accepted, sum(one.acceptance.verified for one in waiting)))
            facts, state = pupil.state()
            host = {name: value.cpu() for name, value in state.items()}
            outbox.put(Learnt(chunks, lesson, pupil.played().cpu(), facts, host))
    except Exception as error:
        outbox.put(Failed(f"{type(error).__name__}: {error}"))


def _outlive_nobody() -> None:
    """Leave signals to the decoder, which ends this process; and die with it, even while standing still."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
