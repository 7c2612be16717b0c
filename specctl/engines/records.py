"""Request and answer, as every engine understands them."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from specctl.engines.vllm_worker import DrafterForm
from specctl.errors import SpecctlError

if TYPE_CHECKING:
    from torch import Tensor


MOST = 2**53  # of a counter that is believed


class EngineError(SpecctlError):
    """A server is not there, is not what it has to be, or went on failing."""


class Untouched(EngineError):
    """A server refused a drafter before it changed anything."""


class Lost(EngineError):
    """A request to which no answer came: it may have been carried out."""


class Malformed(Exception):
    """A response that is no answer to the request; another try may bring one."""


@dataclass(frozen=True)
class Ask:
    """One text to continue.

    Attributes:
        seed: of the engine's own random numbers; the text is not the one that our loop would draw.
    """

    prompt_ids: list[int]
    max_new_tokens: int
    temperature: float = 0.0
    top_k: int = 0  # 0 = off
    top_p: float = 1.0
    seed: int = 0


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < MOST


@dataclass(frozen=True)
class Drafting:
    """Counters of speculative decoding, of a text or of all since an engine was started.

    Attributes:
        rounds: drafts that were verified.
        drafted, accepted: tokens in them.
        accepted_at: how often the token at each place was accepted; empty where the engine does not say.
    """

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_at: list[int] = field(default_factory=list)

    @classmethod
    def of_histogram(cls, histogram: Any, drafted: Any) -> Drafting | None:
        """`histogram[k]`: rounds of which k tokens were accepted. None where they are no counts: an engine's own words,
        in which NaN and numbers of 400 digits are JSON, too."""
        if not isinstance(histogram, list) or not all(_is_count(count) for count in (*histogram, drafted)):
            return None
        at = [sum(histogram[k + 1 :]) for k in range(len(histogram) - 1)]
        return cls(sum(histogram), drafted, sum(at), at)

    @classmethod
    def total(cls, parts: Sequence[Drafting]) -> Drafting:
        """The sum of several."""
        depth = max((len(part.accepted_at) for part in parts), default=0)
        return cls(
            sum(part.rounds for part in parts),
            sum(part.drafted for part in parts),
            sum(part.accepted for part in parts),
            [sum(part.accepted_at[at] for part in parts if at < len(part.accepted_at)) for at in range(depth)],
        )

    @property
    def mat(self) -> float | None:
        """Mean tokens of a round, the one that the target adds included; None without rounds."""
        return 1 + self.accepted / self.rounds if self.rounds else None

    @property
    def shares(self) -> list[float]:
        """The share of rounds of which the token at each place was accepted."""
        return [count / self.rounds for count in self.accepted_at] if self.rounds else []

    def since(self, before: Drafting) -> Drafting:
        """The part that came since `before`."""
        earlier = before.accepted_at + [0] * (len(self.accepted_at) - len(before.accepted_at))
        return Drafting(
            self.rounds - before.rounds,
            self.drafted - before.drafted,
            self.accepted - before.accepted,
            [now - then for now, then in zip(self.accepted_at, earlier, strict=False)],
        )


@dataclass(frozen=True)
class Answer:
    """The continuation of a prompt.

    Attributes:
        output_ids: with the end-of-sequence token, where the engine gives it.
        stop: "eos" or "length".
        drafting: of this text alone; None where the engine does not say.
        seconds: from the request that succeeded to its answer.
        first_s: to its first token; None of an answer that was not streamed.
        tries: requests that it took.
    """

    output_ids: list[int]
    stop: str
    drafting: Drafting | None = None
    seconds: float = 0.0
    first_s: float | None = None
    tries: int = 1


@dataclass(frozen=True)
class Refusal:
    """A text that the engine will not continue, however often it is asked, in its own words."""

    reason: str


@dataclass(frozen=True)
class Wanted:
    """The hidden states of a target that a drafter learns from.

    Attributes:
        target, revision: its hub id or directory, for the command that serves it.
        ids: indices into `transformers`' hidden_states, ascending. The last one is that of the last layer, which is
            meant as it is before the final norm.
        width: values in one state.
    """

    target: str
    revision: str | None
    ids: tuple[int, ...]
    width: int

    @property
    def place(self) -> str:
        """The target on a command line, and its revision, for which both engines have the same option."""
        return shlex.quote(self.target) + (f" --revision {shlex.quote(self.revision)}" if self.revision else "")


@dataclass(frozen=True)
class EndpointFacts:
    """A server as it describes itself.

    Attributes:
        engine: "vllm" or "sglang".
        context_length: longest text, in tokens; None where it does not say.
    """

    engine: str
    version: str
    models: list[str]
    context_length: int | None


class Dialect(Protocol):
    """How an engine is spoken to: paths, what is sent, and what comes back. Every function is pure."""

    NAME: str
    GENERATE: str  # path
    NORMED: bool  # whether states of the last layer come from behind the final norm
    UNCACHED: str  # the option without which a text's beginning may be taken from a prefix cache

    def body(self, ask: Ask, model: str) -> dict[str, Any]:
        """The request of a text."""

    def answer(self, document: Any, ask: Ask) -> Answer:
        """The answer in a response. Raises Malformed."""

    def streamed(self, body: dict[str, Any]) -> dict[str, Any]:
        """The same request, to be answered piece by piece."""

    def begun(self, piece: Any) -> bool:
        """Whether there is a token in a piece."""

    def joined(self, pieces: list[Any]) -> Any:
        """The response that the pieces make. Raises Malformed."""

    def probe(self, ids: list[int], model: str) -> dict[str, Any]:
        """The request of log probabilities of a prompt's own tokens."""

    def logprobs(self, document: Any) -> list[float]:
        """Log probabilities of a prompt's tokens, but for the first, in such a response. Raises Malformed."""

    def drafting(self, metrics: str) -> Drafting | None:
        """The counters in a page of metrics; None where the engine does not draft, or does not tell."""

    def capturing(self, wanted: Wanted) -> str | None:
        """The command that starts a server which hands out hidden states; None where the engine cannot."""

    def capture(self, ids: list[int], model: str) -> dict[str, Any]:
        """The request of a text's hidden states."""

    def captured(self, document: Any, sent: int) -> str | list[Any] | None:
        """The states of a text of `sent` tokens in such a response: a file of the server's machine, or rows; None where
        it has none. Raises Malformed, EngineError."""

    def keeps_prefixes(self, metrics: str) -> bool:
        """Whether a page of metrics says that a prefix cache is on."""


@dataclass(frozen=True)
class Call:
    """A request to an engine's administration: GET where there is no body, POST otherwise.

    Attributes:
        after: what has to follow in any case once this was asked, after all calls that come later.
        changes: whether the drafter may be another one from here on.
    """

    path: str
    body: dict[str, Any] | None = None
    after: Call | None = None
    changes: bool = False


@dataclass(frozen=True)
class Exported:
    """A drafter as `specctl export` wrote it, to be published.

    Attributes:
        fingerprint: of its files.
        tensors: its weights; empty for engines that read them themselves.
    """

    directory: Path
    fingerprint: str
    outline: DrafterForm
    tensors: dict[str, Tensor]


@dataclass(frozen=True)
class Loaded:
    """The drafter that a server drafts with, as far as it says.

    Attributes:
        version: None of the one that it was started with.
        directory: that it came from, None where that is not known; `started`: of the one that it was started with.
        fingerprint: of its files, where the engine says so.
        method: what the engine calls its kind; empty where it does not say.
        ranks: processes that share its weights.
    """

    version: str | None
    directory: str | None
    started: str | None = None
    fingerprint: str = ""
    method: str = ""
    ranks: int = 1


class PublishingDialect(Protocol):
    """How an engine that runs is given other draft weights. Every function is pure."""

    SENDS: bool  # whether weights go over the wire; otherwise the engine reads the directory itself
    LOADED: tuple[Call, ...]  # what tells which drafter is loaded

    def loaded(self, documents: list[Any]) -> Loaded:
        """The drafter in the answers to `LOADED`. EngineError where the engine cannot be given another; Malformed."""

    def fits(self, drafter: Exported, first: Exported | None, now: Loaded) -> list[Call]:
        """Calls that ask before anything changes, whose refusals `taken` raises. Untouched where it is known already
        that the drafter does not fit. `first` is the one that the engine was started with, if it is here, too."""

    def swap(self, drafter: Exported, version: str | None, now: Loaded) -> list[Call]:
        """The calls that replace the weights; version None means those of the start."""

    def taken(self, call: Call, document: Any) -> float | None:
        """Seconds that the engine stood still for a call of `fits` or `swap`, where it says so. Untouched or
        EngineError where it refused; Malformed."""

    def unable(self, call: Call, status: int, said: str) -> EngineError:
        """The error that a status other than 200 means."""
