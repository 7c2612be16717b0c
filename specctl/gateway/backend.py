"""Interface of the two kinds of back ends: an engine in this process, and running engines."""

from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from specctl.gateway.metrics import Meter


class Backend(Protocol):
    """Answers requests for texts. Raises `ApiError` for requests that it cannot serve."""

    meter: Meter

    async def texts(self, request: Request, body: bytes) -> Response:
        """Answer a request for texts: a chat, or completions."""
        ...

    async def other(self, request: Request) -> Response:
        """Answer a GET request that changes nothing, such as the list of models."""
        ...

    def healthy(self) -> bool:
        """Whether requests for texts can be answered."""
        ...

    def describe(self) -> dict[str, Any]:
        """Facts for the page: model and drafters."""
        ...

    async def close(self) -> None:
        """Free what the back end holds. No request is in flight."""
        ...
