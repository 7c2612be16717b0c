"""Requests of clients as a proxy passes them on, and what their answers say: token ids, and what became of drafts.

An engine says neither unless it is asked to. What is asked for besides is taken out of the answer again, so a client
sees what it would have seen.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specctl.engines import sglang, vllm
from specctl.engines.records import Drafting

RECORDED = {"/v1/chat/completions": "vllm", "/v1/completions": "vllm", "/generate": "sglang"}
"""Paths whose answers are texts, and the engine that can give their ids there."""

LINE = re.compile(rb"\r\n|\n|\r")
END = re.compile(rb"((?:\r\n|\n|\r(?!\n|\Z)){2})")  # a CR that is the last byte so far may be half of a CRLF
DATA, BYTE_ORDER_MARK = b"data:", b"\xef\xbb\xbf"

OPEN = ("/v1/", "/generate", "/health", "/ping", "/version", "/metrics", "/tokenize", "/detokenize", "/get_model_info")
"""Beginnings of the paths that clients may ask for. All others change a server, or end it."""


def is_open(path: str) -> bool:
    """Whether clients may ask for a path. One that climbs up again leads elsewhere than it begins."""
    if {".", ".."} & {*path.replace("\\", "/").split("/")} or "%" in path:
        return False
    return any(path.startswith(one) if one.endswith("/") else path == one for one in OPEN)


def recorded(engine: str, path: str, body: Any) -> bool:
    """Whether a request asks for one text, whose ids the engine can give."""
    if not isinstance(body, dict) or RECORDED.get(path) not in (engine, "vllm"):
        return False
    several = body.get("n") not in (None, 1) or body.get("echo")
    prompt = body.get("prompt", body.get("input_ids", ""))
    batch = isinstance(prompt, list) and any(not isinstance(one, int) for one in prompt)
    return not several and not batch and not isinstance(body.get("text"), list)


def asking(engine: str, body: Mapping[str, Any], *, ids: bool = True) -> tuple[dict[str, Any], frozenset[str]]:
    """The request that makes an engine say counters and, with `ids`, token ids; and what of that its client did not ask
    for."""
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
    """A text that an engine has written: its tokens, and what became of its drafts; None where it does not say."""

    tokens: int
    drafting: Drafting | None


def text_counts(engine: str, path: str, said: Mapping[str, Any]) -> TextCounts | None:
    """The counters in an answer, or in what `counters` kept of a stream. None of a stream that broke off, and of paths
    where this engine never says what became of drafts."""
    if RECORDED.get(path) != engine:
        return None
    about = said.get("meta_info" if engine == "sglang" else "usage")
    tokens = about.get("completion_tokens") if isinstance(about, dict) else None
    if not isinstance(about, dict) or type(tokens) is not int or tokens < 1:
        return None
    return TextCounts(tokens, sglang.own_drafting(about) if engine == "sglang" else vllm.own_drafting(said))


def counters(piece: Any) -> dict[str, Any]:
    """The part of a stream's piece that counts: the last one of each holds for the whole."""
    return {key: piece[key] for key in ("usage", "metrics", "meta_info") if isinstance(piece, dict) and piece.get(key)}


def restored(document: Any, added: frozenset[str]) -> Any | None:
    """An answer, or a piece of a stream, without what was added; None for a piece that would not have come."""
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


async def events(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The events of a stream (server-sent events, HTML Standard §9.2), each with the empty line that ends it. Lines end
    with CR, LF or both; JSON may hold what else Unicode takes for a line's end."""
    rest = b""
    async for part in parts:
        *whole, rest = END.split(rest + part)
        for event, end in zip(whole[::2], whole[1::2], strict=True):
            yield event + end
    if rest:
        yield rest


def data_of(event: bytes) -> bytes:
    """The lines of data of an event, without their field's name; empty where it has none, as of a comment."""
    lines = (line for line in LINE.split(event.removeprefix(BYTE_ORDER_MARK)) if line.startswith(DATA))
    return b"\n".join(line.removeprefix(DATA).removeprefix(b" ") for line in lines)


def piece_of(event: bytes) -> Any:
    """The JSON in an event; None where there is none."""
    try:
        return json.loads(data_of(event))
    except ValueError:
        return None


def restored_event(event: bytes, piece: Any, added: frozenset[str]) -> bytes:
    """An event, with this piece in it, as its client should see it: empty where it would not have come."""
    if piece is None or not added:
        return event
    shown = restored(piece, added)
    if shown is None:
        return b""
    others = [line + b"\n" for line in LINE.split(event) if line and not line.startswith(DATA)]
    return b"".join(others) + f"data: {json.dumps(shown, ensure_ascii=False)}\n\n".encode()


def joined(pieces: Sequence[Any]) -> dict[str, Any]:
    """The response that the pieces of a stream make, as far as `traffic` reads it. ValueError where they make none."""
    last = pieces[-1] if pieces else {}
    if "output_ids" in last:  # SGLang: each piece has all there is so far, or what is new
        written = (last.get("meta_info") or {}).get("completion_tokens", 0)
        whole = len(last["output_ids"]) >= written - 1
        return last if whole else last | {"output_ids": [token for piece in pieces for token in piece["output_ids"]]}
    choices = [choice for piece in pieces for choice in piece.get("choices") or []]
    reason = next((one["finish_reason"] for one in reversed(choices) if one.get("finish_reason")), None)
    if reason is None:
        raise ValueError("its stream broke off")
    texts = [(one.get("delta") or {}).get("content") or one.get("text") or "" for one in choices]
    choice: dict[str, Any] = {"finish_reason": reason, "text": "".join(texts)}
    choice["message"] = {"role": "assistant", "content": "".join(texts)}
    calls = [call for one in choices for call in (one.get("delta") or {}).get("tool_calls") or []]
    if calls:
        choice["message"]["tool_calls"] = calls
    if any("token_ids" in one for one in choices):
        choice["token_ids"] = [token for one in choices for token in one.get("token_ids") or []]
    said = [*pieces, *choices]
    prompt = next((one["prompt_token_ids"] for one in said if one.get("prompt_token_ids")), None)
    metrics = next((one["metrics"] for one in pieces if one.get("metrics")), None)
    return {"choices": [choice], "prompt_token_ids": prompt, "metrics": metrics}
