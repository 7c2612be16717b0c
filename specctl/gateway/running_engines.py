"""Back end of running engines: requests are passed on to vLLM, SGLang or llama.cpp servers of one target.

Requests and answers pass unchanged, with one exception: a request for one text also asks for token ids and draft
counters, which are removed from the answer again (`proxy_messages`). Every complete answer becomes a line of the log:
{"began": seconds since 1970, "request": {…}, "response": {…}}. `specctl distill --from-log` reads these lines too. A
`Dispatcher` learns from the same answers which server should write such texts.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, Self

import aiohttp
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from specctl import progress
from specctl.engines import proxy_messages
from specctl.engines.proxy_messages import ServerChoice, TextCounts
from specctl.errors import redacted
from specctl.gateway.app import TEXT_PATHS, make_app
from specctl.gateway.engine_http import EngineHttp, NotConnected, passed_on
from specctl.gateway.faults import where
from specctl.gateway.limits import Guard
from specctl.gateway.metrics import GatewayWork, Meter
from specctl.gateway.openai_errors import ApiError
from specctl.gateway.sse import EventResponse, event
from specctl.recipe.serve import LimitsRecipe
from specctl.selection.certificate import Certificate

if TYPE_CHECKING:
    from specctl.selection.dispatch import Dispatcher  # imports torch, which takes seconds

LONGEST_ANSWER = 256 * 2**20  # bytes of an answer that is not streamed
LONGEST_READ_ANSWER = 4 * 2**20  # bytes of an answer that is read for counters, for 0.1 s: other requests wait
MOST_ENGINES = 2  # engines that may see one request: a prompt on which engines fail must not stop all of them
ENGINE_PATHS = (
    "/v1/models",
    "/v1/models/{name:path}",
    "/tokenizer_info",
    "/version",
    "/ping",
    "/get_model_info",
    "/props",
)
POSTED_PATHS = (*TEXT_PATHS, *proxy_messages.OWN_PATHS, "/tokenize", "/detokenize")
RETRY_STATUSES = {429, 500, 502, 503, 504}  # statuses after which another server is tried
REST_STATUSES = {502, 503, 504}  # statuses that tell of the server; others may be the fault of one request
LEARN_AFTER_S = 0.005  # after the answer, which should be on its way then
LEARN_SHARE = 20  # pause between two times of learning, as a multiple of its duration
READY_S = 1.0  # an engine that takes longer to say that it is healthy is not
FIRST_REST_S, LONGEST_REST_S = 1.0, 60.0
LIST_S = 5.0  # seconds between two looks at which models the engines list
LISTED_S = 5.0  # seconds in which an engine must have listed them
MEDIAN_WINDOW = 10_000  # latest decisions that the median is taken over


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
class ForwardedRequest:
    """A request on its way to a server.

    Attributes:
        text: the parsed body, if the request is for one text and its answer can be recorded; otherwise None.
    """

    request: Request
    content: bytes
    text: dict[str, Any] | None
    choice: ServerChoice
    began: float


class RunningEngines:
    """Passes requests on to servers. A server that fails is tried last for a while, and another answers its requests.

    Attributes:
        log: gets a line for each text that was answered completely, or None.
        dispatch: orders the servers for requests for one text. All other requests go to the least busy server.
        failures: number of requests that each server failed to answer.
        broken: number of streams that each server broke off after their first event. Their clients got an error event.
        models: what clients see of each model, by address and name, for the engines that answer only to these names:
            vLLM. Empty: every request is passed on.
        on_text: called with every text that was answered completely: its server (`url`), its `tokens`, its `passes` of
            the target, the drafted tokens among them (`accepted`, None if not reported), and `decide_us` of the choice.
    """

    def __init__(
        self,
        servers: dict[str, str],
        meter: Meter,
        log: logging.Logger | None = None,
        dispatch: Dispatcher | None = None,
        key: str | None = None,
    ):
        """
        Args:
            servers: engine ("vllm", "sglang" or "llama.cpp") by address.
            key: API key for the engines, in the place of the client's, or None to pass that on.
        """
        self.servers, self.meter, self.log, self.dispatch = servers, meter, log, dispatch
        self.http = EngineHttp(servers, key)
        self.names = {url: redacted(url) for url in servers}
        self.in_flight = dict.fromkeys(servers, 0)
        self.failures = dict.fromkeys(servers, 0)
        self.broken = dict.fromkeys(servers, 0)
        self.models: dict[str, dict[str, Any]] = {}
        self._listing = asyncio.Lock()
        self._list_at = 0.0  # time from which the engines may be asked for their models again
        self.on_text: Callable[[dict[str, Any]], None] = lambda text: None
        self._decisions: deque[float] = deque(maxlen=MEDIAN_WINDOW)
        self._rests: dict[str, Backoff] = {}  # servers that have failed recently
        self._refusals = dict.fromkeys(servers, 0)  # statuses of `RETRY_STATUSES` in a row
        self._warned: set[str] = set()
        self._ready: asyncio.Future[bool] | None = None  # answer of the engines about their health
        self._asked_at = 0.0  # when they were asked
        self._heard: list[tuple[ServerChoice, str, TextCounts]] = []  # texts that the dispatch has not learned from
        self._learn_s = 0.0  # CPU seconds of the last learning
        self._learn_at = 0.0  # time of the next call of `learn`
        if dispatch is not None:
            meter.certificate = Certificate(most=1.0)  # a text has no more passes than tokens
        meter.watch(lambda: sum(self.in_flight.values()), lambda: 0)

    async def texts(self, request: Request, body: bytes) -> Response:
        """Return an engine's answer. Raises ApiError: 502 if no engine answers, 404 if none lists the model."""
        document = _json(body)
        model = await self._model(request, document.get("model") if isinstance(document, dict) else None)
        kinds, path = set(self.servers.values()), request.scope["path"]  # `request.url` is made anew every time
        text = document if any(proxy_messages.is_recordable(one, path, document) for one in kinds) else None
        return await self._forward(ForwardedRequest(request, body, text, self._choice(text, model), time.time()))

    async def other(self, request: Request) -> Response:
        """Pass on a GET request."""
        name = request.path_params.get("name", "")
        if "%" in name or {".", ".."} & {*name.split("/")}:
            raise ApiError(f"there is no {request.url.path[:200]}", 404)  # it could lead elsewhere than it begins
        model = await self._model(request, name or None)
        if request.scope["path"] == "/v1/models" and self._lists_differ:
            await self._list_models(request)
            cards = {key: card for listed in self.models.values() for key, card in listed.items()}
            return JSONResponse({"object": "list", "data": [*cards.values()]})
        return await self._forward(ForwardedRequest(request, b"", None, self._choice(None, model), time.time()))

    async def _model(self, request: Request, name: Any) -> str | None:
        """The model that a request names, if an engine lists it, or None for the engines' default. Raises ApiError if
        no engine has a model of this name."""
        if not isinstance(name, str) or not name:
            return None
        if not self._serving(name):
            await self._list_models(request)  # vLLM loads adapters while it runs
        if not self._serving(name):
            known = ", ".join(dict.fromkeys(one for listed in self.models.values() for one in listed))
            raise ApiError(f"the model does not exist: use {known}", 404, param="model", code="model_not_found")
        return name if any(name in listed for listed in self.models.values()) else None

    def _serving(self, name: str | None) -> list[str]:
        """The servers that answer to the name of a model."""
        return [url for url in self.servers if name is None or url not in self.models or name in self.models[url]]

    @property
    def _lists_differ(self) -> bool:
        return len({frozenset(listed) for listed in self.models.values()}) > 1

    async def _list_models(self, request: Request) -> None:
        """Ask the engines for their models, unless that was done a moment ago. An engine without a usable answer keeps
        its list."""
        async with self._listing:
            if time.monotonic() < self._list_at:
                return
            for url in self.models:
                with contextlib.suppress(aiohttp.ClientError, TimeoutError, LookupError, TypeError):
                    async with asyncio.timeout(LISTED_S):
                        answer = await self.http.send(url, "/v1/models", "GET", request.headers.raw, b"")
                        try:
                            document = _json(await _content(answer))
                        finally:
                            answer.close()
                    self.models[url] = {str(card["id"]): card for card in document["data"]}
            self._list_at = time.monotonic() + LIST_S

    def healthy(self) -> bool:
        return True

    async def ready(self) -> bool:
        """Whether an engine reports that it is healthy. Engines are asked once a second at most."""
        now = time.monotonic()
        if self._ready is None or now > self._asked_at + READY_S:
            self._asked_at, self._ready = now, asyncio.ensure_future(self._some_healthy())
        return await asyncio.shield(self._ready)

    async def _some_healthy(self) -> bool:
        return any(await asyncio.gather(*map(self._is_healthy, self.servers)))

    async def _is_healthy(self, url: str) -> bool:
        try:
            async with asyncio.timeout(READY_S):
                answer = await self.http.send(url, "/health", "GET", [], b"")
        except (aiohttp.ClientError, TimeoutError):
            return False
        answer.close()
        return answer.status == 200

    async def close(self) -> None:
        await self.http.close()

    def work(self) -> GatewayWork:
        """The work up to now. The meter then has a row for every server, also for one without a text."""
        for name in self.names.values():
            self.meter.drafter(name)
        return GatewayWork(
            self.meter.drafters,
            self.meter.certificate,
            {self.names[url]: kind for url, kind in self.servers.items()},
            {self.names[url]: count for url, count in self.failures.items()},
            {self.names[url]: count for url, count in self.broken.items()},
            median(self._decisions) if self._decisions else None,
        )

    def _choice(self, text: dict[str, Any] | None, model: str | None) -> ServerChoice:
        """The order of the servers that list a model. A dispatch that raises costs its opinion alone."""
        in_flight = {url: self.in_flight[url] for url in self._serving(model)}
        if text is not None and self.dispatch is not None and len(in_flight) > 1:
            try:
                return self.dispatch.choose(text, in_flight, model)
            except Exception as error:  # it computes with numbers that engines have sent
                self._fault("choosing a server", error)
        return ServerChoice(sorted(in_flight, key=lambda url: in_flight[url]))

    def _fault(self, part: str, error: Exception) -> None:
        self.meter.fault(part)
        if part not in self._warned:
            self._warned.add(part)
            progress.warn(f"{part} failed: {where(error)}; later failures are counted in /metrics alone")

    async def _forward(self, passage: ForwardedRequest) -> Response:
        """The answer of the first server that gives one."""
        answer: Response | None = None
        seen = 0
        path = passage.request.scope["path"]
        able = [url for url in passage.choice.order if proxy_messages.has_path(self.servers[url], path)]
        for url in sorted(able or passage.choice.order, key=self._resting):
            if seen == MOST_ENGINES:
                break
            self.in_flight[url] += 1
            kept = False
            try:
                answer = await self._forward_to(url, passage)
                kept = isinstance(answer, EventResponse)  # it counts as in flight until its end
                failed, rests = answer.status_code in RETRY_STATUSES, answer.status_code in REST_STATUSES
                seen += 1
            except NotConnected:
                failed = rests = True
            except aiohttp.ClientError as error:
                seen += 1
                message = f"the engine gave no valid answer: {type(error).__name__}"
                answer, failed, rests = ApiError(message, 502).response, True, True
            finally:
                self.in_flight[url] -= not kept
            if not failed:
                self._rests.pop(url, None)
                self._refusals[url] = 0
                return answer  # type: ignore[return-value]
            self._failed(url, rests)
        return answer or ApiError("no engine responds", 502).response

    def _failed(self, url: str, rests: bool = True) -> None:
        self.failures[url] += 1
        self._refusals[url] += 1
        if rests or self._refusals[url] > 1:
            self._rests[url] = Backoff.after(self._rests.get(url))

    def _resting(self, url: str) -> bool:
        rest = self._rests.get(url)
        return rest is not None and rest.until > time.monotonic()

    async def _forward_to(self, url: str, passage: ForwardedRequest) -> Response:
        """The answer of one engine. Raises aiohttp.ClientError."""
        request, engine, content = passage.request, self.servers[url], passage.content
        raw = request.scope.get("raw_path")
        path = request.url.path if raw is None else raw.decode("ascii")
        added: frozenset[str] = frozenset()
        kept = passage.text is not None and proxy_messages.is_recordable(engine, request.scope["path"], passage.text)
        if kept and passage.text is not None:
            asked, added = proxy_messages.with_counters(engine, passage.text, ids=self.log is not None)
            content, added = _rewritten(asked, content, added)
        query = request.scope["query_string"].decode("ascii")
        answer = await self.http.send(
            url, f"{path}?{query}" if query else path, request.method, request.headers.raw, content
        )
        try:
            return await self._answer(url, answer, added, passage, kept)
        except BaseException:
            answer.close()
            raise

    async def _answer(
        self, url: str, answer: aiohttp.ClientResponse, added: frozenset[str], passage: ForwardedRequest, kept: bool
    ) -> Response:
        shown, status = passed_on(answer.raw_headers), answer.status
        if not 200 <= status <= 599:
            raise aiohttp.ClientPayloadError(f"status {status}")
        encoded = answer.headers.get("content-encoding", "identity") != "identity"  # although identity was asked for
        kept = kept and status == 200 and not encoded
        if status == 200 and "text/event-stream" in answer.headers.get("content-type", ""):

            async def done() -> None:
                self.in_flight[url] -= 1
                answer.close()

            events = self._streamed(url, answer, added, passage if kept else None)
            if not (first := await anext(events, b"")):
                raise aiohttp.ClientPayloadError("a stream without an event")
            streaming = EventResponse(first, events, done, {})
            streaming.raw_headers = shown
            return streaming
        content = await _content(answer)
        if passage.content and status == 200 and not content:
            raise aiohttp.ClientPayloadError("an empty answer")
        if kept and (added or len(content) <= LONGEST_READ_ANSWER):
            document = _json(content)
            if not isinstance(document, dict):
                raise aiohttp.ClientPayloadError("an answer that is no JSON object")
            self._record(passage, url, document, document)
            if added:
                content, _ = _rewritten(proxy_messages.without_added_fields(document, added), content, added)
        response = Response(content, status)
        response.raw_headers = [*shown, (b"content-length", str(len(content)).encode())]
        return response

    async def _streamed(
        self, url: str, answer: aiohttp.ClientResponse, added: frozenset[str], passage: ForwardedRequest | None
    ) -> AsyncIterator[bytes]:
        """The parts of a stream, in whole events. If the client leaves, the engine's work ends too."""
        pieces: list[Any] = []
        said: dict[str, Any] = {}
        splitter = proxy_messages.EventSplitter()
        began = ended = False  # the client has a part; the last part was whole

        def restored(event: bytes) -> bytes:
            if self.log is None and not proxy_messages.may_hold_counters(event):
                return event
            piece = proxy_messages.piece_of(event)
            if piece is not None:
                said.update(proxy_messages.counters(piece))
                if self.log is not None:
                    pieces.append(piece)
            return proxy_messages.restored_event(event, piece, added)

        try:
            async for part in answer.content.iter_any():
                if passage is None or (self.log is None and splitter.passes(part)):
                    shown = part
                else:
                    shown = b"".join(map(restored, splitter.add(part)))
                if not shown:
                    continue
                if not began and passage is not None:
                    self.meter.first_s.observe(time.time() - passage.began)
                began, ended = True, shown.endswith(b"\n")
                yield shown
            if splitter.rest:
                yield restored(bytes(splitter.rest))
        except aiohttp.ClientError:
            if not began:
                raise  # another server can answer
            self.broken[url] += 1
            self._failed(url)
            yield (b"" if ended else b"\n\n") + event(ApiError("the engine closed the connection", 502).document)
            return
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
                row = {"began": passage.began, "request": passage.text, "ended": ended, "response": response}
                if self.dispatch is not None:
                    row["server"] = self.names[url]
                self.log.info(json.dumps(row))
        try:
            counts = proxy_messages.text_counts(self.servers[url], passage.request.scope["path"], said)
            if counts is None:
                return
            drafting, name = counts.drafting, self.names[url]
            accepted = drafting.accepted if drafting is not None else 0
            passes = max(counts.tokens - accepted, 1)
            sums = self.meter.drafter(name)
            sums.texts += 1
            sums.add_rounds(
                passes,
                counts.tokens,
                drafting.drafted if drafting is not None else 0,
                accepted,
                drafting.accepted_at if drafting is not None else [],
            )
            self.meter.tokens.inc(counts.tokens)
            self.meter.whole_s.observe(ended - passage.began)
            told = None if drafting is None else accepted
            decide_us = passage.choice.decide_us
            if decide_us is not None:
                self._decisions.append(decide_us)
            text = {"url": name, "tokens": counts.tokens, "passes": passes, "accepted": told, "decide_us": decide_us}
            self.on_text(text)
            if self.dispatch is not None:
                self.meter.certify(passes / max(counts.tokens, 1))
                self._heard.append((passage.choice, url, counts))
                self._learn_soon()
        except Exception as error:  # it computes with numbers that engines have sent
            self._fault("counting an answer", error)

    def _learn_soon(self) -> None:
        """Plan the next call of `learn`, unless it is planned."""
        now, pause = time.monotonic(), LEARN_AFTER_S + LEARN_SHARE * self._learn_s
        if now >= self._learn_at:
            self._learn_at = now + pause
            asyncio.get_running_loop().call_later(pause, self.learn)

    def learn(self) -> None:
        """Let the dispatch learn from the answers since the last time. It computes for milliseconds: so it learns from
        several answers at once, and after they have been sent."""
        assert self.dispatch is not None
        began, heard = time.thread_time(), self._heard  # other processes lengthen no pause
        self._heard = []
        for choice, url, counts in heard:
            try:
                self.dispatch.learn(choice, url, counts)
            except Exception as error:  # it computes with numbers that engines have sent
                self._fault("learning from an answer", error)
        try:
            self.dispatch.settle()
        except Exception as error:
            self._fault("learning from an answer", error)
        self._learn_s = time.thread_time() - began


def engines_app(backend: RunningEngines, limits: LimitsRecipe, key: str | None = None) -> Guard:
    """The application of running engines, with their paths by name. `key`: API key that clients must send."""
    return make_app(backend, limits, key, text_paths=POSTED_PATHS, other_paths=ENGINE_PATHS)


def _rewritten(document: Any, content: bytes, added: frozenset[str]) -> tuple[bytes, frozenset[str]]:
    """The bytes of a changed document, and the fields to take out of its answer: none, and the old bytes, if JSON
    cannot express it (1e999 is infinity)."""
    if not added:
        return content, added
    try:
        return json.dumps(document, allow_nan=False).encode(), added
    except (ValueError, RecursionError):
        return content, frozenset()


async def _content(answer: aiohttp.ClientResponse) -> bytes:
    """A whole answer. Raises aiohttp.ClientError, also if it is too long."""
    parts, size = [], 0
    async for part in answer.content.iter_any():
        parts.append(part)
        size += len(part)
        if size > LONGEST_ANSWER:
            raise aiohttp.ClientPayloadError("an answer is too long")
    return b"".join(parts)


def _json(content: bytes) -> Any:
    """A body parsed as JSON, or None if it is not JSON."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return None
