"""Learners along a stream: one drafter, here or in another process, or the specialists of a pool."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from specctl.adaptation.buffer import ReplayBuffer
from specctl.adaptation.updates.ensemble import UpdateOutcome
from specctl.adaptation.updates.watchdog import Acceptance, Ruling
from specctl.decoding.records import Label
from specctl.decoding.target import Target
from specctl.recipe import OnlineRecipe


@dataclass(frozen=True)
class Lesson:
    """The result of a chunk: the watchdog's ruling on the update before, the new update, and what both cost."""

    ruling: Ruling
    outcome: UpdateOutcome
    texts: int  # learnt from
    tokens: int  # of their responses
    dropped: int  # texts that the buffer had no room for, so far
    rates: tuple[float, ...]  # η of the members afterwards
    learn_s: float
    swap_s: float = 0.0  # making a drafter of the new weights
    behind: int = 0  # chunks that were answered and not learnt from yet


def new_buffer(recipe: OnlineRecipe, target: Target, taps: tuple[int, ...]) -> ReplayBuffer:
    """An empty one, as large as the recipe allows."""
    options = recipe.buffer
    return ReplayBuffer(target, taps, max_bytes=int(options.max_mb * 2**20), feedback=options.feedback)


class StreamLearner(ABC):
    """A contender that learns from the texts that it has drafted.

    Attributes:
        buffer: its `observe` is the decoding loop's `on_commit`.
    """

    buffer: ReplayBuffer

    @abstractmethod
    def drafting(self, labels: list[Label]) -> dict[str, Any]:
        """Options of `decode` for texts of these labels."""

    @abstractmethod
    def sit(self, acceptance: Acceptance, decode_s: float) -> Lesson:
        """Learn from the chunk that was just answered in so many seconds, and play the new weights from now on."""

    @abstractmethod
    def retarget(self, target: Target) -> None:
        """Draft for, and learn from, another target from now on: a later checkpoint of the same model.

        What was learnt stays; texts of the old target are forgotten. CheckpointError where a drafter does not fit it.
        """

    @abstractmethod
    def save(self, directory: Path, info: dict[str, Any]) -> Path:
        """Write what is played below a directory."""

    @abstractmethod
    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """(what JSON can say, tensors): all that `restore` needs, between two chunks."""

    @abstractmethod
    def restore(self, facts: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """Go on from what `state` has told. CheckpointError where it is that of another learner."""

    @abstractmethod
    def _new_buffer(self) -> ReplayBuffer:
        """An empty buffer for the present target."""

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """While answers are to leave no trace: nothing is learnt from them, and no text makes room for theirs."""
        kept, self.buffer = self.buffer, self._new_buffer()
        try:
            yield
        finally:
            self.buffer = kept

    @contextmanager
    def awake(self) -> Iterator[None]:
        """While it is this one's turn to draft."""
        yield

    def finish(self) -> None:  # noqa: B027
        """The stream has ended: wait for what learns elsewhere."""

    def close(self) -> None:  # noqa: B027
        """Free what it holds besides memory."""
