"""A proxy between clients and engines of the same target: it passes requests on, and may keep a log of them.

Beside learning it is a process of its own, which that does not slow down. What clients send and get is theirs: bodies
are changed only to make the engine say token ids and counters, which are taken out of the answer again (`exchanges`).
Requests of one text that were answered whole are lines of the log: {"began": seconds since 1970, "request": {…},
"response": {…}}, as `specctl distill --from-log` reads them, too; and a `Dispatch` learns from them who should write
such texts.
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

from specctl import progress, regular
from specctl.engines import exchanges
from specctl.engines.pools import Pools
from specctl.errors import UsageError
from specctl.runs import PRIVATE

CONNECT_S = 10.0
CONNECTIONS = 256  # to the engines, about
LAST_REQUESTS_S = 30  # for those that are being answered when it ends
HOP_BY_HOP = {"connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade", "proxy-authorization"}
REMADE = {"host", "content-length", "accept-encoding", "content-encoding"}
FAILING = {429, 500, 502, 503, 504}  # another server may answer all the same
FIRST_REST_S, LONGEST_REST_S = 1.0, 60.0

Done = Callable[[], Awaitable[None]]


@dataclass(frozen=True)
class Rest:
    """The seconds that a server which has failed is asked last, and when they are over: twice as long every time."""

    seconds: float
    until: float

    @classmethod
    def after(cls, earlier: Rest | None) -> Self:
        seconds = min(2 * earlier.seconds, LONGEST_REST_S) if earlier else FIRST_REST_S
        return cls(seconds, time.monotonic() + seconds)


@dataclass(frozen=True)
class ServerOrder:
    """The addresses that a request goes to, in turn until one answers."""

    order: Sequence[str]


class Dispatch(Protocol):
    """A rule that says which server continues a text, and learns from what comes back."""

    def choose(self, body: Mapping[str, Any], in_flight: Mapping[str, int]) -> ServerOrder:
        """The order for a request, of one text, given the requests that each address has."""
        ...

    def answered(self, choice: ServerOrder, url: str, counts: exchanges.TextCounts) -> None:
        """Learn from a text that `url` has written whole."""
        ...


class LeastBusy:
    """The server with the fewest requests first."""

    def choose(self, body: Mapping[str, Any], in_flight: Mapping[str, int]) -> ServerOrder:
        return ServerOrder(sorted(in_flight, key=lambda one: in_flight[one]))

    def answered(self, choice: ServerOrder, url: str, counts: exchanges.TextCounts) -> None:
        """Whoever is least busy is so whatever it wrote."""


@dataclass(frozen=True)
class Passage:
    """A request on its way to a server.

    Attributes:
        body: of a request for one text; None of all others.
    """

    request: Request
    content: bytes
    body: dict[str, Any] | None
    choice: ServerOrder
    began: float


class Relay(StreamingResponse):
    """A stream that is passed on. `done` is called at its end, also where its client left before the first event."""

    def __init__(self, events: AsyncIterator[bytes], status: int, headers: dict[str, str], done: Done):
        super().__init__(events, status, headers)
        self.done = done

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self.done()


class Proxy:
    """The requests on their way. A server that fails is asked last for a while; what it did not answer, others do.

    Attributes:
        log: takes a line for each text that was answered whole; None keeps none.
        dispatch: who gets requests of one text; all others go to the least busy.
        failures: requests that each server did not answer.
    """

    def __init__(self, servers: dict[str, str], log: logging.Logger | None, dispatch: Dispatch | None = None):
        """`servers`: engine ("vllm" or "sglang") by address."""
        self.servers, self.log, self.dispatch = servers, log, dispatch
        self.in_flight = dict.fromkeys(servers, 0)
        self.failures = dict.fromkeys(servers, 0)
        self._rests: dict[str, Rest] = {}  # those that have just failed
        checked = any(url.startswith("https:") for url in servers)
        self.pools = Pools(CONNECTIONS, verify=checked, timeout=httpx.Timeout(None, connect=CONNECT_S))

    async def pass_on(self, request: Request) -> Response:
        """The engine's answer; 404 for what clients have no business with, 502 where no engine is."""
        path = request.url.path
        if not exchanges.is_open(path):
            return JSONResponse({"error": f"{path} is not passed on"}, 404)
        try:
            content = await request.body()
        except ClientDisconnect:
            return Response(status_code=499)
        body = _json(content) if request.method == "POST" else None
        text = body if any(exchanges.recorded(one, path, body) for one in set(self.servers.values())) else None
        rule = LeastBusy() if text is None or self.dispatch is None else self.dispatch
        choice = rule.choose(text or {}, self.in_flight)
        passage = Passage(request, content, text, choice, time.time())
        answer: Response = JSONResponse({"error": "no engine answers"}, 502)
        for url in sorted(choice.order, key=self._resting):
            self.in_flight[url] += 1
            try:
                answer = await self._asked(url, passage)
                failed = answer.status_code in FAILING
            except httpx.ConnectError:
                failed = True
            except httpx.TransportError as error:
                answer, failed = JSONResponse({"error": f"the engine broke off: {type(error).__name__}"}, 502), True
            except BaseException:
                self.in_flight[url] -= 1
                raise
            if isinstance(answer, Relay):  # which counts as in flight until its end
                return answer
            self.in_flight[url] -= 1
            if not failed:
                self._rests.pop(url, None)
                return answer
            self._failed(url)
        return answer

    def _failed(self, url: str) -> None:
        self.failures[url] += 1
        self._rests[url] = Rest.after(self._rests.get(url))

    def _resting(self, url: str) -> bool:
        rest = self._rests.get(url)
        return rest is not None and rest.until > time.monotonic()

    async def _asked(self, url: str, passage: Passage) -> Response:
        """The answer of one engine. Raises httpx.TransportError."""
        request, body = passage.request, passage.body
        engine, path, content = self.servers[url], request.url.path, passage.content
        added: frozenset[str] = frozenset()
        kept = exchanges.recorded(engine, path, body)
        if kept and body is not None:
            asked, added = exchanges.asking(engine, body, ids=self.log is not None)
            content = json.dumps(asked).encode()
        headers = [(name, value) for name, value in request.headers.items() if name not in HOP_BY_HOP | REMADE]
        query = f"?{request.url.query}" if request.url.query else ""
        http = self.pools.http
        onward = http.build_request(request.method, url + path + query, headers=headers, content=content)
        answer = await http.send(onward, stream=True)
        shown = {name: value for name, value in answer.headers.items() if name not in HOP_BY_HOP | REMADE}
        kept = kept and answer.status_code == 200
        if "text/event-stream" in answer.headers.get("content-type", ""):

            async def done() -> None:
                self.in_flight[url] -= 1
                await answer.aclose()

            events = self._streamed(url, answer, added, passage if kept else None)
            return Relay(events, answer.status_code, shown, done)
        try:
            content = await answer.aread()
        finally:
            await answer.aclose()
        document = _json(content)
        if kept and isinstance(document, dict):
            self._keep(passage, url, document, document)
            content = json.dumps(exchanges.restored(document, added), ensure_ascii=False).encode()
        return Response(content, answer.status_code, shown)

    async def _streamed(
        self, url: str, answer: httpx.Response, added: frozenset[str], passage: Passage | None
    ) -> AsyncIterator[bytes]:
        """The events of a stream, one by one. A client that leaves ends the engine's work, too."""
        pieces: list[Any] = []
        said: dict[str, Any] = {}
        try:
            async for event in exchanges.events(answer.aiter_bytes()):
                piece = exchanges.piece_of(event) if passage is not None else None
                if piece is not None:
                    said |= exchanges.counters(piece)
                    if self.log is not None:
                        pieces.append(piece)
                if shown := exchanges.restored_event(event, piece, added):
                    yield shown
        except httpx.TransportError:  # its client has a part already: nobody else can go on
            self._failed(url)
            raise
        self._rests.pop(url, None)
        if passage is not None:
            self._keep(passage, url, pieces, said)

    def _keep(self, passage: Passage, url: str, wrote: dict[str, Any] | list[Any], said: Mapping[str, Any]) -> None:
        """Log an answer, or the pieces of a stream, and tell the dispatch of its counters, `said`."""
        ended = time.time()
        if self.log is not None:
            with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
                response = wrote if isinstance(wrote, dict) else exchanges.joined(wrote)
                row = {"began": passage.began, "request": passage.body, "ended": ended, "response": response}
                self.log.info(json.dumps(row))
        if self.dispatch is not None:
            counts = exchanges.text_counts(self.servers[url], passage.request.url.path, said)
            if counts is not None:
                self.dispatch.answered(passage.choice, url, counts)


def _json(content: bytes) -> Any:
    """A body read as JSON; None where it is none."""
    try:
        return json.loads(content)
    except ValueError:
        return None


class PrivateLog(RotatingFileHandler):
    """A file that only its owner reads, and so the one that it begins where it was put aside.

    Raises OSError where a link, a pipe or another user's file is in its place. Lines that a full disk refuses are lost,
    which is said once, and without them: they are what clients have written.
    """

    refused = False

    def _open(self) -> TextIOWrapper:
        file = regular.opened(self.baseFilename, "a", follow=False, permissions=PRIVATE, encoding="utf-8")
        try:
            if os.fstat(file.fileno()).st_uid != os.geteuid():
                raise PermissionError(errno.EPERM, "another user's file", self.baseFilename)
            os.fchmod(file.fileno(), PRIVATE)  # one that was there may have had others
        except OSError:
            file.close()
            raise
        return cast(TextIOWrapper, file)

    def format(self, record: logging.LogRecord) -> str:
        """The line of a record. Half a line may be all that was written of the one before it: an empty line is none."""
        return "\n" * self.refused + super().format(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Say that lines are lost, where logging would print them."""
        error = sys.exception()
        if not self.refused:
            why = getattr(error, "strerror", None) or type(error).__name__
            progress.warn(f"cannot write {self.baseFilename}: {why}; lines are lost while this lasts")
        self.refused = True


def opened(path: Path, max_bytes: int) -> logging.Logger:
    """The log. Where it grows beyond `max_bytes` it is put aside as PATH.1, and begins anew."""
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
    """Serve on an open socket until `wait`, which a thread calls, is over; then answer the requests that are there."""
    methods = ["GET", "POST", "PUT", "DELETE", "OPTIONS"]
    app = Starlette(routes=[Route("/{path:path}", proxy.pass_on, methods=methods)])
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
    """An open socket meanwhile, and its address.

    Raises UsageError where `listen` (HOST:PORT; port 0 = any that is free) cannot be listened on.
    """
    host, _, port = listen.rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as place:
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            place.bind((host.strip("[]"), int(port)))
        except (OSError, OverflowError) as error:  # the latter for ports beyond 65535
            why = getattr(error, "strerror", None) or str(error)
            raise UsageError(f"cannot listen on {listen}: {why}", "--listen 127.0.0.1:8100") from error
        place.listen(2048)
        yield place, f"http://{host}:{place.getsockname()[1]}"


@contextmanager
def running(listen: str, servers: dict[str, str], log: Path, max_bytes: int) -> Iterator[str]:
    """A proxy meanwhile, in a process of its own; yields its address. At the end it answers the requests that it has,
    and takes no more. UsageError as `listening`."""
    with listening(listen) as (place, address):
        close(opened(log, max_bytes))  # what cannot be opened is told here
        process = subprocess.Popen(
            [sys.executable, "-m", "specctl.engines.proxy"],
            stdin=subprocess.PIPE,
            pass_fds=[place.fileno()],
            start_new_session=True,  # Ctrl-C is for the one that learns
        )
        # Not as arguments, which all users can read: addresses may hold passwords.
        settings = json.dumps([place.fileno(), servers, str(log), max_bytes])
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended
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
    # Until stdin ends, which it does with the process at its other end.
    serve(socket.socket(fileno=descriptor), Proxy(servers, opened(Path(log), max_bytes)), lambda: os.read(0, 1))
