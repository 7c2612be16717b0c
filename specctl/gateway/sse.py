"""Server-sent events (HTML Standard §9.2), and a response that sends them."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

DONE = b"data: [DONE]\n\n"
HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}

Close = Callable[[], Awaitable[None]]


def event(document: Mapping[str, Any]) -> bytes:
    """One event with a JSON document."""
    return b"data: " + json.dumps(document, separators=(",", ":")).encode() + b"\n\n"


class EventResponse(Response):
    """A stream of events that has begun.

    Args:
        first: the first bytes. Whatever the stream begins with, also an error, is known before the response.
        events: yields further bytes, which are sent at once.
        close: called at the end in any case, also if the stream never began.
    """

    def __init__(self, first: bytes, events: AsyncIterator[bytes], close: Close, headers: Mapping[str, str] = HEADERS):
        super().__init__(headers=dict(headers))
        del self.headers["content-length"]
        self.first, self.events, self.close = first, events, close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": self.first, "more_body": True})
            async for part in self.events:
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await self.close()
