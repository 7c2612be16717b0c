"""Tool calls in an answer's text, in the form that Hermes and Qwen models write: <tool_call>{JSON}</tool_call>.

An answer that is nothing but such JSON, as Qwen2.5-Coder writes it, also calls if it names tools of the request, as in
llama.cpp. Another form stays text: its end cannot be told from other text without the rules of each model.
"""

import json
import re
import uuid
from collections.abc import Collection
from typing import Any, NamedTuple

from specctl.distillation.messages import checked_messages

OPENING, CLOSING = MARKS = "<tool_call>", "</tool_call>"
_CALL = re.compile(r"<tool_call>\s*(?=\{)")
_END = re.compile(r"\s*(?:</tool_call>\s*|\Z)")  # models forget the mark after the last call
_FENCED = re.compile(r"```(?:json)?\s(.*)```", re.DOTALL)
_FENCES = ("", "```", "```json")
_BEGINNING = 256  # characters of an answer that tell whether it can be a call without marks
_JSON = json.JSONDecoder(strict=False)  # models do not escape the line breaks of code


class ParsedAnswer(NamedTuple):
    """An answer that calls tools.

    Attributes:
        content: the text before and after the calls, or None.
        calls: the calls in OpenAI's form; their arguments are strings of JSON.
    """

    content: str | None
    calls: list[dict[str, Any]]


def parse(text: str, names: Collection[str] = ()) -> ParsedAnswer | None:
    """The tool calls of a text; `names` are the tools that can be called without marks. Returns None if there are no
    calls, or if one is damaged or stands after other text."""
    if OPENING not in text:
        return _without_marks(text, names)
    before, opening, rest = text.partition(OPENING)
    rest, calls = opening + rest, []
    while begun := _CALL.match(rest):
        try:
            wrote, end = _JSON.raw_decode(rest, begun.end())
            calls.append(_call(wrote["name"], wrote["arguments"] if len(wrote) > 1 else {}))  # it may have none
        except (ValueError, KeyError, RecursionError):
            return None
        closed = _END.match(rest, end)
        if closed is None:
            return None
        rest = rest[closed.end() :]
    if not calls or OPENING in rest:
        return None
    return ParsedAnswer("\n".join(filter(None, (before.rstrip(), rest))) or None, calls)


def _without_marks(text: str, names: Collection[str]) -> ParsedAnswer | None:
    """The calls of an answer that is only JSON, one object after the other, bare or in a code block."""
    if not _may_need_no_marks(text, names):
        return None
    fenced, calls = _FENCED.fullmatch(text.strip()), []
    rest = (fenced[1] if fenced else text).strip()
    while rest.startswith("{"):
        try:
            wrote, end = _JSON.raw_decode(rest)
            if [*wrote] != ["name", "arguments"] or wrote["name"] not in names:
                return None
            calls.append(_call(**wrote))
        except (ValueError, KeyError, TypeError, RecursionError):
            return None
        rest = rest[end:].lstrip()
    return ParsedAnswer(None, calls) if calls and not rest else None


def _may_need_no_marks(text: str, names: Collection[str]) -> bool:
    """Whether an answer that begins with this text can be calls without marks."""
    begun = "".join(text[:_BEGINNING].split())
    openings = (f'{fence}{{"name":"{"".join(name.split())}"' for fence in _FENCES for name in names)
    return any(begun.startswith(opening) or opening.startswith(begun) for opening in openings)


def _call(name: Any, arguments: Any) -> dict[str, Any]:
    """A call in OpenAI's form. Raises ValueError if it is damaged."""
    said = {"role": "assistant", "tool_calls": [{"name": name, "arguments": arguments}]}
    (call,) = checked_messages([said])[0]["tool_calls"]
    function = call["function"] | {"arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False)}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


class HeldCalls:
    """Text of a stream from which tool calls are held back until its end. `names`: see `parse`."""

    def __init__(self, names: Collection[str] = ()) -> None:
        self._names, self._text, self._sent = names, "", 0

    def add(self, text: str) -> str:
        """Append text. Returns the text that can be sent: it cannot belong to a call."""
        self._text += text
        return self._send(self._safe())

    def end(self, finish: str) -> tuple[str, list[dict[str, Any]]]:
        """The rest of the text, and the calls. Without calls the rest has the text that looked like them."""
        parsed = parse(self._text, self._names) if finish == "stop" else None
        if parsed is None:
            return self._send(len(self._text)), []
        return (parsed.content or "")[self._sent :], parsed.calls

    def _safe(self) -> int:
        """Number of characters before a possible call and the whitespace in front of that call."""
        if not self._sent and _may_need_no_marks(self._text, self._names):
            return 0
        place = self._text.find(OPENING, self._sent)
        if place < 0:
            sizes = range(min(len(OPENING) - 1, len(self._text)), 0, -1)
            begun = next((size for size in sizes if OPENING.startswith(self._text[-size:])), 0)
            place = len(self._text) - begun
        return self._sent + len(self._text[self._sent : place].rstrip())

    def _send(self, end: int) -> str:
        part, self._sent = self._text[self._sent : end], end
        return part
