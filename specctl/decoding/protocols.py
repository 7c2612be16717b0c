"""The protocols through which decoding knows drafters and controllers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from specctl.decoding.device.resident import Resident
from specctl.decoding.records import DraftTree, HeardRound, Score, Sequence, Verdict
from specctl.decoding.state import DecodeState

OnRound = Callable[[DecodeState, DraftTree, Verdict], None]
OnCommit = Callable[[DecodeState], None]


class Proposer(Protocol):
    """Anything that drafts for one round."""

    def propose(self, state: DecodeState, budget: int) -> DraftTree:
        """At most `budget` nodes per sequence, from the last committed token."""
        ...


class Drafter(Proposer, Protocol):
    """A model or an index that proposes tokens, and can be kept while others draft.

    `taps` are the target's hidden states it reads (indices into `transformers`' hidden_states; empty for independent
    drafters). State that belongs to a sequence being decoded lives in `state.memory[self]`, never in the drafter.
    """

    taps: tuple[int, ...]

    def advance(self, state: DecodeState) -> None:
        """Consume the committed positions it has not seen yet (lazy: an idle drafter catches up in one call)."""
        ...

    def score(self, state: DecodeState, spans: list[range], depths: int = 1) -> list[Score]:
        """Its rows at the committed positions `spans[b]` of every live sequence, at draft depths 1 .. `depths`.

        Positions are those of the tokens that are predicted; each must be at least 2 (there is text and a feature to
        draft from) and below the length of its sequence. A span may be empty.
        """
        ...

    def behind(self, state: DecodeState) -> list[int]:
        """How many tokens of every live sequence the next `advance` has to read: what it costs to switch to it."""
        ...

    def invalidate(self, state: DecodeState) -> None:
        """Forget cached keys and values (after a weight update)."""
        ...


class DeviceDraft(Protocol):
    """A drafter's part of rounds that run on the device alone (device/rounds.py), for the sequences of one batch.

    Attributes:
        depth: longest path that it drafts; 0 = plain decoding.
        reach: cache slots behind the committed text that its rows and those of the target's step take.
        carried: tensors that a round changes and the next one reads.
    """

    depth: int
    reach: int
    carried: list[Tensor]

    def load(self, state: DecodeState) -> None:
        """Catch up with the committed text; take over the host's memory of it."""
        ...

    def fits(self, state: DecodeState) -> bool:
        """Whether that memory is where it was when it was first taken over."""
        ...

    def propose(self, sequences: Resident, span: int) -> DraftTree:
        """A draft of the same shape in every round, with padding where a sequence has no room for it."""
        ...

    def advance(self, sequences: Resident, before: Tensor, span: int) -> None:
        """Consume what was committed behind the first `before` [B] tokens."""
        ...

    def store(self, state: DecodeState) -> None:
        """Hand the memory of the committed text back to the host."""
        ...


@runtime_checkable
class OnDevice(Protocol):
    """A drafter that can draft on the device alone.

    `even`: its drafts have one shape, whatever the text; else each round asks the host.
    """

    even: bool

    def on_device(self, state: DecodeState, budget: int) -> DeviceDraft | None:
        """Its part of rounds with at most `budget` nodes per sequence; None where its shape or its model cannot."""
        ...

    def invalidate(self, state: DecodeState) -> None:
        """As of a `Drafter`."""
        ...


class Controller(ABC):
    """Chooses who drafts for the texts that it was told of, and learns from what the target said.

    A state may hold other texts, too: those of other controllers, and slots that are idle.

    Attributes:
        late: numbers are enough for it, one round late: the next round is chosen before it hears of the last one
            (`heard`). Then rounds can run on the device (device/rounds.py); else every round is `observe`d.
        keeps: it is late only where the state keeps what the target said (`DecodeState.hidden`).
    """

    late: bool = False
    keeps: bool = False

    def begin(self, text: Sequence) -> None:  # noqa: B027 - most have nothing to do
        """Prepare for a text whose prompt is about to be read. What is raised here ends that text."""

    def waits(self, state: DecodeState) -> bool:
        """Whether the next round is to be chosen only when it has heard of all rounds. For who is `late`."""
        return False

    @abstractmethod
    def choose(self, state: DecodeState) -> Proposer:
        """Name the drafter of the next round; some text of its own is live. Of who is `late` the state may be a round
        behind."""

    def ready(self, state: DecodeState) -> None:  # noqa: B027
        """Prepare for a round of whoever was chosen last; all is known now. It is not asked between two rounds of one
        drafter on the device, and sometimes twice."""

    @abstractmethod
    def observe(self, state: DecodeState, draft: DraftTree, verdict: Verdict) -> Any:
        """Learn from a round, which is committed."""

    def heard(self, state: DecodeState, round: HeardRound) -> None:  # noqa: B027
        """Learn from the oldest round that was chosen and not heard of, which ran on the device. A round that was
        chosen for a text after it had ended was none."""

    def settled(self, state: DecodeState) -> None:  # noqa: B027
        """Do what cannot be done while a round is under way on the device: nothing is now. Whenever texts have ended,
        they are still there."""

    def unplayed(self, state: DecodeState) -> None:  # noqa: B027
        """Take the last choice back: nobody could draft."""

    def end(self, text: Sequence) -> None:  # noqa: B027
        """Let go of a text, however it has ended."""
