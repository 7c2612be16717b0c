"""Tools with the gateway's own engine: they are rendered by the chat template, and calls in the text are parsed."""

import asyncio
import json

import pytest

from specctl.decoding.controllers import Fixed
from specctl.decoding.engine import Engine, EngineOptions
from specctl.engines.proxy_messages import joined
from specctl.gateway import tool_calls
from specctl.gateway.app import make_app
from specctl.gateway.engine_thread import EngineThread, TextPart
from specctl.gateway.metrics import Meter
from specctl.gateway.own_engine import OwnEngine
from specctl.gateway.tool_calls import HeldCalls
from specctl.recipe import LimitsRecipe, ServeRecipe
from tests.gateway.conftest import chat, served
from tests.toys.agent_traces import tool
from tests.toys.tool_templates import HERMES, PARTS

CHAT = "/v1/chat/completions"
TOOLS = [tool("get_weather"), tool("open_file")]
ONE = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln <tool_call>", "days": 2}}\n</tool_call>'
TWO = ONE + '\n<tool_call>{"name": "open_file", "arguments": {}}</tool_call>\n'


class Scripted(EngineThread):
    """An engine thread that answers with a given text in pieces and records its prompts."""

    text, size, finish = "", 3, "stop"

    def submit(self, generation):
        self.prompts = [*getattr(self, "prompts", []), generation.request.prompt]
        self.open.add(generation)
        pieces = [self.text[at : at + self.size] for at in range(0, len(self.text), self.size)]
        for piece in pieces:
            generation.channel.put(TextPart(generation.index, piece, [1]))
        self.open.discard(generation)
        generation.channel.put(TextPart(generation.index, "", finish=self.finish))


@pytest.fixture
def script(target, monkeypatch):
    """Return `make(text)`: the application of a model that writes this text, and its thread."""
    monkeypatch.setattr(target.tokenizer, "chat_template", HERMES)

    def make(text, size=3, finish="stop"):
        engine = Engine(target, Fixed.of(None), EngineOptions(slots=8))
        thread = Scripted(engine, Meter("toy"), "plain")
        thread.text, thread.size, thread.finish = text, size, finish
        return make_app(OwnEngine(thread, target, "toy", ServeRecipe()), LimitsRecipe(), None), thread

    return make


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_the_openai_client_gets_tool_calls(script, target, size):
    """The conversation continues with the calls and their results, as an agent would."""
    openai = pytest.importorskip("openai")
    app, thread = script("I look.\n" + TWO, size)
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Weather?"}]
    with served(app) as address:
        client = openai.OpenAI(base_url=address + "/v1", api_key="none", max_retries=0)
        ask = {"model": "toy", "tools": TOOLS, "tool_choice": "auto", "parallel_tool_calls": True}
        (choice,) = client.chat.completions.create(**ask, messages=messages).choices
        said = choice.message
        assert (choice.finish_reason, said.content) == ("tool_calls", "I look.")
        assert [call.function.name for call in said.tool_calls] == ["get_weather", "open_file"]
        assert json.loads(said.tool_calls[0].function.arguments) == {"city": "Köln <tool_call>", "days": 2}
        assert len({call.id for call in said.tool_calls}) == 2
        parts = list(client.chat.completions.create(**ask, messages=messages, stream=True))
        text = "".join(part.choices[0].delta.content or "" for part in parts)
        calls = [call for part in parts for call in part.choices[0].delta.tool_calls or []]
        assert text == "I look." and parts[-1].choices[0].finish_reason == "tool_calls"
        assert [(call.index, call.function) for call in calls] == [
            (number, type(calls[0].function)(**call.function.model_dump()))
            for number, call in enumerate(said.tool_calls)
        ]
        with client.chat.completions.stream(**ask, messages=messages) as events:
            whole = [event.name for event in events if event.type == "tool_calls.function.arguments.done"]
        assert whole == ["get_weather", "open_file"], "the end of the answer came with the calls"
        results = [{"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in said.tool_calls]
        more = [*messages, said.model_dump(), *results]
        client.chat.completions.create(**ask, messages=more)
        (choice,) = client.chat.completions.create(**ask | {"tool_choice": "none"}, messages=messages).choices
        assert (choice.finish_reason, choice.message.content) == ("stop", "I look.\n" + TWO)
        (choice,) = client.chat.completions.create(model="toy", messages=messages).choices
        assert choice.message.tool_calls is None
    said = {**said.model_dump(), "tool_calls": [json.loads(call.model_dump_json()) for call in said.tool_calls]}
    for call in said["tool_calls"]:
        call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    wanted = [(messages, TOOLS)] * 3 + [([*messages, said, *results], TOOLS), (messages, None), (messages, None)]
    render = target.tokenizer.apply_chat_template
    assert thread.prompts == [
        render(one, tools=tools, add_generation_prompt=True, return_dict=True)["input_ids"] for one, tools in wanted
    ]


OTHER = {
    "half": ONE[:-5],
    "no JSON": "<tool_call>{'name': 1}</tool_call>",
    "no name": '<tool_call>{"arguments": {}}</tool_call>',
    "a list": '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
    "NaN": '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>',
    "text between calls": ONE + " and " + ONE,
    "other text after the mark": ONE[: ONE.rindex("<")] + "} </tool_call>",
    "arguments of another name": '<tool_call>{"name": "f", "parameters": {"city": "x"}}</tool_call>',
    "another form": "[get_weather(city='x')]",
    "deep": '<tool_call>{"name": "f", "arguments": {"a": ' + "[" * 5000 + "]" * 5000 + "}}</tool_call>",
    "the beginning of a mark": "1 < 2 <tool",
}


CALLS = {
    "text after it": (TWO + "Done.", "So:\nDone."),
    "no end mark": (TWO.rstrip().removesuffix("</tool_call>"), "So:"),
    "an end mark in a string": ('<tool_call>{"name": "f", "arguments": {"a": "{} </tool_call>"}}</tool_call>', "So:"),
    "a line break in a string": ('<tool_call>{"name": "f", "arguments": {"a": "1\n\t2"}}</tool_call>', "So:"),
    "no arguments": ('<tool_call>{"name": "f"}</tool_call>', "So:"),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_that_models_write_carelessly_are_read(script, name):
    """These calls stayed text, so that an agent ended there."""
    text, content = CALLS[name]
    app, _ = script("So: \n" + text, 5)
    whole, parts = answers(app, chat(tools=TOOLS))
    streamed = [call for part in parts for call in part["delta"].get("tool_calls", [])]
    known = [call["function"] for call in whole["message"]["tool_calls"]]
    assert known == [call["function"] for call in streamed]
    assert all(isinstance(json.loads(one["arguments"]), dict) for one in known)
    assert whole["message"]["content"] == content == "".join(part["delta"].get("content", "") for part in parts)
    assert whole["finish_reason"] == parts[-1]["finish_reason"] == "tool_calls"


FIRST, SECOND = ({"name": "get_weather", "arguments": {"city": "Köln"}}, {"name": "open_file", "arguments": {}})
BARE = {
    "alone": json.dumps(FIRST),
    "with line breaks": "\n " + json.dumps(FIRST, indent=4) + "\n",
    "in a block": f"```json\n{json.dumps(FIRST, indent=2)}\n```",
    "in a block without a language": f"```\n{json.dumps(FIRST)}\n```\n",
    "two": f"{json.dumps(FIRST)}\n{json.dumps(SECOND)}",
}


@pytest.mark.parametrize("name", BARE)
@pytest.mark.parametrize("size", [1, 9, 1000])
def test_an_answer_of_calls_without_marks_calls(script, name, size):
    """Qwen2.5-Coder writes no marks: agents of six frameworks took its call for the answer."""
    app, _ = script(BARE[name], size)
    whole, parts = answers(app, chat(tools=TOOLS))
    streamed = [call for part in parts for call in part["delta"].get("tool_calls", [])]
    for calls in (whole["message"]["tool_calls"], streamed):
        read = [{"name": one["name"], "arguments": json.loads(one["arguments"])} for one in functions(calls)]
        assert read == [FIRST, SECOND][: len(read)] and len(read) == 1 + (name == "two")
    assert not whole["message"]["content"] and not any(part["delta"].get("content") for part in parts)
    assert whole["finish_reason"] == parts[-1]["finish_reason"] == "tool_calls"


def message(content):
    return {"role": "assistant", "content": content, "refusal": None}  # OpenAI requires all three


def functions(calls):
    return [call["function"] for call in calls]


NO_CALLS = {
    "of another tool": json.dumps({"name": "other", "arguments": {}}),
    "with another key": json.dumps(FIRST | {"why": 1}),
    "in another order": json.dumps(dict(reversed(FIRST.items()))),
    "an escaped name": json.dumps(FIRST).replace("get_weather", "get\\u005fweather"),
    "a list": json.dumps(FIRST | {"arguments": [1]}),
    "half": json.dumps(FIRST)[:-1],
    "text after it": json.dumps(FIRST) + "\nI call it.",
    "text before it": "I call " + json.dumps(FIRST),
    "an open block": "```json\n" + json.dumps(FIRST),
    "other code": "```python\nprint(1)\n```",
}


@pytest.mark.parametrize("name", NO_CALLS)
def test_other_json_stays_text(script, name):
    text = NO_CALLS[name]
    for tools in ({"tools": TOOLS}, {"tools": TOOLS, "tool_choice": "none"}, {}):
        app, _ = script(text, 3)
        whole, parts = answers(app, chat(**tools))
        assert "".join(part["delta"].get("content", "") for part in parts) == text
        assert not any("tool_calls" in part["delta"] for part in parts)
        assert whole["message"] == message(text)
    app, _ = script(BARE["alone"])
    whole, _ = answers(app, chat(tools=TOOLS, tool_choice="none"))
    assert whole["message"] == message(BARE["alone"])


def test_json_that_names_no_tool_is_streamed(script):
    """Held text comes at the end, which looks like an engine that hangs."""
    app, _ = script('{"name": "getaway", "arguments": {}}', 3)
    _, parts = answers(app, chat(tools=TOOLS))
    assert len([part for part in parts if part["delta"].get("content")]) > 5


def test_a_client_can_ask_for_one_call(script):
    """`parallel_tool_calls: false` was ignored. Engines leave out further calls."""
    app, _ = script("I look.\n" + TWO)
    whole, parts = answers(app, chat(tools=TOOLS, parallel_tool_calls=False))
    streamed = [call for part in parts for call in part["delta"].get("tool_calls", [])]
    for calls in (whole["message"]["tool_calls"], streamed):
        assert [call["function"]["name"] for call in calls] == ["get_weather"]
    assert whole["finish_reason"] == parts[-1]["finish_reason"] == "tool_calls"


def test_every_event_counts_tokens_if_asked(script):
    """Also both events at the end of an answer with calls, which are made together."""
    import httpx

    app, _ = script("I look.\n" + TWO, 5)
    options = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}

    async def work():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://toy") as http:
            return await http.post(CHAT, json=chat(tools=TOOLS, **options))

    events = [json.loads(line[6:]) for line in asyncio.run(work()).text.splitlines() if line.startswith("data: {")]
    calls, end, last = events[-3:]
    assert calls["choices"][0]["delta"]["tool_calls"] and end["choices"][0]["finish_reason"] == "tool_calls"
    assert calls["usage"] == end["usage"] == last["usage"] and last["choices"] == []


def test_text_that_is_held_back_has_its_token_ids(script):
    app, _ = script("I look.\n" + TWO, 5)
    whole, parts = answers(app, chat(tools=TOOLS, return_token_ids=True))
    assert whole["finish_reason"] == parts[-1]["finish_reason"] == "tool_calls"
    assert [id for part in parts for id in part.get("token_ids", [])] == whole["token_ids"] != []


@pytest.mark.parametrize("name", OTHER)
def test_text_in_another_form_stays_text(script, name):
    """Text that resembles a call must arrive completely, also in a stream."""
    text = "So: \n" + OTHER[name]
    app, _ = script(text, 5)
    whole, parts = answers(app, chat(tools=TOOLS))
    assert whole["message"] == message(text) and whole["finish_reason"] == "stop"
    assert "".join(part["delta"].get("content", "") for part in parts) == text
    assert parts[-1]["finish_reason"] == "stop" and not any("tool_calls" in part["delta"] for part in parts)
    app, _ = script(TWO, 5, "length")  # truncated, so the last call may be incomplete
    whole, parts = answers(app, chat(tools=TOOLS))
    assert whole["message"]["content"] == TWO == "".join(part["delta"].get("content", "") for part in parts)


def answers(app, body):
    """Return the choice of a whole answer, and the choices of a stream."""
    import httpx

    async def work():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://toy") as http:
            return await asyncio.gather(*[http.post(CHAT, json=body | {"stream": stream}) for stream in (False, True)])

    whole, stream = asyncio.run(work())
    assert whole.status_code == stream.status_code == 200, whole.text + stream.text
    pieces = [json.loads(line[6:]) for line in stream.text.splitlines() if line.startswith("data: {")]
    return whole.json()["choices"][0], [piece["choices"][0] for piece in pieces]


def test_text_is_held_back_only_for_calls():
    """Held text is sent at the end, in order and once."""
    for text in ("a < b <t <tool_call x", "ends with space \n ", "<", TWO, "x" + TWO, TWO + "y", "x" + TWO + "y"):
        for size in (1, 2, 11, 99):
            held = HeldCalls()
            sent = "".join(held.add(text[at : at + size]) for at in range(0, len(text), size))
            assert "<tool_call>" not in sent and not sent.endswith((" ", "\n"))
            rest, calls = held.end("stop")
            parsed = tool_calls.parse(text)
            assert (sent + rest == text and not calls) if parsed is None else (sent + rest or None) == parsed.content
            assert len(calls) == (len(parsed.calls) if parsed else 0)


def test_streamed_calls_are_whole_in_the_log(script):
    """The log used to contain fragments of arguments as separate calls."""
    app, _ = script("I look.\n" + TWO, 5)
    whole, parts = answers(app, chat(tools=TOOLS))
    *before, called, end = parts
    first, *rest = called["delta"]["tool_calls"]
    arguments = first["function"]["arguments"]
    pieces = [*before, called | {"delta": {"tool_calls": [first | {"function": {"name": "get_weather"}}]}}]
    pieces += [{"delta": {"tool_calls": [{"index": 0, "function": {"arguments": one}}]}} for one in arguments]
    pieces += [{"delta": {"tool_calls": rest}}, end]
    (choice,) = joined([{"choices": [piece]} for piece in pieces])["choices"]
    known = [call | {"id": None} for call in choice["message"]["tool_calls"]]
    assert known == [call | {"id": None} for call in whole["message"]["tool_calls"]]
    assert choice["message"]["content"] == "I look." and choice["finish_reason"] == "tool_calls"


FAULTS = {
    "messages": [
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": "q"}, {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}],
        [{"role": "user", "content": 3}],
    ],
    "tools": [[{"type": "web_search"}], [{"type": "function", "function": {}}], [3], "x"],
    "tool_choice": ["always", {"type": "function", "function": {"name": "f"}}, {"type": "function"}, 3],
    "chat_template_kwargs": [{"tools": []}, {"chat_template": "x"}, {"add_generation_prompt": False}],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in FAULTS.items() for value in values])
def test_invalid_fields_are_named(script, name, value):
    import httpx

    app, _ = script("x")

    async def work():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://toy") as http:
            return await http.post(CHAT, json=chat(tools=TOOLS) | {name: value})

    response = asyncio.run(work())
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"].partition(".")[0] == name and name in error["message"]


def test_text_parts_and_template_options_reach_the_template(script, target, monkeypatch):
    """Parts used to be joined, even for templates that loop over them."""
    monkeypatch.setattr(target.tokenizer, "chat_template", PARTS + "{{ mode }}{{ tools }}")
    app, thread = script("x")
    content = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    body = chat(tools=TOOLS, chat_template_kwargs={"mode": "fast"}) | {
        "messages": [{"role": "user", "content": content}]
    }
    answers(app, body)
    shown = target.tokenizer.decode(thread.prompts[0])
    assert "[one][two]" in shown and "fast[{" in shown
