"""Limits protect clients from each other: headers, bodies, slow clients, connections, floods."""

import asyncio
import json
import socket
import threading
import time
from types import SimpleNamespace

import httpx
import pytest
from starlette.responses import JSONResponse

from specctl.errors import UsageError
from specctl.gateway.connections import JOINED_BYTES, ConnectionTable, ResponseTransport, most_connections
from specctl.gateway.limits import Guard
from specctl.gateway.metrics import Meter
from specctl.gateway.server import listening
from specctl.recipe import LimitsRecipe
from tests.gateway.conftest import served, wait_for


def guard(limits=None, key=None, app=None):
    async def answer(scope, receive, send):
        message = await receive()
        await JSONResponse({"bytes": len(message["body"])})(scope, receive, send)

    return Guard(app or answer, LimitsRecipe(**limits or {}), Meter("toy"), key)


def ask(app, *requests):
    """Send (method, path, options) at once and return the responses."""

    async def work():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://toy") as http:
            return await asyncio.gather(*[http.request(method, path, **more) for method, path, more in requests])

    return asyncio.run(work())


def test_headers_are_limited():
    """Merging 10,000 headers took an HTTP library 5 to 15 s, which blocked all clients."""
    app = guard({"headers": 20, "header_bytes": 2000})
    many = {f"x-{number}": "1" for number in range(30)}
    few, more, long = ask(
        app, ("GET", "/", {}), ("GET", "/", {"headers": many}), ("GET", "/", {"headers": {"x": "y" * 3000}})
    )
    assert [few.status_code, more.status_code, long.status_code] == [200, 431, 431]
    assert app.meter.registry.get_sample_value("specctl:refused_total", {"limit": "headers"}) == 2


@pytest.mark.parametrize(
    "host,status",
    [
        *(("127.0.0.1:8000", 200), ("localhost", 200), ("LOCALHOST:80", 200), ("[::1]:8000", 200), ("10.1.2.3", 200)),
        *((socket.gethostname(), 200), ("llm.localhost:1", 200), ("gateway.example", 200), ("x", 200)),
        *(("evil.example:8000", 421), ("localhost.evil.example", 421), ("127.0.0.1.evil.example", 421)),
    ],
)
def test_foreign_host_names_on_the_loopback_are_refused(host, status):
    """A site that points its name at 127.0.0.1 could read the gateway's answers (DNS rebinding)."""

    def said(limits, key=None, place="127.0.0.1:8000"):
        app, headers = guard(limits, key), {"host": host, "authorization": "Bearer k"}
        answer = ask(app, ("POST", f"http://{place}/v1/completions", {"headers": headers, "content": b"{}"}))[0]
        return answer.status_code, app.meter.registry.get_sample_value("specctl:refused_total", {"limit": "hosts"})

    for place in ("127.0.0.1:8000", "[::1]:8000", "[::ffff:127.0.0.1]:8000"):  # the last is IPv4 on a socket of [::]
        assert said({"hosts": "gateway.example"}, place=place) == (status, 1 if status == 421 else None)
    assert said({}, key="k") == (200, None), "a page of another site has no key"
    assert said({}, place="192.0.2.1:8000") == (200, None), "names of other addresses are not known here"


def test_host_names_are_checked_on_a_real_socket():
    with served(guard()) as address:
        known, other = (httpx.get(address, headers={"host": host}) for host in ("localhost", "evil.example"))
    assert (known.status_code, other.status_code) == (200, 421)
    assert other.json()["error"]["code"] == "unknown_host"


def test_bodies_are_limited_with_and_without_a_declared_length():
    """Four bodies of 200 MB used to take 1.8 GB of memory."""
    app = guard({"body_bytes": 1000, "all_body_bytes": 1500})

    async def parts(count):
        for _ in range(count):
            yield b"x" * 100

    said = ask(
        app,
        ("POST", "/v1/chat/completions", {"content": b"x" * 1000}),
        ("POST", "/v1/chat/completions", {"content": b"x" * 1001}),
        ("POST", "/v1/chat/completions", {"content": parts(11)}),
    )
    assert [one.status_code for one in said] == [200, 413, 413] and said[0].json() == {"bytes": 1000}
    assert app._held == 0 and app.in_flight == 0


def test_all_bodies_together_are_limited():
    gate = asyncio.Event()

    async def slow(scope, receive, send):
        await gate.wait()
        await JSONResponse({})(scope, receive, send)

    app = guard({"body_bytes": 1000, "all_body_bytes": 1500}, app=slow)

    async def work():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://toy") as http:
            first = asyncio.ensure_future(http.post("/", content=b"x" * 1000))
            while not app._held:
                await asyncio.sleep(0)
            second = await http.post("/", content=b"x" * 1000)
            gate.set()
            return await first, second

    first, second = asyncio.run(work())
    assert (first.status_code, second.status_code) == (200, 503) and second.headers["retry-after"]


def test_requests_in_flight_and_their_duration_are_limited():
    async def never(scope, receive, send):
        await asyncio.Event().wait()

    app = guard({"requests": 2, "request_s": 1.0}, app=never)
    said = ask(app, *[("GET", "/v1/models", {})] * 4)
    assert sorted(one.status_code for one in said) == [503, 503, 504, 504] and app.in_flight == 0


def test_an_overlong_stream_ends_with_an_error():
    async def endless(scope, receive, send):
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        while True:
            await send({"type": "http.response.body", "body": b"data: {}\n\n", "more_body": True})
            await asyncio.sleep(0.01)

    (said,) = ask(guard({"request_s": 0.2}, app=endless), ("GET", "/", {}))
    assert json.loads(said.text.strip().rpartition("data: ")[2])["error"]["message"].startswith(
        "the request took longer"
    )


def test_an_internal_error_gives_status_500_without_the_text(capfd):
    async def wrong(scope, receive, send):
        raise ValueError((await receive())["body"].decode())

    app = guard(app=wrong)
    (said,) = ask(app, ("POST", "/", {"content": b"my password is hunter2"}))
    assert said.status_code == 500 and "hunter2" not in said.text + capfd.readouterr().err and app.in_flight == 0


@pytest.mark.parametrize("given", [None, "Bearer", "Bearer wrong", "Basic hush", "Bearer hush ", "hush"])
def test_a_key_is_required(given):
    app = guard(key="hush")
    headers = {} if given is None else {"authorization": given}
    closed, open, page, health = ask(
        app,
        ("GET", "/v1/models", {"headers": headers}),
        ("GET", "/v1/models", {"headers": {"authorization": "bearer hush"}}),  # RFC 9110: in any case
        ("GET", "/", {}),
        ("GET", "/health", {}),
    )
    assert closed.status_code == 401 and closed.json()["error"]["code"] == "invalid_api_key"
    assert closed.headers["www-authenticate"] == "Bearer"
    assert [open.status_code, page.status_code, health.status_code] == [200] * 3


def raw(address, data=b"", timeout=20.0):
    host, port = address.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout)
    connection.sendall(data)
    return connection


def read_all(connection):
    parts = []
    try:
        while part := connection.recv(65536):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


@pytest.mark.parametrize("data", [b"", b"GET / HT", b"POST / HTTP/1.1\r\nhost: x\r\nx-a: b\r\n"])
def test_unfinished_headers_are_cut_off(data):
    """1,300 unfinished headers kept all clients out, and none of these connections was closed."""
    with served(guard({"header_s": 0.2})) as address:
        assert read_all(raw(address, data)) == b""


def test_an_unfinished_second_header_is_cut_off():
    app = guard({"header_s": 20})
    with served(app) as address:
        connection = raw(address, b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        app.limits.header_s = 0.2
        connection.sendall(b"GET /hea")
        assert b"HTTP" not in read_all(connection)


def test_an_unfinished_body_is_cut_off():
    with served(guard({"body_s": 0.2})) as address:
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\nhalf"
        assert read_all(raw(address, head)).startswith(b"HTTP/1.1 408")


def test_idle_connections_are_closed_for_new_ones():
    """The oldest are closed first, and a new client is always served."""
    app = guard({"connections": 20, "header_s": 60})
    with served(app) as address:
        idle = [raw(address) for _ in range(60)]
        wait_for(lambda: app.meter.registry.get_sample_value("specctl:connections") <= 20)
        for _ in range(5):
            assert httpx.get(address + "/health").status_code == 200
        assert read_all(idle[0]) == b"" and app.meter.registry.get_sample_value("specctl:connections") <= 20
        for connection in idle:
            connection.close()


def test_connections_in_use_are_never_closed_for_new_ones():
    gate = threading.Event()

    async def slow(scope, receive, send):
        await asyncio.to_thread(gate.wait)
        await JSONResponse({})(scope, receive, send)

    app = guard({"connections": 16}, app=slow)
    with served(app) as address:
        head = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
        first = [raw(address, head) for _ in range(16)]
        wait_for(lambda: app.in_flight == 16)
        assert read_all(raw(address, head)) == b""
        gate.set()
        assert all(one.recv(65536).startswith(b"HTTP/1.1 200") for one in first)
        for connection in first:
            connection.close()


def test_the_connection_limit_respects_the_open_files_limit(monkeypatch):
    """Beyond it, the event loop wrote 218,745 tracebacks in 20 seconds."""
    monkeypatch.setattr("resource.getrlimit", lambda kind: (1024, 1024))
    monkeypatch.setattr("resource.setrlimit", lambda kind, limits: None)
    assert 16 <= most_connections(LimitsRecipe()) <= 1024 - 192
    assert most_connections(LimitsRecipe(connections=50)) == 50
    assert ConnectionTable(LimitsRecipe(), Meter("x")).most <= 832


SMUGGLED = {
    "CL.TE": b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n"
    b"0\r\n\r\nGET /x HTTP/1.1\r\n\r\n",
    "two CL": b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\ncontent-length: 4\r\n\r\nabcd",
    "bad chunk": b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\nabc\r\n0\r\n\r\n",
    "no host": b"GET / HTTP/1.1\r\n\r\n",
    "CONNECT": b"CONNECT x:1 HTTP/1.1\r\nhost: x\r\n\r\n",
    "NUL": b"GET /\x00 HTTP/1.1\r\nhost: x\r\n\r\n",
    "a header beyond ASCII": "GET /health HTTP/1.1\r\nhost: x\r\nx-user: é\r\nconnection: close\r\n\r\n".encode(),
    "garbage": b"\x16\x03\x01\x02\x00\x01",
    "upgrade": b"GET / HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n",
}


@pytest.mark.parametrize("data", SMUGGLED.values(), ids=SMUGGLED)
def test_malformed_http_does_not_break_the_server(data, capfd):
    app = guard({"header_s": 0.3, "body_s": 0.3})
    with served(app) as address:
        connection = raw(address, data)
        connection.shutdown(socket.SHUT_WR)
        read_all(connection)
        app.limits.header_s = app.limits.body_s = 20
        assert httpx.get(address + "/health").status_code == 200
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("data", "status", "reason"),
    [
        (b"garbage\r\n\r\n", 400, "illegal request line"),
        (b"GET / HTTP/1.1\r\nhost: x\r\nx-long: " + b"a" * 200_000, 431, "Receive buffer too long"),
        (SMUGGLED["bad chunk"], 400, "illegal chunk header"),
        (SMUGGLED["two CL"], 400, "conflicting Content-Length headers"),
    ],
)
def test_malformed_http_gets_an_error_of_the_api(data, status, reason):
    """It was plain text, at which clients that read JSON failed."""
    with served(guard()) as address:
        head, _, body = read_all(raw(address, data)).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status) and b"content-type: application/json" in head
    assert b"connection: close" in head.lower() and b"content-length: %d" % len(body) in head
    error = {"message": f"malformed HTTP: {reason}", "type": "invalid_request_error", "param": None}
    assert json.loads(body) == {"error": error | {"code": "invalid_http"}}


def test_many_headers_do_not_block_other_clients(capfd):
    """100 kB of headers took 4.8 s of the event loop."""
    with served(guard()) as address:
        head = b"GET / HTTP/1.1\r\nhost: x\r\n" + b"".join(b"x%d: 1\r\n" % number for number in range(10_000)) + b"\r\n"
        began = time.process_time()
        for _ in range(3):
            assert read_all(raw(address, head))[:12] in (b"HTTP/1.1 431", b"HTTP/1.1 400", b"")
        assert time.process_time() - began < 8, "seconds of computing, which a busy machine makes longer"
        assert httpx.get(address + "/health").status_code == 200


def test_small_packets_are_sent_at_once():
    """Without TCP_NODELAY, a response of two packets took 47 ms."""
    with listening("127.0.0.1:0") as (place, address), raw(address):
        accepted, _ = place.accept()
        with accepted:
            assert accepted.proto == socket.IPPROTO_TCP, "asyncio looks at this, and sets TCP_NODELAY"


def test_an_address_in_use_is_refused():
    with (
        listening("127.0.0.1:0") as (_, address),
        pytest.raises(UsageError, match="cannot listen on"),
        listening(address.removeprefix("http://")),
    ):
        pass


IDLE, CLIENTS = 2000, 20


@pytest.mark.slow
@pytest.mark.parametrize("most", [IDLE // 4, None], ids=["more than the limit", "within the limit"])
def test_thousands_of_idle_connections_do_not_block_clients(most, capfd):
    """At the limit, new clients used to be refused while the event loop wrote endless tracebacks."""
    app = guard({"connections": most, "header_s": 60})
    count = lambda: app.meter.registry.get_sample_value("specctl:connections")  # noqa: E731
    with served(app) as address:
        idle = [raw(address, b"GET / HT" * (number % 2)) for number in range(IDLE)]
        wait_for(lambda: count() == min(most or IDLE, IDLE))

        async def client(http):
            return [(await http.post(address + "/", content=b"x")).json() for _ in range(5)]

        async def clients():
            async with httpx.AsyncClient(timeout=60) as http:
                return await asyncio.gather(*[client(http) for _ in range(CLIENTS)])

        assert asyncio.run(clients()) == [[{"bytes": 1}] * 5] * CLIENTS
        cut = [connection for connection in idle if hung_up(connection)]
        refused = app.meter.registry.get_sample_value("specctl:refused_total", {"limit": "connections"}) or 0
        assert count() <= (most or IDLE + CLIENTS) and len(cut) == refused
        assert (len(cut) >= IDLE - most) if most else not cut
        for connection in idle:
            connection.close()
    assert not capfd.readouterr().err


def hung_up(connection):
    """Return whether the server has closed an idle connection."""
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


LONG = bytes(JOINED_BYTES + 1)


@pytest.mark.parametrize(
    ("body", "sent"),
    [([b"body", b"end"], [b"headbody", b"end"]), ([LONG], [b"head", LONG]), ([], [b"head"])],
    ids=["short", "long", "none"],
)
def test_the_head_of_a_response_is_sent_with_the_start_of_its_body(body, sent):
    """A long body is sent separately, to avoid a copy. `100 Continue` does not wait for a body."""
    written = []
    below = {"write": written.append, "close": lambda: written.append("closed"), "is_closing": lambda: False}
    response = ResponseTransport(SimpleNamespace(**below))
    response.write(b"continue")
    response.holds = True
    response.write(b"head")
    assert written == [b"continue"]
    response.holds = False
    for part in body:
        response.write(part)
    response.close()
    assert [part for part in written if part] == [b"continue", *sent, "closed"]
