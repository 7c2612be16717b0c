"""Forms that a request asks for, as grammars in llguidance's variant of Lark's language.

A tool call has the form that `tool_calls` reads. JSON schemas are checked by llguidance.
"""

import json
from collections.abc import Callable
from typing import Any

import llguidance

from specctl.gateway.openai_requests import TextsRequest
from specctl.gateway.tool_calls import MARKS

WHITESPACE = r"( |\n[ \t]{0,20})?"
"""Whitespace between two tokens of JSON: none, a space, or a line break with indentation. Without a limit, a small
target may write spaces without end."""


def grammar(asked: TextsRequest, is_special: Callable[[str], bool]) -> str:
    """The grammar of the answers to a request that `has_form`.

    `is_special`: whether a text is a special token, which a grammar names without quotes.
    """
    tools, answer = asked.callable_tools, None if asked.must_call else _answer(asked)
    rules = {} if answer is None else {"answer": answer}
    starts = [*rules]
    if tools:
        starts.append("call" if asked.most_calls == 1 else 'call ("\\n" call)*')
        rules |= _calls(tools, *(mark if is_special(mark) else _literal(mark) for mark in MARKS))
    return "\n".join(f"{name}: {rule}" for name, rule in ({"start": " | ".join(starts)} | rules).items())


def _answer(asked: TextsRequest) -> str | None:
    """The rule of an answer that is no call, or None."""
    if (schema := asked.schema_of_answer) is not None:
        return _json(schema)
    form = asked.structured_outputs
    if form is not None and form.choice is not None:
        return " | ".join(map(_literal, form.choice))
    return None if form is None or form.regex is None else f"/{llguidance.regex_to_lark(form.regex)}/"


def _calls(tools: list[dict[str, Any]], opening: str, closing: str) -> dict[str, str]:
    """Rules of a call of one of the tools. Each schema is a rule of its own: its references begin at its root."""
    rules = {"call": " | ".join(f"call_{place}" for place in range(len(tools)))}
    for place, tool in enumerate(tools):
        function = tool["function"]
        begin = f'\n{{"name": {_literal(function["name"])}, "arguments": '
        end = _literal("}\n")
        rules[f"call_{place}"] = f"{opening} {_literal(begin)} arguments_{place} {end} {closing}"
        rules[f"arguments_{place}"] = _json(function.get("parameters") or {"type": "object"})
    return rules


def _json(schema: dict[str, Any]) -> str:
    return f"%json {json.dumps({'x-guidance': {'whitespace_pattern': WHITESPACE}} | schema)}"


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")  # llguidance refuses this character alone
