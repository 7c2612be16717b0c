"""`serve --server`: each request goes to the server with the best drafter for it, or to another one if that server
fails."""

import json
import os
import random
import signal
import threading
import time
from contextlib import contextmanager
from dataclasses import asdict
from functools import reduce

import httpx
import pytest

from specctl import data_prep, progress
from specctl.commands.serve import serve
from specctl.commands.serve_engines import REQUESTS
from specctl.decoding.target_text import load_target_text
from specctl.engines.records import EngineError
from specctl.errors import CheckpointError, RecipeError, UsageError
from specctl.gateway import running_engines
from specctl.recipe import ServeRecipe
from specctl.recipe.resolve import resolve
from specctl.runs import Run
from specctl.selection.certificate import Certificate
from tests.cli.conftest import specctl
from tests.conftest import holding
from tests.gateway.conftest import wait_for
from tests.toys.engine import FakeEngine

__all__ = ["specctl"]

TOKENS, WELL, BADLY = 40, [0, 0, 0, 10], [30, 5]


@pytest.fixture(scope="module")
def tokenizer():
    return load_target_text("builtin").tokenizer


class Specialist(FakeEngine):
    """A vLLM server with drafts that are accepted in texts of its domain; prompts begin with the name of their
    domain."""

    def __init__(self, tokenizer, domain, engine="vllm"):
        super().__init__(tokenizer, engine)
        self.domain, self.prompts = domain, []

    def generated(self, body):
        if not isinstance(body.get("prompt"), str):
            return super().generated(body)
        self.prompts.append(body["prompt"])
        ids = [7] * TOKENS
        choice = {"token_ids": ids, "prompt_token_ids": [1], "finish_reason": "length", "text": "…"}
        histogram = WELL if body["prompt"].startswith(self.domain) else BADLY
        drafting = {"acceptance_histogram": histogram, "num_draft_tokens": 3 * sum(histogram)}
        usage = {"prompt_tokens": 1, "completion_tokens": TOKENS}
        return {"choices": [choice], "usage": usage, "metrics": {"speculative_decoding": drafting}}


@pytest.fixture
def learns_at_once(monkeypatch):
    """The gateway learns from an answer before the next request comes. Otherwise it learns every few milliseconds, and
    the number of texts that it knows depends on the machine."""
    monkeypatch.setattr(running_engines, "LEARN_AFTER_S", 0)
    monkeypatch.setattr(running_engines, "LEARN_SHARE", 0)


@pytest.fixture
def engines(tokenizer, learns_at_once):
    with Specialist(tokenizer, "sql") as sql, Specialist(tokenizer, "math") as math:
        yield sql, math


@pytest.fixture(scope="module")
def stream():
    """Prompts of two domains in random order, each with its domain in front."""
    draw = random.Random(0)
    return [
        f"{domain} {prompt}"
        for domain in (draw.choice(("sql", "math")) for _ in range(60))
        for prompt in data_prep.get(domain).generate(1, seed=draw.randrange(10**6))
    ]


def recipe(place, *engines, **fields):
    urls = [getattr(one, "url", one) for one in engines]
    return ServeRecipe(server={"urls": urls}, listen="127.0.0.1:0", output_dir=place, **fields)


@contextmanager
def routing(made, capsys):
    """Run a gateway. Yields its address, and a list that gets its result."""
    run, found = Run.create("serve", made, made.output_dir), []

    def work():
        try:
            found.append(serve(made, run))
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    said = ""
    while "Ctrl-C ends it" not in said and not found:
        time.sleep(0.02)
        said += capsys.readouterr().err
    address = said.partition(" at ")[2].partition(" ")[0]
    try:
        yield address, found
    finally:
        progress.interrupts.handle(signal.SIGTERM)
        thread.join(60)
        progress.interrupts.reset()
    if isinstance(found[0], BaseException):
        raise found[0]


def ask(address, prompt, **fields):
    with httpx.Client(transport=httpx.HTTPTransport(verify=False, retries=20)) as http:
        return http.post(f"{address}/v1/completions", json={"model": "toy", "prompt": prompt} | fields)


def share_of_specialists(engines, since):
    """The share of prompts, without the first `since[domain]` per server, that went to the server of their domain."""
    asked = [prompt.startswith(one.domain) for one in engines for prompt in one.prompts]
    own = sum(prompt.startswith(one.domain) for one in engines for prompt in one.prompts[since[one.domain] :])
    return own / (len(asked) - sum(since.values()))


def test_requests_go_to_the_server_of_their_domain(engines, stream, tmp_path, capsys):
    with routing(recipe(tmp_path, *engines), capsys) as (address, found):
        since = {}
        for number, prompt in enumerate(stream):
            if number == len(stream) // 3:
                since = {one.domain: len(one.prompts) for one in engines}
            assert ask(address, prompt).json()["choices"][0]["text"] == "…"
    result = found[0]
    # Chance gives one half; of 40 prompts, three standard deviations above that are 0.74.
    assert share_of_specialists(engines, since) > 0.8
    assert (result.choose, result.requests) == ("cgp-ucb", 60)
    rows = {row.drafter: row for row in result.drafters}
    assert sum(row.texts for row in rows.values()) == 60 and sum(row.share for row in rows.values()) == 1
    assert all(row.tokens == TOKENS * row.texts and not row.failures + row.broken for row in rows.values())
    assert {row.engine for row in rows.values()} == {"vllm 0.32.0"}
    assert 2 < result.mat <= 4 and result.decide_us_p50 > 0
    lines = [json.loads(line) for line in (tmp_path / REQUESTS).read_text().splitlines()]
    assert len(lines) == 60 and {line["passes"] for line in lines} == {10, 35}
    passes = (line["passes"] / line["tokens"] for line in lines)
    certificate = reduce(Certificate.after, passes, Certificate(most=1.0))
    assert result.speed_at_least == pytest.approx(certificate.at_least) and 1.5 < result.speed_at_least < result.mat
    assert "60 texts" in result.at_least and "one pass per token" in result.at_least
    assert "question" not in (tmp_path / REQUESTS).read_text().lower()
    assert os.stat(tmp_path / REQUESTS).st_mode & 0o077 == 0


def test_passwords_of_addresses_are_used_but_not_stored(engines, tmp_path, capsys):
    with routing(recipe(tmp_path, *(one.locked for one in engines)), capsys) as (address, found):
        assert ask(address, "sql x").status_code == 200
    document = Run(tmp_path).result(asdict(found[0]))
    assert {row["drafter"] for row in document["drafters"]} == {one.locked.replace("HUSH", "***") for one in engines}
    assert "***" in (tmp_path / REQUESTS).read_text()
    assert holding(tmp_path, "HUSH") == [] and "HUSH" not in "".join(capsys.readouterr())


def test_random_routing_does_not_find_the_specialists(engines, stream, tmp_path, capsys):
    """Negative control of `test_requests_go_to_the_server_of_their_domain`."""
    with routing(recipe(tmp_path, *engines, choose="random"), capsys) as (address, _):
        for prompt in stream:
            ask(address, prompt)
    assert share_of_specialists(engines, {"sql": 0, "math": 0}) < 0.8


def test_streamed_answers_are_forwarded_and_counted(engines, tmp_path, capsys):
    with routing(recipe(tmp_path, *engines), capsys) as (address, found):
        with (
            httpx.Client(transport=httpx.HTTPTransport(verify=False, retries=20)) as http,
            http.stream(
                "POST", f"{address}/v1/completions", json={"model": "toy", "prompt": "sql x", "stream": True}
            ) as answer,
        ):
            events = [event for event in answer.read().decode().split("\n\n") if event]
        assert events[-1] == "data: [DONE]" and len(events) == TOKENS // 2 + 1  # without the counters
        assert httpx.get(f"{address}/v1/models").json()["data"][0]["id"] == "toy"
        assert httpx.post(f"{address}/collective_rpc", json={}).status_code == 404
    assert found[0].requests == 1 and found[0].mat in (4.0, TOKENS / 35)


@pytest.mark.parametrize("fault", ["reset", "error", "busy"])
def test_another_server_answers_if_one_fails(engines, tmp_path, capsys, fault, monkeypatch):
    monkeypatch.setattr(running_engines, "FIRST_REST_S", 60.0)
    sql, math = engines
    sql.faults = lambda number: fault if number > 2 else None
    with routing(recipe(tmp_path, sql, math), capsys) as (address, found):
        answers = [ask(address, "sql x").status_code for _ in range(12)]
    assert answers == [200] * 12
    rows = {row.drafter: row for row in found[0].drafters}
    # The failed server is tried again only after a while.
    assert rows[math.url].texts >= 9 and 1 <= rows[sql.url].failures <= 4


def test_a_request_goes_to_the_servers_that_list_its_model(engines, tmp_path, capsys, monkeypatch):
    """The engines have different adapters. Each model has a game of its own."""
    monkeypatch.setattr(running_engines, "LIST_S", 3600.0)
    sql, math = engines
    sql.adapters, math.adapters = ["law", "tax"], ["bank", "tax"]
    with routing(recipe(tmp_path, sql, math), capsys) as (address, _):
        for prompt in ("sql x", "math x"):
            for model, only in (("law", sql), ("bank", math)):
                before = len(only.prompts), len(sql.prompts) + len(math.prompts)
                assert [ask(address, prompt, model=model).status_code for _ in range(3)] == [200] * 3
                assert (len(only.prompts), len(sql.prompts) + len(math.prompts)) == (before[0] + 3, before[1] + 3)
        for _ in range(40):
            ask(address, "sql y", model="tax")
        assert sql.prompts.count("sql y") > 25, "the server whose drafts are accepted gets the texts of both"
        listed = httpx.get(f"{address}/v1/models").json()
        assert [card["id"] for card in listed["data"]] == ["toy", "law", "tax", "bank"]
        answer = ask(address, "sql x", model="art")
        assert answer.status_code == 404 and answer.json()["error"] == {
            "message": "the model does not exist: use toy, law, tax, bank",
            "type": "not_found_error",
            "param": "model",
            "code": "model_not_found",
        }
        assert httpx.get(f"{address}/v1/models/art").status_code == 404
        assert ask(address, "sql x", model="").status_code == 200, "an empty name is the engines' default, as in vLLM"
        math.adapters.append("art")
        assert ask(address, "sql x", model="art").status_code == 404, "they are not asked at once"
    assert sql.gone is math.gone is False


def test_a_model_that_an_engine_loads_later_is_found(engines, tmp_path, capsys, monkeypatch):
    """An engine without a usable list keeps its models."""
    monkeypatch.setattr(running_engines, "LIST_S", 0.0)
    sql, math = engines
    sql.adapters, math.adapters = ["law"], ["bank"]
    with routing(recipe(tmp_path, sql, math), capsys) as (address, _):
        sql.pages["/v1/models"] = {"data": [{"name": "law"}]}
        assert ask(address, "x", model="art").status_code == 404
        math.adapters.append("art")
        assert [ask(address, "x", model=model).status_code for model in ("art", "law")] == [200, 200]
        assert math.prompts == ["x"] and sql.prompts == ["x"]


def test_a_restarted_server_is_used_again(engines, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(running_engines, "FIRST_REST_S", 0.0)
    monkeypatch.setattr(running_engines, "LONGEST_REST_S", 0.0)
    sql, math = engines
    with routing(recipe(tmp_path, sql, math), capsys) as (address, found):
        for _ in range(10):
            ask(address, "sql x")
        sql.gone = True
        assert [ask(address, "sql x").status_code for _ in range(5)] == [200] * 5
        sql.gone, before = False, len(sql.prompts)
        for _ in range(10):
            ask(address, "sql x")
        assert len(sql.prompts) - before >= 8
    assert found[0].requests == 25


def test_requests_fail_if_every_server_fails(engines, tmp_path, capsys):
    for one in engines:
        one.faults = lambda number: "error"
    with routing(recipe(tmp_path, *engines), capsys) as (address, found):
        assert ask(address, "sql x").status_code == 500
        assert ask(address, "sql x").status_code == 500
    assert found[0].requests == 0 and found[0].mat is None and found[0].drafters[0].share is None
    assert [row.failures for row in found[0].drafters] == [2, 2]


def test_requests_without_counters_do_not_count(engines, tmp_path, capsys):
    with routing(recipe(tmp_path, *engines), capsys) as (address, found):
        ask(address, "sql x", n=2)
        ask(address, [[1], [2]])
    assert found[0].requests == 0


def refused(made, **how):
    with pytest.raises(CheckpointError) as caught:
        serve(made, Run.create("serve", made, made.output_dir))
    return f"{caught.value.message} | {caught.value.hint}"


def test_servers_of_different_models_are_refused(tokenizer, engines, tmp_path):
    sql, math = engines
    math.model = "other"
    assert f"{sql.url} serves toy, but {math.url} serves other" in refused(recipe(tmp_path, sql, math))
    math.model, math.shift = "toy", 1.0
    assert "serve different weights" in refused(recipe(tmp_path, sql, math))
    math.shift = 0.0

    class Reversed:
        def encode(self, text, **options):
            return tokenizer.encode(text, **options)[::-1]

    math.tokenizer = Reversed()
    assert "with a different tokenizer from the other servers" in refused(recipe(tmp_path, sql, math))


def test_servers_with_another_tokenizer_than_the_named_target_are_refused(tokenizer, engines, tmp_path):
    for one in engines:
        one.tokenizer = type("Other", (), {"encode": lambda self, text, **options: [1, 2, 3]})()
    said = refused(recipe(tmp_path, *engines, target={"name": "builtin"}))
    assert "a different tokenizer from target builtin" in said


def test_an_unreachable_server_is_named(engines, tmp_path):
    made = recipe(tmp_path, engines[0], "http://127.0.0.1:1")
    with pytest.raises(EngineError, match="no server responds at"):
        serve(made, Run.create("serve", made, tmp_path))


@pytest.mark.parametrize("earlier", ["select", "route"])
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["listen=127.0.0.1:1"], "there is no server"),
        (["server.urls=http://a,http://b", "listen=here"], "must be HOST:PORT"),
        (["server.urls=http://a,http://b", "listen=h:1", "algo=[cgp-ucb, random]"], "choose"),
        (["server.urls=http://a,http://b", "listen=h:1", "pool=drafters"], "the engines draft themselves"),
        (
            ["server.urls=http://a,http://b", "listen=h:1", "sampling.temperature=1"],
            "a key of specctl select, not of specctl serve",
        ),
    ],
)
def test_contradictory_settings_of_earlier_commands_are_refused(settings, words, earlier):
    """`select` and `route` are earlier names of `serve --server`. Without a server, `route` would have served the
    built-in target."""
    with pytest.raises((RecipeError, UsageError)) as caught:
        resolve(earlier, None, settings)
    assert words in str(caught.value)


def test_a_policy_that_cannot_choose_a_server_is_refused(engines, tmp_path):
    made = recipe(tmp_path, *engines, choose="hedgespec")
    with pytest.raises(UsageError, match="hedgespec cannot choose among servers"):
        serve(made, Run.create("serve", made, tmp_path))


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_a_signal_finishes_running_requests_and_prints_the_result(specctl, engines, tmp_path, monkeypatch, number):
    """The whole command under its earlier name: running requests are answered, and the result is on stdout."""
    sql, math = engines
    address, got, logged = [], [], progress.log

    def log(message):
        if " at http" in message:
            address.append(message.partition(" at ")[2].partition(" ")[0])
        logged(message)

    monkeypatch.setattr(progress, "log", log)

    def client():
        wait_for(lambda: address)
        sql.seconds = math.seconds = 1.0
        asked = threading.Thread(target=lambda: got.append(ask(address[0], "sql x").status_code))
        asked.start()
        wait_for(lambda: sql.prompts or math.prompts)
        os.kill(os.getpid(), number)
        asked.join()

    thread = threading.Thread(target=client)
    thread.start()
    try:
        urls = f"{sql.url},{math.url}"
        listen = ("--listen", "127.0.0.1:0")
        done = specctl("route", "--server", urls, *listen, "--algo", "random", "--json", "--output-dir", "run")
    finally:
        thread.join()
    assert done.code == 0 and got == [200]
    assert done.json["requests"] == 1 and done.json["target"] == "toy" and len(done.json["drafters"]) == 2
    assert done.json["command"] == "serve" and done.json["choose"] == "random"
    assert done.err.count("specctl route is now specctl serve --server") == 1
    assert json.loads((tmp_path / "run" / "result.json").read_text())["requests"] == 1
