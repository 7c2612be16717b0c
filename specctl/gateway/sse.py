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


async def begun(events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """A stream that has begun: its first part is there. Raises the error that the stream begins with."""
    first = await anext(events, None)

    async def whole() -> AsyncIterator[bytes]:
        if first is not None:
            yield first
            async for later in events:
                yield later

    return whole()


class EventResponse(Response):
    """A stream of events.

    Args:
        events: yields bytes that are sent at once.
        close: called at the end in any case, also if the stream never began.
    """

    def __init__(self, events: AsyncIterator[bytes], close: Close, headers: Mapping[str, str] = HEADERS):
        super().__init__(headers=dict(headers))
        del self.headers["content-length"]
        self.events, self.close = events, close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for part in self.events:
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await self.close()
