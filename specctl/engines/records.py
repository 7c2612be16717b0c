"""Records that all engines share: requests, answers, draft counters, administration calls, and the engine dialects."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

from specctl.engines.vllm_worker import DrafterLayout
from specctl.errors import SpecctlError

if TYPE_CHECKING:
    from torch import Tensor


MAX_COUNTER = 2**53  # limit of a counter; larger values are not believed


class EngineError(SpecctlError):
    """A server is missing, unsuitable, or keeps failing."""


class DrafterRejected(EngineError):
    """A server refused a drafter before it changed anything."""


class NoResponse(EngineError):
    """A request got no answer: the server may have carried it out or not."""


class MalformedResponse(Exception):
    """A response that does not answer the request. Another try may succeed."""


@contextmanager
def parsing(what: str) -> Iterator[None]:
    """Raise MalformedResponse if the block does not find `what` in a document."""
    try:
        yield
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, StopIteration) as error:
        raise MalformedResponse(f"no {what} ({type(error).__name__}: {error})") from error


@dataclass(frozen=True)
class GenerationRequest:
    """A request to continue one text.

    Attributes:
        seed: seed of the engine's own random numbers. Our decoding loop would sample a different text.
    """

    prompt_ids: list[int]
    max_new_tokens: int
    temperature: float = 0.0
    top_k: int = 0  # 0 = off
    top_p: float = 1.0
    seed: int = 0


def is_count(value: Any) -> TypeGuard[int]:
    """Whether a value from an engine is a credible counter. JSON may hold NaN and numbers of 400 digits."""
    return type(value) is int and 0 <= value < MAX_COUNTER


@dataclass(frozen=True)
class DraftCounters:
    """Counters of speculative decoding, for one text or since an engine was started.

    Attributes:
        rounds: number of drafts that were verified.
        drafted, accepted: number of draft tokens, and of accepted draft tokens.
        accepted_at: number of rounds that accepted the token at each draft position; empty if the engine does not say.
    """

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_at: list[int] = field(default_factory=list)

    @classmethod
    def of_histogram(cls, histogram: Any, drafted: Any) -> DraftCounters | None:
        """Counters from `histogram[k]`, the number of rounds that accepted k tokens.

        Returns None if the values are not counts. The engine wrote them, and JSON may hold NaN and numbers of 400
        digits.
        """
        if not isinstance(histogram, list) or not all(is_count(count) for count in (*histogram, drafted)):
            return None
        at = [sum(histogram[k + 1 :]) for k in range(len(histogram) - 1)]
        return cls(sum(histogram), drafted, sum(at), at)

    @classmethod
    def total(cls, parts: Sequence[DraftCounters]) -> DraftCounters:
        """The sum of several counters."""
        depth = max((len(part.accepted_at) for part in parts), default=0)
        return cls(
            sum(part.rounds for part in parts),
            sum(part.drafted for part in parts),
            sum(part.accepted for part in parts),
            [sum(part.accepted_at[at] for part in parts if at < len(part.accepted_at)) for at in range(depth)],
        )

    @property
    def mat(self) -> float | None:
        """Mean tokens per round, including the bonus token, or None without rounds."""
        return 1 + self.accepted / self.rounds if self.rounds else None

    @property
    def acceptance_by_position(self) -> list[float]:
        """Share of rounds that accepted the token at each draft position."""
        return [count / self.rounds for count in self.accepted_at] if self.rounds else []

    def since(self, before: DraftCounters) -> DraftCounters:
        """The increase since `before`."""
        earlier = before.accepted_at + [0] * (len(self.accepted_at) - len(before.accepted_at))
        return DraftCounters(
            self.rounds - before.rounds,
            self.drafted - before.drafted,
            self.accepted - before.accepted,
            [now - then for now, then in zip(self.accepted_at, earlier, strict=False)],
        )


@dataclass(frozen=True)
class GenerationResult:
    """The continuation of a prompt.

    Attributes:
        output_ids: include the end-of-sequence token if the engine reports it.
        stop: "eos" or "length".
        drafting: counters of this text alone, or None if the engine does not report them.
        seconds: from the successful request to its answer.
        first_s: seconds to the first token, or None if the answer was not streamed.
        tries: number of requests sent for this answer.
        cached_tokens: tokens of the prompt that the engine took from its prefix cache, or None if it does not say.
    """

    output_ids: list[int]
    stop: str
    drafting: DraftCounters | None = None
    seconds: float = 0.0
    first_s: float | None = None
    tries: int = 1
    cached_tokens: int | None = None


@dataclass(frozen=True)
class Refusal:
    """The engine will not continue this text, however often it is asked. `reason` holds its own words."""

    reason: str


@dataclass(frozen=True)
class HiddenStatesSpec:
    """The hidden states of a target that a drafter trains on.

    Attributes:
        target, revision: hub id or directory of the target, for the command that serves it.
        ids: indices into `transformers`' hidden_states, ascending. The last index means the output of the last layer
            before the final norm.
        width: number of values in one state.
        adapters: names of the models that have adapters of the target, with the directories of these (None: unknown).
    """

    target: str
    revision: str | None
    ids: tuple[int, ...]
    width: int
    adapters: tuple[tuple[str, str | None], ...] = ()

    @property
    def target_arguments(self) -> str:
        """The target and its revision as command-line arguments, which both engines spell alike."""
        return shlex.quote(self.target) + (f" --revision {shlex.quote(self.revision)}" if self.revision else "")


@dataclass(frozen=True)
class EndpointFacts:
    """A server's description of itself.

    Attributes:
        engine: "vllm", "sglang" or "llama.cpp".
        context_length: longest text in tokens, or None if the server does not say.
        slots: texts that it continues at once while others wait (None = no fixed number).
    """

    engine: str
    version: str
    models: list[str]
    context_length: int | None
    slots: int | None = None


class Dialect(Protocol):
    """The HTTP dialect of an engine: paths, request bodies, and parsers of responses. Every function is pure."""

    NAME: str
    GENERATE: str  # path
    HIDDEN_STATES_NORMED: bool  # whether states of the last layer are taken after the final norm
    # Option that turns the prefix cache off, which could hide the states of a text's beginning.
    NO_PREFIX_CACHE_FLAG: str

    def request_body(self, ask: GenerationRequest, model: str) -> dict[str, Any]:
        """Body of a request to continue a text."""

    def parse_answer(self, document: Any, ask: GenerationRequest) -> GenerationResult | Refusal:
        """Parse the answer in a response. Raises MalformedResponse."""

    def with_streaming(self, body: dict[str, Any]) -> dict[str, Any]:
        """Make a request's body ask for a streamed answer."""

    def has_token(self, piece: Any) -> bool:
        """Whether a piece of a stream holds a token."""

    def join_stream(self, pieces: list[Any]) -> Any:
        """Join the pieces of a stream into one response. Raises MalformedResponse."""

    def tokenize_request(self, text: str, model: str) -> dict[str, Any]:
        """Body of a request for the token ids of a text."""

    def logprobs_request(self, ids: list[int], model: str) -> dict[str, Any]:
        """Body of a request for the log probabilities of a prompt's own tokens, or of the tokens after it."""

    def parse_logprobs(self, document: Any) -> list[float]:
        """Log probabilities that tell models apart, from the response to `logprobs_request`. Raises
        MalformedResponse."""

    def parse_draft_counters(self, metrics: str) -> DraftCounters | None:
        """The draft counters in a page of metrics, or None if the engine does not draft or does not report them."""

    def parse_prefix_cache(self, metrics: str) -> tuple[int, int] | None:
        """The tokens in a page of metrics that the engine has looked up in its prefix cache, and that it found there.
        Returns None if the page does not tell."""

    def capture_command(self, wanted: HiddenStatesSpec) -> str | None:
        """Command that starts a server which outputs hidden states, or None if the engine cannot."""

    def hidden_states_request(self, ids: list[int], model: str) -> dict[str, Any]:
        """Body of a request for a text's hidden states."""

    def parse_hidden_states(self, document: Any, sent: int) -> str | list[Any] | None:
        """Hidden states of a text of `sent` tokens, from the response to `hidden_states_request`.

        Returns a path on the server's machine, or rows, or None if the response has no states. Raises
        MalformedResponse, EngineError.
        """

    def has_prefix_cache(self, metrics: str) -> bool:
        """Whether a page of metrics says that a prefix cache is on."""


@dataclass(frozen=True)
class AdminCall:
    """A request to an engine's administration: GET without a body, otherwise POST.

    Attributes:
        after: call that must follow once this one was sent, even after a failure. It comes after all later calls.
        changes: whether the server may have a different drafter after this call.
    """

    path: str
    body: dict[str, Any] | None = None
    after: AdminCall | None = None
    changes: bool = False


@dataclass(frozen=True)
class ExportedDrafter:
    """A drafter as `specctl export` wrote it, to be published.

    Attributes:
        fingerprint: hash of its files.
        tensors: its weights; empty for engines that read the directory themselves.
    """

    directory: Path
    fingerprint: str
    outline: DrafterLayout
    tensors: dict[str, Tensor]


@dataclass(frozen=True)
class LoadedDrafter:
    """The drafter that a server uses, as far as the server tells.

    Attributes:
        version: name given at publication, or None for the drafter that the server was started with.
        directory: path of the drafter in use, or None if unknown.
        started: path of the drafter that the server was started with.
        fingerprint: hash of the drafter's files, if the engine reports it.
        method: the engine's name for this kind of drafter; empty if the engine does not say.
        ranks: number of processes that share the weights.
    """

    version: str | None
    directory: str | None
    started: str | None = None
    fingerprint: str = ""
    method: str = ""
    ranks: int = 1


class WeightUpdateDialect(Protocol):
    """The calls that give a running engine other draft weights. Every function is pure."""

    SENDS_WEIGHTS: bool  # whether weights are sent over the wire; otherwise the engine reads the directory itself
    LOADED_CALLS: tuple[AdminCall, ...]  # calls that ask for the loaded drafter

    def parse_loaded(self, documents: list[Any]) -> LoadedDrafter:
        """Parse the loaded drafter from the answers to `LOADED_CALLS`.

        Raises EngineError if this engine's drafter cannot be replaced; MalformedResponse.
        """

    def compatibility_calls(
        self, drafter: ExportedDrafter, first: ExportedDrafter | None, now: LoadedDrafter
    ) -> list[AdminCall]:
        """Calls that ask whether the drafter fits, before anything changes.

        `check_response` raises the refusals in their answers. `first` is the drafter that the engine was started with,
        if it is on this machine. Raises DrafterRejected if the drafter is already known not to fit.
        """

    def swap_calls(self, drafter: ExportedDrafter, version: str | None, now: LoadedDrafter) -> list[AdminCall]:
        """Calls that replace the weights. Version None means the drafter that the engine was started with."""

    def check_response(self, call: AdminCall, document: Any) -> float | None:
        """Check the answer to a call of `compatibility_calls` or `swap_calls`.

        Returns the seconds that the engine stood still, or None if it does not report them. Raises DrafterRejected or
        EngineError if the engine refused; MalformedResponse.
        """

    def error_for_status(self, call: AdminCall, status: int, text: str) -> EngineError:
        """The error that a status other than 200 means."""
