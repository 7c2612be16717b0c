"""Responses that are there already: logs of a server, chat and instruction data sets, a JSON object a line.

{"request": {"messages": […], …}, "response": {"choices": [{"message": {…}, "finish_reason": "stop"}], …}}
    a request to an OpenAI-compatible server with its response; both may be strings of JSON. Token ids in the response
    (vLLM's `return_token_ids`, the proxy of `specctl online --server`) are taken as they are.
{"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}, …]}
{"conversations": [{"from": "human", "value": "…"}, {"from": "gpt", "value": "…"}, …]}                  ShareGPT
{"instruction": "…", "input": "…", "output": "…"}                                                       Alpaca
{"prompt": "…", "response": "…"}

Of a conversation every turn of the assistant is a response, and what stands before it is its prompt.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from specctl.decoding.target_text import TargetText
from specctl.distillation.prompts import Rejections, conversation, ends_with_question, lines, open_prompts, prompt_id
from specctl.distillation.prompts import json_object as parsed
from specctl.engines import sglang, vllm
from specctl.engines.records import Answer, Ask, Malformed
from specctl.errors import ChatTemplateError

EXPECTED = (
    'one JSON object a line, {"request": {…}, "response": {…}}, {"messages": […]} or {"prompt": "…", "response": "…"}'
)
SPEAKERS = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
UNKNOWN = -1.0  # temperature of a response that does not say


class Given(NamedTuple):
    """A response in the ids that an engine has read and written."""

    prompt_ids: list[int]
    answer: Answer


class Turn(NamedTuple):
    """A response, and the conversation before it: empty where only the engine's ids can tell it, as with tools."""

    messages: list[dict[str, str]]
    answer: str
    cut: bool = False  # by its length
    temperature: float = UNKNOWN
    given: Given | None = None

    @property
    def id(self) -> str:
        """Stable id: 32 hex digits over conversation and answer, so the same response has it in every file."""
        said = self.answer if self.messages or self.given is None else str(self.given)
        return hashlib.sha256(f"{prompt_id(self.messages)}/{said}".encode()).hexdigest()[:32]


def turns(row: dict[str, Any]) -> list[Turn]:
    """The assistant's turns in a line. ValueError says why there are none."""
    if "response" in row and "prompt" not in row:
        return [_logged(_body(row, "request"), _body(row, "response"))]
    if "conversations" in row:
        return _turns([_spoken(part) for part in _list(row, "conversations")])
    if "messages" in row:
        return _turns(_list(row, "messages"))
    if "instruction" in row:
        question = "\n\n".join(str(row[key]) for key in ("instruction", "input") if row.get(key))
        return _turns(_dialogue(question, row.get("output")))
    if "prompt" in row:
        return _turns(_dialogue(row["prompt"], row.get("response", row.get("completion"))))
    raise ValueError("has none of `response`, `messages`, `conversations`, `instruction`, `prompt`")


def read(file: str, rejections: Rejections) -> Iterator[tuple[str, Turn]]:
    """The turns of a file with their places, line by line; lines that have none go to `rejections`."""
    label = "<stdin>" if file == "-" else file
    with open_prompts(file) as opened:
        for number, line in enumerate(lines(opened), 1):
            if line is not None and not line.strip():
                continue
            where = f"{label}:{number}"
            rejections.seen += 1
            try:
                found = turns(parsed(line))
            except ValueError as error:
                rejections.add(where, str(error), (line or b"").decode("utf-8", "replace"))
                continue
            for turn in found:
                yield where, turn


def record(turn: Turn, domain: str, target: TargetText, options: dict[str, Any]) -> dict[str, Any]:
    """A turn as it is stored, in the engine's ids, or those of the target's template. ValueError where it refuses it,
    the target lacks a token, or has no room."""
    messages = turn.messages
    if turn.given is not None:
        prompt, ids = turn.given.prompt_ids, turn.given.answer.output_ids
        if not all(type(token) is int and 0 <= token < target.vocab_size for token in [*prompt, *ids]):
            raise ValueError(f"has tokens that the target's vocabulary of {target.vocab_size} does not")
        messages = messages or [{"role": "user", "content": target.tokenizer.decode(prompt)}]
    else:
        try:
            prompt = target.render(messages, **options)
            ids = response_ids(turn, prompt, target, options)
        except ChatTemplateError as error:
            raise ValueError(error.message) from None
    if len(prompt) + len(ids) > target.context_length:
        raise ValueError(f"{len(prompt) + len(ids)} tokens, the target's context has {target.context_length}")
    return {
        "id": turn.id,
        "prompt_id": prompt_id(messages),
        "domain": domain,
        "messages": messages,
        "prompt_ids": prompt,
        "response_ids": ids,
        "text": turn.answer,
        "temperature": turn.temperature,
        "seed": 0,
        "stop": "length" if turn.cut else "eos",
        "target": target.identity["vocab_hash"],
    }


def response_ids(turn: Turn, prompt: list[int], target: TargetText, options: dict[str, Any]) -> list[int]:
    """Ids of an answer: what the template lays out behind the prompt, as far as the token that ends it.

    Where the template changes what stands before (some leave thinking out of earlier turns), the answer's own ids.
    """
    answered = [*turn.messages, {"role": "assistant", "content": turn.answer}]
    whole = target.render(answered, **options, add_generation_prompt=False)
    own = target.tokenizer.encode(turn.answer, add_special_tokens=False)
    ids = whole[len(prompt) :] if whole[: len(prompt)] == prompt else own
    end = next((place for place, token in enumerate(ids) if token in target.eos_ids), None)
    if end is not None:
        return ids[: end if turn.cut else end + 1]
    return ids if turn.cut else [*ids, target.tokenizer.eos_token_id]


def _logged(request: dict[str, Any], response: dict[str, Any]) -> Turn:
    given = _given(request, response)
    if given is None:
        return _said(request, response)
    try:
        return _said(request, response)._replace(given=given)
    except ValueError:  # the ids say more than messages can
        return Turn([], "", given.answer.stop == "length", _temperature(request), given)


def _given(request: dict[str, Any], response: dict[str, Any]) -> Given | None:
    """The ids of an engine's answer; None where it has none. ValueError where they are no text."""
    boundless = 2**62
    try:
        if "output_ids" in response and isinstance(request.get("input_ids"), list):
            prompt = request["input_ids"]
            return Given(prompt, sglang.answer(response, Ask(prompt, boundless)))
        choice = response["choices"][0] if response.get("choices") else {}
        prompt = choice.get("prompt_token_ids") or response.get("prompt_token_ids")
        if not prompt or not choice.get("token_ids"):
            return None
        ended = choice.get("finish_reason")
        only = choice | {"finish_reason": "stop" if ended == "tool_calls" else ended}
        return Given(prompt, vllm.answer(response | {"choices": [only]}, Ask(prompt, boundless)))
    except (Malformed, AttributeError, TypeError, LookupError) as error:
        raise ValueError(f"its response is no text: {error}") from None


def _temperature(request: dict[str, Any]) -> float:
    said = request.get("temperature")
    return float(said) if isinstance(said, (int, float)) else UNKNOWN


def _said(request: dict[str, Any], response: dict[str, Any]) -> Turn:
    """A turn as its messages have it. ValueError where they have none."""
    choices = response.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise ValueError("its response has no `choices`")
    message = choices[0].get("message")
    if not isinstance(message, dict):
        raise ValueError("its response has no message")
    messages = ends_with_question(conversation([_plain(part) for part in _list(request, "messages")]))
    answer = conversation([_plain({"role": "assistant", **message})])[0]["content"]
    return Turn(messages, answer, choices[0].get("finish_reason") == "length", _temperature(request))


def _turns(messages: list[Any]) -> list[Turn]:
    checked = conversation([_plain(message) for message in messages])
    found = [
        Turn(checked[:place], message["content"])
        for place, message in enumerate(checked)
        if message["role"] == "assistant" and place and checked[place - 1]["role"] in ("user", "tool")
    ]
    if not found:
        raise ValueError("the assistant answers nothing in it")
    return found


def _plain(message: Any) -> Any:
    """A message whose content is in parts as one with a text. ValueError where there is more than text in it."""
    if not isinstance(message, dict):
        return message
    if message.get("tool_calls") or message.get("function_call"):
        raise ValueError("calls tools, which no template of ours represents")
    content = message.get("content")
    if isinstance(content, list):
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
            raise ValueError("has content that is no text")
        return message | {"content": "".join(part["text"] for part in content)}
    return message


def _spoken(part: Any) -> dict[str, Any]:
    speaker = part.get("from") if isinstance(part, dict) else None
    if speaker not in SPEAKERS:
        raise ValueError(f"somebody called {str(speaker)[:40]!r} speaks, expected {', '.join(SPEAKERS)}")
    return {"role": SPEAKERS[speaker], "content": part.get("value")}


def _dialogue(question: Any, answer: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _body(row: dict[str, Any], key: str) -> dict[str, Any]:
    body = row.get(key)
    if isinstance(body, str):
        try:
            body = json.loads(body)
        except ValueError:
            raise ValueError(f"`{key}` is a string, but no JSON") from None
    if isinstance(body, dict) and isinstance(body.get("body"), dict):
        body = body["body"]
    if not isinstance(body, dict):
        raise ValueError(f"has no `{key}`")
    return body


def _list(row: dict[str, Any], key: str) -> list[Any]:
    if not isinstance(row.get(key), list) or not row[key]:
        raise ValueError(f"`{key}` must be a non-empty list")
    return list(row[key])
