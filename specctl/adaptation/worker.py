"""A process that learns, and what it and the decoder say to each other. On several devices there are several of them:
the first hears the decoder and answers it, the others hear the first."""

from __future__ import annotations

import ctypes
import signal
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specctl.adaptation.buffer import ID_BYTES, BufferedText, ReplayBuffer
from specctl.adaptation.online_drafter import OnlineDrafter
from specctl.adaptation.ranks import ALONE, Ranks
from specctl.adaptation.stream_learner import Lesson
from specctl.adaptation.updates.watchdog import Acceptance
from specctl.decoding.target import load_target
from specctl.recipe import OnlineRecipe
from specctl.training.feature_files import Features

PR_SET_PDEATHSIG = 1
UNHEARD = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)  # often sent to a whole group of processes

State = tuple[dict[str, Any], dict[str, Tensor]]
"""The arguments of `OnlineDrafter.restore`: what JSON can say, and tensors."""


@dataclass(frozen=True)
class Parcel:
    """Tensors as one, to be sent: every tensor that is sent is an open file, and a state has some for each old text."""

    kinds: dict[str, tuple[torch.dtype, torch.Size]]
    bytes: Tensor

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Parcel:
        """On the CPU. The widest come first: a view as a wider dtype has to begin at a multiple of its size."""
        host = dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))
        parts = [x.cpu().reshape(-1).view(torch.uint8) for x in host.values()]
        joined = torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)
        return cls({name: (x.dtype, x.shape) for name, x in host.items()}, joined)

    def tensors(self) -> dict[str, Tensor]:
        """The tensors, as views of `bytes`."""
        parts = self.bytes.split([dtype.itemsize * shape.numel() for dtype, shape in self.kinds.values()])
        kinds = zip(self.kinds.items(), parts, strict=True)
        return {name: part.view(dtype).view(shape) for (name, (dtype, shape)), part in kinds}


@dataclass(frozen=True)
class Chunk:
    """A chunk of texts on its way to the learner; their features are joined, as every tensor is an open file."""

    texts: list[BufferedText]
    features: Features | None
    acceptance: Acceptance

    @property
    def bytes(self) -> int:
        """Size of its texts and their features."""
        parts = () if self.features is None else vars(self.features).values()
        return sum(x.nbytes for x in parts) + ID_BYTES * sum(len(text.example.tokens) for text in self.texts)

    def share(self) -> None:
        """Move the features to shared memory now: the queue's thread would do it while a state is being saved."""
        for x in () if self.features is None else vars(self.features).values():
            if x.numel():
                x.share_memory_()

    def state(self) -> State:
        """All that `restored` needs."""
        texts, features = [text.facts() for text in self.texts], self.features
        return {"texts": texts, "accepted": self.acceptance.texts}, dict(vars(features)) if features else {}

    @classmethod
    def restored(cls, facts: dict[str, Any], tensors: dict[str, Tensor]) -> Chunk:
        """The chunk of a `state`."""
        features = Features(**tensors) if tensors else None
        return cls([*map(BufferedText.of, facts["texts"])], features, Acceptance.of(facts["accepted"]))

    @classmethod
    def of(cls, buffer: ReplayBuffer, acceptance: Acceptance) -> Chunk:
        """The chunk of all texts in a buffer; without features where the target is to be run again."""
        kept = [buffer.kept[index] for index in buffer.texts if index in buffer.kept]
        if not kept:
            return cls(list(buffer.texts.values()), None, acceptance)
        joined = (torch.cat(parts) for parts in zip(*(vars(features).values() for features in kept), strict=True))
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
class Ready:
    """All processes stand by."""


@dataclass(frozen=True)
class Learnt:
    """The learner's answer to the chunks it was sent: its lesson, the weights that are played [P], and its state."""

    lesson: Lesson
    played: Tensor
    facts: dict[str, Any]
    state: Parcel


@dataclass(frozen=True)
class Failed:
    """The message of a process that ends with an error."""

    message: str


@dataclass(frozen=True)
class WorkerPlace:
    """Where a process learns: which of the devices is its own, with how many threads, and where it meets the others."""

    rank: int
    devices: list[str]
    threads: int
    meeting: Path


def live(
    place: WorkerPlace, recipe: OnlineRecipe, algo: str, seed: int, start: Path | None, inboxes: list[Any], outbox: Any
) -> None:
    """The process: learns from what comes, until it is killed. `inboxes` are those of all ranks."""
    _outlive_nobody()
    try:
        torch.set_num_threads(place.threads)
        group = Ranks(place.rank, place.devices, place.meeting) if len(place.devices) > 1 else ALONE
        loading = {"device": place.devices[place.rank], "device_map": None, "max_memory": None}
        target = load_target(**recipe.target.loading | loading, whole=recipe.buffer.reruns)
        pupil = OnlineDrafter(recipe, algo, target, seed, start, group)
        group.sum(torch.zeros(1))  # returns when all are here
        if place.rank == 0:
            outbox.put(Ready())
        for heard in _heard(place.rank, inboxes):
            if not isinstance(heard, list):
                pupil.restore(heard[0], heard[1].tensors())
                continue
            for chunk in heard:
                chunk.into(pupil.buffer)
            lesson = pupil.learn(Acceptance.of(text for chunk in heard for text in chunk.acceptance.texts))
            if place.rank == 0:
                facts, state = pupil.state()
                outbox.put(Learnt(lesson, pupil.played().cpu(), facts, Parcel.of(state)))
    except Exception as error:
        outbox.put(Failed(f"{type(error).__name__}: {error}"))


def _heard(rank: int, inboxes: list[Any]) -> Iterator[list[Chunk] | tuple[dict[str, Any], Parcel]]:
    """Chunks to learn from at once, or a state to go on from. The first rank passes on what it hears, so that all learn
    from the same chunks: features stay where they are, in shared memory."""
    inbox, others = inboxes[rank], [] if rank else inboxes[1:]
    while True:
        heard = inbox.get()
        for other in others:
            other.put(heard)
        yield heard


def _outlive_nobody() -> None:
    """Leave signals to the decoder, which ends this process; and die with it, even while standing still."""
    for number in UNHEARD:
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
