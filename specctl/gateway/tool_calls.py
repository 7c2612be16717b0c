"""Tool calls in an answer's text, in the form that Hermes and Qwen models write: <tool_call>{JSON}</tool_call>.

Another form stays text: its end cannot be told from other text without the rules of each model.
"""

import json
import re
import uuid
from typing import Any, NamedTuple

from specctl.distillation.messages import checked_messages

OPENING, CLOSING = MARKS = "<tool_call>", "</tool_call>"
_CALL = re.compile(r"<tool_call>\s*(?=\{)")
_END = re.compile(r"\s*(?:</tool_call>\s*|\Z)")  # models forget the mark after the last call
_JSON = json.JSONDecoder(strict=False)  # models do not escape the line breaks of code


class ParsedAnswer(NamedTuple):
    """An answer that calls tools.

    Attributes:
        content: the text before and after the calls, or None.
        calls: the calls in OpenAI's form; their arguments are strings of JSON.
    """

    content: str | None
    calls: list[dict[str, Any]]


def parse(text: str) -> ParsedAnswer | None:
    """The tool calls of a text. Returns None if there are none, or if one is damaged or stands after other text."""
    before, opening, rest = text.partition(OPENING)
    rest, calls = opening + rest, []
    while begun := _CALL.match(rest):
        try:
            wrote, end = _JSON.raw_decode(rest, begun.end())
            arguments = wrote["arguments"] if len(wrote) > 1 else {}  # a function may have none
            said = {"role": "assistant", "tool_calls": [{"name": wrote["name"], "arguments": arguments}]}
            (call,) = checked_messages([said])[0]["tool_calls"]
        except (ValueError, KeyError, RecursionError):
            return None
        closed = _END.match(rest, end)
        if closed is None:
            return None
        function = call["function"] | {"arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False)}
        calls.append({"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function})
        rest = rest[closed.end() :]
    if not calls or OPENING in rest:
        return None
    return ParsedAnswer("\n".join(filter(None, (before.rstrip(), rest))) or None, calls)


class HeldCalls:
    """Text of a stream from which tool calls are held back until its end."""

    def __init__(self) -> None:
        self._text, self._sent = "", 0

    def add(self, text: str) -> str:
        """Append text. Returns the text that can be sent: it cannot belong to a call."""
        self._text += text
        return self._send(self._safe())

    def end(self, finish: str) -> tuple[str, list[dict[str, Any]]]:
        """The rest of the text, and the calls. Without calls the rest has the text that looked like them."""
        parsed = parse(self._text) if finish == "stop" else None
        if parsed is None:
            return self._send(len(self._text)), []
        return (parsed.content or "")[self._sent :], parsed.calls

    def _safe(self) -> int:
        """Number of characters before a possible call and the whitespace in front of that call."""
        place = self._text.find(OPENING, self._sent)
        if place < 0:
            sizes = range(min(len(OPENING) - 1, len(self._text)), 0, -1)
            begun = next((size for size in sizes if OPENING.startswith(self._text[-size:])), 0)
            place = len(self._text) - begun
        return self._sent + len(self._text[self._sent : place].rstrip())

    def _send(self, end: int) -> str:
        part, self._sent = self._text[self._sent : end], end
        return part
