"""HTTP proxy between clients and engines of one target: it passes requests on, and can log them for online learning.

Next to an online learner it runs in its own process, so that learning does not slow it down. Requests and answers pass
unchanged, with one exception: a request also asks for token ids and draft counters, which are removed from the answer
again (`proxy_messages`). Every complete answer to a request for one text becomes a line of the log: {"began": seconds
since 1970, "request": {…}, "response": {…}}. `specctl distill --from-log` reads these lines too. A `Dispatch` learns
from the same answers which server should write such texts.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any, Protocol, Self, cast

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from specctl import progress, regular_files
from specctl.engines import proxy_messages
from specctl.engines.http_pools import HttpPools
from specctl.errors import UsageError
from specctl.runs import PRIVATE

CONNECT_S = 10.0
CONNECTIONS = 256  # to the engines, approximately
LAST_REQUESTS_S = 30  # for requests that are still being answered at shutdown
HOP_BY_HOP = {"connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade", "proxy-authorization"}
REBUILT_HEADERS = {"host", "content-length", "accept-encoding", "content-encoding"}
RETRY_STATUSES = {429, 500, 502, 503, 504}  # statuses after which another server is tried
FIRST_REST_S, LONGEST_REST_S = 1.0, 60.0

Done = Callable[[], Awaitable[None]]


@dataclass(frozen=True)
class Backoff:
    """Back-off of a server that failed: other servers are tried first for `seconds`, until the time `until`.

    Each failure in a row doubles the seconds, up to a limit.
    """

    seconds: float
    until: float

    @classmethod
    def after(cls, earlier: Backoff | None) -> Self:
        seconds = min(2 * earlier.seconds, LONGEST_REST_S) if earlier else FIRST_REST_S
        return cls(seconds, time.monotonic() + seconds)


@dataclass(frozen=True)
class ServerChoice:
    """Addresses to try for a request, in order, until one answers."""

    order: Sequence[str]


class Dispatch(Protocol):
    """A rule that selects the server for a text, and learns from the answer."""

    def choose(self, body: Mapping[str, Any], in_flight: Mapping[str, int]) -> ServerChoice:
        """Order the servers for a request for one text, given the number of requests in flight per address."""
        ...

    def learn(self, choice: ServerChoice, url: str, counts: proxy_messages.TextCounts) -> None:
        """Learn from a text that `url` has written completely."""
        ...


class LeastBusy:
    """Dispatch that puts the server with the fewest requests in flight first."""

    def choose(self, body: Mapping[str, Any], in_flight: Mapping[str, int]) -> ServerChoice:
        return ServerChoice(sorted(in_flight, key=lambda one: in_flight[one]))

    def learn(self, choice: ServerChoice, url: str, counts: proxy_messages.TextCounts) -> None:
        """Learn nothing: an idle server says nothing about the quality of its text."""


@dataclass(frozen=True)
class ForwardedRequest:
    """A request on its way to a server.

    Attributes:
        body: the parsed body, if the request is for one text and its answer can be recorded; otherwise None.
    """

    request: Request
    content: bytes
    body: dict[str, Any] | None
    choice: ServerChoice
    began: float


class StreamRelay(StreamingResponse):
    """A stream that is passed on. `done` is called at its end, even if the client left before the first event."""

    def __init__(self, events: AsyncIterator[bytes], status: int, headers: dict[str, str], done: Done):
        super().__init__(events, status, headers)
        self.done = done

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self.done()


class Proxy:
    """Passes requests on to servers. A server that fails is tried last for a while, and the others answer its requests.

    Attributes:
        log: gets a line for each text that was answered completely, or None.
        dispatch: orders the servers for requests for one text. All other requests go to the least busy server.
        failures: number of requests that each server failed to answer.
    """

    def __init__(self, servers: dict[str, str], log: logging.Logger | None, dispatch: Dispatch | None = None):
        """`servers`: engine ("vllm" or "sglang") by address."""
        self.servers, self.log, self.dispatch = servers, log, dispatch
        self.in_flight = dict.fromkeys(servers, 0)
        self.failures = dict.fromkeys(servers, 0)
        self._rests: dict[str, Backoff] = {}  # servers that have failed recently
        checked = any(url.startswith("https:") for url in servers)
        self.pools = HttpPools(CONNECTIONS, verify=checked, timeout=httpx.Timeout(None, connect=CONNECT_S))

    async def forward(self, request: Request) -> Response:
        """Return an engine's answer: 404 for paths closed to clients, 502 if no engine answers."""
        path = request.url.path
        if not proxy_messages.is_open(path):
            return JSONResponse({"error": f"the proxy does not forward {path}"}, 404)
        try:
            content = await request.body()
        except ClientDisconnect:
            return Response(status_code=499)
        body = _json(content) if request.method == "POST" else None
        text = (
            body if any(proxy_messages.is_recordable(one, path, body) for one in set(self.servers.values())) else None
        )
        rule = LeastBusy() if text is None or self.dispatch is None else self.dispatch
        choice = rule.choose(text or {}, self.in_flight)
        passage = ForwardedRequest(request, content, text, choice, time.time())
        answer: Response = JSONResponse({"error": "no engine responds"}, 502)
        for url in sorted(choice.order, key=self._resting):
            self.in_flight[url] += 1
            try:
                answer = await self._forward_to(url, passage)
                failed = answer.status_code in RETRY_STATUSES
            except httpx.ConnectError:
                failed = True
            except httpx.TransportError as error:
                answer, failed = (
                    JSONResponse({"error": f"the engine closed the connection: {type(error).__name__}"}, 502),
                    True,
                )
            except BaseException:
                self.in_flight[url] -= 1
                raise
            if isinstance(answer, StreamRelay):  # it counts as in flight until its end
                return answer
            self.in_flight[url] -= 1
            if not failed:
                self._rests.pop(url, None)
                return answer
            self._failed(url)
        return answer

    def _failed(self, url: str) -> None:
        self.failures[url] += 1
        self._rests[url] = Backoff.after(self._rests.get(url))

    def _resting(self, url: str) -> bool:
        rest = self._rests.get(url)
        return rest is not None and rest.until > time.monotonic()

    async def _forward_to(self, url: str, passage: ForwardedRequest) -> Response:
        """The answer of one engine. Raises httpx.TransportError."""
        request, body = passage.request, passage.body
        engine, path, content = self.servers[url], request.url.path, passage.content
        added: frozenset[str] = frozenset()
        kept = proxy_messages.is_recordable(engine, path, body)
        if kept and body is not None:
            asked, added = proxy_messages.with_counters(engine, body, ids=self.log is not None)
            content = json.dumps(asked).encode()
        headers = [(name, value) for name, value in request.headers.items() if name not in HOP_BY_HOP | REBUILT_HEADERS]
        query = f"?{request.url.query}" if request.url.query else ""
        http = self.pools.http
        onward = http.build_request(request.method, url + path + query, headers=headers, content=content)
        answer = await http.send(onward, stream=True)
        shown = {name: value for name, value in answer.headers.items() if name not in HOP_BY_HOP | REBUILT_HEADERS}
        kept = kept and answer.status_code == 200
        if "text/event-stream" in answer.headers.get("content-type", ""):

            async def done() -> None:
                self.in_flight[url] -= 1
                await answer.aclose()

            events = self._streamed(url, answer, added, passage if kept else None)
            return StreamRelay(events, answer.status_code, shown, done)
        try:
            content = await answer.aread()
        finally:
            await answer.aclose()
        document = _json(content)
        if kept and isinstance(document, dict):
            self._record(passage, url, document, document)
            content = json.dumps(proxy_messages.without_added_fields(document, added), ensure_ascii=False).encode()
        return Response(content, answer.status_code, shown)

    async def _streamed(
        self, url: str, answer: httpx.Response, added: frozenset[str], passage: ForwardedRequest | None
    ) -> AsyncIterator[bytes]:
        """The events of a stream, one at a time. If the client leaves, the engine's work ends too."""
        pieces: list[Any] = []
        said: dict[str, Any] = {}
        try:
            async for event in proxy_messages.events(answer.aiter_bytes()):
                piece = proxy_messages.piece_of(event) if passage is not None else None
                if piece is not None:
                    said |= proxy_messages.counters(piece)
                    if self.log is not None:
                        pieces.append(piece)
                if shown := proxy_messages.restored_event(event, piece, added):
                    yield shown
        except httpx.TransportError:  # the client has a part already, so no other server can continue
            self._failed(url)
            raise
        self._rests.pop(url, None)
        if passage is not None:
            self._record(passage, url, pieces, said)

    def _record(
        self, passage: ForwardedRequest, url: str, wrote: dict[str, Any] | list[Any], said: Mapping[str, Any]
    ) -> None:
        """Log an answer or the pieces of a stream. Report the draft counters, `said`, to the dispatch."""
        ended = time.time()
        if self.log is not None:
            with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
                response = wrote if isinstance(wrote, dict) else proxy_messages.joined(wrote)
                row = {"began": passage.began, "request": passage.body, "ended": ended, "response": response}
                self.log.info(json.dumps(row))
        if self.dispatch is not None:
            counts = proxy_messages.text_counts(self.servers[url], passage.request.url.path, said)
            if counts is not None:
                self.dispatch.learn(passage.choice, url, counts)


def _json(content: bytes) -> Any:
    """A body parsed as JSON, or None if it is not JSON."""
    try:
        return json.loads(content)
    except ValueError:
        return None


class PrivateLog(RotatingFileHandler):
    """Rotating log file that only its owner can read, including the files that rotation creates.

    Raises OSError if a link, a pipe or another user's file has its path. If the disk is full, lines are lost. A single
    warning says so without quoting them, because clients wrote them.
    """

    refused = False

    def _open(self) -> TextIOWrapper:
        file = regular_files.open_regular(self.baseFilename, "a", follow=False, permissions=PRIVATE, encoding="utf-8")
        try:
            if os.fstat(file.fileno()).st_uid != os.geteuid():
                raise PermissionError(errno.EPERM, "file of another user", self.baseFilename)
            os.fchmod(file.fileno(), PRIVATE)  # an existing file may have had other permissions
        except OSError:
            file.close()
            raise
        return cast(TextIOWrapper, file)

    def format(self, record: logging.LogRecord) -> str:
        """The line of a record. After a failed write it starts with a newline: half a line may have been written."""
        return "\n" * self.refused + super().format(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Warn that lines are lost. Logging's default would print the lines."""
        error = sys.exception()
        if not self.refused:
            why = getattr(error, "strerror", None) or type(error).__name__
            progress.warn(f"cannot write {self.baseFilename}: {why}; log lines are lost until this is fixed")
        self.refused = True


def opened(path: Path, max_bytes: int) -> logging.Logger:
    """Open the log. When it grows beyond `max_bytes`, it is renamed to PATH.1 and a new file begins."""
    handler = PrivateLog(path, maxBytes=max_bytes, backupCount=1)
    handler.setFormatter(logging.Formatter("%(message)s"))
    log = logging.Logger("traffic")
    log.addHandler(handler)
    return log


def close(log: logging.Logger) -> None:
    """Close the files of a log."""
    for handler in log.handlers:
        handler.close()


def serve(place: socket.socket, proxy: Proxy, wait: Callable[[], object]) -> None:
    """Serve on an open socket until `wait` returns; a thread calls it. Then answer the requests still in flight."""
    methods = ["GET", "POST", "PUT", "DELETE", "OPTIONS"]
    app = Starlette(routes=[Route("/{path:path}", proxy.forward, methods=methods)])
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, timeout_graceful_shutdown=LAST_REQUESTS_S, lifespan="off"
    )
    server = uvicorn.Server(config)

    def watch() -> None:
        wait()
        server.should_exit = True

    threading.Thread(target=watch, daemon=True).start()
    server.run([place])


@contextmanager
def listening(listen: str) -> Iterator[tuple[socket.socket, str]]:
    """Yield an open socket and its address.

    Raises UsageError if `listen` (HOST:PORT; port 0 = any free port) cannot be listened on.
    """
    host, _, port = listen.rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as place:
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            place.bind((host.strip("[]"), int(port)))
        except (OSError, OverflowError) as error:  # OverflowError: ports beyond 65535
            why = getattr(error, "strerror", None) or str(error)
            raise UsageError(
                f"cannot listen on {listen}: {why}", "use an address such as --listen 127.0.0.1:8100"
            ) from error
        place.listen(2048)
        yield place, f"http://{host}:{place.getsockname()[1]}"


@contextmanager
def running(listen: str, servers: dict[str, str], log: Path, max_bytes: int) -> Iterator[str]:
    """Run a proxy in its own process and yield its address.

    At the end it accepts no more requests, and answers all requests still in flight.

    Raises UsageError as `listening` does.
    """
    with listening(listen) as (place, address):
        close(opened(log, max_bytes))  # report here if the log cannot be opened
        process = subprocess.Popen(
            [sys.executable, "-m", "specctl.engines.proxy"],
            stdin=subprocess.PIPE,
            pass_fds=[place.fileno()],
            start_new_session=True,  # Ctrl-C is for the learning process
        )
        # Send the settings over stdin: all users can read a process's arguments, and addresses may hold passwords.
        settings = json.dumps([place.fileno(), servers, str(log), max_bytes])
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the process has ended
            process.stdin.write(settings.encode() + b"\n")
            process.stdin.flush()
    try:
        yield address
    finally:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(LAST_REQUESTS_S + 5)
        except subprocess.TimeoutExpired:
            process.kill()


if __name__ == "__main__":
    descriptor, servers, log, max_bytes = json.loads(sys.stdin.buffer.readline())
    # Serve until stdin ends, which happens when the parent process ends.
    serve(socket.socket(fileno=descriptor), Proxy(servers, opened(Path(log), max_bytes)), lambda: os.read(0, 1))
