"""The proxy: clients get the engine's answers, the log also has ids and counters, other paths are closed."""

import asyncio
import contextlib
import errno
import io
import json
import os
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import httpx
import psutil
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from specctl.errors import UsageError
from specctl.gateway import proxy_process, running_engines, traffic_log
from specctl.gateway.metrics import Meter
from specctl.gateway.running_engines import RunningEngines
from specctl.gateway.sse import EventResponse

PATIENCE_S = 180  # processes start slowly on a busy machine

WORDS = ["SEL", "ECT", " a\u2028b\x85", " é"]


class Engine:
    """A fake vLLM that returns token ids and counters on request. It answers no chat while `holds()`."""

    def __init__(self, pause=0.0, holds=lambda: False):
        self.pause, self.holds, self.bodies, self.headers, self.ended = pause, holds, [], [], 0

    async def chat(self, request):
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        if not body.get("messages"):
            return JSONResponse({"error": {"message": "no messages"}}, 400)
        told = {"prompt_token_ids": [1, 2]} if body.get("return_token_ids") else {}
        metrics = {"metrics": {"speculative_decoding": {"acceptance_histogram": [1, 1], "num_draft_tokens": 2}}}
        if body.get("stream"):
            return StreamingResponse(self.pieces(body, told, metrics), media_type="text/event-stream")
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "".join(WORDS)}}
        choice |= {"token_ids": [5, 6, 7, 8]} if told else {}
        while self.holds():
            await asyncio.sleep(0.01)
        return JSONResponse({"id": "x", "choices": [choice], **told, **metrics})

    async def pieces(self, body, told, metrics):
        try:
            for place, word in enumerate(WORDS):
                last = place == len(WORDS) - 1
                choice = {"index": 0, "delta": {"content": word}, "finish_reason": "stop" if last else None}
                choice |= {"token_ids": [5 + place]} if told else {}
                piece = {"id": "x", "choices": [choice], **(told if place == 0 else {})}
                yield f"data: {json.dumps(piece, ensure_ascii=False)}\n\n"
                await asyncio.sleep(self.pause)
            if (body.get("stream_options") or {}).get("include_usage"):
                yield f"data: {json.dumps({'choices': [], 'usage': {'total_tokens': 6}, **metrics})}\n\n"
            yield "data: [DONE]\n\n"
        finally:
            self.ended += 1

    async def models(self, request):
        return JSONResponse({"data": [{"id": "toy"}], "asked": str(request.url.query)})

    async def pause_all(self, request):
        raise AssertionError("a client has reached what is not for clients")


@contextmanager
def running(*options):
    """Run a gateway process and yield its address."""
    with proxy_process.running(*options) as gateway:
        yield gateway.address
        gateway.check()


@contextmanager
def served(engine):
    routes = [
        Route("/v1/chat/completions", engine.chat, methods=["POST"]),
        Route("/v1/models", engine.models),
        Route("/pause", engine.pause_all, methods=["POST"]),
    ]
    config = uvicorn.Config(Starlette(routes=routes), port=0, log_level="error", lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)


@pytest.fixture(scope="module")
def engine():
    return Engine()


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return tmp_path_factory.mktemp("log") / "traffic.jsonl"


@pytest.fixture(scope="module")
def address(engine, log):
    with served(engine) as url, running("127.0.0.1:0", {url: "vllm"}, log, 2**20) as address:
        with httpx.Client(transport=httpx.HTTPTransport(verify=False, retries=20), timeout=PATIENCE_S) as http:
            http.get(f"{address}/v1/models")
        yield address


def lines(log):
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def chat(**fields):
    return {"model": "toy", "messages": [{"role": "user", "content": "x"}], **fields}


def test_clients_get_the_unmodified_answer_and_the_log_gets_ids(engine, address, log):
    before = len(lines(log))
    answer = httpx.post(f"{address}/v1/chat/completions", json=chat(), headers={"Authorization": "Bearer secret"})
    (choice,) = answer.json()["choices"]
    assert choice["message"]["content"] == "".join(WORDS) and "token_ids" not in choice
    assert "prompt_token_ids" not in answer.json() and answer.json()["id"] == "x"
    assert engine.headers[-1]["authorization"] == "Bearer secret"
    (row,) = lines(log)[before:]
    assert row["request"] == chat() and row["began"] <= row["ended"] <= time.time()
    assert row["response"]["prompt_token_ids"] == [1, 2] and row["response"]["choices"][0]["token_ids"] == [5, 6, 7, 8]
    assert "secret" not in log.read_text() and os.stat(log).st_mode & 0o077 == 0


@pytest.mark.parametrize("usage", [False, True])
def test_a_stream_is_forwarded_unmodified_and_logged(engine, address, log, usage):
    before = len(lines(log))
    body = chat(stream=True) | ({"stream_options": {"include_usage": True}} if usage else {})
    with httpx.stream("POST", f"{address}/v1/chat/completions", json=body) as answer:
        events = [event for event in answer.read().decode().split("\n\n") if event]
    assert events[-1] == "data: [DONE]" and len(events) == len(WORDS) + 1 + usage
    pieces = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
    assert "".join(piece["choices"][0]["delta"]["content"] for piece in pieces if piece["choices"]) == "".join(WORDS)
    assert not any("token_ids" in json.dumps(piece) for piece in pieces)
    (row,) = lines(log)[before:]
    assert row["response"]["choices"][0]["token_ids"] == [5, 6, 7, 8] and row["response"]["metrics"]


def test_the_openai_client_works(address):
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=address + "/v1", api_key="none", max_retries=0)
    ask = {"model": "toy", "messages": [{"role": "user", "content": "x"}]}
    assert client.chat.completions.create(**ask).choices[0].message.content == "".join(WORDS)
    pieces = client.chat.completions.create(**ask, stream=True)
    assert "".join(piece.choices[0].delta.content for piece in pieces) == "".join(WORDS)
    assert [model.id for model in client.models.list()] == ["toy"]
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="toy", messages=[])


def test_refusals_and_other_pages_pass_through_and_are_not_logged(address, log):
    before = len(lines(log))
    assert httpx.post(f"{address}/v1/chat/completions", json=chat(messages=[])).status_code == 400
    assert httpx.get(f"{address}/v1/models?a=b%20c").json()["asked"] == "a=b%20c"
    assert httpx.post(f"{address}/v1/chat/completions", content=b"{half").status_code >= 400
    assert len(lines(log)) == before


def test_paths_that_change_an_engine_are_closed(address):
    assert httpx.post(f"{address}/pause").status_code == 404
    assert httpx.post(f"{address}//pause").status_code == 404
    assert httpx.post(f"{address}/v1/../pause").status_code == 404
    assert httpx.post(f"{address}/v1/%2e%2e/pause").status_code == 404


def test_a_client_that_leaves_ends_the_generation(tmp_path):
    engine = Engine(pause=PATIENCE_S)  # its stream is not over before the client has left
    log = tmp_path / "log"
    with served(engine) as url, running("127.0.0.1:0", {url: "vllm"}, log, 2**20) as address:
        with httpx.Client(transport=httpx.HTTPTransport(verify=False, retries=20), timeout=PATIENCE_S) as http:
            with http.stream("POST", f"{address}/v1/chat/completions", json=chat(stream=True)) as answer:
                next(answer.iter_raw())
            until = time.monotonic() + PATIENCE_S
            while not engine.ended and time.monotonic() < until:
                time.sleep(0.02)
        assert engine.ended == 1
    assert not lines(log)


def test_requests_finish_when_the_gateway_stops(tmp_path):
    engine = Engine(pause=0.3)
    got = []
    with served(engine) as url:
        with running("127.0.0.1:0", {url: "vllm"}, tmp_path / "log", 2**20) as address:

            def ask():
                with httpx.Client(transport=httpx.HTTPTransport(verify=False, retries=20), timeout=PATIENCE_S) as http:
                    got.append(http.post(f"{address}/v1/chat/completions", json=chat(stream=True)).text)

            thread = threading.Thread(target=ask)
            thread.start()
            while not engine.bodies:
                time.sleep(0.01)
        thread.join()
    assert got[0].endswith("data: [DONE]\n\n") and len(lines(tmp_path / "log")) == 1


def test_engines_share_requests_and_replace_a_missing_one(tmp_path):
    held = lambda: len(one.bodies) + len(other.bodies) < 6  # noqa: E731
    one, other = Engine(holds=held), Engine(holds=held)  # requests one by one would all go to the first
    with served(one) as url, served(other) as second:
        servers = {url: "vllm", second: "vllm", "http://127.0.0.1:1": "vllm"}
        with running("127.0.0.1:0", servers, tmp_path / "log", 2**20) as address:
            with httpx.Client(transport=httpx.HTTPTransport(verify=False, retries=20), timeout=PATIENCE_S) as http:
                http.get(f"{address}/v1/models")
            codes = []
            ask = lambda: codes.append(httpx.post(f"{address}/v1/chat/completions", json=chat()).status_code)  # noqa: E731
            threads = [threading.Thread(target=ask) for _ in range(6)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    assert codes == [200] * 6 and min(len(one.bodies), len(other.bodies)) >= 2


def test_no_engine_gives_502_and_a_used_address_is_refused(tmp_path):
    with running("127.0.0.1:0", {"http://127.0.0.1:1": "vllm"}, tmp_path / "log", 2**20) as address:
        with httpx.Client(transport=httpx.HTTPTransport(verify=False, retries=20), timeout=PATIENCE_S) as http:
            assert http.get(f"{address}/v1/models").status_code == 502
        with (
            pytest.raises(UsageError, match="cannot listen on"),
            running(address.removeprefix("http://"), {}, tmp_path / "b", 1),
        ):
            pass


def test_a_rotated_log_is_private(tmp_path):
    log = traffic_log.opened(tmp_path / "log", 100)
    for number in range(10):
        log.info(json.dumps({"number": number, "text": "x" * 30}))
    files = sorted(tmp_path.iterdir())
    assert [path.name for path in files] == ["log", "log.1"]
    assert all(path.stat().st_mode & 0o077 == 0 and path.stat().st_size <= 100 for path in files)


def test_an_existing_log_becomes_private_and_links_are_refused(tmp_path, pipe):
    (tmp_path / "log").write_text("")
    (tmp_path / "log").chmod(0o644)
    traffic_log.close(traffic_log.opened(tmp_path / "log", 100))
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o600
    (tmp_path / "link").symlink_to(tmp_path / "victim")
    for path, words in ((tmp_path / "link", "a symbolic link"), (pipe(tmp_path / "pipe"), "a named pipe")):
        with pytest.raises(OSError, match=words):
            traffic_log.opened(path, 100)
        with pytest.raises(OSError, match=words), running("127.0.0.1:0", {}, path, 100):
            pass
    assert not (tmp_path / "victim").exists()


def test_a_log_file_of_another_user_is_refused(tmp_path, monkeypatch):
    """In a shared directory, another user could create the file first and read it."""
    (tmp_path / "log").write_text("")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(PermissionError, match="file of another user"):
        traffic_log.opened(tmp_path / "log", 100)


class Full(io.StringIO):
    """A file on a disk that is full for a while."""

    full = True

    def write(self, text):
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(text)


def test_a_full_disk_is_reported_once_without_the_text(tmp_path, capfd):
    """Python's logging would print the record, with the client's text."""
    log = traffic_log.opened(tmp_path / "log", 2**20)
    (handler,) = log.handlers
    handler.stream.close()
    handler.stream = Full()
    for _ in range(3):
        log.info("my password is hunter2")
    handler.stream.full = False
    log.info("{}")
    said = capfd.readouterr().err
    assert said.count("No space left on device") == 1 == len(said.splitlines()) and str(tmp_path / "log") in said
    assert "hunter2" not in said and handler.stream.getvalue().split() == ["{}"]


class Torn(Full):
    """A file that takes the beginning of a line before the disk is full."""

    def write(self, text):
        if self.full:
            io.StringIO.write(self, text[:5])
        return super().write(text)


def test_a_torn_line_does_not_spoil_later_lines(tmp_path):
    log = traffic_log.opened(tmp_path / "log", 2**20)
    (handler,) = log.handlers
    handler.stream.close()
    handler.stream = Torn()
    log.info(json.dumps({"text": "x" * 30}))
    handler.stream.full = False
    log.info("{}")
    assert handler.stream.getvalue().splitlines()[-1] == "{}"


def test_the_gateway_process_does_not_import_torch():
    """torch takes seconds and 200 MB, while clients wait."""
    code = "import sys, specctl.gateway.proxy_process; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_addresses_are_not_on_the_command_line(tmp_path):
    """All users can read command lines, and an address may contain a password."""
    servers = {"http://me:HUSH@127.0.0.1:1": "vllm"}
    with running("127.0.0.1:0", servers, tmp_path / "log", 2**20) as address:
        with httpx.Client(transport=httpx.HTTPTransport(verify=False, retries=20), timeout=PATIENCE_S) as http:
            assert http.get(f"{address}/v1/models").status_code == 502, "it has its settings"
        commands = [one.cmdline() for one in psutil.Process().children(recursive=True)]
    assert any("specctl.gateway.proxy_process" in one for one in commands) and "HUSH" not in str(commands)


def test_a_failed_server_is_asked_last_for_a_while(tmp_path):
    """Otherwise every request would wait for it first."""
    now, rest = time.monotonic(), None
    for seconds in (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0):
        rest = running_engines.Backoff.after(rest)
        assert rest.seconds == seconds and rest.until >= now + seconds
    through = RunningEngines({"http://a": "vllm", "http://b": "vllm"}, Meter("toy"))
    through._failed("http://a")
    assert sorted(["http://a", "http://b"], key=through._resting) == ["http://b", "http://a"]
    assert through.failures == {"http://a": 1, "http://b": 0}


@pytest.mark.parametrize("version", ["2.3", "2.4"])
def test_a_client_that_leaves_before_its_stream_is_noticed(version):
    """Otherwise its server would count as busy forever."""
    ended = []

    async def done():
        ended.append(True)

    async def events():
        yield b"data: {}\n\n"

    async def receive():
        return {"type": "http.disconnect"}

    async def send(message):
        raise OSError("gone")

    relay = EventResponse(b"", events(), done)
    scope = {"type": "http", "asgi": {"version": "3.0", "spec_version": version}}
    with contextlib.suppress(Exception):
        asyncio.run(relay(scope, receive, send))
    assert ended == [True]
