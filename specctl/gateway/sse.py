"""Server-sent events (HTML Standard §9.2), and a response that sends them until the client leaves."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from specctl.gateway.openai_errors import ApiError

DONE = b"data: [DONE]\n\n"
HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}

Close = Callable[[], Awaitable[None]]
Result = TypeVar("Result")


def event(document: Mapping[str, Any]) -> bytes:
    """One event with a JSON document."""
    return b"data: " + json.dumps(document, separators=(",", ":")).encode() + b"\n\n"


async def gone(receive: Receive) -> None:
    """Return when the client has left. Call it after the body has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`, which is cancelled if the client leaves. Raises ApiError (499) then."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ApiError("the client has left", 499)
    finally:
        await ended(working, leaving)


async def ended(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks, and wait for their ends."""
    for task in tasks:
        task.cancel()
    for task in tasks:
        with suppress(asyncio.CancelledError, Exception):
            await task


class EventResponse(Response):
    """A stream of events. When the client leaves, the stream is closed.

    Args:
        events: yields bytes that are sent at once.
        close: called at the end in any case, also if the stream never began.
    """

    def __init__(self, events: AsyncIterator[bytes], close: Close, headers: Mapping[str, str] = HEADERS):
        super().__init__(headers=dict(headers))
        del self.headers["content-length"]
        self.events, self.close = events, close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send(send))
        leaving = asyncio.ensure_future(gone(receive))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            await ended(sending, leaving)
            await self.close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for part in self.events:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
