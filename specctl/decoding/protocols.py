"""Protocols of drafters and controllers, as the decoding loop uses them."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from collections.abc import Sequence as Many
from typing import Protocol

from torch import Tensor

from specctl.decoding.device.device_batch import DeviceBatch
from specctl.decoding.records import DraftTree, RoundResult, Score, Sequence, Verdict
from specctl.decoding.state import DecodeState

OnRound = Callable[[DecodeState, RoundResult], None]
OnPrefill = Callable[[DecodeState, list[int], Tensor], None]


class DeviceDraft(ABC):
    """A drafter's part in rounds that run entirely on the device (device/rounds.py), for the sequences of one batch. By
    default it has no memory of the text.

    Attributes:
        depth: longest path in its drafts; 0 = plain decoding.
        reach: cache slots after the committed text that its rows and the target's verification rows take.
        carried: tensors that a round changes and the next one reads.
        reads_text: the host drafts (part of) it in `load`, from the committed text. So `load` runs before every round,
            and no round starts before the host has read the previous one.
        host_seconds: time that the host took to draft in the last `load`.
    """

    depth: int = 0
    reach: int = 1
    carried: Many[Tensor] = ()
    reads_text: bool = False
    host_seconds: float = 0.0

    def load(self, state: DecodeState) -> None:  # noqa: B027
        """Catch up with the committed text, and take over the memory of it from the host."""

    def fits(self, state: DecodeState) -> bool:
        """Whether that memory is still at the addresses it had when it was first taken over."""
        return True

    @abstractmethod
    def propose(self, sequences: DeviceBatch, span: int) -> DraftTree:
        """Draft with one shape for all rounds, with padding if a sequence has no room for it."""

    def advance(self, sequences: DeviceBatch, before: Tensor, span: int) -> None:  # noqa: B027
        """Consume the tokens committed after the first `before` [B] tokens."""

    def store(self, state: DecodeState) -> None:  # noqa: B027
        """Return the memory of the committed text to the host."""


class Proposer(Protocol):
    """Base class of anything that drafts for one round. By default its rounds run on the host.

    Attributes:
        weighs_rows: it never proposes more nodes than their rows are worth, even in a batch.
    """

    weighs_rows: bool = False

    def propose(self, state: DecodeState, budget: int) -> DraftTree:
        """Draft at most `budget` nodes per sequence, from the last committed token on."""
        ...

    def invalidate(self, state: DecodeState) -> None:
        """Forget cached keys and values, if there are any: weights have changed, or a draft has failed."""
        return

    @property
    def kind(self) -> str:
        """Key under which graphs of its rounds are refused, with the batch size."""
        return type(self).__name__

    @property
    def fixed_shape(self) -> bool:
        """Whether its drafts have one shape for any text. Otherwise the host decides in every round."""
        return False

    def on_device(self, state: DecodeState, budget: int) -> DeviceDraft | None:
        """Its part in rounds on the device with at most `budget` nodes per sequence, or None if it has no fixed shape,
        or its drafts or its model do not support this."""
        return None


class ReadsVerdicts(ABC):
    """Base class of drafters that learn from the target's predictions at all nodes of a draft, in rounds that the host
    runs. No protocol: every round checks every drafter, and with a protocol a check takes 10 µs."""

    @abstractmethod
    def read_verdict(self, state: DecodeState, draft: DraftTree, verdict: Verdict) -> None:
        """Read the verdict of a draft that is not committed yet. The draft may be another drafter's, or a larger
        one."""


class Drafter(Proposer, Protocol):
    """Base class of models and indexes that propose tokens, and may stay idle while other drafters run. By default a
    drafter has no tokens to catch up with.

    `taps` are the target's hidden states it reads (indices into `transformers`' hidden_states; empty for independent
    drafters). State that belongs to a sequence being decoded lives in `state.memory[self]`, never in the drafter.
    """

    taps: tuple[int, ...] = ()

    def advance(self, state: DecodeState) -> None:
        """Consume the committed positions not seen yet (lazy: an idle drafter catches up in one call)."""
        return

    def score(self, state: DecodeState, spans: list[range], depths: int = 1) -> list[Score]:
        """Proposals for the committed positions `spans[b]` of every live sequence b, at draft depths 1 .. `depths`.

        A position is the place of the predicted token. Each must be at least 2, so that there is text and a feature to
        draft from, and below the length of its sequence. A span may be empty.
        """
        ...

    def lag(self, state: DecodeState) -> list[int]:
        """The drafter's lag: for every sequence, the number of tokens that the next `advance` has to read. This is the
        cost of switching to the drafter."""
        return [0] * state.batch


class Controller(ABC):
    """Chooses the drafter of every round, and learns from the results.

    Attributes:
        taps: the target's hidden states that its drafters read.
        accepts_late_counts: the controller needs only the counts of a round, and may get them one round late: it
            chooses round r + 1 before it observes round r. Rounds can then run on the device (device/rounds.py).
        keeps_hidden: `accepts_late_counts` holds only if the state keeps the target's hidden states
            (`DecodeState.hidden`).
    """

    taps: tuple[int, ...] = ()
    accepts_late_counts: bool = False
    keeps_hidden: bool = False

    def begin(self, text: Sequence) -> None:  # noqa: B027 - most have nothing to do
        """Prepare for a sequence that is about to be prefilled. An exception raised here ends the sequence."""

    @abstractmethod
    def choose(self, state: DecodeState) -> Proposer | None:
        """Choose the drafter of the next round. At least one sequence is live.

        A late controller may return None while rounds are pending (`state.at_rest` is False). The pending rounds are
        then observed. If a sequence is still live, `choose` is called again, and must not return None.
        """

    @abstractmethod
    def observe(self, state: DecodeState, result: RoundResult) -> None:
        """Learn from the oldest round not observed yet. A sequence without counts did not take part: the choice made
        for it was not played. If sequences have just ended, their rows still exist."""

    def end(self, text: Sequence) -> None:  # noqa: B027
        """Forget a sequence that has ended, for any reason. Its choices that were not observed were not played."""
