"""Client of one or several servers of the same target: it limits concurrency, retries, and checks every answer."""

from __future__ import annotations

import asyncio
import copy
import itertools
import os
import random
import time
from collections.abc import Callable, Coroutine, Generator, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import httpx

from specctl import progress
from specctl.decoding.target_text import TargetText
from specctl.engines import corpora, endpoints, proxy_messages, publication, registry, sglang
from specctl.engines.corpora import PublishedCorpus
from specctl.engines.endpoints import Endpoint
from specctl.engines.http_pools import HttpPools
from specctl.engines.records import (
    AdminCall,
    DraftCounters,
    EngineError,
    GenerationRequest,
    GenerationResult,
    HiddenStatesSpec,
    LoadedDrafter,
    MalformedResponse,
    NoResponse,
    Refusal,
    parsing,
)
from specctl.engines.responses import describe_transport_error, error_message, parse_json, parse_piece, retry_after
from specctl.errors import CheckpointError, SpecctlError, UsageError
from specctl.recipe import ServerRecipe

if TYPE_CHECKING:
    from torch import Tensor

    from specctl.formats.corpus import CorpusTexts

CONNECT_S = 10.0
JOIN_S = 60.0  # seconds in which a server that joins must have answered the questions about it
POLL_S = 0.2  # seconds until a signal is noticed while engines are slow
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 30.0
LOOKAHEAD = 8  # requests that may start ahead of the oldest unfinished one, per request in flight
BUSY = {408, 409, 425, 429}  # retried, as are all statuses from 500 on: another try may succeed
REFUSED = {400, 413, 422}  # final for this text, on any server

Result = TypeVar("Result")
Job = TypeVar("Job")


class Client:
    """Continues texts on engines, or reads their hidden states there. A context manager.

    `answers` and `states` may be used from one thread only.

    Attributes:
        servers: the endpoints at `recipe.urls`.
        failures: number of requests that failed and were retried.
        probe: token ids of the text that every server was asked about. Empty until `compare` or `compare_servers`.
    """

    def __init__(self, recipe: ServerRecipe):
        self.recipe = recipe
        self.failures = 0
        self._turn = itertools.count()
        self._vocabulary: int | None = None
        self._target = ""
        self.probe: list[int] = []
        self._suspects: set[str] = set()  # addresses that were unreachable: check their weights before the next use
        self._pending: dict[asyncio.Task[Any], int] = {}  # requests in flight, with their positions

    def __enter__(self) -> Self:
        self._runner = asyncio.Runner()
        key = os.environ.get(self.recipe.api_key_env)
        self._pools = HttpPools(
            self.recipe.concurrency,
            verify=not self.recipe.urls or any(url.startswith("https:") for url in self.recipe.urls),
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(self.recipe.timeout_s, connect=CONNECT_S),
        )
        try:
            self.servers = [
                self._runner.run(endpoints.connect(self._pools.http, url, self.recipe)) for url in self.recipe.urls
            ]
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._cancel(self._pending)
        self._runner.run(self._pools.aclose())
        self._runner.close()

    def with_model(self, model: str) -> Client:
        """A client of another model at the same servers. It uses the connections of this client, and ends with it.

        Raises UsageError if a server does not list the model.
        """
        other = copy.copy(self)
        other.recipe, other._suspects = self.recipe.model_copy(update={"model": model}), set()
        other.servers = [
            replace(one, model=endpoints.served(one.url, one.facts, model), in_flight=0, logprobs=[])
            for one in self.servers
        ]
        return other

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop of all requests. While another thread runs it, only coroutines of this class may be used."""
        return self._runner.get_loop()

    def check(self, target: TargetText) -> None:
        """Check that the servers serve `target` (`compare`), and cap its context length at the servers' limits.

        Raises CheckpointError.
        """
        limits = [server.facts.context_length for server in self.servers]
        target.context_length = min([target.context_length, *(limit for limit in limits if limit)])
        if self.in_flight < self.recipe.concurrency:
            progress.log(
                f"texts at a time: {self.in_flight}, one per slot of llama-server (--parallel); further requests wait"
            )
        self.compare(target)

    @property
    def in_flight(self) -> int:
        """Requests in flight: `recipe.concurrency`, but no more than the servers have slots, if all have a number."""
        slots = [server.facts.slots for server in self.servers]
        limited = slots and all(slots)
        return min(self.recipe.concurrency, sum(filter(None, slots))) if limited else self.recipe.concurrency

    def compare(self, target: TargetText) -> None:
        """Check that the servers serve `target`: they use its tokenizer, and all have equal weights.

        Raises CheckpointError.
        """
        self._vocabulary, self._target = target.vocab_size, target.name
        self.probe = target.tokenizer.encode(endpoints.PROBE, add_special_tokens=False)
        for server in self.servers:
            self._run_question(self._same_tokenizer(server))
        self._equal_weights()

    async def _same_tokenizer(self, server: Endpoint) -> None:
        """Raise CheckpointError if a server tokenizes the probe in another way than the target does."""
        theirs = await endpoints.probe_token_ids(self._pools.http, server)
        if theirs is None:
            progress.log(f"{server.url} has no tokenize endpoint: its vocabulary is not compared with the target's")
        elif theirs != self.probe:
            raise CheckpointError(
                f"{server.url} serves {server.model} with a different tokenizer from target {self._target}",
                "set --target to the served model, or to a directory with its config.json and tokenizer",
            )

    def compare_servers(self) -> None:
        """Check that all servers serve one model: equal name, tokenizer and weights, as far as the servers tell.

        Needs no file of the model on this machine. Raises CheckpointError.
        """
        first, known = self.servers[0], None
        for server in self.servers:
            if server.model != first.model:
                raise CheckpointError(
                    f"{first.url} serves {first.model}, but {server.url} serves {server.model}",
                    "start both with the same --served-model-name (llama-server: --alias), or set server.model to a "
                    "model that both serve",
                )
            theirs = self._run_question(endpoints.probe_token_ids(self._pools.http, server))
            if theirs is None:
                progress.log(
                    f"{server.url} has no tokenize endpoint: its model is not compared with the other servers'"
                )
            elif known is not None and theirs != known:
                raise CheckpointError(
                    f"{server.url} serves {server.model} with a different tokenizer from the other servers"
                )
            known = known or theirs
        self.probe = known or []
        if self.probe:
            self._equal_weights()

    def _equal_weights(self) -> None:
        """Raise CheckpointError if the servers assign different log probabilities to the probe's tokens."""
        for server in self.servers:
            self._run_question(self._as_the_first(server))

    async def _as_the_first(self, server: Endpoint) -> None:
        """Raise CheckpointError if a server's log probabilities of the probe differ from the first server's."""
        server.logprobs = await endpoints.logprobs(self._pools.http, server, self.probe)
        if endpoints.distance(server.logprobs, self.servers[0].logprobs) > endpoints.MAX_LOGPROB_DIFFERENCE:
            raise CheckpointError(f"{server.url} and {self.servers[0].url} serve different weights")

    def answers(
        self, asks: Sequence[GenerationRequest], *, limit: int | None = None, timed: bool = False
    ) -> Iterator[tuple[int, GenerationResult | Refusal]]:
        """Yield (position of the request, answer) in order of arrival. Ends early after a signal.

        Args:
            limit: requests in flight (None = `in_flight`). If a server has fewer slots, the others wait in its queue.
            timed: stream the answers, to measure the time to the first token.

        Raises NoResponse if a request has failed once more than `recipe.retries` allows.
        """
        limit = limit or self.in_flight
        yield from self._all(asks, lambda ask: self._complete(ask, timed), limit, LOOKAHEAD * limit)

    def states(self, texts: Sequence[list[int]], wanted: HiddenStatesSpec) -> Generator[tuple[int, Tensor | Refusal]]:
        """Yield (position of the text, hidden states [tokens, layers, width] on the CPU) in order of arrival.

        Ends early after a signal. At most twice `recipe.concurrency` texts are in memory.

        Raises EngineError if a server cannot give the states, or under the conditions of `answers`.
        """
        limit = self.recipe.concurrency
        return self._all(texts, lambda text: self.read_states(text, wanted), limit, limit)

    def check_states(self, wanted: HiddenStatesSpec) -> None:
        """Raise EngineError if a server cannot give these states, or reports a prefix cache that would hide some."""
        for server in self.servers:
            self._run_question(self._gives_states(server, wanted))

    async def _gives_states(self, server: Endpoint, wanted: HiddenStatesSpec) -> None:
        if server.dialect.HIDDEN_STATES_NORMED != self.servers[0].dialect.HIDDEN_STATES_NORMED:
            raise EngineError(
                "the servers are different engines, which return different hidden states", "use servers of one engine"
            )
        if server.dialect.capture_command(wanted) is None:
            raise EngineError(
                f"{server.url} is {server.facts.engine}, which cannot return hidden states {list(wanted.ids)} of one "
                "text",
                "use vLLM for it; SGLang has the last layer's, enough for eagle, hydra, medusa and lm",
            )
        if server.dialect.has_prefix_cache(await endpoints.metrics(self._pools.http, server)):
            raise EngineError(
                f"{server.url} has a prefix cache, so states of cached tokens may be missing",
                f"start it with {server.dialect.NO_PREFIX_CACHE_FLAG}",
            )

    async def probe_states(self, server: Endpoint, wanted: HiddenStatesSpec) -> Tensor:
        """Hidden states [tokens, layers, width] of the probe from one server.

        Raises CheckpointError or EngineError if the server is not like the first server, or does not give the states.
        """
        await self._same_tokenizer(server)
        await self._as_the_first(server)
        await self._gives_states(server, wanted)
        response, rows = await self._states_from(server, self.probe, wanted)
        if rows is None:
            raise self._status_error(server, response)
        return rows

    async def follow(
        self, urls: Sequence[str], accept: Callable[[Endpoint], Coroutine[Any, Any, None]]
    ) -> dict[str, str]:
        """From now on, use the servers at `urls` that answer. If none does, the current servers stay.

        A server that is new, or that was unreachable, is connected, and `accept` raises an error if it is unsuitable.

        Returns, by address, why servers are left out.
        """
        known = {server.url: server for server in self.servers if server.url not in self._suspects}
        recipe = self.recipe.model_copy(update={"wait_s": 0.0})

        async def find(url: str) -> Endpoint | str:
            if url in known:
                return known[url]
            try:
                async with asyncio.timeout(JOIN_S):
                    server = await endpoints.connect(self._pools.http, url, recipe)
                    await accept(server)
            except SpecctlError as error:
                return error.message
            except httpx.RequestError as error:
                return f"{url} does not respond: {describe_transport_error(error)}"
            except (MalformedResponse, TimeoutError) as error:
                return f"{url} gives no valid answer in {JOIN_S:g} s {error}".rstrip()
            self._suspects.discard(url)
            return server

        found = await asyncio.gather(*map(find, urls))
        self.servers = [server for server in found if isinstance(server, Endpoint)] or self.servers
        return {url: why for url, why in zip(urls, found, strict=True) if isinstance(why, str)}

    def _all(
        self, jobs: Sequence[Job], one: Callable[[Job], Coroutine[Any, Any, Result]], limit: int, ahead: int
    ) -> Generator[tuple[int, Result]]:
        """Run `one` for every job. Yield (position of the job, result) in order of arrival.

        Args:
            limit: jobs in flight.
            ahead: jobs that may start ahead of the oldest unfinished job. A caller that writes in order has to hold
                their results.
        """
        loop = self._runner.get_loop()
        pending: dict[asyncio.Task[Result], int] = {}
        self._pending = pending
        asked = 0
        try:
            while not progress.interrupts.requested():
                while asked < len(jobs) and len(pending) < limit:
                    if asked - next(iter(pending.values()), asked) >= ahead:
                        break
                    pending[loop.create_task(one(jobs[asked]))] = asked
                    asked += 1
                if not pending:
                    return
                done, _ = self._runner.run(asyncio.wait(pending, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED))
                for task in sorted(done, key=pending.__getitem__):
                    yield pending.pop(task), task.result()
        finally:
            self._cancel(pending)

    def _cancel(self, pending: dict[asyncio.Task[Any], int]) -> None:
        """Cancel requests. A generator that is closed after its client finds nothing pending."""
        if pending:
            tasks = list(pending)
            pending.clear()
            self._runner.run(_cancelled(tasks))

    def drafting(self) -> DraftCounters | None:
        """Sum of the draft counters of all servers, or None if a server does not draft or does not report them."""
        found = [server.dialect.parse_draft_counters(self._metrics(server)) for server in self.servers]
        parts = [part for part in found if part is not None]
        return DraftCounters.total(parts) if len(parts) == len(found) else None

    def prefix_cache(self) -> tuple[int, int]:
        """Tokens that all servers have looked up in their prefix caches, and found there; 0 for those that do not
        tell."""
        found = [server.dialect.parse_prefix_cache(self._metrics(server)) for server in self.servers]
        asked, hit = zip(*(part or (0, 0) for part in found), strict=True)
        return sum(asked), sum(hit)

    def _metrics(self, server: Endpoint) -> str:
        return self._run_question(endpoints.metrics(self._pools.http, server))

    def publish(self, directory: Path, version: str) -> None:
        """Make all servers draft with the drafter in `directory` from their next step on.

        `specctl export` wrote the directory for this engine. The seconds that requests stood still are logged.

        Raises UsageError, CheckpointError or EngineError if a server rejects the drafter. The message tells which
        server, why, and the drafter of the others. All servers then get their previous drafter back.
        """
        self._runner.run(publication.publish([self._place(server) for server in self.servers], directory, version))

    def publish_corpus(self, name: str, corpus: CorpusTexts) -> list[PublishedCorpus]:
        """Make all servers draft from a datastore's texts, which replace the texts published before under `name`.

        Raises UsageError if an engine takes no corpora while it runs, and EngineError under the conditions of
        `publish`.
        """
        for server in self.servers:
            if server.facts.engine != sglang.NAME:
                raise UsageError(
                    f"{server.url} is {server.facts.engine}, which does not accept corpora while it runs",
                    "run `specctl export --to vllm`: it prints the command that starts vLLM with a datastore",
                )
        return self._runner.run(corpora.publish([self._place(server) for server in self.servers], name, corpus))

    def loaded(self) -> list[LoadedDrafter]:
        """The drafter of each server, as far as it tells. Raises EngineError."""
        return [self._runner.run(publication.loaded_drafter(self._place(server))) for server in self.servers]

    def _place(self, server: Endpoint) -> publication.PublicationServer:
        publisher = registry.publisher(server.facts.engine, server.url)
        return publication.PublicationServer(
            server.url, publisher, partial(self._admin_call, server), server.published_directories
        )

    async def _admin_call(self, server: Endpoint, call: AdminCall) -> Any:
        """Send an administration call and return the response's document. Raises EngineError, MalformedResponse."""
        try:
            response = await self._pools.http.request(
                "GET" if call.body is None else "POST",
                server.url + call.path,
                json=call.body,
                headers={"Connection": "close"},  # a reused connection breaks: vLLM drops it after a failure
            )
        except httpx.RequestError as error:
            raise NoResponse(f"the server does not respond: {describe_transport_error(error)}") from error
        if response.status_code in (401, 403):
            raise EngineError(f"the server rejects the API key (status {response.status_code})", self._key_hint())
        if response.status_code != 200:
            raise registry.PUBLISHERS[server.facts.engine].error_for_status(
                call, response.status_code, error_message(response)
            )
        return parse_json(response)

    def _run_question(self, question: Coroutine[Any, Any, Result]) -> Result:
        """Answer to a question about a server. Raises EngineError if the server is gone or the answer is malformed."""
        try:
            return self._runner.run(question)
        except httpx.RequestError as error:
            raise NoResponse(f"a server does not respond: {describe_transport_error(error)}") from error
        except MalformedResponse as error:
            raise EngineError(
                f"a server gives an unexpected answer: {error}", "check that the URL is that of an engine"
            ) from error

    async def _complete(self, ask: GenerationRequest, timed: bool) -> GenerationResult | Refusal:
        async def exchange(server: Endpoint) -> tuple[httpx.Response, GenerationResult | Refusal | None]:
            started = time.perf_counter()
            response, content, first = await self._send(server, ask, timed)
            if response.status_code != 200:
                return response, None
            answer = self._read(server, content, ask)
            if isinstance(answer, Refusal):
                return response, answer
            seconds, first_s = time.perf_counter() - started, first and first - started
            return response, replace(answer, seconds=seconds, first_s=first_s)

        answer: GenerationResult | Refusal
        answer, tries = await self._with_retries(exchange)
        return answer if isinstance(answer, Refusal) else replace(answer, tries=tries)

    async def read_states(self, text: list[int], wanted: HiddenStatesSpec) -> Tensor | Refusal:
        """Hidden states [tokens, layers, width] of one text, on the CPU. Raises the errors of `states`."""
        return (await self._with_retries(lambda server: self._states_from(server, text, wanted)))[0]

    async def _states_from(
        self, server: Endpoint, text: list[int], wanted: HiddenStatesSpec
    ) -> tuple[httpx.Response, Tensor | None]:
        from specctl.engines import capture  # imports torch, which no other method needs

        body = server.dialect.hidden_states_request(text, server.model)
        response = await self._pools.http.post(server.url + server.dialect.GENERATE, json=body)
        if response.status_code != 200:
            return response, None
        found = server.dialect.parse_hidden_states(parse_json(response), len(text))
        return response, await capture.states(server, found, text, wanted, self.recipe.timeout_s)

    async def _with_retries(
        self, exchange: Callable[[Endpoint], Coroutine[Any, Any, tuple[httpx.Response, Result | None]]]
    ) -> tuple[Result | Refusal, int]:
        """Return an exchange's content, and the number of requests it took.

        A request is retried while that may help, on another server if there is one. `exchange` returns a response and,
        if its status is 200, its content.
        """
        failed: Endpoint | None = None
        why = ""
        for tried in range(1, self.recipe.retries + 2):
            server = self._least_busy(failed)
            server.in_flight += 1
            pause = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (tried - 1)) * random.uniform(0.5, 1)
            try:
                if server.url in self._suspects:
                    await self._same_weights(server)
                response, brought = await exchange(server)
                if brought is not None:
                    return brought, tried
                why = f"status {response.status_code}: {error_message(response)}"
                if response.status_code in REFUSED:
                    return Refusal(error_message(response)), tried
                if not (response.status_code in BUSY or response.status_code >= 500):
                    raise self._status_error(server, response)
                pause = max(pause, retry_after(response) or 0.0)
            except httpx.RequestError as error:
                self._suspects.add(server.url)
                why = describe_transport_error(error)
            except MalformedResponse as error:
                why = str(error)
            finally:
                server.in_flight -= 1
            failed = server
            self.failures += 1
            if tried <= self.recipe.retries:
                await asyncio.sleep(pause)
        assert failed is not None
        raise NoResponse(
            f"{failed.url} failed {self.recipe.retries + 1} times in a row, most recently: {why}",
            "finished work is kept: continue with --resume, or raise server.retries or server.timeout_s",
        )

    def _least_busy(self, failed: Endpoint | None) -> Endpoint:
        """The server with the fewest requests; prefers any other server to the `failed` one."""
        turn = next(self._turn)
        order = self.servers[turn % len(self.servers) :] + self.servers[: turn % len(self.servers)]
        return min(order, key=lambda server: (server is failed, server.in_flight))

    async def _send(
        self, server: Endpoint, ask: GenerationRequest, timed: bool
    ) -> tuple[httpx.Response, Any, float | None]:
        """Send a request.

        Returns the response, its content, and the time at which the first token came (if `timed`).
        """
        path, body = server.url + server.dialect.GENERATE, server.dialect.request_body(ask, server.model)
        if not timed:
            response = await self._pools.http.post(path, json=body)
            return response, parse_json(response) if response.status_code == 200 else None, None
        first, pieces = None, []
        async with self._pools.http.stream("POST", path, json=server.dialect.with_streaming(body)) as response:
            if response.status_code != 200:
                await response.aread()
                return response, None, None
            async for event in proxy_messages.events(response.aiter_bytes()):
                data = proxy_messages.data_of(event).decode(errors="replace").strip()
                if data and data != "[DONE]":
                    pieces.append(parse_piece(data))
                    with parsing("tokens in its stream"):
                        if first is None and server.dialect.has_token(pieces[-1]):
                            first = time.perf_counter()
        return response, server.dialect.join_stream(pieces), first

    def _read(self, server: Endpoint, content: Any, ask: GenerationRequest) -> GenerationResult | Refusal:
        with parsing("text in its answer"):
            answer = server.dialect.parse_answer(content, ask)
        if isinstance(answer, Refusal):
            return answer
        ids, stop = answer.output_ids, answer.stop
        if not isinstance(ids, list) or not all(type(token) is int and token >= 0 for token in ids):
            raise MalformedResponse("its token ids are not a list of non-negative integers")
        if self._vocabulary is not None and max(ids, default=0) >= self._vocabulary:
            raise MalformedResponse(f"token {max(ids)} is outside the target's vocabulary of {self._vocabulary}")
        if not 0 < len(ids) <= ask.max_new_tokens or (stop == "length" and len(ids) < ask.max_new_tokens):
            raise MalformedResponse(
                f"it returned {len(ids)} tokens, ended by {stop}, but {ask.max_new_tokens} were requested"
            )
        return answer

    def _status_error(self, server: Endpoint, response: httpx.Response) -> EngineError:
        if response.status_code in (401, 403):
            return EngineError(f"{server.url} rejects the API key (status {response.status_code})", self._key_hint())
        return EngineError(f"{server.url} returned status {response.status_code}: {error_message(response)}")

    def _key_hint(self) -> str:
        return f"set the key in the environment: {self.recipe.api_key_env}=…"

    async def _same_weights(self, server: Endpoint) -> None:
        """Raise EngineError if an address that was unreachable for a while has come back with another model."""
        now = await endpoints.logprobs(self._pools.http, server, self.probe)
        if endpoints.distance(now, server.logprobs) > endpoints.MAX_LOGPROB_DIFFERENCE:
            raise EngineError(
                f"{server.url} was restarted with different weights during this run",
                "finished work is kept and comes from the old weights; use one server for each set of weights",
            )
        if now or not server.logprobs:  # otherwise the server is still loading: ask again next time
            self._suspects.discard(server.url)


async def _cancelled(tasks: list[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
