"""Answers of a given form: JSON schemas, and tool calls that a request requires."""

import copy
import json
import re
from types import SimpleNamespace

import pytest

from specctl.decoding.constraint import Constraint, grammar_tokenizer
from specctl.decoding.controllers import Fixed
from specctl.drafters.text.lookup import Lookup
from specctl.gateway import forms
from specctl.gateway.openai_requests import ChatRequest
from tests.gateway.conftest import chat, served
from tests.gateway.test_tools import TOOLS
from tests.toys.tool_templates import HERMES

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SCHEMA = {
    "$defs": {"word": {"type": "string", "maxLength": 5}},
    "type": "object",
    "properties": {
        "ok": {"type": "boolean"},
        "words": {"type": "array", "items": {"$ref": "#/$defs/word"}, "maxItems": 2},
    },
    "required": ["ok", "words"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
SHORT = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA | {"description": "x"}}} for name in ("f", "g")
]


@pytest.fixture
def ask(make_gateway, target, monkeypatch):
    """Send a chat to the target with a drafter, and return its choices."""
    monkeypatch.setattr(target.tokenizer, "chat_template", HERMES)
    gateway = make_gateway(Fixed.of(Lookup()), "lookup")

    def make(path=CHAT, **fields):
        (response,) = gateway.ask(path, chat(**{"max_tokens": 200} | fields) if path == CHAT else fields)
        return response.json()["choices"] if response.status_code == 200 else response.json()["error"]

    return make


def check(document):
    assert [*document] == ["ok", "words"] and document["ok"] in (True, False)
    assert len(document["words"]) <= 2 and all(len(word) <= 5 for word in document["words"])


@pytest.mark.parametrize("temperature", [0, 1])
def test_answers_match_the_schema(ask, temperature):
    for choice in ask(response_format=FORM, temperature=temperature, n=3):
        assert choice["finish_reason"] == "stop"
        check(json.loads(choice["message"]["content"]))


def test_completions_match_the_schema(ask):
    for choice in ask(COMPLETIONS, prompt=["SELECT", "a longer prompt"], max_tokens=200, seed=1, response_format=FORM):
        check(json.loads(choice["text"]))


def test_json_of_any_form(ask):
    (choice,) = ask(response_format={"type": "json_object"}, temperature=0, max_tokens=12)
    assert choice["message"]["content"].startswith("{")


TEXTS = ["yes", "no / maybe", 'a "b"\n', "\x7f"]


@pytest.mark.parametrize(
    ("form", "older", "fits"),
    [
        ({"json": SCHEMA}, "guided_json", lambda text: check(json.loads(text)) is None),
        ({"json": json.dumps(SCHEMA)}, "guided_json", lambda text: check(json.loads(text)) is None),
        ({"choice": TEXTS}, "guided_choice", lambda text: text in TEXTS),
        ({"regex": r"[a-c]{2}/\/\n[0-9]"}, "guided_regex", re.compile("[a-c]{2}//\n[0-9]").fullmatch),
        ({"regex": "[x/]{3}\n"}, "guided_regex", re.compile("[x/]{3}\n").fullmatch),
    ],
)
def test_answers_have_the_forms_of_vllm(ask, form, older, fits):
    """Clients of vLLM send them; they were refused."""
    for fields in ({"structured_outputs": form}, {older: next(iter(form.values()))}):
        (choice,) = ask(temperature=1, **fields)
        assert choice["finish_reason"] == "stop" and fits(choice["message"]["content"]), choice


def test_any_object_in_the_form_of_vllm(ask):
    (choice,) = ask(structured_outputs={"json_object": True}, temperature=0, max_tokens=12)
    assert choice["message"]["content"].startswith("{")


@pytest.mark.parametrize("parallel", [True, False, None])
def test_required_calls_are_written(ask, parallel):
    (choice,) = ask(tools=SHORT, tool_choice="required", parallel_tool_calls=parallel)
    if choice["finish_reason"] == "length":
        assert parallel  # the target may call again and again
        return
    calls = choice["message"]["tool_calls"]
    assert choice["message"]["content"] is None and choice["finish_reason"] == "tool_calls"
    assert {call["function"]["name"] for call in calls} <= {"f", "g"} and (parallel or len(calls) == 1)
    for call in calls:
        check(json.loads(call["function"]["arguments"]))


def test_the_named_function_is_called(ask):
    (choice,) = ask(tools=SHORT, tool_choice={"type": "function", "function": {"name": "g"}})
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "g"
    check(json.loads(call["function"]["arguments"]))


def test_a_call_or_an_answer_of_the_schema(ask):
    """With both, the target may answer or call."""
    for seed in range(4):
        (choice,) = ask(tools=SHORT, response_format=FORM, seed=seed, parallel_tool_calls=False)
        calls = choice["message"].get("tool_calls")
        check(json.loads(calls[0]["function"]["arguments"] if calls else choice["message"]["content"]))


def test_the_openai_client_parses_streams_and_models(make_gateway, target, monkeypatch):
    openai, pydantic = pytest.importorskip("openai"), pytest.importorskip("pydantic")
    monkeypatch.setattr(target.tokenizer, "chat_template", HERMES)

    class Answer(pydantic.BaseModel):
        yes: bool
        grade: int = pydantic.Field(ge=1, le=6)

    messages = [{"role": "user", "content": "Is it good?"}]
    with served(make_gateway(Fixed.of(Lookup()), "lookup").app) as address:
        client = openai.OpenAI(base_url=address + "/v1", api_key="none", max_retries=0)
        (choice,) = client.chat.completions.parse(
            model="toy", messages=messages, max_tokens=80, seed=1, response_format=Answer
        ).choices
        assert isinstance(choice.message.parsed, Answer) and 1 <= choice.message.parsed.grade <= 6
        form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": Answer.model_json_schema()}}
        stream = client.chat.completions.create(
            model="toy", messages=messages, max_tokens=80, seed=1, stream=True, response_format=form
        )
        text = "".join(part.choices[0].delta.content or "" for part in stream)
    assert Answer.model_validate_json(text)


BAD = [
    ({"response_format": {"type": "json_schema"}}, "response_format", "which needs it"),
    ({"response_format": {"type": "json_object", "json_schema": FORM["json_schema"]}}, "response_format", "goes with"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "json_object"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format", "schema"),
    ({"response_format": FORM, "ignore_eos": True}, "ignore_eos", "cannot be combined"),
    ({"response_format": FORM, "min_tokens": 3}, "min_tokens", "cannot be combined"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs", "unclosed group"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs", "a JSON schema"),
    ({"structured_outputs": {"json": {"type": "thing"}}}, "structured_outputs", "enforced"),
    ({"structured_outputs": {}}, "structured_outputs", "one of json"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "one of json"),
    ({"structured_outputs": {"grammar": "x"}}, "structured_outputs.grammar", "Unrecognized"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "at least 1"),
    ({"structured_outputs": {"regex": "a"}, "response_format": FORM}, "structured_outputs", "not allowed with"),
    ({"guided_regex": "a", "response_format": FORM}, "guided_regex", "'guided_regex' is not allowed with"),
    ({"guided_json": SCHEMA, "guided_regex": "a"}, "guided_json", "another form"),
    ({"guided_choice": ["a"], "structured_outputs": {"regex": "a"}}, "guided_choice", "another form"),
    ({"guided_grammar": "x"}, "guided_grammar", "Unrecognized"),
    ({"guided_regex": "("}, "guided_regex", "enforced"),
    ({"guided_json": "{"}, "guided_json", "'guided_json' must be a JSON schema"),
    ({"guided_json": {"type": "thing"}}, "guided_json", "enforced"),
    ({"guided_json": 3}, "guided_json", "'guided_json"),
    ({"guided_choice": []}, "guided_choice", "'guided_choice': List should have at least 1"),
    ({"guided_regex": "a", "response_format": FORM}, "guided_regex", "'guided_regex' is not allowed with 'response"),
    ({"tools": SHORT, "tool_choice": {"type": "function", "function": {"name": "h"}}}, "tool_choice", "a function of"),
    ({"tools": SHORT, "tool_choice": {"type": "allowed_tools"}}, "tool_choice", "a function of 'tools'"),
    ({"tool_choice": "required"}, "tool_choice", "only allowed with 'tools'"),
]
SCHEMAS = [
    {"type": "thing"},
    {"$ref": "#/$defs/none"},
    {"$ref": "http://x.test/y"},
    {"type": "string", "pattern": "("},
    {"type": "integer", "minimum": 5, "maximum": 3},
    {"allOf": 3},
    {"type": "string", "pattern": "(?=a)b"},
]
BAD += [
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": one}}}, "response_format", "enforced")
    for one in SCHEMAS
]


@pytest.mark.parametrize(("fields", "param", "message"), BAD)
def test_forms_that_cannot_be_enforced_are_refused(ask, fields, param, message):
    error = ask(**fields)
    assert error["param"].startswith(param) and message in error["message"], error
    assert "structured_outputs" in fields or "structured_outputs" not in error["param"] + error["message"]
    assert "builtin" not in error["message"] and len(error["message"]) < 300


def test_a_recursive_schema(ask):
    tree = {
        "$defs": {
            "tree": {
                "type": "object",
                "properties": {"left": {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "null"}]}},
                "additionalProperties": False,
                "required": ["left"],
            }
        },
        "$ref": "#/$defs/tree",
    }
    (choice,) = ask(response_format={"type": "json_schema", "json_schema": {"schema": tree}}, max_tokens=24, seed=3)
    assert choice["message"]["content"].lstrip().startswith("{")


def test_most_requests_ask_for_no_form():
    for fields in (
        {},
        {"tools": TOOLS},
        {"tools": TOOLS, "tool_choice": "none"},
        {"response_format": {"type": "text"}},
    ):
        assert not ChatRequest.model_validate(chat(**fields)).has_form


@pytest.mark.parametrize("special", [True, False])
def test_the_marks_of_a_call_may_be_special_tokens(special):
    asked = ChatRequest.model_validate(chat(tools=SHORT, tool_choice="required"))
    (call,) = [line for line in forms.grammar(asked, lambda text: special).splitlines() if line.startswith("call_0")]
    assert ("call_0: <tool_call> " in call and call.endswith(" </tool_call>")) == special
    assert ('call_0: "<tool_call>" ' in call) != special


def test_special_marks_are_written_as_special_tokens(target):
    """With its bytes, the token broke the grammar of Qwen's calls."""
    tokenizer = copy.deepcopy(target.tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<tool_call>", "</tool_call>"]})
    names = tokenizer.convert_tokens_to_ids(["<tool_call>", "</tool_call>"])
    assert names == [len(target.tokenizer), len(target.tokenizer) + 1]
    wide = SimpleNamespace(tokenizer=tokenizer, vocab_size=len(tokenizer), eos_ids=target.eos_ids, name="toy")
    asked = ChatRequest.model_validate(chat(tools=SHORT, tool_choice="required", parallel_tool_calls=False))
    made = grammar_tokenizer(wide)
    constraint = Constraint(made, forms.grammar(asked, lambda text: made.is_special_token(names[text[1] == "/"])))
    call = '<tool_call>\n{"name": "g", "arguments": {"ok": true, "words": []}}\n</tool_call>'
    ids = tokenizer.encode(call)
    assert ids[0] == names[0] and ids[-1] == names[1]
    for place, token in enumerate(ids):
        assert constraint.allowed(ids[:place], [], [])[0, token]
    assert constraint.allowed(ids, [], [])[0].nonzero().flatten().tolist() == sorted(target.eos_ids)


def test_an_answer_that_starts_again_keeps_its_form(make_gateway, target, monkeypatch):
    """After a failed step a text starts again with the tokens that its client has."""
    monkeypatch.setattr(target.tokenizer, "chat_template", HERMES)
    gateway = make_gateway(Fixed.of(Lookup()), "lookup")
    (whole,) = gateway.ask(CHAT, chat(response_format=FORM, max_tokens=200, seed=2, n=2))
    steps, step = [0], gateway.thread.engine.step

    def failing():
        steps[0] += 1
        if steps[0] == 6:
            raise RuntimeError("a step fails")
        return step()

    monkeypatch.setattr(gateway.thread.engine, "step", failing)
    (again,) = gateway.ask(CHAT, chat(response_format=FORM, max_tokens=200, seed=2, n=2))
    assert again.status_code == 200, again.text
    assert again.json()["choices"] == whole.json()["choices"] and steps[0] > 8
