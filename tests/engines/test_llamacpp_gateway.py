"""Two running llama-servers behind `serve --server`, one with an n-gram drafter: answers are forwarded and counted."""

import json

import httpx
import pytest

from tests.commands.test_serve_engines import recipe, routing
from tests.engines.test_llamacpp_server import NO_LLAMACPP, PYTHON, file, serving

__all__ = ["file"]
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not PYTHON.is_file(), reason=NO_LLAMACPP)]
NAMES = [f"column_{letter}" for letter in "abcdefgh"]
PROMPT = "SELECT " + ", ".join(NAMES) + " FROM t; SELECT " + ", ".join(NAMES[:3])
OWN = {
    "timings",
    "id",
    "created",
    "id_slot",
    "generation_settings",
    "usage",
}  # keys that always differ


@pytest.fixture(scope="module")
def urls(file, tmp_path_factory):
    """Addresses of a server with a drafter, and of a server without one."""
    log = tmp_path_factory.mktemp("log")
    with serving(log / "drafts", file, "-", "ngram-cache", 3) as drafts, serving(log / "plain", file) as plain:
        yield drafts, plain


def asked(path, number, stream):
    prompt = {"messages": [{"role": "user", "content": f"{PROMPT} {number}"}]} if "chat" in path else {}
    prompt = prompt or {"prompt": f"{PROMPT} {number}"}
    limit = {"n_predict": 24} if path == "/completion" else {"max_tokens": 24}
    return prompt | limit | {"temperature": 0, "cache_prompt": False, "stream": stream}


def pieces(answer, stream):
    if not stream:
        return [answer.json()]
    events = [event.removeprefix("data: ") for event in answer.text.split("\n\n") if event]
    return [json.loads(event) for event in events if event != "[DONE]"]


def shown(piece):
    return {key: value for key, value in piece.items() if key not in OWN}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/completion"])
def test_forwarded_answers_equal_the_servers(urls, path, stream, tmp_path, capsys):
    body = asked(path, 1, stream)
    with routing(recipe(tmp_path, *urls[:1]), capsys) as (address, found), httpx.Client(timeout=60) as http:
        through, direct = http.post(address + path, json=body), http.post(urls[0] + path, json=body)
        assert [*map(shown, pieces(through, stream))] == [*map(shown, pieces(direct, stream))]
    timings = pieces(through, stream)[-1]["timings"]
    (row,) = found[0].drafters
    assert row.tokens == timings["predicted_n"] > 1
    assert row.accepted == timings["draft_n_accepted"] and row.engine.startswith("llama.cpp ")


def test_the_server_with_accepted_drafts_gets_most_texts(urls, tmp_path, capsys):
    paths = ["/v1/chat/completions", "/v1/completions", "/completion"]
    with routing(recipe(tmp_path, *urls), capsys) as (address, found), httpx.Client(timeout=60) as http:
        for number in range(30):
            path = paths[number % 3]
            assert http.post(address + path, json=asked(path, number, number % 2 == 0)).status_code == 200
        models = http.get(f"{address}/v1/models").json()["data"]
        assert models[0]["owned_by"] == "llamacpp" and http.get(f"{address}/props").json()["total_slots"] == 1
    drafts, plain = found[0].drafters
    assert drafts.texts + plain.texts == 30 and drafts.texts > plain.texts >= 1
    assert drafts.mat > plain.mat == 1.0 and plain.accepted == 0
    with capsys.disabled():
        print(f"\n{drafts.texts} of 30 texts, mat {drafts.mat:.2f}, {found[0].decide_us_p50:.0f} µs per choice")
