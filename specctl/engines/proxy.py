"""A proxy between clients and engines of the same target: it passes requests on, and keeps a log of them.

It is a process of its own, which learning does not slow down. What clients send and get is theirs: bodies are changed
only to make the engine say token ids, which are taken out of the answer again (`exchanges`). Requests of one text that
were answered whole are lines of the log: {"began": seconds since 1970, "request": {…}, "response": {…}}, as `specctl
distill --from-log` reads them, too.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from specctl.engines import exchanges
from specctl.engines.pools import Pools
from specctl.errors import UsageError

CONNECT_S = 10.0
CONNECTIONS = 256  # to the engines, about
LAST_REQUESTS_S = 30  # for those that are being answered when it ends
HOP_BY_HOP = {"connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade", "proxy-authorization"}
REMADE = {"host", "content-length", "accept-encoding", "content-encoding"}


class Proxy:
    """The requests on their way. `log` takes a line for each that was answered whole."""

    def __init__(self, servers: dict[str, str], log: logging.Logger):
        """`servers`: engine ("vllm" or "sglang") by address."""
        self.servers, self.log = servers, log
        self.in_flight = dict.fromkeys(servers, 0)
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
        began = time.time()
        for url in sorted(self.servers, key=lambda one: self.in_flight[one]):
            self.in_flight[url] += 1
            try:
                return await self._asked(url, request, content, began)
            except httpx.ConnectError:
                self.in_flight[url] -= 1  # the next one may be there
            except httpx.TransportError as error:
                self.in_flight[url] -= 1
                return JSONResponse({"error": f"the engine broke off: {type(error).__name__}"}, 502)
            except BaseException:
                self.in_flight[url] -= 1
                raise
        return JSONResponse({"error": "no engine answers"}, 502)

    async def _asked(self, url: str, request: Request, content: bytes, began: float) -> Response:
        """The answer of one engine. Raises httpx.TransportError."""
        engine, path = self.servers[url], request.url.path
        body = _json(content) if request.method == "POST" else None
        added: frozenset[str] = frozenset()
        kept = exchanges.recorded(engine, path, body)
        if kept and body is not None:
            asked, added = exchanges.asking(engine, body)
            content = json.dumps(asked).encode()
        headers = [(name, value) for name, value in request.headers.items() if name not in HOP_BY_HOP | REMADE]
        query = f"?{request.url.query}" if request.url.query else ""
        http = self.pools.http
        onward = http.build_request(request.method, url + path + query, headers=headers, content=content)
        answer = await http.send(onward, stream=True)
        shown = {name: value for name, value in answer.headers.items() if name not in HOP_BY_HOP | REMADE}
        row = {"began": began, "request": body} if kept and answer.status_code == 200 else None
        if "text/event-stream" in answer.headers.get("content-type", ""):
            events = self._streamed(url, answer, added, row)
            return StreamingResponse(events, answer.status_code, shown)
        try:
            content = await answer.aread()
        finally:
            await answer.aclose()
        self.in_flight[url] -= 1
        document = _json(content)
        if row is not None and isinstance(document, dict):
            self._keep(row, document)
            content = json.dumps(exchanges.restored(document, added), ensure_ascii=False).encode()
        return Response(content, answer.status_code, shown)

    async def _streamed(
        self, url: str, answer: httpx.Response, added: frozenset[str], row: dict[str, Any] | None
    ) -> AsyncIterator[bytes]:
        """The events of a stream, one by one. A client that leaves ends the engine's work, too."""
        pieces: list[Any] = []
        try:
            async for event in exchanges.events(answer.aiter_bytes()):
                piece = exchanges.piece_of(event) if row is not None else None
                if piece is not None:
                    pieces.append(piece)
                if shown := exchanges.restored_event(event, piece, added):
                    yield shown
            if row is not None:
                with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
                    self._keep(row, exchanges.joined(pieces))
        finally:
            self.in_flight[url] -= 1
            await answer.aclose()

    def _keep(self, row: dict[str, Any], response: dict[str, Any]) -> None:
        self.log.info(json.dumps(row | {"ended": time.time(), "response": response}))


def _json(content: bytes) -> Any:
    """A body read as JSON; None where it is none."""
    try:
        return json.loads(content)
    except ValueError:
        return None


class PrivateLog(RotatingFileHandler):
    """A file that only its owner reads, and so the one that it begins where it was put aside."""

    def _open(self) -> TextIOWrapper:
        return open(self.baseFilename, "a", encoding="utf-8", opener=lambda path, flags: os.open(path, flags, 0o600))


def opened(path: Path, max_bytes: int) -> logging.Logger:
    """The log. Where it grows beyond `max_bytes` it is put aside as PATH.1, and begins anew."""
    handler = PrivateLog(path, maxBytes=max_bytes, backupCount=1)
    handler.setFormatter(logging.Formatter("%(message)s"))
    log = logging.Logger("traffic")
    log.addHandler(handler)
    return log


def serve(descriptor: int, servers: dict[str, str], log: Path, max_bytes: int) -> None:
    """Serve on an open socket until stdin ends, which it does with the process at its other end."""
    proxy = Proxy(servers, opened(log, max_bytes))
    methods = ["GET", "POST", "PUT", "DELETE", "OPTIONS"]
    app = Starlette(routes=[Route("/{path:path}", proxy.pass_on, methods=methods)])
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, timeout_graceful_shutdown=LAST_REQUESTS_S, lifespan="off"
    )
    server = uvicorn.Server(config)

    def watch() -> None:
        os.read(0, 1)
        server.should_exit = True

    threading.Thread(target=watch, daemon=True).start()
    server.run([socket.socket(fileno=descriptor)])


@contextmanager
def running(listen: str, servers: dict[str, str], log: Path, max_bytes: int) -> Iterator[str]:
    """A proxy meanwhile; yields its address. At the end it answers the requests that it has, and takes no more.

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
        arguments = json.dumps([place.fileno(), servers, str(log), max_bytes])
        process = subprocess.Popen(
            [sys.executable, "-m", "specctl.engines.proxy", arguments],
            stdin=subprocess.PIPE,
            pass_fds=[place.fileno()],
            start_new_session=True,  # Ctrl-C is for the one that learns
        )
        address = f"http://{host}:{place.getsockname()[1]}"
    try:
        yield address
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(LAST_REQUESTS_S + 5)
        except subprocess.TimeoutExpired:
            process.kill()


if __name__ == "__main__":
    descriptor, servers, log, max_bytes = json.loads(sys.argv[1])
    serve(descriptor, servers, Path(log), max_bytes)
