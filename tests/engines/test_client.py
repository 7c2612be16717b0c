"""The client of engines: validation of answers, retries, and error messages."""

import asyncio
import math
import random
import signal
import threading
import time

import httpx
import pytest

from specctl import progress
from specctl.engines import endpoints, responses, vllm
from specctl.engines.client import Client
from specctl.engines.records import (
    DraftCounters,
    EngineError,
    GenerationRequest,
    GenerationResult,
    MalformedResponse,
    Refusal,
)
from specctl.engines.responses import error_message, parse_json, parse_piece, retry_after
from specctl.errors import CheckpointError, UsageError
from specctl.recipe import ServerRecipe
from tests.toys.engine import FAULTS, FakeEngine

ENGINES = ["vllm", "sglang", "llama.cpp"]


@pytest.fixture(params=ENGINES)
def engine(request, text):
    with FakeEngine(text.tokenizer, request.param) as server:
        yield server


def asks(count):
    draw = random.Random(0)
    return [
        GenerationRequest([draw.randrange(5, 200) for _ in range(5)], 12, 0.7 * (n % 2), seed=n) for n in range(count)
    ]


def recipe(*engines, **options):
    return ServerRecipe(urls=[engine.url for engine in engines], **options)


def answered(client, questions):
    found = dict(client.answers(questions))
    assert sorted(found) == list(range(len(questions)))
    return [found[place] for place in range(len(questions))]


def expected(engine, questions):
    whole = []
    for ask in questions:
        ids, stop = engine.text(ask.prompt_ids, ask.max_new_tokens, ask.temperature, ask.seed)
        whole.append((ids, {"stop": "eos", "length": "length"}[stop]))
    return whole


def test_answers_are_matched_to_their_requests(engine, text):
    engine.seconds = 0.01
    with Client(recipe(engine, concurrency=7)) as client:
        client.check(text)
        found = answered(client, asks(40))
    assert [(one.output_ids, one.stop) for one in found] == expected(engine, asks(40))
    assert 1 < engine.most <= 7 and max(engine.asked.values()) == 1 and client.failures == 0


def test_failed_requests_are_retried_until_all_texts_are_right(engine, text):
    engine.faults = lambda number: FAULTS[number // 5 % len(FAULTS)] if number % 5 == 0 else None
    with Client(recipe(engine, concurrency=8, timeout_s=0.3)) as client:
        client.check(text)
        found = answered(client, asks(60))
    assert [(one.output_ids, one.stop) for one in found] == expected(engine, asks(60))
    assert client.failures >= 12 and sum(one.tries > 1 for one in found) >= 8


ODD = [None, 5, -1, 10**400, 1e308, "x", [], [[]], {}, {"a": {}}]


def altered(document):
    """Copies of a JSON document, each with one odd value in the place of a part."""
    if isinstance(document, dict):
        for key, value in document.items():
            yield from (document | {key: other} for other in [*ODD, *altered(value)])
    elif isinstance(document, list) and document:
        yield from ([other, *document[1:]] for other in altered(document[0]))


def test_an_answer_of_wrong_types_is_no_error_of_ours(engine, text):
    """A finish reason that was a list ended a run of hours with a TypeError. Now such an answer is asked for again."""
    (ask,) = asks(1)
    engine.histogram = [1, 2]
    with Client(recipe(engine)) as client:
        (server,) = client.servers
        whole = engine.generated(server.dialect.request_body(ask, server.model))
        assert client._read(server, whole, ask).drafting.rounds == 3
        refused = 0
        for document in [*ODD, *altered(whole)]:
            try:
                client._read(server, document, ask)
            except MalformedResponse:
                refused += 1
    assert refused > 30


def test_json_that_is_nested_too_deeply_is_malformed():
    """It used to end a command with a RecursionError."""
    deep = "[" * 100_000
    with pytest.raises(MalformedResponse, match="invalid or incomplete JSON"):
        parse_json(httpx.Response(200, text=deep))
    with pytest.raises(MalformedResponse, match="incomplete piece of a stream"):
        parse_piece(deep)
    assert error_message(httpx.Response(500, text=deep)).startswith("[[[")


def test_an_answer_that_cannot_be_unpacked_is_an_engine_error():
    """It used to end a command with a DecodingError."""
    broken = httpx.MockTransport(
        lambda request: httpx.Response(200, headers={"Content-Encoding": "gzip"}, stream=httpx.ByteStream(b"junk"))
    )

    async def connect():
        async with httpx.AsyncClient(transport=broken) as http:
            await endpoints.connect(http, "http://a", ServerRecipe(urls=["http://a"], wait_s=0))

    with pytest.raises(EngineError, match="no server responds at http://a: DecodingError"):
        asyncio.run(connect())


@pytest.mark.parametrize("fault", ["short", "foreign", "cut", "html"])
def test_an_invalid_answer_is_requested_again(engine, text, fault):
    engine.faults = lambda number: fault if number == 1 else None
    with Client(recipe(engine)) as client:
        client.check(text)
        (found,) = answered(client, asks(1))
    assert found.output_ids == expected(engine, asks(1))[0][0] and found.tries == 2


@pytest.mark.parametrize(
    ("fault", "says"),
    [("error", "status 500"), ("html", "a web page"), ("reset", "Error"), ("foreign", "outside the target's")],
)
def test_a_server_that_keeps_failing_ends_the_run(engine, text, fault, says):
    engine.faults = lambda number: fault if number > 3 else None
    with Client(recipe(engine, retries=2, concurrency=1)) as client:
        client.check(text)
        seen = []
        with pytest.raises(EngineError, match=says) as error:
            seen.extend(client.answers(asks(9)))
    assert [place for place, _ in seen] == [0, 1, 2]
    assert "3 times" in error.value.message and "--resume" in error.value.hint


@pytest.mark.parametrize("fault", [None, "torn", "reset", "busy"])
def test_streamed_answers_equal_whole_ones_and_time_the_first_token(engine, text, fault):
    engine.faults = lambda number: fault if number % 4 == 0 else None
    engine.histogram = [2, 0, 1]
    with Client(recipe(engine)) as client:
        client.check(text)
        found = dict(client.answers(asks(12), limit=3, timed=True))
    assert [(found[place].output_ids, found[place].stop) for place in range(12)] == expected(engine, asks(12))
    assert all(0 < one.first_s <= one.seconds for one in found.values()) and engine.most <= 3
    assert {one.drafting.mat for one in found.values()} == {1 + 2 / 3}
    places = [] if engine.engine == "llama.cpp" else [1, 1]  # not in its answers
    assert found[0].drafting == DraftCounters(3, 9, 2, places)
    assert client.failures == (0 if fault is None else sum(one.tries - 1 for one in found.values())) and (
        fault is None or client.failures
    )


def test_a_refused_text_is_not_retried(engine, text):
    engine.faults = lambda number: "refused" if number == 1 else None
    with Client(recipe(engine, concurrency=1)) as client:
        client.check(text)
        first, second = answered(client, asks(2))
    assert isinstance(first, Refusal) and "maximum context" in first.reason and isinstance(second, GenerationResult)
    assert engine.number == 2


def test_the_api_key_comes_from_the_named_environment_variable(engine, text, monkeypatch):
    monkeypatch.setenv("OTHER", "open-sesame")
    with Client(recipe(engine, api_key_env="OTHER")) as client:
        answered(client, asks(1))
    assert engine.keys == ["Bearer open-sesame"]
    engine.faults = lambda number: "denied"
    with Client(recipe(engine)) as client, pytest.raises(EngineError) as error:
        answered(client, asks(1))
    assert "SPECCTL_API_KEY" in error.value.hint and engine.keys[1] is None


def test_several_servers_share_the_work_and_replace_a_failed_one(text):
    with FakeEngine(text.tokenizer) as one, FakeEngine(text.tokenizer) as other:
        other.faults = lambda number: "reset" if number > 5 else None
        with Client(recipe(one, other, concurrency=4)) as client:
            client.check(text)
            found = answered(client, asks(40))
        assert [found.output_ids for found in found] == [ids for ids, _ in expected(one, asks(40))]
        assert other.number > 5 and one.number > 20


def test_the_oldest_request_limits_how_far_others_run_ahead(text):
    """A consumer that writes in order must buffer the results after a slow one."""
    with FakeEngine(text.tokenizer) as engine:
        engine.faults = lambda number: "slow" if number == 1 else None
        with Client(recipe(engine, concurrency=2)) as client:
            places = [place for place, _ in client.answers(asks(40))]
    assert places.index(0) <= 16 and sorted(places) == list(range(40))


def test_a_signal_stops_new_requests(text, monkeypatch):
    with FakeEngine(text.tokenizer, seconds=0.05) as engine:
        monkeypatch.setattr(progress.interrupts, "_signal", None)
        with Client(recipe(engine, concurrency=2)) as client:
            found = []
            for place, _ in client.answers(asks(40)):
                found.append(place)
                if len(found) == 4:
                    progress.interrupts._signal = signal.SIGTERM
    assert 4 <= len(found) < 10


class TestServerChecks:
    def test_an_unreachable_server_is_refused(self, text):
        engine = FakeEngine(text.tokenizer)
        engine.server.server_close()
        with pytest.raises(EngineError, match="no server responds at http://127") as error, Client(recipe(engine)):
            pass
        assert "server.wait_s" in error.value.hint

    def test_a_server_that_starts_later_is_waited_for(self, text):
        with FakeEngine(text.tokenizer) as first:
            port = first.server.server_address[1]
        late = []

        def start():
            time.sleep(0.5)
            late.append(FakeEngine(text.tokenizer, port=port).__enter__())

        thread = threading.Thread(target=start)
        thread.start()
        try:
            with Client(ServerRecipe(urls=[first.url], wait_s=20)) as client:
                assert client.servers[0].facts.engine == "vllm"
        finally:
            thread.join()
            late[0].__exit__()

    def test_a_web_page_instead_of_models_is_refused(self, engine):
        engine.pages["/v1/models"] = "<html>Log in</html>"
        with pytest.raises(EngineError, match="text/html instead of JSON"), Client(recipe(engine)):
            pass

    @pytest.mark.parametrize("named", ["auto", "vllm"])
    def test_specctl_serve_is_no_engine(self, engine, named):
        """Advice to name it as vLLM used to end in nine requests without token ids."""
        engine.pages["/v1/models"] = {"data": [{"id": "m", "owned_by": "specctl"}]}
        with pytest.raises(EngineError, match="is specctl serve") as error, Client(recipe(engine, engine=named)):
            pass
        assert "URL of vLLM" in error.value.hint

    def test_an_unknown_engine_is_refused_unless_named(self, engine):
        engine.engine = "tgi"
        with pytest.raises(EngineError, match="neither vLLM nor SGLang") as error, Client(recipe(engine)):
            pass
        assert "server.engine" in error.value.hint
        with Client(recipe(engine, engine="vllm")) as client:
            assert client.servers[0].facts.version == "unknown"

    def test_a_server_without_models_is_refused(self, engine):
        engine.pages["/v1/models"] = {"data": []}
        with pytest.raises(EngineError, match="lists no models"), Client(recipe(engine)):
            pass

    def test_a_model_without_a_name_is_refused(self, engine):
        engine.pages["/v1/models"] = {"data": [{"id": ["toy"]}]}
        with pytest.raises(EngineError, match="lists no models"):
            Client(recipe(engine)).__enter__()

    def test_a_missing_model_is_refused(self, engine):
        with (
            pytest.raises(UsageError, match="does not serve model 'other'") as error,
            Client(recipe(engine, model="other")),
        ):
            pass
        assert error.value.hint == "it serves toy"

    def test_a_model_that_would_not_answer_is_refused(self, text):
        """SGLang's requests name no model: its first one would answer for another."""
        with FakeEngine(text.tokenizer) as vllm, FakeEngine(text.tokenizer, "sglang") as sglang:
            vllm.adapters = sglang.adapters = ["law"]
            with Client(recipe(vllm)) as client:
                other = client.with_model("law")
                assert [one.model for one in (*other.servers, *client.servers)] == ["law", "toy"]
                with pytest.raises(UsageError, match="does not serve model 'bank'"):
                    client.with_model("bank")
            with pytest.raises(UsageError, match="toy would answer, not 'law'"), Client(recipe(sglang, model="law")):
                pass

    def test_another_tokenizer_is_refused(self, engine, text, monkeypatch):
        monkeypatch.setattr(
            engine, "tokenizer", type("Other", (), {"encode": lambda self, words, add_special_tokens: [1, 2, 3]})()
        )
        with Client(recipe(engine)) as client, pytest.raises(CheckpointError, match="different tokenizer"):
            client.check(text)

    @pytest.mark.parametrize("shift", [0.3, math.nan])
    def test_servers_with_different_weights_are_refused(self, text, shift):
        with FakeEngine(text.tokenizer) as one, FakeEngine(text.tokenizer) as other:
            other.shift = shift
            with Client(recipe(one, other)) as client, pytest.raises(CheckpointError, match="different weights"):
                client.check(text)

    @pytest.mark.parametrize("shift", [0.0, 0.5])
    def test_after_a_restart_the_weights_are_checked_again(self, engine, text, shift):
        """With equal weights the work continues. Negative control: with other weights it stops."""

        def faults(number):
            if number == 3:
                engine.shift = shift
            return "reset" if number == 3 else None

        engine.faults = faults
        with Client(recipe(engine, concurrency=1)) as client:
            client.check(text)
            if shift:
                with pytest.raises(EngineError, match="different weights"):
                    answered(client, asks(9))
            else:
                assert len(answered(client, asks(9))) == 9

    def test_a_tls_error_is_reported(self, text, tmp_path):
        """The engine speaks plain HTTP, so that TLS fails."""
        with FakeEngine(text.tokenizer) as engine:
            address = engine.url.replace("http://", "https://")
            with (
                pytest.raises(EngineError, match=r"no server responds at https://.*SSL"),
                Client(ServerRecipe(urls=[address])),
            ):
                pass

    def test_a_server_that_stops_during_the_check_is_reported(self, text):
        with FakeEngine(text.tokenizer) as engine, Client(recipe(engine)) as client:
            engine.gone = True
            with pytest.raises(EngineError, match="does not respond"):
                client.check(text)

    def test_a_web_page_instead_of_tokens_is_refused(self, engine, text):
        with Client(recipe(engine)) as client:
            engine.page = "<html>Log in</html>"
            with pytest.raises(EngineError, match="unexpected answer: it returned a web page"):
                client.check(text)

    @pytest.mark.parametrize("kind", ["vllm", "sglang"])  # llama-server always reports it, or is refused
    def test_a_server_without_a_context_length_keeps_the_targets(self, text, kind):
        before = text.context_length
        with FakeEngine(text.tokenizer, kind) as engine:
            engine.context = None
            with Client(recipe(engine)) as client:
                client.check(text)
        assert text.context_length == before

    def test_the_context_length_of_the_server_is_the_limit(self, engine, text):
        whole = text.context_length
        engine.context = 100
        with Client(recipe(engine)) as client:
            client.check(text)
        assert text.context_length == 100
        text.context_length = whole


@pytest.mark.parametrize(
    ("urls", "says"),
    [
        ("localhost:8000", "is not an address"),
        ("http://a:1,http://a:1/", "twice"),
        ("http://a:1/v1,http://a:1", "twice"),
    ],
)
def test_invalid_and_repeated_addresses_are_refused(urls, says):
    with pytest.raises(ValueError, match=says):
        ServerRecipe(urls=urls)


def test_an_address_may_end_with_v1():
    assert ServerRecipe(urls="http://a:8000/v1/, https://b").urls == ["http://a:8000", "https://b"]


@pytest.mark.parametrize(
    ("value", "seconds"), [("2", 2), ("9999", 120), ("-1", 0), ("soon", None), ("Wed, 21 Oct 2015 07:28:00 GMT", 0)]
)
def test_retry_after_is_parsed_and_capped(value, seconds):
    assert retry_after(httpx.Response(429, headers={"Retry-After": value})) == seconds


PAGE = """# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 274.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 6.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 822.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 130.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="a\\"b",position="1"} 18.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 112.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="m",position="0"} 4.0
vllm:e2e_request_latency_seconds_bucket{le="+Inf"} 12
"""


def test_counters_are_summed_from_a_metrics_page():
    found = vllm.parse_draft_counters(PAGE)
    assert found == DraftCounters(280, 822, 130, [116, 18])
    assert found.since(DraftCounters(100, 22, 30, [16])) == DraftCounters(180, 800, 100, [100, 18])
    assert vllm.parse_draft_counters("vllm:num_requests_running 1\n") is None
    assert responses.total(PAGE, "vllm:e2e_request_latency_seconds_bucket") == 12


DRAFTS, PLACES = "vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_accepted_tokens_per_pos_total"


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        (f"{DRAFTS} NaN", None),
        (f"{DRAFTS} +Inf", None),
        (f"{DRAFTS} many", None),
        (f"{DRAFTS} 4\nvllm:spec_decode_num_draft_tokens_total NaN", DraftCounters(4)),
        (f"{DRAFTS} 4\n{PLACES} 3", DraftCounters(4)),
        (f'{DRAFTS} 4\n{PLACES}{{position="9999"}} 3', DraftCounters(4)),
    ],
)
def test_invalid_numbers_of_a_metrics_page_are_ignored(line, wanted):
    """Prometheus writes NaN for a metric without samples, which once gave a traceback."""
    assert vllm.parse_draft_counters(f"{line}\n") == wanted


@pytest.mark.parametrize(("blank", "end"), [("", "\n"), (" ", "\r\n"), ("", "\r\n"), ("", "\r")])
def test_streams_with_other_line_ends_give_the_same_text(engine, text, blank, end):
    """ "data:" without a blank was ignored, so that the text had no end, and CRLF split an event."""
    engine.blank, engine.end = blank, end
    with Client(recipe(engine)) as client:
        client.check(text)
        found = dict(client.answers(asks(4), timed=True))
    assert [(found[place].output_ids, found[place].stop) for place in range(4)] == expected(engine, asks(4))
    assert client.failures == 0
