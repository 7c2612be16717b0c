"""The gateway as an ASGI application: its paths and methods, by name."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from specctl.gateway.limits import Guard
from specctl.gateway.metrics import Meter
from specctl.gateway.openai_errors import ApiError
from specctl.recipe.serve import LimitsRecipe

PAGE = Path(__file__).resolve().parent.parent / "assets/serve.html"
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
TEXT_PATHS = ("/v1/chat/completions", "/v1/completions")
POSTED_PATHS = (*TEXT_PATHS, "/tokenize", "/detokenize")
OTHER_PATHS = ("/v1/models", "/v1/models/{name:path}", "/tokenizer_info")


class Backend(Protocol):
    """An engine in this process, or running engines. Raises `ApiError` for a request that it refuses."""

    meter: Meter

    async def texts(self, request: Request, body: bytes) -> Response:
        """Answer a request for texts (a chat, or completions) or for the tokens of a text."""

    async def other(self, request: Request) -> Response:
        """Answer a GET request that changes nothing, such as the list of models."""

    def healthy(self) -> bool:
        """Whether this process can work on. A failed one must be started again."""

    async def ready(self) -> bool:
        """Whether requests for texts can be answered now."""

    async def close(self) -> None:
        """Free memory and connections. No request is in flight."""


def make_app(
    backend: Backend,
    limits: LimitsRecipe,
    key: str | None = None,
    *,
    text_paths: Sequence[str] = POSTED_PATHS,
    other_paths: Sequence[str] = OTHER_PATHS,
) -> Guard:
    """Make the application.

    Args:
        key: API key that clients must send, or None.
        text_paths: paths with texts or their tokens as answers (POST).
        other_paths: paths that the back end answers besides (GET).
    """
    page = front_page()

    async def texts(request: Request) -> Response:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # a page of another site can send all other types without asking
            raise ApiError("send the header 'Content-Type: application/json'", 415)
        return await backend.texts(request, (await request.receive())["body"])  # `Guard` gives the whole body at once

    async def metrics(request: Request) -> Response:
        return Response(backend.meter.page(), media_type=METRICS_TYPE)

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok"}) if backend.healthy() else JSONResponse({"status": "failed"}, 503)

    async def ready(request: Request) -> Response:
        return JSONResponse({"status": "ok"}) if await backend.ready() else JSONResponse({"status": "waiting"}, 503)

    async def front(request: Request) -> Response:
        return HTMLResponse(page, headers={"content-security-policy": POLICY, "x-content-type-options": "nosniff"})

    routes = [Route(path, texts, methods=["POST"]) for path in text_paths]
    routes += [Route(path, backend.other, methods=["GET"]) for path in other_paths]
    routes += [Route("/metrics", metrics), Route("/health", health), Route("/ready", ready), Route("/", front)]
    handlers = {ApiError: _api_error, HTTPException: _http_error, Exception: _fault}
    routed = Starlette(routes=routes, exception_handlers=handlers)  # type: ignore[arg-type]
    routed.router.redirect_slashes = False
    posted = {*text_paths}

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != "POST" or scope["path"] not in posted:
            return await routed(scope, receive, send)
        try:  # the middleware and the routes of Starlette take longer than a choice
            response = await texts(Request(scope, receive))
        except ApiError as error:
            response = error.response
        await response(scope, receive, send)

    return Guard(app, limits, backend.meter, key, close=backend.close)


def front_page() -> str:
    """The page that shows the metrics."""
    return PAGE.read_text(encoding="utf-8")


async def _api_error(request: Request, error: ApiError) -> Response:
    return error.response


async def _fault(request: Request, error: Exception) -> Response:
    """Answer for a fault of ours, which `Guard` then reports."""
    return ApiError("the gateway failed on this request", 500).response


async def _http_error(request: Request, error: HTTPException) -> Response:
    path = request.url.path[:200]
    if error.status_code == 405:
        response: Response = ApiError(f"{request.method[:20]} is not allowed on {path}", 405).response
        response.headers.update(error.headers or {})
        return response
    missing = f"there is no {path}: texts are at {' and '.join(TEXT_PATHS)}"
    return ApiError(missing if error.status_code == 404 else error.detail, error.status_code).response
