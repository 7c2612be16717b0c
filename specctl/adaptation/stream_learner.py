"""Base class of the learners along a stream: an online drafter, in this or another process, or a pool's specialists."""

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
from specctl.decoding.protocols import Controller
from specctl.decoding.records import Label, RoundResult
from specctl.decoding.state import DecodeState
from specctl.decoding.target import Target
from specctl.recipe import DrafterStreamRecipe


@dataclass(frozen=True)
class Lesson:
    """Result of learning from a chunk: the watchdog's ruling on the update before, the new update, and both times."""

    ruling: Ruling
    outcome: UpdateOutcome
    texts: int  # texts learned from
    tokens: int  # response tokens of these texts
    dropped: int  # texts that the buffer had no room for, in total
    rates: tuple[float, ...]  # η of the members after the update
    learn_s: float
    swap_s: float = 0.0  # building a drafter with the new weights
    lag_chunks: int = 0  # lag: answered chunks not learned from yet


class StreamLearner(ABC):
    """A contender that learns from the texts it has drafted. The engine that decodes with its `controller` must call
    `observe` after every round, and keep the target's hidden states if `keeps_hidden`.

    Attributes:
        read_taps: the target's hidden states that the learning drafters read.
    """

    recipe: DrafterStreamRecipe
    target: Target
    buffer: ReplayBuffer
    read_taps: tuple[int, ...]

    @property
    @abstractmethod
    def controller(self) -> Controller:
        """Controller of the drafters with their present weights."""

    @property
    def keeps_hidden(self) -> bool:
        """Whether `observe` reads the target's hidden states."""
        return self.buffer.keeps_hidden

    def observe(self, state: DecodeState, result: RoundResult) -> None:
        """Take in the tokens that a round has committed."""
        self.buffer.observe(state)

    def labels(self, labels: list[Label]) -> list[Label]:
        """Labels of the texts of one batch, with the keys of their games."""
        return labels

    @abstractmethod
    def learn_chunk(self, acceptance: Acceptance, decode_s: float) -> Lesson:
        """Learn from the chunk that was just answered in `decode_s` seconds, and draft with the new weights."""

    @abstractmethod
    def retarget(self, target: Target) -> None:
        """Draft for, and learn from, another target from now on: a later checkpoint of the same model.

        The learned weights stay; texts of the old target are forgotten. Raises CheckpointError if a drafter does not
        fit.
        """

    @abstractmethod
    def save(self, directory: Path, info: dict[str, Any]) -> Path:
        """Write the played weights below a directory."""

    @abstractmethod
    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """(JSON-able facts, tensors) that `restore` needs, between two chunks."""

    @abstractmethod
    def restore(self, facts: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """Restore a `state`. Raises CheckpointError if it belongs to another learner."""

    def _new_buffer(self) -> ReplayBuffer:
        """An empty buffer for the present target."""
        size, feedback = int(self.recipe.buffer.max_mb * 2**20), self.recipe.buffer.feedback
        return ReplayBuffer(self.target, self.read_taps, max_bytes=size, feedback=feedback)

    @contextmanager
    def warming_up(self) -> Iterator[None]:
        """Context in which answers leave no trace: they are not learned from, and displace no buffered text."""
        kept, self.buffer = self.buffer, self._new_buffer()
        try:
            yield
        finally:
            self.buffer = kept

    @contextmanager
    def active(self) -> Iterator[None]:
        """Context for this contender's turn to draft."""
        yield

    def finish(self) -> None:  # noqa: B027
        """Wait for a learner in another process to finish; the stream has ended."""

    def close(self) -> None:  # noqa: B027
        """Free resources other than memory."""
