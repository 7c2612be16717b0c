"""Forms that a request asks for, as grammars in llguidance's variant of Lark's language.

A tool call has the form that `tool_calls` reads. JSON schemas are checked by llguidance.
"""

import json
from typing import Any

from specctl.gateway.openai_requests import TextsRequest
from specctl.gateway.tool_calls import CLOSING, OPENING

WHITESPACE = r"( |\n[ \t]{0,20})?"
"""Whitespace between two tokens of JSON: none, a space, or a line break with indentation. Without a limit, a small
target may write spaces without end."""


def grammar(asked: TextsRequest) -> str | None:
    """The grammar of the answers, or None if they may have any form."""
    schema, tools = asked.schema_of_answer, asked.callable_tools
    if schema is None and not asked.must_call:
        return None
    calls = "call" if asked.most_calls == 1 else 'call ("\\n" call)*'
    if asked.must_call:
        return _rules(calls, _calls(tools))
    answer = _json(schema)
    return _rules(f"answer | {calls}", {"answer": answer} | _calls(tools)) if tools else _rules(answer, {})


def _calls(tools: list[dict[str, Any]]) -> dict[str, str]:
    """Rules of a call of one of the tools. Each schema is a rule of its own: its references begin at its root."""
    rules = {"call": " | ".join(f"call_{place}" for place in range(len(tools)))}
    for place, tool in enumerate(tools):
        function = tool["function"]
        begin = f'{OPENING}\n{{"name": {_literal(function["name"])}, "arguments": '
        end = f"}}\n{CLOSING}"
        rules[f"call_{place}"] = f"{_literal(begin)} arguments_{place} {_literal(end)}"
        rules[f"arguments_{place}"] = _json(function.get("parameters") or {"type": "object"})
    return rules


def _json(schema: dict[str, Any] | None) -> str:
    return f"%json {json.dumps({'x-guidance': {'whitespace_pattern': WHITESPACE}} | (schema or {}))}"


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _rules(start: str, others: dict[str, str]) -> str:
    return "\n".join(f"{name}: {rule}" for name, rule in ({"start": start} | others).items())
