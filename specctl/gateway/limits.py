"""Limits of what one client, or all together, can ask of the gateway: an ASGI middleware."""

import asyncio
import functools
import hmac
import ipaddress
import re
import socket
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specctl import progress
from specctl.gateway.faults import where
from specctl.gateway.metrics import Meter
from specctl.gateway.openai_errors import ApiError
from specctl.gateway.sse import event
from specctl.recipe.serve import LimitsRecipe

OPEN_PATHS = {"/", "/health", "/ready"}
"""Paths that need no key. The page holds no data: it asks for /metrics."""
KNOWN_PATHS = {*OPEN_PATHS, "/metrics", "/v1/models", "/v1/chat/completions", "/v1/completions", "/generate"}
BUSY_S = 1  # seconds after which a client that was refused may try again
LEFT = "the client has left"
"""Message of the CancelledError of a request without a client."""


class Guard:
    """Middleware that refuses requests beyond the limits, reads bodies, and turns every error into a response.

    Attributes:
        in_flight: number of requests that are being answered.
        close: called when the server has ended.
    """

    def __init__(
        self,
        app: ASGIApp,
        limits: LimitsRecipe,
        meter: Meter,
        key: str | None = None,
        close: Callable[[], Awaitable[None]] | None = None,
    ):
        self.app, self.limits, self.meter, self.key, self.close = app, limits, meter, key, close
        self.in_flight = self._held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._refuse_other(scope, receive, send)
        answer = Answer(send)
        held = [0]
        self.in_flight += 1
        self.meter.in_flight.set(self.in_flight)
        try:
            async with asyncio.timeout(self.limits.request_s):
                self._check(scope)
                body = await self._body(scope, receive, held)
                await self.app(scope, _replayed(body, receive), answer)
        except ApiError as error:
            await answer.fail(error)
        except TimeoutError:
            self.meter.refused("request_s")
            await answer.fail(ApiError(f"the request took longer than {self.limits.request_s:g} s", 504))
        except asyncio.CancelledError as error:
            if error.args == (LEFT,):
                answer.status = answer.status or 499  # the client would not read an answer
            else:  # the server stops, and its time for requests in flight is over
                await answer.fail(ApiError("the gateway is stopping", 503, retry_s=BUSY_S))
        except Exception as error:  # a fault of ours, which must not print a text
            self.meter.fault("http")
            progress.warn(f"a request failed: {where(error)}")
            await answer.fail(ApiError("the gateway failed on this request", 500))
        finally:
            self._held -= held[0]
            self.in_flight -= 1
            self.meter.in_flight.set(self.in_flight)
            path = scope["path"] if scope["path"] in KNOWN_PATHS else "other"
            self.meter.answered(path, answer.status or 0)

    async def _refuse_other(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Close the back end when the server ends; refuse websockets."""
        if scope["type"] != "lifespan":
            return await send({"type": "websocket.close", "code": 1008})
        while (await receive())["type"] != "lifespan.shutdown":
            await send({"type": "lifespan.startup.complete"})
        if self.close is not None:
            await self.close()
        await send({"type": "lifespan.shutdown.complete"})

    def _check(self, scope: Scope) -> None:
        """Raise ApiError for a request that is refused before its body is read."""
        headers, limits = scope["headers"], self.limits
        if len(headers) > limits.headers or sum(len(n) + len(v) for n, v in headers) > limits.header_bytes:
            self.meter.refused("headers")
            raise ApiError(f"more than {limits.headers} headers, or {limits.header_bytes} bytes of them", 431)
        if self.key is None and _is_loopback(scope) and not self._knows_host(headers):
            self.meter.refused("hosts")
            hint = "this name of the gateway is not known: set limits.hosts, or a key"
            raise ApiError(hint, 421, code="unknown_host")
        if self.key is not None and scope["path"] not in OPEN_PATHS and not self._has_key(headers):
            self.meter.refused("key")
            hint = "the API key is missing or wrong: send 'Authorization: Bearer KEY'"
            raise ApiError(hint, 401, code="invalid_api_key")
        if self.in_flight > limits.requests and scope["path"] not in OPEN_PATHS:
            self.meter.refused("requests")
            raise ApiError("too many requests in flight: try again later", 503, code="busy", retry_s=BUSY_S)

    def _knows_host(self, headers: list[tuple[bytes, bytes]]) -> bool:
        """Whether the header Host has no name that a site can own. DNS rebinding needs a name with a dot."""
        given = [value.decode("latin-1").lower() for name, value in headers if name == b"host"]
        hosts = [re.sub(r":[0-9]*$", "", host).strip("[]") for host in given]
        known = {socket.gethostname().lower(), *map(str.lower, self.limits.hosts)}
        return all(
            "." not in host or host in known or host.endswith(".localhost") or _address(host) is not None
            for host in hosts
        )

    def _has_key(self, headers: list[tuple[bytes, bytes]]) -> bool:
        given = [value for name, value in headers if name == b"authorization"]
        assert self.key is not None
        if len(given) != 1:
            return False
        scheme, _, key = given[0].partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(key, self.key.encode())

    async def _body(self, scope: Scope, receive: Receive, held: list[int]) -> bytes:
        """Read the body of a request; `held[0]` is its part of the bytes of all bodies."""
        declared = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        if declared.isdigit() and int(declared[:20]) > self.limits.body_bytes:
            raise self._too_large()
        parts: list[bytes] = []
        try:
            async with asyncio.timeout(self.limits.body_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ApiError(LEFT, 499)
                    part = message.get("body", b"")
                    parts.append(part)
                    held[0] += len(part)
                    self._held += len(part)
                    if held[0] > self.limits.body_bytes:
                        raise self._too_large()
                    if self._held > self.limits.all_body_bytes:
                        self.meter.refused("all_body_bytes")
                        raise ApiError("the bodies of all requests are too large: try again later", 503, retry_s=BUSY_S)
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError:
            self.meter.refused("body_s")
            raise ApiError(f"the body took longer than {self.limits.body_s:g} s", 408) from None

    def _too_large(self) -> ApiError:
        self.meter.refused("body_bytes")
        return ApiError(f"the body has more than {self.limits.body_bytes} bytes", 413)


@functools.lru_cache(256)
def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _is_loopback(scope: Scope) -> bool:
    """Whether the connection came to a loopback address of this machine."""
    address = _address((scope.get("server") or ("",))[0])
    # A socket on [::] also accepts IPv4 and then has the address ::ffff:127.0.0.1, which is not `is_loopback`.
    address = getattr(address, "ipv4_mapped", None) or address
    return address is not None and address.is_loopback


class Answer:
    """Send channel of one request that remembers how far its response has come.

    Attributes:
        status: status of the response, once it has begun.
    """

    def __init__(self, send: Send):
        self._send = send
        self.status: int | None = None
        self._streams = self._ended = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            kinds = [value for name, value in message["headers"] if name == b"content-type"]
            self._streams = any(kind.startswith(b"text/event-stream") for kind in kinds)
        self._ended = message["type"] == "http.response.body" and not message.get("more_body", False)
        await self._send(message)

    async def fail(self, error: ApiError) -> None:
        """Send an error: as the response, or as the last event of a stream that has begun."""
        if self.status is None:
            self.status = error.status
            response = error.response
            response.headers["connection"] = "close"  # a part of the request may not have been read
            await response({"type": "http"}, _nothing, self._send)
        elif not self._ended:
            body = event(error.document) if self._streams else b""
            self._ended = True
            await self._send({"type": "http.response.body", "body": body, "more_body": False})


async def _nothing() -> Message:
    return {"type": "http.disconnect"}


def _replayed(body: bytes, receive: Receive) -> Callable[[], Any]:
    """A `receive` that gives the whole body once, and then the rest of the connection's events."""
    given = False

    async def replay() -> Message:
        nonlocal given
        if not given:
            given = True
            return {"type": "http.request", "body": body, "more_body": False}
        return await receive()

    return replay
