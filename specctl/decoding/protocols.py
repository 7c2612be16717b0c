"""Protocols of drafters and controllers, as the decoding loop uses them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from specctl.decoding.device.device_batch import DeviceBatch
from specctl.decoding.records import DeviceRoundResult, DraftTree, Score, Sequence, Verdict
from specctl.decoding.state import DecodeState

OnRound = Callable[[DecodeState, DraftTree, Verdict], None]
OnCommit = Callable[[DecodeState], None]


class Proposer(Protocol):
    """Interface of anything that drafts for one round."""

    def propose(self, state: DecodeState, budget: int) -> DraftTree:
        """Draft at most `budget` nodes per sequence, from the last committed token on."""
        ...


class Drafter(Proposer, Protocol):
    """Interface of a model or an index that proposes tokens, and may stay idle while other drafters run.

    `taps` are the target's hidden states it reads (indices into `transformers`' hidden_states; empty for independent
    drafters). State that belongs to a sequence being decoded lives in `state.memory[self]`, never in the drafter.
    """

    taps: tuple[int, ...]

    def advance(self, state: DecodeState) -> None:
        """Consume the committed positions not seen yet (lazy: an idle drafter catches up in one call)."""
        ...

    def score(self, state: DecodeState, spans: list[range], depths: int = 1) -> list[Score]:
        """Proposals for the committed positions `spans[b]` of every live sequence b, at draft depths 1 .. `depths`.

        A position is the place of the predicted token. Each must be at least 2, so that there is text and a feature to
        draft from, and below the length of its sequence. A span may be empty.
        """
        ...

    def lag(self, state: DecodeState) -> list[int]:
        """The drafter's lag: for every sequence, the number of tokens that the next `advance` has to read. This is the
        cost of switching to the drafter."""
        ...

    def invalidate(self, state: DecodeState) -> None:
        """Forget cached keys and values (after a weight update)."""
        ...


class DeviceDraft(Protocol):
    """A drafter's part in rounds that run entirely on the device (device/rounds.py), for the sequences of one batch.

    Attributes:
        depth: longest path in its drafts; 0 = plain decoding.
        reach: cache slots after the committed text that its rows and the target's verification rows take.
        carried: tensors that a round changes and the next one reads.
    """

    depth: int
    reach: int
    carried: list[Tensor]

    def load(self, state: DecodeState) -> None:
        """Catch up with the committed text, and take over the memory of it from the host."""
        ...

    def fits(self, state: DecodeState) -> bool:
        """Whether that memory is still at the addresses it had when it was first taken over."""
        ...

    def propose(self, sequences: DeviceBatch, span: int) -> DraftTree:
        """Draft with one shape for all rounds, with padding if a sequence has no room for it."""
        ...

    def advance(self, sequences: DeviceBatch, before: Tensor, span: int) -> None:
        """Consume the tokens committed after the first `before` [B] tokens."""
        ...

    def store(self, state: DecodeState) -> None:
        """Return the memory of the committed text to the host."""
        ...


@runtime_checkable
class OnDevice(Protocol):
    """A drafter that can draft entirely on the device.

    `fixed_shape`: its drafts have one shape for any text; otherwise each round asks the host.
    """

    fixed_shape: bool

    def on_device(self, state: DecodeState, budget: int) -> DeviceDraft | None:
        """The drafter's part in rounds with at most `budget` nodes per sequence, or None if its drafts or its model do
        not support this."""
        ...

    def invalidate(self, state: DecodeState) -> None:
        """Forget cached keys and values, as in `Drafter.invalidate`."""
        ...


class Controller(ABC):
    """Chooses the drafter for the sequences assigned to it with `begin`, and learns from the target's verdicts.

    A state may also hold idle slots and sequences of other controllers.

    Attributes:
        accepts_late_counts: the controller needs only counts of each round, and may get them one round late: it chooses
            the next round before it is told the result of the last one (`observe_device_round`). Rounds can then run on
            the device (device/rounds.py). Otherwise every round goes through `observe`.
        keeps_hidden: `accepts_late_counts` holds only if the state keeps the target's hidden states
            (`DecodeState.hidden`).
    """

    accepts_late_counts: bool = False
    keeps_hidden: bool = False

    def begin(self, text: Sequence) -> None:  # noqa: B027 - most have nothing to do
        """Prepare for a sequence that is about to be prefilled. An exception raised here ends the sequence."""

    def must_wait(self, state: DecodeState) -> bool:
        """Whether all pending rounds must be reported before the next choice. Only for `accepts_late_counts`
        controllers."""
        return False

    @abstractmethod
    def choose(self, state: DecodeState) -> Proposer:
        """Choose the drafter of the next round. At least one sequence of this controller is live. If the controller is
        `accepts_late_counts`, the state may lag by one round."""

    def prepare_round(self, state: DecodeState) -> None:  # noqa: B027
        """Prepare for a round of the chosen drafter, when the state is complete. It is not called between two device
        rounds of one drafter, and may be called twice for a round."""

    @abstractmethod
    def observe(self, state: DecodeState, draft: DraftTree, verdict: Verdict) -> Any:
        """Learn from a committed round."""

    def observe_device_round(self, state: DecodeState, round: DeviceRoundResult) -> None:  # noqa: B027
        """Learn from a round that ran on the device: the oldest choice not reported yet. If a sequence had ended before
        the round, the choice made for it was not played."""

    def on_drained(self, state: DecodeState) -> None:  # noqa: B027
        """Do work that is impossible while a device round is pending; none is pending now. If sequences have just
        ended, their rows still exist."""

    def withdraw_choice(self, state: DecodeState) -> None:  # noqa: B027
        """Take back the last choice: no draft could be made."""

    def end(self, text: Sequence) -> None:  # noqa: B027
        """Forget a sequence that has ended, for any reason."""
