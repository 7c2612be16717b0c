"""Worker process of one or several asynchronous learners, and the messages between it and the decoder."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specctl.adaptation.buffer import ID_BYTES, BufferedText, ReplayBuffer
from specctl.adaptation.online_drafter import OnlineDrafter
from specctl.adaptation.stream_learner import Lesson
from specctl.adaptation.updates.watchdog import Acceptance
from specctl.decoding.target import load_target
from specctl.progress import STOPPING
from specctl.recipe import OnlineRecipe
from specctl.training.feature_files import Features

PR_SET_PDEATHSIG = 1
NICENESS = 10  # of a learner in the background: about a tenth of a core that others use, too
# Often sent to a whole process group; workers ignore them.
IGNORED_SIGNALS = signal.SIGINT, *STOPPING

State = tuple[dict[str, Any], dict[str, Tensor]]
"""Arguments of `OnlineDrafter.restore`: JSON-able facts, and tensors."""


def share(tensors: Iterable[Tensor]) -> None:
    """Move tensors to shared memory before they are sent. Otherwise the queue's thread would do it later, and lose the
    message if /dev/shm is full."""
    for x in tensors:
        if x.numel():
            x.share_memory_()


@dataclass(frozen=True)
class PackedTensors:
    """Tensors packed into one for sending: each sent tensor is an open file, and a state has several per text."""

    kinds: dict[str, tuple[torch.dtype, torch.Size]]
    bytes: Tensor

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> PackedTensors:
        """Pack tensors on the CPU, the widest dtype first: a view must begin at a multiple of its dtype's size."""
        host = dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))
        parts = [x.cpu().reshape(-1).view(torch.uint8) for x in host.values()]
        joined = torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)
        share([joined])
        return cls({name: (x.dtype, x.shape) for name, x in host.items()}, joined)

    def tensors(self) -> dict[str, Tensor]:
        """The tensors, as views of `bytes`."""
        parts = self.bytes.split([dtype.itemsize * shape.numel() for dtype, shape in self.kinds.values()])
        kinds = zip(self.kinds.items(), parts, strict=True)
        return {name: part.view(dtype).view(shape) for (name, (dtype, shape)), part in kinds}


@dataclass(frozen=True)
class Chunk:
    """A chunk of texts on its way to the learner. Features are joined, because every tensor is an open file.

    Attributes:
        decode_s: seconds in which the chunk was decoded, if they limit the time for learning from it.
        learner: name of the learner in its process.
    """

    texts: list[BufferedText]
    features: Features | None
    acceptance: Acceptance
    decode_s: float | None = None
    learner: str = ""

    @property
    def bytes(self) -> int:
        """Size of the texts and their features."""
        return sum(x.nbytes for x in self._tensors()) + ID_BYTES * sum(len(text.example.tokens) for text in self.texts)

    def _tensors(self) -> list[Tensor]:
        return [] if self.features is None else [*vars(self.features).values()]

    def share(self) -> None:
        """Move the features to shared memory now, and not while a state is being saved."""
        share(self._tensors())

    def state(self) -> State:
        """(JSON-able facts, tensors) that `restored` needs."""
        texts, features = [text.to_json() for text in self.texts], self.features
        return {"texts": texts, "accepted": self.acceptance.texts}, dict(vars(features)) if features else {}

    @classmethod
    def restored(cls, facts: dict[str, Any], tensors: dict[str, Tensor]) -> Chunk:
        """Rebuild a chunk from its `state`."""
        features = Features(**tensors) if tensors else None
        return cls([*map(BufferedText.from_json, facts["texts"])], features, Acceptance.of(facts["accepted"]))

    @classmethod
    def of(cls, buffer: ReplayBuffer, acceptance: Acceptance) -> Chunk:
        """Build a chunk from all texts in a buffer; without features if the target is to be run again."""
        kept = [vars(buffer.kept[index]).values() for index in buffer.texts if index in buffer.kept]
        features = Features(*(torch.cat(parts) for parts in zip(*kept, strict=True))) if kept else None
        return cls(list(buffer.texts.values()), features, acceptance)

    def into(self, buffer: ReplayBuffer) -> None:
        """Add all texts to a buffer."""
        if self.features is None:
            parts: list[Features | None] = [None] * len(self.texts)
        else:
            slots = [len(text.example.tokens) - 2 for text in self.texts]
            asked = [text.example.response_length - 1 for text in self.texts]
            sizes = (slots, asked, asked)
            split = (x.split(size) for x, size in zip(vars(self.features).values(), sizes, strict=True))
            parts = [Features(*part) for part in zip(*split, strict=True)]
        for text, features in zip(self.texts, parts, strict=True):
            buffer.add(text, features)


@dataclass(frozen=True)
class Ready:
    """Message that the worker is ready."""


@dataclass(frozen=True)
class LearnerResult:
    """The learner's answer to the chunks it was sent: its lesson, the played weights [P], and its state."""

    lesson: Lesson
    played: Tensor
    facts: dict[str, Any]
    state: PackedTensors
    learner: str = ""


@dataclass(frozen=True)
class Failed:
    """Message of a learner that ends with an error, or of a worker that cannot start."""

    message: str
    learner: str = ""


@dataclass(frozen=True)
class WorkerLearner:
    """A learner of a worker: its recipe, and where it runs.

    Attributes:
        in_background: give way to other processes, and report weights without the learner's state.
    """

    recipe: OnlineRecipe
    algo: str
    seed: int
    start: Path | None
    device: str
    threads: int
    in_background: bool = False
    name: str = ""


def run_worker(learners: Sequence[WorkerLearner], inbox: Any, outbox: Any) -> None:
    """Run a worker: its learners take turns with the messages of a queue, until the process is killed. All learn with
    one copy of the target. If one fails, the others go on."""
    _die_with_parent()
    try:
        first = learners[0]
        torch.set_num_threads(first.threads)
        loading = {"device": first.device, "device_map": None, "max_memory": None}
        target = load_target(**first.recipe.target.loading | loading, whole=first.recipe.buffer.reruns)
        drafters = {one.name: OnlineDrafter(one.recipe, one.algo, target, one.seed, one.start) for one in learners}
    except Exception as error:
        outbox.put(_failed(error))
        return
    accounts = [drafter.account for drafter in drafters.values()]
    for account in accounts:
        account.group = accounts
    outbox.put(Ready())
    if first.in_background:
        os.nice(NICENESS)
    while drafters:
        message: list[Chunk] | tuple[dict[str, Any], PackedTensors] = inbox.get()
        name = message[0].learner if isinstance(message, list) else ""  # a state is for the only learner
        drafter = drafters.get(name)
        if drafter is None:  # it has failed
            continue
        try:
            if isinstance(message, list):
                outbox.put(_answer(drafter, message, with_state=not first.in_background))
            else:
                drafter.restore(message[0], message[1].tensors())
        except Exception as error:
            outbox.put(_failed(error, name))
            accounts.remove(drafters.pop(name).account)


def _failed(error: Exception, learner: str = "") -> Failed:
    return Failed(f"{type(error).__name__}: {error}", learner)


def _answer(drafter: OnlineDrafter, chunks: list[Chunk], *, with_state: bool) -> LearnerResult:
    """Let a learner learn from chunks."""
    for chunk in chunks:
        chunk.into(drafter.buffer)
    lesson = _lesson(drafter, chunks)
    facts, state = drafter.state() if with_state else ({}, {})
    played = drafter.played().cpu()
    share([played])
    return LearnerResult(lesson, played, facts, PackedTensors.of(state), chunks[0].learner)


def _lesson(online_drafter: OnlineDrafter, chunks: list[Chunk]) -> Lesson:
    """Learn from chunks, within the time budget if the seconds of decoding are known."""
    acceptance = Acceptance.of(text for chunk in chunks for text in chunk.acceptance.texts)
    seconds = [chunk.decode_s for chunk in chunks if chunk.decode_s is not None]
    return online_drafter.learn_within_budget(acceptance, sum(seconds)) if seconds else online_drafter.learn(acceptance)


def _die_with_parent() -> None:
    """Leave signals to the decoder, which ends this process; die with the decoder, even while stopped by SIGSTOP."""
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
