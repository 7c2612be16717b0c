"""Rewrite the requests that a proxy passes on, and read token ids and draft counters from their answers.

An engine reports ids and counters only if a request asks for them. Fields that the proxy asked for are removed from the
answer again, so a client sees the answer to its own request.
"""

import json
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specctl.engines import llamacpp, sglang, vllm
from specctl.engines.records import DraftCounters

OPENAI_PATHS = frozenset({"/v1/chat/completions", "/v1/completions"})
"""Paths with texts as answers that all engines have."""

OWN_PATHS = {"/generate": sglang.NAME, llamacpp.GENERATE: llamacpp.NAME}
"""Paths with texts as answers that one engine has, and that engine."""

COUNTED_PATHS = {
    vllm.NAME: OPENAI_PATHS,
    sglang.NAME: frozenset({"/generate"}),
    llamacpp.NAME: OPENAI_PATHS | {llamacpp.GENERATE},
}
"""Paths on which an engine reports draft counters."""

COUNTS_AT = {
    vllm.NAME: ("usage", "completion_tokens"),
    sglang.NAME: ("meta_info", "completion_tokens"),
    llamacpp.NAME: ("timings", "predicted_n"),
}
"""Field of an answer with an engine's counters, and the key of the number of tokens there."""

COUNTER_FIELDS = ("usage", "metrics", "meta_info", "timings")
QUOTED_FIELDS = tuple(f'"{field}"'.encode() for field in COUNTER_FIELDS)

ENDINGS = ("finish_reason", "stop_reason", "matched_stop")
"""Keys of a choice that tell how it ended; the latter two name the stop string or token, if there was one."""

LINE = re.compile(rb"\r\n|\n|\r")
END = re.compile(rb"((?:\r\n|\n|\r(?!\n|\Z)){2})")  # a CR at the end of the received bytes may be half of a CRLF
LONGEST_EVENT = 16 * 2**20  # bytes
LONGEST_TEXT = 2**24  # tokens of one text; a larger number is not believed
DATA, BYTE_ORDER_MARK = b"data:", b"\xef\xbb\xbf"


def has_path(engine: str, path: str) -> bool:
    """Whether an engine answers requests for texts on a path."""
    return path in OPENAI_PATHS or OWN_PATHS.get(path, engine) == engine


def is_recordable(engine: str, path: str, body: Any) -> bool:
    """Whether a request asks for one text, on a path where this engine answers with texts."""
    if not isinstance(body, dict) or not (path in OPENAI_PATHS or OWN_PATHS.get(path) == engine):
        return False
    several = body.get("n") not in (None, 1) or body.get("n_cmpl") not in (None, 1) or body.get("echo")
    prompt = body.get("prompt", body.get("input_ids", ""))
    batch = isinstance(prompt, list) and any(not isinstance(one, int) for one in prompt)
    return not several and not batch and not isinstance(body.get("text"), list)


def with_counters(engine: str, body: Mapping[str, Any], *, ids: bool = True) -> tuple[dict[str, Any], frozenset[str]]:
    """Make a request ask for draft counters and, with `ids`, for token ids. SGLang and llama.cpp always report theirs.

    Returns the new request, and the keys of the response that its client did not ask for.
    """
    sent, added = dict(body), set()
    if engine == "vllm":
        if ids and not body.get("return_token_ids"):
            sent["return_token_ids"] = True
            added |= {"token_ids", "prompt_token_ids"}
        options = body.get("stream_options") or {}
        if body.get("stream") and not options.get("include_usage"):
            sent["stream_options"] = {**options, "include_usage": True}
            added.add("usage")
    return sent, frozenset(added)


@dataclass(frozen=True)
class TextCounts:
    """Number of tokens in a text that an engine has written, and its draft counters (None if not reported)."""

    tokens: int
    drafting: DraftCounters | None


@dataclass(frozen=True)
class ServerChoice:
    """Addresses of servers to try for a request, in order, until one answers.

    Attributes:
        decide_us: microseconds of the choice, or None if nothing was chosen.
    """

    order: Sequence[str]
    decide_us: float | None = None


def text_counts(engine: str, path: str, answer: Mapping[str, Any]) -> TextCounts | None:
    """Counters in an answer, or in the fields of a stream that `counters` collected.

    Returns None if the stream broke off, and on paths where this engine never reports draft counters.
    """
    if path not in COUNTED_PATHS[engine]:
        return None
    field, key = COUNTS_AT[engine]
    about = answer.get(field)
    tokens = about.get(key) if isinstance(about, dict) else None
    if not isinstance(about, dict) or type(tokens) is not int or not 1 <= tokens <= LONGEST_TEXT:
        return None
    if engine == llamacpp.NAME:  # it leaves the counters out of answers without a draft
        return TextCounts(tokens, llamacpp.own_drafting(answer) or DraftCounters())
    return TextCounts(tokens, sglang.own_drafting(about) if engine == sglang.NAME else vllm.own_drafting(answer))


def counters(piece: Any) -> dict[str, Any]:
    """Fields of a stream's piece that hold counters. The last value of each field covers the whole stream."""
    return {key: piece[key] for key in COUNTER_FIELDS if isinstance(piece, dict) and piece.get(key)}


def without_added_fields(document: Any, added: frozenset[str]) -> Any | None:
    """An answer, or a piece of a stream, without the added fields. A piece with nothing else becomes None."""
    if not isinstance(document, dict):
        return document
    if "usage" in added and document.get("choices") == []:
        return None
    ids = added - {"usage"}
    document = {key: value for key, value in document.items() if key not in ids}
    if isinstance(document.get("choices"), list):
        choices = [
            {key: value for key, value in choice.items() if key not in ids} if isinstance(choice, dict) else choice
            for choice in document["choices"]
        ]
        document["choices"] = choices
    return document


class EventSplitter:
    """Splitter of a stream into events (server-sent events, HTML Standard §9.2), with the empty lines that end them.

    Lines end with CR, LF or CRLF only: JSON may contain other characters that Unicode counts as line ends. More than
    `LONGEST_EVENT` bytes without an end are passed on as one event.

    Attributes:
        rest: the bytes after the last whole event.
    """

    def __init__(self) -> None:
        self.rest, self._start = bytearray(), 0

    def passes(self, part: bytes) -> bool:
        """Whether a part can pass without being split: it consists of whole events without counters."""
        return not self.rest and part.endswith(b"\n\n") and not may_hold_counters(part)

    def add(self, part: bytes) -> list[bytes]:
        """The events that are whole with this part of the stream."""
        rest, found = self.rest, []
        rest += part
        done, start = 0, self._start
        while (end := END.search(rest, start)) is not None:
            found.append(bytes(rest[done : end.end()]))
            done = start = end.end()
        del rest[:done]
        if len(rest) > LONGEST_EVENT:
            found.append(bytes(rest))
            rest.clear()
        self._start = max(0, len(rest) - 3)  # an end has up to four bytes
        return found


async def events(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Split a stream into its events; bytes after the last whole event come last."""
    splitter = EventSplitter()
    async for part in parts:
        for event in splitter.add(part):
            yield event
    if splitter.rest:
        yield bytes(splitter.rest)


def may_hold_counters(event: bytes) -> bool:
    """Whether an event may hold one of `COUNTER_FIELDS`. Most events of a stream do not, and need not be parsed."""
    return any(field in event for field in QUOTED_FIELDS)


def data_of(event: bytes) -> bytes:
    """The data lines of an event, without the field name; empty for events without data, such as comments."""
    lines = (line for line in LINE.split(event.removeprefix(BYTE_ORDER_MARK)) if line.startswith(DATA))
    return b"\n".join(line.removeprefix(DATA).removeprefix(b" ") for line in lines)


def piece_of(event: bytes) -> Any:
    """The JSON in an event, or None if it has no valid JSON."""
    try:
        return json.loads(data_of(event))
    except (ValueError, RecursionError):
        return None


def restored_event(event: bytes, piece: Any, added: frozenset[str]) -> bytes:
    """The event as its client should see it, given its parsed `parse_piece`; empty if only the added fields caused
    it."""
    if piece is None or not added:
        return event
    shown = without_added_fields(piece, added)
    if shown is None:
        return b""
    others = [line + b"\n" for line in LINE.split(event) if line and not line.startswith(DATA)]
    return b"".join(others) + f"data: {json.dumps(shown)}\n\n".encode()  # in ASCII: it may hold lone surrogates


def _joined_calls(parts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tool calls of a stream, in which a part has the index of its call, and the next characters of its arguments."""
    calls: dict[Any, dict[str, Any]] = {}
    for part in parts:
        call = calls.setdefault(part.get("index"), {"type": "function", "function": {"name": "", "arguments": ""}})
        if part.get("id"):
            call["id"] = part["id"]
        function = part.get("function") or {}
        for name in ("name", "arguments"):
            call["function"][name] += function.get(name) or ""
    return list(calls.values())


def joined(pieces: Sequence[Any]) -> dict[str, Any]:
    """Join the pieces of a stream into one response, with the fields that `traffic` reads.

    Raises ValueError if the stream broke off.
    """
    last = pieces[-1] if pieces else {}
    if "output_ids" in last:  # SGLang: a piece holds the whole output up to now, or only the new tokens
        written = (last.get("meta_info") or {}).get("completion_tokens", 0)
        whole = len(last["output_ids"]) >= written - 1
        return last if whole else last | {"output_ids": [token for piece in pieces for token in piece["output_ids"]]}
    choices = [choice for piece in pieces for choice in piece.get("choices") or []]
    last = next((one for one in reversed(choices) if one.get("finish_reason")), None)
    if last is None:
        raise ValueError("its stream ended early")
    deltas = [one.get("delta") or {} for one in choices]
    texts = [delta.get("content") or one.get("text") or "" for delta, one in zip(deltas, choices, strict=True)]
    choice: dict[str, Any] = {key: last[key] for key in ENDINGS if key in last} | {"text": "".join(texts)}
    choice["message"] = {"role": "assistant", "content": "".join(texts)}
    for name in ("reasoning_content", "reasoning"):
        if thoughts := "".join(delta.get(name) or "" for delta in deltas):
            choice["message"][name] = thoughts
    if calls := _joined_calls([call for delta in deltas for call in delta.get("tool_calls") or []]):
        choice["message"]["tool_calls"] = calls
    if any("token_ids" in one for one in choices):
        choice["token_ids"] = [token for one in choices for token in one.get("token_ids") or []]
    parts = [*pieces, *choices]
    prompt = next((one["prompt_token_ids"] for one in parts if one.get("prompt_token_ids")), None)
    metrics = next((one["metrics"] for one in pieces if one.get("metrics")), None)
    return {"choices": [choice], "prompt_token_ids": prompt, "metrics": metrics}
