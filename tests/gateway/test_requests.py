"""Bad requests get OpenAI's error object with the right status, and later requests succeed."""

import asyncio
import gzip
import json
from inspect import signature

import pytest
from transformers import PreTrainedTokenizerBase

from specctl.gateway import openai_requests
from specctl.recipe import LimitsRecipe
from tests.gateway.conftest import chat

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
JSON = {"content-type": "application/json"}


@pytest.fixture
def send(make_gateway):
    """Return `send(content, path, …)`, which sends bytes, checks that a good request still works, and returns the
    response."""
    gateway = make_gateway(slots=2)

    def send(content, path=CHAT, headers=JSON, method="POST"):
        async def work():
            async with gateway.client() as http:
                bad = await http.request(method, path, content=content, headers=headers)
                return bad, await http.post(CHAT, json=chat(max_tokens=2))

        bad, good = asyncio.run(work())
        assert good.status_code == 200 and not gateway.thread.open and not gateway.app.in_flight
        return bad

    return send


def error(response, status):
    assert response.status_code == status, response.text
    document = response.json()
    assert set(document) == {"error"} and set(document["error"]) == {"message", "type", "param", "code"}
    assert "\n" not in document["error"]["message"] and len(response.content) < 600
    return document["error"]


MESSAGES = [{"role": "user", "content": "Hi"}]
BAD_BODIES = {
    "half": b'{"messages": [',
    "not JSON": b"hello",
    "empty": b"",
    "a list": b"[1]",
    "a number": b"3",
    "NaN": b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
    "beyond floats": b'{"messages": [{"role": "user", "content": "x"}], "temperature": 1e999}',
    "no UTF-8": b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}',
    "a lone surrogate": b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    "deep": b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "a long number": b'{"max_tokens": ' + b"9" * 5000 + b"}",
}


@pytest.mark.parametrize("body", BAD_BODIES.values(), ids=BAD_BODIES)
def test_invalid_bodies_are_refused(send, body):
    """Nested brackets, surrogates and numbers of 400 digits used to raise."""
    assert error(send(body), 400)["type"] == "invalid_request_error"


FIELDS = {
    "messages": [None, "Hi", [], [None], [{}], [{"role": "x", "content": "y"}], [{"role": "user", "content": 3}]],
    "temperature": ["hot", -1, 3, [], True],
    "top_p": [2, "x", -0.1],
    "top_k": [1.5, -2, "x"],
    "max_tokens": [0, -1, 1.5, "x", 10**40],
    "n": [0, 65, "x", 10**30],
    "seed": [1.5, "x", 2**63, 10**400],
    "stop": [3, [""], ["x"] * 17, [3]],
    "stream": ["yes", 1],
    "stream_options": [{"include_usage": True}, {"x": 1}, 3],
    "logprobs": [3, "x"],
    "top_logprobs": [2, 21, -1, "x"],
    "model": [3, []],
    "chat_template_kwargs": [3, {"tokenize": False}],
    "tools": [[{"type": "function"}], 3],
    "logit_bias": [{"x": 1}, {"-1": 1}, {"3": 101}, {"999999999": 1}, {"3": "x"}, [3]],
    "presence_penalty": [2.5, "x"],
    "frequency_penalty": [-2.5],
    "min_p": [1.5, -0.1, "x"],
    "min_tokens": [-1, 2, "x"],
    "stop_token_ids": [["x"], [-1], [10**8], 3],
    "include_stop_str_in_output": ["x"],
    "response_format": [{"type": "yaml"}, "json_object", {"type": "json_schema"}],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in FIELDS.items() for value in values])
def test_invalid_fields_are_named(send, name, value):
    body = json.dumps({"messages": MESSAGES, "max_tokens": 1} | {name: value}).encode()
    said = error(send(body), 400)
    assert said["param"].partition(".")[0] == name and name in said["message"]


def test_a_required_call_needs_tools(send):
    """llama-index asks for one without tools. The message listed the value that was sent as possible."""
    for choice in ("required", {"type": "function", "function": {"name": "f"}}):
        said = error(send(json.dumps({"messages": MESSAGES, "tool_choice": choice})), 400)
        assert said["message"] == "'tool_choice' is only allowed with 'tools'" and said["param"] == "tool_choice"


def test_unknown_fields_are_named(send):
    said = error(send(json.dumps({"messages": MESSAGES, "temprature": 1}).encode()), 400)
    assert said["param"] == "temprature" and "temprature" in said["message"]
    said = error(send(json.dumps({"messages": [MESSAGES[0] | {"contents": "x"}]}).encode()), 400)
    assert said["param"] == "messages.0.contents"


def test_neutral_values_of_unsupported_fields_are_accepted(make_gateway):
    """Many clients send default values."""
    neutral = {
        "min_p": 0.0,
        "tools": [],
        "user": "me",
        "stop": None,
        "verbosity": "medium",
        "stop_token_ids": [],
        "prompt_cache_retention": "24h",
        "parallel_tool_calls": False,
    }
    neutral |= {"response_format": {"type": "text"}, "n": None, "seed": None, "stream": False, "metadata": {"a": "b"}}
    nulls = dict.fromkeys([*openai_requests.NEUTRAL, *openai_requests.ChatRequest.model_fields, "of_next_year"])
    spoken = {"role": "assistant", "content": "Hi", "reasoning": None, "of_next_year": None}
    talk = {"messages": [*MESSAGES, spoken, *MESSAGES], "max_tokens": 1}
    for body in (chat(max_tokens=1, temperature=1, **neutral), nulls | talk):
        (response,) = make_gateway().ask(CHAT, body)
        assert response.status_code == 200, response.text


PROMPTS = [[], [[]], [-1], [10**9], [10**30], ["a", 1], "", [""], [[1], []], 3, {"a": 1}, ["x"] * 65, [1.5]]


@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda prompt: json.dumps(prompt)[:20])
def test_invalid_prompts_are_refused(send, prompt):
    assert error(send(json.dumps({"prompt": prompt, "max_tokens": 1}).encode(), COMPLETIONS), 400)["param"]


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"prompt": [3, -1]}, "prompt.1", "greater than or equal to 0"),
        ({"prompt": ["x", 3]}, "prompt.1", "valid string"),
        ({"prompt": ["x"] * 65}, "prompt", "at most 64 items"),
        ({"prompt": "x", "stop": [""]}, "stop.0", "at least 1 character"),
        ({"prompt": "x", "stop": "x" * 1025}, "stop", "at most 1024 characters"),
        ({"prompt": "x", "str": 1}, "str", "Unrecognized"),
        ({"prompt": "x", "echo": 1}, "echo", "boolean"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens", "only with 'echo'"),
        ({"prompt": "x", "min_tokens": 17}, "min_tokens", "at most the limit of new tokens, 16"),
        ({"prompt": "x", "stop_token_ids": [10**8]}, "stop_token_ids", "must be below"),
        ({"prompt": "x", "prompt_logprobs": 1}, "prompt_logprobs", "leave it out"),
        ({"prompt": "x", "bad_words": ["x"]}, "bad_words", "leave it out"),
    ],
)
def test_messages_name_the_fault_that_matters(send, body, param, message):
    """All faults of a union used to be "Input should be a valid string", at places such as stop.constrained-str."""
    said = error(send(json.dumps(body), COMPLETIONS), 400)
    assert said["param"] == param and message in said["message"] and param in said["message"]


@pytest.mark.parametrize("size", [10_000, 4_000_000])
def test_overlong_prompts_are_refused(send, size):
    for path, body in ((COMPLETIONS, {"prompt": "ab " * size}), (CHAT, chat("ab " * (size // 2)))):
        if len(json.dumps(body)) < LimitsRecipe().body_bytes:
            said = error(send(json.dumps(body).encode(), path), 400)
            assert said["code"] == "context_length_exceeded"
            assert said["message"].startswith("This model's maximum context length is ")  # litellm reads these words
        else:
            error(send(json.dumps(body).encode(), path), 413)


def test_a_chat_refused_by_the_template_is_an_error(send):
    body = chat() | {"chat_template_kwargs": {"messages": []}}
    assert send(json.dumps(body).encode()).status_code in (400, 500)


def test_an_empty_name_is_the_only_model(make_gateway):
    """Clients without a model send it. vLLM answers."""
    (response,) = make_gateway().ask(CHAT, chat(model="", max_tokens=1))
    assert response.status_code == 200, response.text


def test_unknown_models_are_refused(send):
    assert error(send(json.dumps(chat(model="gpt-4")).encode()), 404)["code"] == "model_not_found"
    assert error(send(b"", "/v1/models/gpt-4", method="GET"), 404)["code"] == "model_not_found"


PATHS = ["/v1/%00", "/v1/load_lora_adapter", "/v1", "/v1/", "//v1/models", "/v1/embeddings", "/docs"]
PATHS += ["/openapi.json", "/collective_rpc", "/v1/chat/completions/", "/metrics/", "/\u00e9", "/%2e%2e/", "/a\\b"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_unknown_paths_are_closed(send, path, method):
    """All of /v1/ used to reach the engine, including its weight exchange."""
    response = send(b"{}", path, method=method)
    assert response.status_code in (404, 405), response.text


def test_a_missing_path_names_the_paths_of_texts(send):
    """A client with another base_url, or for OpenAI's Responses API, said only that there is no such path."""
    for path in ("/chat/completions", "/v1/v1/chat/completions", "/v1/responses"):
        said = error(send(b"{}", path), 404)["message"]
        assert said == f"there is no {path}: texts are at /v1/chat/completions and /v1/completions"


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "GET"])
def test_unsupported_methods_are_refused(send, method):
    assert error(send(b"{}", method=method), 405)


def test_other_content_types_are_refused(send):
    """A page of another site could send these to the loopback without a preflight request."""
    body = json.dumps(chat()).encode()
    error(send(body, headers={"content-type": "text/plain"}), 415)
    error(send(body, headers={}), 415)
    assert send(body, headers={"content-type": "Application/JSON; charset=utf-8"}).status_code == 200


def test_compressed_bodies_are_refused(send):
    """They were "not valid JSON"."""
    body = gzip.compress(json.dumps(chat()).encode())
    assert "compressed" in error(send(body, headers=JSON | {"content-encoding": "gzip"}), 415)["message"]


def test_a_long_invalid_list_gives_one_error(send, monkeypatch):
    """pydantic collected an error per element, and a body of 8 MiB blocked all clients for minutes."""
    counts = []
    real = openai_requests.of_validation
    monkeypatch.setattr(
        openai_requests, "of_validation", lambda error: counts.append(error.error_count()) or real(error)
    )
    for body in (
        {"prompt": [-1] * 5000},
        {"prompt": [[1]] * 5000},
        {"prompt": [[-1] * 5000] * 9},
        {"prompt": [None] * 5000},
    ):
        error(send(json.dumps(body), COMPLETIONS), 400)
    error(send(json.dumps({"messages": [{"role": 1}] * 5000})), 400)
    assert len(counts) == 5 and max(counts) < 10
    bias = dict.fromkeys(range(5000), "x")
    assert "logit_bias" in error(send(json.dumps({"messages": MESSAGES, "logit_bias": bias})), 400)["message"]
    assert counts.pop() == 1
    error(send(json.dumps({"messages": MESSAGES} | {f"field{n}": 1 for n in range(5000)})), 400)


@pytest.mark.parametrize("stop", ["x" * 1025, ["a", "x" * 1025], ["x"] * 17])
def test_long_stop_strings_are_refused(send, stop):
    """Searching for their prefixes slowed the engine thread for all clients."""
    assert error(send(json.dumps({"messages": MESSAGES, "stop": stop})), 400)["param"].startswith("stop")


def test_arguments_of_the_template_call_cannot_be_set(send):
    """`padding` and `max_length` used to allocate gigabytes, and `self` raised."""
    for name in signature(PreTrainedTokenizerBase.apply_chat_template).parameters.keys() - {"kwargs"}:
        body = {"messages": MESSAGES, "chat_template_kwargs": {name: 3}}
        assert error(send(json.dumps(body)), 400)["param"] == "chat_template_kwargs", name


def test_an_internal_error_is_an_error_object(make_gateway, monkeypatch):
    """It used to be a page of plain text."""
    gateway = make_gateway()
    monkeypatch.setattr(gateway.backend, "_check_model", lambda asked: 1 / 0)
    (response,) = gateway.ask(CHAT, chat(max_tokens=2))
    assert error(response, 500)["type"] == "server_error"


def test_health_is_answered_while_the_gateway_is_full(make_gateway):
    """A flood of requests used to look like a failed engine to a supervisor."""
    gateway = make_gateway(limits=LimitsRecipe(requests=1))
    gateway.app.in_flight = 1

    async def work():
        async with gateway.client() as http:
            return await http.get("/health"), await http.get("/v1/models")

    health, models = asyncio.run(work())
    gateway.app.in_flight = 0
    assert (health.status_code, models.status_code) == (200, 503)


def test_equal_prompts_get_different_texts(make_gateway):
    """Without a seed, all texts of a list used to start with the same random numbers."""
    ask = {"prompt": ["SELECT"] * 6, "temperature": 1.5, "max_tokens": 12}
    free, seeded = make_gateway().ask(COMPLETIONS, ask, ask | {"seed": 3})
    texts = [[choice["text"] for choice in one.json()["choices"]] for one in (free, seeded)]
    assert len({*texts[0]}) > 1 and len({*texts[1]}) == 1
