"""Record of a conversation: its messages, the tools that the assistant may call, and arguments of the chat template.

Prompt files, logs, the gateway's own engine and all commands that decode or send prompts use this record. Messages are
reduced to the fields that chat templates read:

    role, content        content is text, a user's list of text parts, or None in an assistant's message with calls
    reasoning_content    an assistant's thinking, under any name in `THINKING`
    tool_calls           [{"id": …, "type": "function", "function": {"name": …, "arguments": {…}}}]; OpenAI sends the
                         arguments as a string of JSON, templates read an object
    tool_call_id, name   of a tool's message
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NoReturn

from specctl import progress

if TYPE_CHECKING:
    from specctl.decoding.target_text import TargetText

ROLES = ("system", "developer", "user", "assistant", "tool")
OLD_ROLES = {"function": "tool"}  # of OpenAI's API before tools
THINKING = ("reasoning_content", "reasoning", "thinking")  # names of an assistant's thinking before its content
TEXT_PARTS = ("text", "input_text", "output_text", None)
ANSWERED = ("user", "tool")  # roles of messages that the assistant answers
SHOWN_TOOLS = "<tools>"  # opens the list of tools in Hermes' system prompts
DEEPEST = 64  # nested lists and objects in tools and arguments
RESERVED = {
    *("conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt", "self"),
    *("continue_final_message", "tokenize", "padding", "truncation", "max_length", "sanitize_control_tokens"),
    *("return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
}
"""Arguments of `apply_chat_template` that a row or a request may not set."""

ChatMessage = dict[str, Any]
Tool = dict[str, Any]


@dataclass(frozen=True)
class Conversation:
    """A conversation, as `checked_messages`, `tool_list` and `template_options` return its parts.

    Attributes:
        options: arguments of the chat template, which replace equal ones of the recipe.
        agent: the row's layout is that of an agent's trace.
    """

    messages: list[ChatMessage]
    tools: list[Tool] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    agent: bool = False

    @property
    def id(self) -> str:
        return prompt_id(self.messages, self.tools, self.options)

    @property
    def is_trace(self) -> bool:
        """Whether it is the trace of an agent: messages call tools or hold their results."""
        return self.agent or any(one["role"] == "tool" or one.get("tool_calls") for one in self.messages)

    def before(self, place: int) -> Conversation:
        return replace(self, messages=self.messages[:place])

    def answered_places(self) -> list[int]:
        """Places of the assistant's messages that answer a user or a tool."""
        roles = [message["role"] for message in self.messages]
        return [n for n in range(1, len(roles)) if roles[n] == "assistant" and roles[n - 1] in ANSWERED]


def conversation_with(row: Mapping[str, Any], messages: list[Any], *, agent: bool = False) -> Conversation:
    """Conversation of these messages, with the tools and template arguments of its row or request."""
    checked = checked_messages(messages)
    tools = tool_list(row.get("tools"))
    if tools is None and isinstance(row.get("functions"), list):  # of OpenAI's API before tools
        tools = tool_list(row["functions"])
    if any(one["role"] == "system" and SHOWN_TOOLS in str(one["content"]) for one in checked):
        tools = None  # the text has the list already
    return Conversation(checked, tools, template_options(row.get("chat_template_kwargs")), agent)


def prompt_id(
    messages: Sequence[ChatMessage], tools: list[Tool] | None = None, options: Mapping[str, Any] | None = None
) -> str:
    """Stable id of a conversation: 32 hex digits of the SHA-256 of its canonical JSON."""
    whole: Any = [messages, tools or None, dict(options or {})] if tools or options else messages
    canonical = json.dumps(whole, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:32]


def arguments_with(options: Mapping[str, Any], tools: list[Tool] | None, own: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of the chat template: `options` of the recipe, replaced by a conversation's `own`, and its tools."""
    return {**options, **own, **({"tools": tools} if tools else {})}


def stored_fields(tools: list[Tool] | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a stored record that a conversation has beside its messages."""
    return ({"tools": tools} if tools else {}) | ({"chat_template_kwargs": dict(options)} if options else {})


def text_of(message: ChatMessage) -> str:
    """The text of a message's content; empty if it only calls tools."""
    content = message.get("content")
    return "".join(part["text"] for part in content) if isinstance(content, list) else content or ""


def checked_messages(messages: list[Any], *, allow_empty: bool = False) -> list[ChatMessage]:
    """Check messages and reduce them to the fields of the record. ValueError names the message and the reason.

    A message without text is refused, unless it calls tools, is a tool's, or `allow_empty` is set.
    """
    checked = []
    for number, message in enumerate(messages, 1):
        try:
            checked.append(_checked_message(message, allow_empty))
        except ValueError as error:
            if len(messages) == 1:
                raise
            raise ValueError(f"message {number}: {error}") from None
    return checked


def _checked_message(message: Any, allow_empty: bool) -> ChatMessage:
    if not isinstance(message, dict) or "role" not in message or not message.keys() & {"content", "tool_calls"}:
        raise ValueError("each message must be an object with `role` and `content`")
    role = message["role"]
    role = OLD_ROLES.get(role, role) if isinstance(role, str) else role
    if role not in ROLES:
        raise ValueError(f"unknown role {str(role)[:40]!r}, expected one of {', '.join(ROLES)}")
    calls = _tool_calls(message) if role == "assistant" else []
    thoughts = next((message[name] for name in THINKING if message.get(name)), "") if role == "assistant" else ""
    content = message.get("content")
    if thoughts and content in (None, "") and not calls:
        raise ValueError("has thinking, but no answer after it")
    if content is not None or not calls:
        content = _content(content)
    if role != "user" and isinstance(content, list):  # templates that take lists take them from users
        content = "".join(part["text"] for part in content)
    _check_text(thoughts, "thinking")
    made: ChatMessage = {"role": role, "content": content}
    if not (calls or allow_empty or role == "tool" or text_of(made).strip()):
        raise ValueError("empty prompt" if role == "user" else f"empty {role} message")
    made |= {"reasoning_content": thoughts} if thoughts.strip() else {}
    made |= {"tool_calls": calls} if calls else {}
    for name in ("tool_call_id", "name") if role == "tool" else ():
        if message.get(name) is not None:
            made[name] = _check_text(message[name], f"`{name}`")
    return made


def _content(content: Any) -> str | list[dict[str, str]]:
    """Text, or several text parts. ValueError names a part of another type."""
    if not isinstance(content, list):
        return _check_text(content, "content")
    parts = []
    for number, part in enumerate(content, 1):
        if not isinstance(part, dict):
            raise ValueError(f"part {number} of the content must be an object, got {type(part).__name__}")
        kind = part.get("type")
        if kind not in TEXT_PARTS:
            raise ValueError(f"part {number} of the content is not text: it has the type {kind!r:.40}")
        parts.append({"type": "text", "text": _check_text(part.get("text"), f"part {number} of the content")})
    return parts if len(parts) > 1 else "".join(part["text"] for part in parts)


def _tool_calls(message: ChatMessage) -> list[dict[str, Any]]:
    calls = message.get("tool_calls")
    if not calls and message.get("function_call"):  # of OpenAI's API before tools
        calls = [{"function": message["function_call"]}]
    if calls is None:
        return []
    if not isinstance(calls, list):
        raise ValueError(f"`tool_calls` must be a list, got {type(calls).__name__}")
    return [_tool_call(call, f"tool call {number}") for number, call in enumerate(calls, 1)]


def _tool_call(call: Any, what: str) -> dict[str, Any]:
    """A tool call as templates read it. A call without `function` has name and arguments itself."""
    kind = call.get("type") or "function" if isinstance(call, dict) else None
    if kind not in ("function", "tool_call"):
        raise ValueError(f"{what} must be an object of the type 'function'")
    function = call.get("function", call)
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not name.strip():
        raise ValueError(f"{what} has no function name")
    made = {"name": _check_text(name, f"the name of {what}"), "arguments": _arguments(function.get("arguments"), what)}
    id = call.get("id")
    known = {} if id is None else {"id": _check_text(id, f"the id of {what}")}
    return {**known, "type": "function", "function": made}


def _arguments(value: Any, what: str) -> dict[str, Any]:
    what = f"the arguments of {what}"
    if isinstance(value, str):
        value = parsed_json(value, what) if value.strip() else None
    if value is None:  # a function without arguments
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"{what} must be a JSON object, got {type(value).__name__}")
    _check_plain(value, what)
    return value


def tool_list(value: Any) -> list[Tool] | None:
    """The tools of a row or a request, in OpenAI's form; data sets also have them as a string of JSON, or without
    `function`. Returns None if there are none. ValueError says why they cannot be used."""
    if isinstance(value, str):
        value = parsed_json(value, "`tools`") if value.strip() else None
    if value is None or value == []:
        return None
    if not isinstance(value, list):
        raise ValueError(f"`tools` must be a list, got {type(value).__name__}")
    tools = []
    for number, tool in enumerate(value, 1):
        if not isinstance(tool, dict):
            raise ValueError(f"tool {number} must be an object, got {type(tool).__name__}")
        if "function" not in tool and "name" in tool:
            tool = {"type": "function", "function": {key: tool[key] for key in tool if key != "type"}}
        function = tool.get("function")
        if tool.get("type", "function") != "function" or not isinstance(function, dict):
            raise ValueError(f"tool {number} is not a function")
        if not isinstance(function.get("name"), str) or not function["name"].strip():
            raise ValueError(f"tool {number} has no function name")
        tools.append({"type": "function", **tool})
    _check_plain(tools, "`tools`")
    return tools


def template_options(value: Any) -> dict[str, Any]:
    """The `chat_template_kwargs` of a row or a request. ValueError names a forbidden argument."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"`chat_template_kwargs` must be an object, got {type(value).__name__}")
    _check_plain(value, "`chat_template_kwargs`")
    if reserved := RESERVED & value.keys():
        raise ValueError(f"`chat_template_kwargs`: {min(reserved)!r} is not allowed")
    return value


def parsed_json(text: str, what: str) -> Any:
    """Parse a string of JSON. ValueError says why it is none."""

    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"it has the constant {constant}")

    try:
        return json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        why = getattr(error, "msg", None) or ("nested too deeply" if isinstance(error, RecursionError) else error)
        raise ValueError(f"{what}: not JSON: {why}") from None


def _check_text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{what} must be a string, got {type(value).__name__}")
    if "\0" in value:
        raise ValueError(f"{what} contains a NUL character")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{what} contains half of a surrogate pair, which is not valid text") from None
    return value


def _check_plain(value: Any, what: str, depth: int = 0) -> None:
    """Check that a nested value is JSON. Parsers of Python also make NaN and half surrogate pairs."""
    if depth > DEEPEST:
        raise ValueError(f"{what}: nested deeper than {DEEPEST}")
    if isinstance(value, str):
        _check_text(value, what)
    elif isinstance(value, dict):
        for key, inner in value.items():
            _check_text(key, f"a key of {what}")
            _check_plain(inner, what, depth + 1)
    elif isinstance(value, list):
        for inner in value:
            _check_plain(inner, what, depth + 1)
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{what}: {value} is not JSON")
    elif not isinstance(value, (bool, int, float, type(None))):
        raise ValueError(f"{what}: a value of the type {type(value).__name__} is not JSON")


class ContextExceeded(ValueError):
    """A conversation does not fit the target's context. `unit`: tokens or characters."""

    def __init__(self, count: int, target: TargetText, unit: str = "tokens"):
        super().__init__(f"{count} {unit} do not fit the target's context of {target.context_length}")


def check_length(messages: list[ChatMessage], target: TargetText) -> None:
    """Raise ContextExceeded for a conversation that is too long for the target even before it is tokenized."""
    count = sum(len(text_of(message)) for message in messages)
    if count > target.longest_text:
        raise ContextExceeded(count, target, "characters")


def check_tools(target: TargetText, messages: list[ChatMessage], arguments: dict[str, Any], where: str) -> None:
    """Warn once per data set if the target's chat template ignores tools; `where` is file:line."""
    source = where.rpartition(":")[0]
    if source not in target.tool_sources:
        target.tool_sources.add(source)
        if target.ignores_tools(messages, arguments):
            progress.warn(
                f"{source}: its rows have tools, which the chat template of target {target.name} does not render "
                f"(first at {where}): the target does not see them"
            )
