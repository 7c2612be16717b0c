"""Connections of the HTTP server: limits on their number, on idle time and on slow headers."""

from __future__ import annotations

import asyncio
import os
import resource
import sys
from contextlib import suppress
from http import HTTPStatus
from typing import Any

import h11
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from specctl.gateway.limits import LEFT
from specctl.gateway.metrics import Meter
from specctl.gateway.openai_errors import ApiError
from specctl.recipe.serve import LimitsRecipe

MOST_CONNECTIONS = 16384
SPARE_FILES = 192  # files that remain for engines, templates, logs, and connections being accepted
READ_BYTES = 16384  # most bytes of one read of a connection
JOINED_BYTES = 65536  # most bytes of a body that are copied to be sent with the head of their response
BACKLOG = 64  # connections that are accepted in one turn of the event loop, before the limit can act


def most_connections(limits: LimitsRecipe) -> int:
    """Number of connections that may be open. The process's limit of open files is raised as far as the system allows.

    Without free files the event loop can accept no connection, and logs that without end.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    held = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 128
    free = MOST_CONNECTIONS if soft == resource.RLIM_INFINITY else soft - held - SPARE_FILES
    return max(16, min(limits.connections or MOST_CONNECTIONS, free))


class ConnectionTable:
    """The open connections of a server: one beyond the limit closes the connection that has been idle longest.

    Attributes:
        idle: connections without a request in flight, the oldest first.
    """

    def __init__(self, limits: LimitsRecipe, meter: Meter):
        self.limits, self.meter = limits, meter
        self.most = most_connections(limits)
        self.idle: dict[Connection, None] = {}
        self.open = 0

    def opened(self, connection: Connection) -> bool:
        """Note a new connection. Returns False if it must be closed, because all others are in use."""
        self.open += 1
        self.meter.connections.set(self.open)
        if self.open > self.most:
            self.meter.refused("connections")
            if not self.idle:
                return False
            oldest = next(iter(self.idle))
            del self.idle[oldest]
            oldest.transport.abort()
        self.idle[connection] = None
        return True

    def closed(self, connection: Connection) -> None:
        """Forget a connection."""
        self.open -= 1
        self.meter.connections.set(self.open)
        self.idle.pop(connection, None)

    def protocol(self, *args: Any, **options: Any) -> Connection:
        """Make the protocol of a new connection, as uvicorn's `http_protocol_class`."""
        return Connection(self, *args, **options)


class ResponseTransport:
    """Transport of one response. It sends the head with the first bytes of the body: that is one system call less, and
    the client wakes up once.

    Attributes:
        holds: whether the bytes that are written now wait for the next ones.
    """

    def __init__(self, transport: asyncio.Transport):
        self._transport, self._held, self.holds = transport, b"", False
        self.is_closing = transport.is_closing

    def write(self, data: bytes) -> None:
        if self.holds:
            self._held += data
            return
        if self._held and len(data) <= JOINED_BYTES:
            data = self._held + data
        elif self._held:
            self._transport.write(self._held)
        self._held = b""
        self._transport.write(data)

    def close(self) -> None:
        self._transport.write(self._held)
        self._transport.close()


class Connection(H11Protocol):
    """A connection that is closed if the headers of a request take too long. If the client leaves, its request is
    cancelled."""

    def __init__(self, table: ConnectionTable, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.table = table
        self._header_timer: asyncio.TimerHandle | None = None
        self._application: Any = self.app
        self.app = self._answer
        self._task: asyncio.Task[Any] | None = None  # answers the request in flight

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application for one request."""
        cycle, transport = self.cycle, ResponseTransport(self.transport)
        cycle.transport = transport  # type: ignore[assignment]

        async def send_joined(message: Message) -> None:
            transport.holds = message["type"] == "http.response.start"
            await send(message)

        task = self._task = asyncio.current_task()
        try:
            await self._application(scope, receive, send_joined)
        except asyncio.CancelledError:
            if not cycle.disconnected:
                raise
        finally:
            if self._task is task:  # the next request may have begun
                self._task = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # Parsing a body in chunks of one byte takes seconds for a read of 256 KiB, asyncio's size.
        transport.max_size = READ_BYTES  # type: ignore[attr-defined]
        if self.table.opened(self):
            self._await_headers()
        else:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._between_requests:
            if self._header_timer is None:
                self._await_headers()
        else:
            self._stop_timer()
            self.table.idle.pop(self, None)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._between_requests and not self.transport.is_closing():
            self.table.idle[self] = None

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._task is not None and self.cycle.disconnected:
            self._task.cancel(LEFT)
        self._stop_timer()
        self._unset_keepalive_if_required()
        self.table.closed(self)

    def send_400_response(self, msg: str) -> None:
        """Answer malformed HTTP with an error in OpenAI's form, and close the connection. uvicorn answers in plain
        text, and calls this while it handles the parser's error."""
        fault = sys.exc_info()[1]
        reason = str(fault or msg).partition(":")[0]  # after the colon, h11 quotes the client's bytes
        error = ApiError(f"malformed HTTP: {reason}", getattr(fault, "error_status_hint", 400), code="invalid_http")
        headers = [*error.response.raw_headers, (b"connection", b"close")]
        phrase = HTTPStatus(error.status).phrase.encode()
        with suppress(h11.LocalProtocolError):  # an answer to this request has begun
            head = self.conn.send(h11.Response(status_code=error.status, headers=headers, reason=phrase))
            self.transport.write((head or b"") + (self.conn.send(h11.Data(bytes(error.response.body))) or b""))
            self.transport.write(self.conn.send(h11.EndOfMessage()) or b"")
        self.transport.close()

    def _unsupported_upgrade_warning(self) -> None:
        """No warning: the request is answered as if it asked for no upgrade."""

    @property
    def _between_requests(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _await_headers(self) -> None:
        self._header_timer = self.loop.call_later(self.table.limits.header_s, self._too_slow)

    def _too_slow(self) -> None:
        self._header_timer = None
        if self._between_requests:
            self.table.meter.refused("header_s")
            self.transport.abort()

    def _stop_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None
