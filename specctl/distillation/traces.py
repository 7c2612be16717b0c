"""Reader for conversations in the layouts of public data sets, one row per conversation.

{"messages": […], "tools": […]}                                  OpenAI; `messages` may be a string of JSON (SWE-smith)
{"conversations": [{"from": "human", "value": "…"}, …]}          ShareGPT, Hermes function calling
{"conversation": [{"role": "user", "content": "…"}, …]}          LMSYS-Chat-1M, WildChat
{"system": "…", "conversations": […], "tools": "[…]"}            ToolACE, APIGen-MT, LLaMA-Factory
{"conversations": [{"role": "user", "content": "…"}, …]}         SpecForge
{"query": "…", "answers": "[{…}]", "tools": "[…]"}               xLAM
{"instruction": "…", "input": "…", "output": "…"}                Alpaca; `context` is another name of `input` (Dolly)
{"prompt": [{"role": "user", "content": "…"}], "completion": […]}   TRL; verl has the prompt alone
{"input": […], "output": {…}}                                    generations that Langfuse exports
{"request": {"messages": […]}, …}                                a logged request, without its response
{"body": {"messages": […]}, …}                                   a line of OpenAI's batch files
{"trajectory": [{"role": "ai", "text": "…"}, …]}                 SWE-agent trajectories; also with OpenAI's messages
{"history": [{"role": "assistant", "content": "…"}, …]}          files *.traj of SWE-agent

Any row may have `tools` and `chat_template_kwargs`.
"""

from collections.abc import Mapping
from typing import Any

from specctl.distillation.messages import Conversation, conversation_with, parsed_json

SPEAKERS = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "ai": "assistant",
    "system": "system",
    "developer": "developer",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
    "function_call": "assistant",
}
CALLS = "function_call"
"""Speaker of a turn that is a tool call as JSON."""


def conversation_of(row: Mapping[str, Any]) -> Conversation | None:
    """The conversation of a row, with the assistant's turns, or None for a row in another layout. ValueError says what
    is wrong with it."""
    agent = False
    if "messages" in row:
        messages = list_of(row, "messages")
    elif name := next((name for name in ("conversations", "conversation") if name in row), None):
        messages = [_from_conversation(part) for part in list_of(row, name)]
        system = row.get("system")
        if isinstance(system, str) and system.strip() and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": system}, *messages]
    elif name := next((name for name in ("history", "trajectory") if name in row), None):
        messages, agent = [_from_step(step) for step in list_of(row, name)], True
    elif {"query", "answers"} <= row.keys():
        calls = {"role": "assistant", "content": None, "tool_calls": _parsed(row["answers"], "`answers`")}
        messages = [{"role": "user", "content": row["query"]}, calls]
    elif "instruction" in row:
        question = "\n\n".join(str(row[key]) for key in ("instruction", "input", "context") if row.get(key))
        messages = dialogue(question, row.get("output"))
    elif {"input", "output"} <= row.keys():
        asked, answer = _json_or_text(row["input"]), _json_or_text(row["output"])
        if isinstance(asked, dict):  # a request, with its tools
            row, asked = asked, list_of(asked, "messages")
        messages = dialogue(asked or "", [answer] if isinstance(answer, dict) else answer)
    elif isinstance(row.get("prompt"), list):
        messages = dialogue(list_of(row, "prompt"), row.get("completion"))
    elif "request" in row or isinstance(row.get("body"), dict):
        row = body_of(row, "request" if "request" in row else "body")
        messages = list_of(row, "messages")
    else:
        return None
    return conversation_with(row, messages, agent=agent)


def dialogue(question: Any, answer: Any) -> list[dict[str, Any]]:
    """The messages of a question and its answer, without an empty answer. Both may be lists of messages already."""
    asked = question if isinstance(question, list) else [{"role": "user", "content": question}]
    if isinstance(answer, list):
        return [*asked, *answer]
    return [*asked, *([] if answer in (None, "") else [{"role": "assistant", "content": answer}])]


def keys_of(row: Mapping[str, Any]) -> str:
    """The keys of a row in another layout, for a message."""
    return f"has {', '.join(f'`{key:.40}`' for key in list(row)[:5]) or 'no key'}"


def body_of(row: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The request or the response in a log's row; proxies also write it as a string of JSON, or below `body`."""
    body = _parsed(row.get(key), f"`{key}`")
    if isinstance(body, dict) and isinstance(body.get("body"), dict):
        body = body["body"]
    if not isinstance(body, dict):
        raise ValueError(f"has no `{key}`")
    return body


def list_of(row: Mapping[str, Any], key: str) -> list[Any]:
    """A list in a row, which may be written as a string of JSON. ValueError if there is none, or an empty one."""
    value = row.get(key)
    value = _parsed(value, f"`{key}`") if isinstance(value, str) and value.lstrip()[:1] == "[" else value
    if not isinstance(value, list) or not value:
        raise ValueError(f"`{key}` must be a non-empty list")
    return list(value)


def _parsed(value: Any, what: str) -> Any:
    return parsed_json(value, what) if isinstance(value, str) else value


def _json_or_text(value: Any) -> Any:
    """A value from a table, where lists and objects are strings of JSON."""
    try:
        return parsed_json(value, "") if isinstance(value, str) and value.startswith(("[", "{")) else value
    except ValueError:
        return value


def _from_conversation(part: Any) -> Any:
    """A message of `conversations`, in either form, as a message with `role` and `content`."""
    for speaker, text in (("from", "value"), ("role", "content")):
        if isinstance(part, dict) and speaker in part and (text in part or part.get("tool_calls")):
            name = str(part[speaker])
            if speaker == "from" and name not in SPEAKERS:
                raise ValueError(f"has the unknown speaker {name[:40]!r}, expected one of {', '.join(SPEAKERS)}")
            message = part | {"role": SPEAKERS.get(name, name), "content": part.get(text)}
            if name == CALLS:
                called = _parsed(part.get(text), "a function call")
                message |= {"content": None, "tool_calls": called if isinstance(called, list) else [called]}
            return message
    raise ValueError("each of `conversations` needs `from` and `value`, or `role` and `content`")


def _from_step(step: Any) -> Any:
    """A message of a trajectory, in which texts have other names."""
    if not isinstance(step, dict):
        return step
    role = step.get("role")
    message = step | ({"role": SPEAKERS.get(role, role)} if isinstance(role, str) else {})
    if step.get("content") is None and not step.get("tool_calls"):
        text = next((step[name] for name in ("text", "system_prompt") if step.get(name) is not None), None)
        message |= {"content": text}
    return message
