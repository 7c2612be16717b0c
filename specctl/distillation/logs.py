"""Reader for existing responses: server logs, chat and instruction data sets, with one JSON object per line.

{"request": {"messages": […], …}, "response": {"choices": [{"message": {…}, "finish_reason": "stop"}], …}}
    a request to an OpenAI-compatible server with its response; both may be strings of JSON. Token ids in the response
    (vLLM's `return_token_ids`, the proxy of `specctl learn-from-server`) are used unchanged. The request may also be
    `body`, as in OpenAI's batch files, `proxy_server_request`, as LiteLLM stores it, or the row itself (`messages`
    beside `response`), and the response a text.
{"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}, …]}
{"instruction": "…", "input": "…", "output": "…"}                                                       Alpaca
{"prompt": "…", "response": "…"}

and the other layouts of `traces`. In a conversation every turn of the assistant is a response, and the messages before
it are its prompt. A message may have its thinking separate from its content, as `reasoning_content`, `reasoning` or
`thinking`.
"""

import hashlib
import json
import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from specctl.decoding.target_text import TargetText
from specctl.distillation.line_streams import json_lines
from specctl.distillation.line_streams import json_object as parsed
from specctl.distillation.messages import (
    ChatMessage,
    ContextExceeded,
    Conversation,
    Tool,
    arguments_with,
    check_length,
    checked_messages,
    conversation_with,
    prompt_id,
    stored_fields,
    text_of,
)
from specctl.distillation.prompts import CHECKED_LINES, ends_with_question
from specctl.distillation.rejections import Rejections
from specctl.distillation.traces import body_of, conversation_of, dialogue, keys_of, list_of
from specctl.engines import sglang, vllm
from specctl.engines.records import GenerationRequest, GenerationResult, MalformedResponse
from specctl.errors import ChatTemplateError, DataError

EXPECTED = (
    'one JSON object per line: {"request": {…}, "response": {…}}, {"messages": […]} or {"prompt": "…", "response": "…"}'
)
UNKNOWN = -1.0  # temperature of a response if the log has none, or none that a server accepts
MOST_TEMPERATURE = 1e6
ENDED_REASONS = ("stop", "eos", "eos_token")
CUT_REASONS = ("length", "max_tokens", "stop_sequence", None)  # None: the server or a gateway was interrupted
TOOL_CALL_REASONS = ("tool_calls", "function_call")
CALLS_TOOLS = "ends with a tool call, but has none"
THINK_MARK = re.compile(r"<[^<>\s]*think[^<>\s]*>", re.IGNORECASE)
_OPENING = r"<(?!/|\|?end)[^<>\s]*think[^<>\s]*>\s*"
THINK_START = re.compile(rf"^\s*{_OPENING}", re.IGNORECASE)
EMPTY_THINK = re.compile(r"^(?:<[^<>/]*think[^<>]*><[^<>]*think[^<>]*>)?", re.IGNORECASE)
EMPTY_BLOCK = re.compile(r"<[^<>/]*think[^<>]*>\s*<[^<>]*think[^<>]*>\s*$", re.IGNORECASE)
THINK_OPENED = re.compile(rf"{_OPENING}$", re.IGNORECASE)


class EngineIds(NamedTuple):
    """A response as token ids that an engine has read and written."""

    prompt_ids: list[int]
    answer: GenerationResult


class LoggedTurn(NamedTuple):
    """A response and the conversation before it. The conversation is empty if only the engine's ids contain it, as with
    images."""

    messages: list[ChatMessage]
    answer: str
    cut: bool = False  # ended before its end token: by length, stop string or interruption
    temperature: float = UNKNOWN
    engine_ids: EngineIds | None = None
    thinking: str = ""  # thinking before the answer, if the log has it separately
    calls: tuple[dict[str, Any], ...] = ()  # tool calls after the answer's text
    tools: list[Tool] | None = None
    options: Mapping[str, Any] = MappingProxyType({})  # arguments of the chat template for this conversation alone
    in_trace: bool = False  # a turn of an agent's trace, after its first one

    @property
    def prompt_id(self) -> str:
        return prompt_id(self.messages, self.tools, self.options)

    def arguments(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """All arguments of the chat template, given the recipe's `options`."""
        return arguments_with(options, self.tools, self.options)

    @property
    def message(self) -> ChatMessage:
        """The response as a message."""
        made: ChatMessage = {"role": "assistant", "content": self.answer or (None if self.calls else "")}
        made |= {"reasoning_content": self.thinking} if self.thinking else {}
        return made | ({"tool_calls": list(self.calls)} if self.calls else {})

    @property
    def id(self) -> str:
        """Stable id: 32 hex digits over conversation and answer, so a response has the same id in every file."""
        content = self.answer if self.messages or self.engine_ids is None else str(self.engine_ids)
        content = f"{self.thinking}\0{content}" if self.thinking else content
        content = f"{content}\0{json.dumps(self.calls, sort_keys=True)}" if self.calls else content
        return hashlib.sha256(f"{self.prompt_id}/{content}".encode()).hexdigest()[:32]


def turns(row: dict[str, Any]) -> list[LoggedTurn]:
    """The assistant's turns in a line. ValueError says why there are none."""
    if "response" in row and "prompt" not in row:
        request, response = _exchange(row)
        choices = response.get("choices")
        if not isinstance(choices, list) or len(choices) < 2:
            return [_turn_from_exchange(request, response)]
        return [_turn_from_exchange(request, response | {"choices": [choice]}) for choice in choices]  # `n` in OpenAI's
    if (conversation := conversation_of(row)) is not None:
        return _turns(conversation)
    if "prompt" in row:
        answer = row.get("response", row.get("completion"))
        return _turns(conversation_with(row, dialogue(row["prompt"], answer)))
    raise ValueError(
        f"has none of `response`, `messages`, `conversations`, `instruction`, `prompt`, but {keys_of(row)}"
    )


def check_beginning(file: str, max_rejected: float) -> None:
    """Raise DataError if none of the first lines of a file has a turn: the user learns of a wrong file at once."""
    rejections = rejections_of(None, max_rejected)
    if next(read(file, rejections, CHECKED_LINES), None) is None:
        rejections.check()
        raise no_responses(file)


def rejections_of(path: Path | None, allowed: float, *, hold: bool = False) -> Rejections:
    """A collector of lines without a response; the arguments are as in `Rejections`."""
    return Rejections(path, allowed, hold=hold, expected=EXPECTED, what="responses")


def no_responses(file: str) -> DataError:
    return DataError(f"no responses in {file}", hint=f"expected {EXPECTED}")


def read(file: str, rejections: Rejections, most: int | None = None) -> Iterator[tuple[str, LoggedTurn]]:
    """Yield the turns of a file, or of its first `most` lines, with their places. Lines without a turn go to
    `rejections`."""
    for where, line in islice(json_lines(file), most):
        rejections.seen += 1
        try:
            found = turns(parsed(line))
        except ValueError as error:
            rejections.add(where, str(error), (line or b"").decode("utf-8", "replace"))
            continue
        rejections.seen += len(found) - 1  # every turn may be rejected
        for turn in found:
            yield where, turn


def record(turn: LoggedTurn, domain: str, target: TargetText, options: dict[str, Any]) -> dict[str, Any]:
    """A turn as a stored record, with the engine's ids or the ids of the target's chat template. ValueError if the
    template refuses the turn, the vocabulary lacks a token, or the context is too short."""
    messages, cut = turn.messages, turn.cut
    if turn.engine_ids is not None:
        prompt, ids = turn.engine_ids.prompt_ids, turn.engine_ids.answer.output_ids
        if not all(type(token) is int and 0 <= token < target.vocab_size for token in [*prompt, *ids]):
            raise ValueError(f"has tokens outside the target's vocabulary of {target.vocab_size}")
        cut = cut and not (ids and ids[-1] in target.eos_ids)
        messages = messages or [{"role": "user", "content": target.tokenizer.decode(prompt)}]
    else:
        try:
            prompt, ids = rendered_turn(turn, target, options)
        except ChatTemplateError as error:
            raise ValueError(error.message) from None
    if len(prompt) + len(ids) > target.context_length:
        raise ContextExceeded(len(prompt) + len(ids), target)
    return {
        "id": turn.id,
        "prompt_id": turn._replace(messages=messages).prompt_id,
        "domain": domain,
        "messages": messages,
        **stored_fields(turn.tools, turn.options),
        "prompt_ids": prompt,
        "response_ids": ids,
        "text": target.tokenizer.decode(ids, skip_special_tokens=True) if turn.thinking or turn.calls else turn.answer,
        "temperature": turn.temperature,
        "seed": 0,
        "stop": "length" if cut else "eos",
        "target": target.identity["vocab_hash"],
    }


def rendered_turn(turn: LoggedTurn, target: TargetText, options: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Prompt ids and response ids of a turn, by the target's chat template.

    The response is the part of the rendered conversation that holds the answer, up to the token that ends it. Text that
    the template adds between its generation prompt and the answer, such as an empty think block, belongs to the prompt:
    the target did not write it. Some templates render no such part (base models, templates that change earlier turns).
    The response is then the ids of the answer alone, with the target's end token. Tool calls have no such ids: they are
    in the form that the template gives them.

    Raises ValueError if the target would have written more than the log contains, and ChatTemplateError.
    """
    options = turn.arguments(options)
    check_length([*turn.messages, turn.message], target)
    prompt = target.render(turn.messages, **options)
    whole = target.render([*turn.messages, turn.message], **{**options, "add_generation_prompt": False})
    end = next((token for token in reversed(whole) if token in target.eos_ids), target.end_id)
    before = target.tokenizer.decode(prompt, skip_special_tokens=False)
    answer = turn.answer
    if turn.thinking or not THINK_OPENED.search(before):
        after = _after_prompt(prompt, whole, turn, target)
        parts = None if after is None else _rendered(after, turn, end, target)
        if parts is not None:
            lead, ids = parts
            return prompt + lead, ids
        if turn.thinking:
            raise ValueError(
                f"has thinking outside its content, which the chat template of target {target.name} does not render"
            )
        if turn.calls:
            raise ValueError(
                f"calls tools, but the chat template of target {target.name} does not render this turn after its prompt"
            )
    else:  # the answer continues the thinking that the prompt opened; a template would add an empty think block
        if not turn.cut and not THINK_MARK.search(answer):
            raise ValueError(f"has no thinking, but the prompt of target {target.name} ends with an opening think tag")
        if turn.calls:
            raise ValueError(f"calls tools, but the prompt of target {target.name} ends with an opening think tag")
        answer = THINK_START.sub("", answer)
    return prompt, _up_to_end(target.tokenizer.encode(answer, add_special_tokens=False), turn.cut, end, target)


def _after_prompt(prompt: list[int], whole: list[int], turn: LoggedTurn, target: TargetText) -> list[int] | None:
    """The ids of the rendered conversation after its prompt, or None if it does not begin with the prompt.

    A token may lie on both sides of the prompt's end, and some templates end the prompt with an empty think block that
    they leave out of the rendered turn. For a turn with tool calls, the text after the prompt is tokenized then.
    """
    if whole[: len(prompt)] == prompt:
        return whole[len(prompt) :]
    if turn.calls:
        plain = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        before, after = (target.tokenizer.decode(ids, **plain) for ids in (prompt, whole))
        for start in (before, EMPTY_BLOCK.sub("", before)):
            if after.startswith(start):
                return list(target.tokenizer.encode(after[len(start) :], add_special_tokens=False))
    return None


def _rendered(
    ids: list[int], turn: LoggedTurn, end: int | None, target: TargetText
) -> tuple[list[int], list[int]] | None:
    """Divide the ids that a template renders after a prompt into ids that belong to the prompt, and the response.
    Returns None if they do not contain the answer, its thinking and the names of its tool calls. The comparison ignores
    whitespace, because templates change it."""
    ends = [place for place, token in enumerate(ids) if token in target.eos_ids]
    body = ids[: ends[-1]] if ends else ids
    text, wanted = target.characters(body), target.normalized(turn.answer)
    rest = text.partition(target.normalized(turn.thinking))[2] if turn.thinking else text
    if wanted not in rest:
        return None
    if turn.calls:  # in the template's form, before or after the text
        wanted = EMPTY_THINK.sub("", rest)
    start = 0
    if turn.thinking or not text.startswith(wanted):
        if not turn.thinking and THINK_START.match(turn.answer):
            return None  # a think block of the template, before the answer's think block
        sizes = range(len(body) + 1)
        start = bisect_left(sizes, True, key=lambda size: wanted not in target.characters(body[size:])) - 1
    stop, ended = len(ids), any(place >= start for place in ends)
    if turn.cut if ended else not turn.calls:  # the target did not write the template's marks after the answer
        sizes = range(start, len(ids) + 1)
        stop = start + bisect_left(sizes, True, key=lambda size: wanted in target.characters(ids[start:size]))
    response = _up_to_end(ids[start:stop], turn.cut, end, target)
    shown = target.characters(response) if turn.calls else ""
    if not all(target.normalized(call["function"]["name"]) in shown for call in turn.calls):
        return None
    return ([], ids[:start] + response) if turn.thinking else (ids[:start], response)


def _up_to_end(ids: list[int], cut: bool, end: int | None, target: TargetText) -> list[int]:
    """Ids up to their first end token; if they have none and are not cut, `end` is added. ValueError if `end` is
    None."""
    place = next((place for place, token in enumerate(ids) if token in target.eos_ids), None)
    if place is not None:
        return ids[: place if cut else place + 1]
    if cut:
        return ids
    if end is None:
        raise ValueError(
            f"has no end token: target {target.name} does not define one (eos_token_id in generation_config.json)"
        )
    return [*ids, end]


def _exchange(row: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Request and response of a row. ValueError says what is missing."""
    given = row["response"]
    if isinstance(given, list) or (isinstance(given, str) and given.startswith("data:")):
        raise ValueError("its response is a stream in pieces: log the whole answer")
    if isinstance(given, str) and given.strip() and not given.lstrip().startswith("{"):
        answer = {"message": {"content": given}, "finish_reason": "stop"}
        row = row | {"response": {"choices": [answer]}}
    asked = next((name for name in ("request", "body", "proxy_server_request") if name in row), None)
    if asked is None and "messages" not in row:
        raise ValueError("has a response, but no `request`, `body` or `messages`")
    parameters = row.get("model_parameters")  # of LiteLLM: temperature, tools and stop strings
    request = row | (parameters if isinstance(parameters, dict) else {}) if asked is None else body_of(row, asked)
    return request, body_of(row, "response")


def _turn_from_exchange(request: dict[str, Any], response: dict[str, Any]) -> LoggedTurn:
    given = _engine_ids(request, response)
    if given is None:
        return _turn_from_messages(request, response)
    try:
        return _turn_from_messages(request, response)._replace(engine_ids=given)
    except ValueError:  # the ids contain more than messages can express
        return LoggedTurn([], "", given.answer.stop == "length", _temperature(request), given)


def _engine_ids(request: dict[str, Any], response: dict[str, Any]) -> EngineIds | None:
    """The ids of an engine's answer, or None if there are none. ValueError if they are not valid."""
    boundless = 2**62
    try:
        if "output_ids" in response and isinstance(request.get("input_ids"), list):
            prompt, about = request["input_ids"], response["meta_info"]
            ended = about["finish_reason"] or {"type": None}
            stop = _stop({"finish_reason": ended["type"], "matched_stop": ended.get("matched")}, request)
            given = response | {"meta_info": about | {"finish_reason": ended | {"type": stop}}}
            return EngineIds(prompt, _whole(sglang.parse_answer(given, GenerationRequest(prompt, boundless))))
        choice = response["choices"][0] if response.get("choices") else {}
        prompt = choice.get("prompt_token_ids") or response.get("prompt_token_ids")
        if not isinstance(prompt, list) or not prompt or not choice.get("token_ids"):
            return None
        only = choice | {"finish_reason": _stop(choice, request, calls=True)}
        return EngineIds(
            prompt, _whole(vllm.parse_answer(response | {"choices": [only]}, GenerationRequest(prompt, boundless)))
        )
    except (MalformedResponse, AttributeError, TypeError, LookupError) as error:
        raise ValueError(f"its response is not text: {error}") from None


def _whole(answer: GenerationResult) -> GenerationResult:
    if not isinstance(answer.output_ids, list):
        raise MalformedResponse("its token ids are not a list")
    return answer


def _stop(choice: dict[str, Any], request: dict[str, Any], *, calls: bool = False) -> str:
    """End of a text in the engines' terms: "stop" if the target wrote its end token, "length" if the text was cut.

    A stop string ends a text without the end token. vLLM and SGLang report the stop string (`stop_reason`,
    `matched_stop`). Other servers do not, so a request with `stop` counts as cut. Raises ValueError if the text may be
    incomplete, or may not come from the target. With `calls`, a tool call is accepted as an end that the target wrote.
    """
    ended = choice.get("finish_reason")
    if ended in TOOL_CALL_REASONS and not calls:
        raise ValueError(CALLS_TOOLS)
    if ended in CUT_REASONS:
        return "length"
    if ended not in ENDED_REASONS and ended not in TOOL_CALL_REASONS:
        raise ValueError(f"has the unknown finish reason {ended!r:.40}")
    matched = [choice[name] for name in ("stop_reason", "matched_stop") if name in choice]
    if not matched:
        return "length" if request.get("stop") and ended not in TOOL_CALL_REASONS else "stop"
    stops = request.get("stop_token_ids")
    own = stops if isinstance(stops, list) else []
    return "length" if any(isinstance(one, str) or one in own for one in matched) else "stop"


def _temperature(request: dict[str, Any]) -> float:
    value = request.get("temperature")
    return float(value) if isinstance(value, (int, float)) and 0 <= value <= MOST_TEMPERATURE else UNKNOWN


def _turn_from_messages(request: dict[str, Any], response: dict[str, Any]) -> LoggedTurn:
    """A turn from the messages of request and response. ValueError if they have none."""
    choices = response.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise ValueError("its response has no `choices`")
    message = choices[0].get("message")
    if not isinstance(message, dict):
        raise ValueError("its response is no chat: of a completion, only token ids (`return_token_ids`) can be used")
    asked = conversation_with(request, list_of(request, "messages"))
    ends_with_question(asked.messages)
    answer = checked_messages([{**message, "role": "assistant"}])[0]
    cut = _stop(choices[0], request, calls="tool_calls" in answer) == "length"
    if cut and "tool_calls" in answer:
        raise ValueError("calls tools, but its text was cut")
    return _turn(asked, answer)._replace(cut=cut, temperature=_temperature(request))


def _turn(asked: Conversation, answer: ChatMessage) -> LoggedTurn:
    return LoggedTurn(
        asked.messages,
        text_of(answer),
        thinking=answer.get("reasoning_content", ""),
        calls=tuple(answer.get("tool_calls", ())),
        tools=asked.tools,
        options=asked.options,
    )


def _turns(whole: Conversation) -> list[LoggedTurn]:
    places = whole.answered_places()
    if not places:
        raise ValueError("has no answer from the assistant")
    return [
        _turn(whole.before(place), whole.messages[place])._replace(in_trace=whole.is_trace and place > places[0])
        for place in places
    ]
