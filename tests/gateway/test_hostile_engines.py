"""Faulty engines and clients in front of the gateway must not affect other clients."""

import asyncio
import base64
import contextlib
import gzip
import os
import signal
import socket
import threading
import time
from contextlib import contextmanager

import httpx
import psutil
import pytest

from specctl.errors import SpecctlError
from specctl.gateway import proxy_process, running_engines, server
from specctl.gateway.metrics import Meter
from specctl.gateway.running_engines import RunningEngines, engines_app
from specctl.recipe import LimitsRecipe, PolicyRecipe
from specctl.selection.dispatch import Dispatcher
from tests.gateway.conftest import served, wait_for

COMPLETIONS = "/v1/completions"
BODY = {"model": "toy", "prompt": "SELECT", "max_tokens": 5}


class Hostile:
    """An engine that answers with the bytes of `answer(head, body, connection)` and records requests and
    connections."""

    def __init__(self, answer):
        self.answer, self.requests, self.open = answer, [], 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"

    def __enter__(self):
        self.accepting = threading.Thread(target=self._accept, daemon=True)
        self.accepting.start()
        return self

    def __exit__(self, *_):
        # Closing alone wakes no `accept`, which could take a connection of the next test's engine.
        self.listener.shutdown(socket.SHUT_RDWR)
        self.accepting.join()
        self.listener.close()

    def _accept(self):
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection):
        self.open += 1
        try:
            with connection:
                data = b""
                while b"\r\n\r\n" not in data:
                    if not (part := connection.recv(65536)):
                        return
                    data += part
                head, _, body = data.partition(b"\r\n\r\n")
                size = next(
                    (int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")), 0
                )
                while len(body) < size:
                    body += connection.recv(65536)
                self.requests.append((head, body))
                sent = self.answer(head, body, connection)
                if sent is not None:
                    connection.sendall(sent)
        except OSError:
            pass
        finally:
            self.open -= 1


def reply(content, *headers, status=b"200 OK", kind=b"application/json"):
    lines = [
        b"HTTP/1.1 " + status,
        b"content-type: " + kind,
        b"content-length: %d" % len(content),
        b"connection: close",
    ]
    return b"\r\n".join([*lines, *headers]) + b"\r\n\r\n" + content


def text(counters="", **fields):
    usage = fields.pop("usage", '{"prompt_tokens": 1, "completion_tokens": 5}')
    return (
        '{"choices": [{"index": 0, "text": "x", "finish_reason": "stop"}], "usage": ' + usage + counters + "}"
    ).encode()


def counters(histogram, drafted="2"):
    told = '{"speculative_decoding": {"acceptance_histogram": ' + histogram + f', "num_draft_tokens": {drafted}' + "}}"
    return ', "metrics": ' + told


def gateway(*engines, choose=None, engine="vllm", **limits):
    urls = [one.url for one in engines]
    rule = Dispatcher(urls, choose, PolicyRecipe(), 0) if choose else None
    backend = RunningEngines(dict.fromkeys(urls, engine), Meter("toy"), dispatch=rule)
    return engines_app(backend, LimitsRecipe(**limits)), backend


def ask(app, *requests):
    async def work():
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://toy", timeout=60) as http:
            try:
                return [await http.request(method, path, **more) for method, path, more in requests]
            finally:
                await app.close()  # the next requests use another event loop

    return asyncio.run(work())


def completions(app, count=1, **fields):
    return ask(app, *[("POST", COMPLETIONS, {"json": BODY | fields})] * count)


@contextmanager
def hostile(answer, count=1):
    engines = [Hostile(answer) for _ in range(count)]
    try:
        yield [one.__enter__() for one in engines]
    finally:
        for one in engines:
            one.__exit__()


CLOSED = [
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/collective_rpc",
    "/v1/%00",
    "/v1/audio/speech",
    "/pause",
]
CLOSED += ["/v1/models/..%2f..%2fpause", "/v1/models/%2e%2e", "/v1/models/../pause/../../pause", "/reset_prefix_cache"]


@pytest.mark.parametrize("path", CLOSED)
@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE"])
def test_paths_that_change_an_engine_are_closed(path, method):
    with hostile(lambda *_: reply(b"{}")) as engines:
        app, _ = gateway(*engines)
        (said,) = ask(app, (method, path, {"json": {}}))
        assert said.status_code in (404, 405) and not engines[0].requests


POISON = [
    counters("[1e308, 1e308]"),
    counters("[1, NaN]"),
    counters("[1, Infinity]"),
    counters("[-1, 2]"),
    counters("[true, 2]"),
    counters("[1" + "0" * 400 + "]"),
    counters("[1, 1]", "9" * 400),
    counters('["1", 2]'),
    counters("{}"),
    counters("[0, 0, 0, 9007199254740991]"),
]
USAGES = [
    '{"completion_tokens": ' + value + "}" for value in ("1" + "0" * 400, "1e12", "1000000000000", "-3", "null", "[]")
]


@pytest.mark.parametrize("choose", ["cgp-ucb", "metasd-ducb"])
@pytest.mark.parametrize(
    "poison", [*((one, None) for one in POISON), *(("", one) for one in USAGES)], ids=lambda one: str(one)[:60]
)
def test_absurd_counters_do_not_break_later_requests(choose, poison):
    """One such answer used to make all later requests fail with status 500 until a restart."""
    told, usage = poison
    answers = iter([text(told, **({"usage": usage} if usage else {}))])
    good = text(counters("[1, 1]"))
    with hostile(lambda *_: reply(next(answers, good)), 2) as engines:
        app, backend = gateway(*engines, choose=choose)
        assert [one.status_code for one in completions(app, 12)] == [200] * 12
        total = sum(one.tokens for one in backend.meter.drafters.values())
        assert total <= 60 and not any(backend.in_flight.values())


@pytest.mark.parametrize("method", ["choose", "learn"])
def test_a_failing_policy_is_ignored(method, monkeypatch):
    with hostile(lambda *_: reply(text(counters("[1, 1]"))), 2) as engines:
        app, backend = gateway(*engines, choose="cgp-ucb")
        monkeypatch.setattr(backend.dispatch, method, lambda *args: 1 / 0)
        assert [one.status_code for one in completions(app, 5)] == [200] * 5
        backend.learn()  # the last answers, for which there was no time left
        part = "choosing a server" if method == "choose" else "learning from an answer"
        assert backend.meter.registry.get_sample_value("specctl:faults_total", {"part": part}) == 5


def test_unmodified_requests_and_answers_pass_byte_for_byte():
    """Reformatting turned 1e999 into Infinity, which is not JSON."""
    answer = b'{ "choices": [{"text": "\xc3\xa9", "x": 1e999}],\n "usage": {"completion_tokens": 1.0} }'
    sent = b'{"model":  "toy", "prompt": "x", "temperature": 1e999, "seed": 1.50, "seed": 2}'
    with hostile(lambda *_: reply(answer)) as engines:
        app, _ = gateway(*engines)
        (said,) = ask(app, ("POST", COMPLETIONS, {"content": sent, "headers": {"content-type": "application/json"}}))
        assert said.content == answer and engines[0].requests[0][1] == sent


@pytest.mark.parametrize("path", ["/v1/models/org/m", "/v1/models/org%2Fm", "/v1/models/my%20adapter"])
def test_names_of_models_may_be_encoded(path):
    """Clients of OpenAI encode a slash, and got status 404."""
    with hostile(lambda head, *_: reply(head.split()[1])) as engines:
        (said,) = ask(gateway(*engines)[0], ("GET", path, {}))
        assert said.status_code == 200 and said.text == path


def test_answers_have_one_date():
    """The engine's date stood beside the date of the gateway's server."""
    with (
        hostile(lambda *_: reply(text(), b"date: Sun, 29 Nov 2026 02:00:00 GMT")) as engines,
        served(gateway(*engines)[0]) as address,
    ):
        assert len(httpx.post(address + COMPLETIONS, json=BODY).headers.get_list("date")) == 1


def test_compressed_answers_are_not_requested_and_not_unpacked():
    """0.4 MB used to be unpacked to 400 MB."""
    packed = gzip.compress(b" " * 50_000_000)
    with hostile(lambda *_: reply(packed, b"content-encoding: gzip")) as engines:
        app, _ = gateway(*engines)
        before = psutil.Process().memory_info().rss

        async def work():
            async with (
                httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://toy") as http,
                http.stream("POST", COMPLETIONS, json=BODY, headers={"accept-encoding": "gzip"}) as said,
            ):
                return said.headers["content-encoding"], b"".join([part async for part in said.aiter_raw()])

        assert asyncio.run(work()) == ("gzip", packed)
        assert psutil.Process().memory_info().rss - before < 30e6
        assert b"accept-encoding: identity" in engines[0].requests[0][0].lower()


def test_headers_pass_unchanged_except_hop_by_hop_headers():
    extra = (b"set-cookie: a=1", b"set-cookie: b=2", b"x-own: \xc3\xa9", b"x-hop: 1", b"connection: x-hop")
    with hostile(lambda *_: reply(b"{}", *extra)) as engines, served(gateway(*engines)[0]) as address:
        given = [(b"x-user", "é".encode()), (b"x-twice", b"1"), (b"x-twice", b"2")]
        given += [(b"connection", b"keep-alive, x-secret"), (b"x-secret", b"1"), (b"te", b"trailers")]
        said = httpx.get(address + "/v1/models", headers=given)
        assert said.headers.get_list("set-cookie") == ["a=1", "b=2"] and "x-hop" not in said.headers
        assert (b"x-own", b"\xc3\xa9") in said.headers.raw
        head = engines[0].requests[0][0].lower()
        assert b"x-user: \xc3\xa9" in head and head.count(b"x-twice") == 2
        assert b"x-secret" not in head and b"te: trailers" not in head


ANSWERS = {
    "deep": reply(b'{"choices": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "a lone surrogate": reply(text().replace(b'"x"', b'"\\ud800"')),
    "HTML": reply(b"<html>", kind=b"text/html"),
    "half": reply(b'{"choices": [{"te'),
    "empty": reply(b""),
    "a list": reply(b"[1]"),
    "status 999": reply(b"{}", status=b"999 Odd"),
    "status 100": reply(b"{}", status=b"100 Go on"),
    "redirect": reply(b"", b"location: http://127.0.0.1:1/pause", status=b"307 Temporary Redirect"),
    "garbage": b"\x00\x01garbage",
    "cut": reply(text())[:-3],
    "nothing": b"",
    "a long header": reply(b"{}", b"x: " + b"y" * 300_000),
}


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("stream", [False, True])
def test_malformed_answers_give_a_response_without_a_traceback(name, stream, capfd):
    """Surrogates, deep JSON and status 999 used to raise. An answer that is no JSON passed with status 200."""
    answer = ANSWERS[name]
    if stream:
        head, _, body = answer.partition(b"\r\n\r\n")
        answer = head.replace(b"application/json", b"text/event-stream") + b"\r\n\r\n" + body if body else answer
    with hostile(lambda *_: answer) as engines:
        app, backend = gateway(*engines)
        with served(app) as address:
            try:
                said = httpx.post(address + COMPLETIONS, json=BODY | {"stream": stream}, timeout=20)
                broken = {"deep", "HTML", "half", "empty", "a list"}
                assert said.status_code == 502 if not stream and name in broken else said.status_code in (200, 307, 502)
            except httpx.TransportError:
                assert stream, "the engine's stream broke off, and so does ours"
            assert httpx.get(address + "/health").status_code == 200
        assert not any(backend.in_flight.values()) and not app.in_flight
    assert "Traceback" not in capfd.readouterr().err


def stream_head(*lines):
    return (
        b"\r\n".join([b"HTTP/1.1 200 OK", b"content-type: text/event-stream", b"connection: close", *lines])
        + b"\r\n\r\n"
    )


@pytest.mark.parametrize("blank", [b"\n\n", b"\r\n\r\n"], ids=["LF", "CRLF"])
def test_events_are_forwarded_one_by_one_with_any_line_ending(blank):
    """With CRLF, all events used to arrive at the end."""
    go = threading.Event()
    line = blank[: len(blank) // 2]

    def answer(head, body, connection):
        first = b"event: message" + line + b'data: {"choices": [{"index": 0, "text": "a"}]}' + blank
        connection.sendall(stream_head() + b": hello" + blank + first)
        go.wait(20)
        usage = b'data: {"choices": [], "usage": {"completion_tokens": 2}}' + blank
        return (
            b'data: {"choices": [{"index": 0, "text": "b", "finish_reason": "stop"}]}'
            + blank
            + usage
            + b"data: [DONE]"
            + blank
        )

    with hostile(answer) as engines:
        app, backend = gateway(*engines)
        with served(app) as address, httpx.stream("POST", address + COMPLETIONS, json=BODY | {"stream": True}) as said:
            parts = said.iter_bytes()
            got = next(parts)
            while b'"a"' not in got or len(got) < len(b": hello" + blank) + 20:
                got += next(parts)
            go.set()
            got += b"".join(parts)
    assert got.startswith(b": hello" + blank) and b"event: message" in got and b"[DONE]" in got and b'"b"' in got
    assert b'"usage"' not in got, "only the gateway has asked for it"
    assert backend.meter.drafters[engines[0].url].tokens == 2


def test_a_stream_without_event_ends_takes_linear_time():
    """60 MB used to take more than 45 s, because every part was searched from the beginning."""
    size = 40_000_000

    def answer(head, body, connection):
        connection.sendall(stream_head())
        for _ in range(size // 10_000):
            connection.sendall(b"x" * 10_000)

    with hostile(answer) as engines, served(gateway(*engines)[0]) as address:
        began = time.process_time()
        with httpx.stream("POST", address + COMPLETIONS, json=BODY | {"stream": True}, timeout=60) as said:
            assert sum(map(len, said.iter_raw())) == size
        assert time.process_time() - began < 20, "seconds of computing; before, it grew with the square"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_early_frees_the_engine(stream):
    """These requests used to stay in flight, forever if the engine never answered."""
    ended = threading.Event()

    def answer(head, body, connection):
        connection.settimeout(20)
        if connection.recv(1) == b"":
            ended.set()

    with hostile(answer) as engines:
        app, backend = gateway(*engines)
        with served(app) as address:
            while len(engines[0].requests) < 5:  # on a busy machine a client may leave before the engine is asked
                with pytest.raises(httpx.ReadTimeout):
                    httpx.post(address + COMPLETIONS, json=BODY | {"stream": stream}, timeout=0.2)
            wait_for(lambda: not app.in_flight and not any(backend.in_flight.values()) and not engines[0].open)
        assert ended.is_set()


def test_an_engine_that_never_answers_gives_status_504():
    with hostile(lambda head, body, connection: connection.recv(1) and None) as engines:
        app, backend = gateway(*engines, request_s=0.3)
        assert completions(app)[0].status_code == 504 and not any(backend.in_flight.values())


@pytest.mark.parametrize("fault", [reply(b"{}", status=b"500 Oh"), b""], ids=["500", "died"])
def test_a_prompt_that_makes_engines_fail_is_not_sent_to_all(fault):
    def answer(head, body, connection):
        return fault if b"poison" in body else reply(text())

    with hostile(answer, 4) as engines:
        app, _ = gateway(*engines)
        assert completions(app, prompt="poison")[0].status_code in (500, 502)
        assert sum(b"poison" in body for one in engines for _, body in one.requests) == 2
        assert completions(app)[0].status_code == 200


PIECE = b'data: {"choices": [{"index": 0, "text": "a"}]}\n\n'


def chunked(*parts):
    """Return a chunked stream that breaks off after its parts."""
    lines = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)
    return stream_head(b"transfer-encoding: chunked") + lines


@pytest.mark.parametrize(
    "fault",
    [chunked(), chunked(b""), reply(PIECE, status=b"500 Oh", kind=b"text/event-stream")],
    ids=["died", "no event", "500"],
)
def test_an_engine_that_fails_before_its_first_event_is_replaced(fault):
    """The client used to get an error event or an empty stream, although another engine could answer."""
    whole = stream_head() + PIECE + b"data: [DONE]\n\n"
    with hostile(lambda *_: fault) as (dying,), hostile(lambda *_: whole) as (other,):
        app, backend = gateway(dying, other)
        (said,) = completions(app, stream=True)
        assert said.content == PIECE + b"data: [DONE]\n\n"
        assert (backend.failures[dying.url], backend.broken[dying.url]) == (1, 0) and len(dying.requests) == 1


@pytest.mark.parametrize("several", [False, True])
def test_a_broken_stream_ends_with_an_error_event(several, capfd):
    """It used to be reported as a fault of the gateway in the event, the metrics and stderr."""
    with hostile(lambda *_: chunked(PIECE, PIECE[:9])) as engines:
        app, backend = gateway(*engines)
        (said,) = completions(app, stream=True, n=2 if several else 1)
        *_, last = [event for event in said.text.split("\n\n") if event]
        assert said.text.startswith(PIECE.decode()) and last.startswith("data: {")
        assert "the engine closed the connection" in last and last.count("data:") == 1
        assert (backend.failures[engines[0].url], backend.broken[engines[0].url]) == (1, 1)
        assert not any(backend.in_flight.values()) and not backend.meter.drafters
        assert not backend.meter.registry.get_sample_value("specctl:faults_total", {"part": "http"})
    assert "a request failed" not in capfd.readouterr().err


def test_the_death_of_the_gateway_process_is_noticed(tmp_path):
    """Clients used to be refused while the learner waited forever."""
    with (
        hostile(lambda *_: reply(b"{}")) as engines,
        proxy_process.running("127.0.0.1:0", {engines[0].url: "vllm"}, tmp_path / "log", 2**20) as gateway,
    ):
        gateway.check()

        def child():  # a new process has no command line at first
            return [one for one in psutil.Process().children() if "specctl.gateway.proxy_process" in one.cmdline()]

        wait_for(child)
        os.kill(child()[0].pid, signal.SIGKILL)

        def noticed():
            try:
                gateway.check()
            except SpecctlError as error:
                return "has ended" in error.message
            return False

        wait_for(noticed)


@pytest.mark.parametrize("key", [None, "theirs"])
def test_credentials_in_an_address_become_the_authorization(key):
    """The HTTP client refuses a request with both, so a client's key used to make the request fail."""
    with hostile(lambda *_: reply(b"{}")) as engines:
        url = engines[0].url.replace("http://", "http://me:pa%3Ass@")
        app = engines_app(RunningEngines({url: "vllm"}, Meter("toy"), key=key), LimitsRecipe())
        (said,) = ask(app, ("GET", "/v1/models?a=%2e%2E", {"headers": {"authorization": "Bearer ours"}}))
        (head, _), line = engines[0].requests[0], b"basic " + base64.b64encode(b"me:pa:ss").lower()
        assert said.status_code == 200 and head.startswith(b"GET /v1/models?a=%2e%2E HTTP/1.1")
        assert head.lower().count(b"authorization: ") == 1 == head.lower().count(b"authorization: " + line)


def test_proxies_and_netrc_of_the_environment_are_ignored(tmp_path, monkeypatch):
    """They would send texts to another machine."""
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password hush")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with hostile(lambda *_: reply(text())) as engines:
        assert completions(gateway(*engines)[0])[0].status_code == 200
        assert b"authorization" not in engines[0].requests[0][0].lower()


def test_an_engine_with_endless_headers_is_cut_off():
    """A million headers would fill the memory."""
    sent = []

    def answer(head, body, connection):
        connection.sendall(b"HTTP/1.1 200 OK\r\n")
        with contextlib.suppress(OSError):
            for number in range(4000):
                connection.sendall(b"".join(b"x%d-%d: %s\r\n" % (number, one, b"y" * 900) for one in range(16)))
                sent.append(number)
        return None

    with hostile(answer) as engines:
        assert completions(gateway(*engines)[0])[0].status_code == 502 and len(sent) < 1000


@pytest.mark.parametrize("limit", ["LONGEST_READ_ANSWER", "LONGEST_ANSWER"])
@pytest.mark.parametrize("size", [2000, 4000])
def test_a_huge_answer_is_not_searched_for_counters(limit, size, monkeypatch):
    """Searching an answer of 200 MB used to block all other clients."""
    content = text(counters("[1, 1]") + ', "logprobs": [' + "0," * (size // 2) + "0]")
    monkeypatch.setattr(running_engines, limit, 3000)
    with hostile(lambda *_: reply(content)) as (engine,):
        app, backend = gateway(engine)
        (said,) = completions(app)
        refused = limit == "LONGEST_ANSWER" and size > 3000
        assert said.status_code == 502 if refused else said.content == content
        assert bool(backend.meter.drafters) == (size < 3000)


def test_the_event_loop_is_asyncio(monkeypatch):
    """With uvloop every connection failed, because it has no limit on a single read."""
    config = server.make_server(gateway(Hostile(None))[0]).config
    assert config.get_loop_factory() is asyncio.SelectorEventLoop


@pytest.mark.parametrize("key", [None, "", "theirs"])
def test_client_keys_and_engine_keys_are_kept_apart(key):
    """A key of the gateway is not a key of the engines."""
    with hostile(lambda *_: reply(b"{}")) as engines:
        backend = RunningEngines({engines[0].url: "vllm"}, Meter("toy"), key=key)
        app = engines_app(backend, LimitsRecipe())
        ask(app, ("GET", "/v1/models", {"headers": {"authorization": "Bearer ours"}}))
        head = engines[0].requests[0][0]
        expected = {None: b"Bearer ours", "": b"", "theirs": b"Bearer theirs"}[key]
        assert (expected in head if expected else b"Bearer" not in head) and head.count(b"Bearer") <= 1


@pytest.mark.parametrize(
    ("statuses", "ready"), [([b"503 Loading", b"200 OK"], 200), ([b"503 Loading"] * 2, 503), ([b"", b""], 503)]
)
def test_the_gateway_is_ready_if_an_engine_is_healthy(statuses, ready, monkeypatch):
    """A load balancer would send clients to a gateway without engines."""
    monkeypatch.setattr(running_engines, "READY_S", 60.0)  # a busy machine takes more than a second
    answers = [reply(b"", status=one) if one else b"" for one in statuses]
    with hostile(lambda *_: answers[0]) as (one,), hostile(lambda *_: answers[1]) as (other,):
        app, _ = gateway(one, other)
        said = ask(app, *[("GET", path, {}) for path in ("/ready", "/ready", "/health")])
        assert [answer.status_code for answer in said] == [ready, ready, 200]
        # All clients of `READY_S` share an answer. An engine that closes its connections is asked again.
        assert not any(statuses) or len(one.requests) == len(other.requests) == 1
        assert one.requests[0][0].startswith(b"GET /health ")
