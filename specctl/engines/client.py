"""A client of one or several servers of the same target: bounded, patient, and it believes nothing unchecked."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import httpx

from specctl import progress
from specctl.decoding.target_text import TargetText
from specctl.engines import corpora, exchanges, publication, questions, registry, sglang
from specctl.engines.corpora import PublishedCorpus
from specctl.engines.pools import Pools
from specctl.engines.questions import Endpoint
from specctl.engines.records import (
    Answer,
    Ask,
    Call,
    Drafting,
    EngineError,
    Loaded,
    Lost,
    Malformed,
    Refusal,
    Wanted,
)
from specctl.engines.responses import document, piece, retry_after, said, transport
from specctl.errors import CheckpointError, UsageError
from specctl.recipe import ServerRecipe

if TYPE_CHECKING:
    from torch import Tensor

    from specctl.formats.corpus import CorpusTexts

CONNECT_S = 10.0
POLL_S = 0.2  # how long a signal waits for a slow engine
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 30.0
LOOKAHEAD = 8  # requests that may be ahead of the oldest one, as a multiple of those in flight
BUSY = {408, 409, 425, 429}  # and all from 500 on: another try may succeed
REFUSED = {400, 413, 422}  # this text, whoever asks

Told = TypeVar("Told")
Sent = TypeVar("Sent")


class Client:
    """Texts continued by engines, or read by them. A context manager; `answers` and `states` are for one thread.

    Attributes:
        servers: those of `recipe.urls`.
        failures: requests that failed so far, and were sent again.
        probe: the text that every server was asked about, as ids; empty until `compare`.
    """

    def __init__(self, recipe: ServerRecipe):
        self.recipe = recipe
        self.failures = 0
        self._turn = itertools.count()
        self._vocabulary: int | None = None
        self.probe: list[int] = []
        self._suspects: set[str] = set()  # addresses that were gone for a moment: who is there now?
        self._pending: dict[asyncio.Task[Any], int] = {}  # requests in flight, with their places

    def __enter__(self) -> Self:
        self._runner = asyncio.Runner()
        key = os.environ.get(self.recipe.api_key_env)
        self._pools = Pools(
            self.recipe.concurrency,
            verify=any(url.startswith("https:") for url in self.recipe.urls),
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(self.recipe.timeout_s, connect=CONNECT_S),
        )
        try:
            self.servers = [
                self._runner.run(questions.opened(self._pools.http, url, self.recipe)) for url in self.recipe.urls
            ]
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._cancel(self._pending)
        self._runner.run(self._pools.aclose())
        self._runner.close()

    def check(self, target: TargetText) -> None:
        """The servers' texts are those of `target` (`compare`), which may be asked no longer ones than they take.

        Raises CheckpointError.
        """
        limits = [server.facts.context_length for server in self.servers]
        target.context_length = min([target.context_length, *(limit for limit in limits if limit)])
        self.compare(target)

    def compare(self, target: TargetText) -> None:
        """The servers' texts are those of `target`: its tokenizer's ids, and the same weights everywhere.

        Raises CheckpointError.
        """
        self._vocabulary = target.vocab_size
        self.probe = target.tokenizer.encode(questions.PROBE, add_special_tokens=False)
        for server in self.servers:
            theirs = self._told(questions.tokenized(self._pools.http, server))
            if theirs is None:
                progress.log(f"{server.url} does not tokenize: that its vocabulary is the target's is not checked")
            elif theirs != self.probe:
                raise CheckpointError(
                    f"{server.url} serves {server.model} with another tokenizer than that of target {target.name}",
                    "--target names the model that is served, or a directory with its config.json and tokenizer",
                )
        self._equal_weights()

    def compare_servers(self) -> None:
        """All servers serve one model: by its name, its tokenizer's ids and its weights, as far as they say. Nothing of
        it has to be here.

        Raises CheckpointError.
        """
        first, known = self.servers[0], None
        for server in self.servers:
            if server.model != first.model:
                raise CheckpointError(
                    f"{first.url} serves {first.model}, and {server.url} {server.model}",
                    "a request names its model: start both with one --served-model-name, or name it by server.model",
                )
            theirs = self._told(questions.tokenized(self._pools.http, server))
            if theirs is None:
                progress.log(f"{server.url} does not tokenize: that its model is that of the others is not checked")
            elif known is not None and theirs != known:
                raise CheckpointError(f"{server.url} serves {server.model} with another tokenizer than the others")
            known = known or theirs
        self.probe = known or []
        if self.probe:
            self._equal_weights()

    def _equal_weights(self) -> None:
        """CheckpointError where the servers do not find the probe's tokens equally probable."""
        for server in self.servers:
            server.logprobs = self._told(questions.logprobs(self._pools.http, server, self.probe))
            if questions.distance(server.logprobs, self.servers[0].logprobs) > questions.SAME:
                raise CheckpointError(f"{server.url} and {self.servers[0].url} serve different weights")

    def answers(
        self, asks: Sequence[Ask], *, limit: int | None = None, timed: bool = False
    ) -> Iterator[tuple[int, Answer | Refusal]]:
        """Answers with the places of their requests, as they come in; ends early when a signal came.

        Args:
            limit: requests in flight; None = `recipe.concurrency`.
            timed: stream them, for the time of the first token.

        Raises EngineError where a request has failed once more than `recipe.retries` allows.
        """
        limit = limit or self.recipe.concurrency
        yield from self._all(asks, lambda ask: self._one(ask, timed), limit, LOOKAHEAD * limit)

    def states(self, texts: Sequence[list[int]], wanted: Wanted) -> Iterator[tuple[int, Tensor | Refusal]]:
        """Hidden states [tokens, layers, width] of texts, on the CPU, with the places of the texts, as they come in;
        ends early when a signal came. At most twice `recipe.concurrency` texts are in memory.

        Raises EngineError where a server cannot give them, or as `answers`.
        """
        limit = self.recipe.concurrency
        return self._all(texts, lambda text: self._read_states(text, wanted), limit, limit)

    def check_states(self, wanted: Wanted) -> None:
        """EngineError where a server could not give these, or says that it would take some from a cache."""
        if len({server.dialect.NORMED for server in self.servers}) > 1:
            raise EngineError("the servers are different engines, whose hidden states are, too", "take one kind")
        for server in self.servers:
            if len(wanted.ids) > 1 and server.dialect.capturing(wanted) is None:
                raise EngineError(
                    f"{server.url} is {server.facts.engine}, which hands out hidden states of the last layer or of "
                    f"others, and this drafter needs {list(wanted.ids)}",
                    "take vLLM for it; eagle, hydra, medusa and lm read those of the last layer alone",
                )
            if server.dialect.keeps_prefixes(self._told(questions.metrics(self._pools.http, server)) or ""):
                raise EngineError(
                    f"{server.url} keeps a prefix cache, from which states may be missing",
                    f"start it with {server.dialect.UNCACHED}",
                )

    def _all(
        self,
        jobs: Sequence[Sent],
        one: Callable[[Sent], Coroutine[Any, Any, Told]],
        limit: int,
        ahead: int,
    ) -> Iterator[tuple[int, Told]]:
        """Results of `one` for every job, with its place, as they come in.

        Args:
            limit: jobs in flight.
            ahead: jobs that may be begun behind the oldest in flight: who writes in order has to keep them.
        """
        loop = self._runner.get_loop()
        pending: dict[asyncio.Task[Told], int] = {}
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
        """Give up requests. A generator that is closed late, after its client, has none left."""
        if pending:
            tasks = list(pending)
            pending.clear()
            self._runner.run(_cancelled(tasks))

    def drafting(self) -> Drafting | None:
        """Counters of all servers together; None where one of them does not draft, or does not tell."""
        found = [self._told(questions.drafting(self._pools.http, server)) for server in self.servers]
        parts = [part for part in found if part is not None]
        return Drafting.total(parts) if len(parts) == len(found) else None

    def publish(self, directory: Path, version: str) -> None:
        """All servers draft with the drafter in `directory`, which `specctl export` wrote for them, from their next
        step on. How long requests stood still for it is logged.

        Raises UsageError, CheckpointError or EngineError where one of them does not take it: which, why, and what the
        others draft with. They have what they had before then.
        """
        self._runner.run(publication.publish([self._place(server) for server in self.servers], directory, version))

    def publish_corpus(self, name: str, corpus: CorpusTexts) -> list[PublishedCorpus]:
        """All servers draft from a datastore's texts, in place of those that they were given under `name` before.

        Raises UsageError (a server that takes none while it runs), EngineError as `publish`.
        """
        for server in self.servers:
            if server.facts.engine != sglang.NAME:
                raise UsageError(
                    f"{server.url} is {server.facts.engine}, which takes no corpora while it runs",
                    "specctl export --to vllm prints the command that starts vLLM with a datastore",
                )
        return self._runner.run(corpora.publish([self._place(server) for server in self.servers], name, corpus))

    def loaded(self) -> list[Loaded]:
        """The drafter of each server, as far as it says. Raises EngineError."""
        return [self._runner.run(publication.loaded(self._place(server))) for server in self.servers]

    def published(self) -> list[str | None]:
        """The version that each server drafts with; None of what it was started with. Raises EngineError."""
        return [one.version for one in self.loaded()]

    def _place(self, server: Endpoint) -> publication.Served:
        publisher = registry.PUBLISHERS[server.facts.engine]
        return publication.Served(server.url, publisher, partial(self._asked, server), server.published)

    async def _asked(self, server: Endpoint, call: Call) -> Any:
        """The document that a server's administration answers with. Raises EngineError, Malformed."""
        try:
            response = await self._pools.http.request(
                "GET" if call.body is None else "POST",
                server.url + call.path,
                json=call.body,
                headers={"Connection": "close"},  # vLLM breaks those on which it failed, whoever sends on them next
            )
        except httpx.TransportError as error:
            raise Lost(f"it is gone: {transport(error)}") from error
        if response.status_code in (401, 403):
            raise EngineError(f"it asks for another key (status {response.status_code})", self._key_hint())
        if response.status_code != 200:
            raise registry.PUBLISHERS[server.facts.engine].unable(call, response.status_code, said(response))
        return document(response)

    def _told(self, question: Coroutine[Any, Any, Told]) -> Told:
        """The answer to a question about a server. EngineError where it is gone, or answers something else."""
        try:
            return self._runner.run(question)
        except httpx.TransportError as error:
            raise EngineError(f"a server is gone: {transport(error)}") from error
        except Malformed as error:
            raise EngineError(f"a server answers strangely: {error}", "is it an engine's address?") from error

    async def _one(self, ask: Ask, timed: bool) -> Answer | Refusal:
        async def exchange(server: Endpoint) -> tuple[httpx.Response, Answer | None]:
            started = time.perf_counter()
            response, content, first = await self._sent(server, ask, timed)
            if response.status_code != 200:
                return response, None
            answer = self._read(server, content, ask)
            seconds, first_s = time.perf_counter() - started, first and first - started
            return response, replace(answer, seconds=seconds, first_s=first_s)

        answer, tries = await self._tried(exchange)
        return answer if isinstance(answer, Refusal) else replace(answer, tries=tries)

    async def _read_states(self, text: list[int], wanted: Wanted) -> Tensor | Refusal:
        from specctl.engines import capture  # torch, which nobody else here needs

        async def exchange(server: Endpoint) -> tuple[httpx.Response, Tensor | None]:
            body = server.dialect.capture(text, server.model)
            response = await self._pools.http.post(server.url + server.dialect.GENERATE, json=body)
            if response.status_code != 200:
                return response, None
            found = server.dialect.captured(document(response), len(text))
            return response, await capture.states(server, found, text, wanted, self.recipe.timeout_s)

        return (await self._tried(exchange))[0]

    async def _tried(
        self, exchange: Callable[[Endpoint], Coroutine[Any, Any, tuple[httpx.Response, Told | None]]]
    ) -> tuple[Told | Refusal, int]:
        """The content of a response, and how many requests it took: they are sent again, to another server if there is
        one, while that may help. `exchange` gives what a response of status 200 holds."""
        failed: Endpoint | None = None
        why = ""
        for tried in range(1, self.recipe.retries + 2):
            server = self._free(failed)
            server.in_flight += 1
            pause = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (tried - 1)) * random.uniform(0.5, 1)
            try:
                if server.url in self._suspects:
                    await self._same_weights(server)
                response, brought = await exchange(server)
                if brought is not None:
                    return brought, tried
                why = f"status {response.status_code}: {said(response)}"
                if response.status_code in REFUSED:
                    return Refusal(said(response)), tried
                if not (response.status_code in BUSY or response.status_code >= 500):
                    raise self._denied(server, response)
                pause = max(pause, retry_after(response) or 0.0)
            except httpx.TransportError as error:
                self._suspects.add(server.url)
                why = transport(error)
            except Malformed as error:
                why = str(error)
            finally:
                server.in_flight -= 1
            failed = server
            self.failures += 1
            if tried <= self.recipe.retries:
                await asyncio.sleep(pause)
        assert failed is not None
        raise EngineError(
            f"{failed.url} has failed {self.recipe.retries + 1} times in a row, last: {why}",
            "what is finished is kept: --resume goes on; server.retries and server.timeout_s allow for more",
        )

    def _free(self, failed: Endpoint | None) -> Endpoint:
        """The server with the fewest requests, another one than that which has just failed, if there is one."""
        turn = next(self._turn)
        order = self.servers[turn % len(self.servers) :] + self.servers[: turn % len(self.servers)]
        return min(order, key=lambda server: (server is failed, server.in_flight))

    async def _sent(self, server: Endpoint, ask: Ask, timed: bool) -> tuple[httpx.Response, Any, float | None]:
        """The response to a request, what it holds, and when its first token came."""
        path, body = server.url + server.dialect.GENERATE, server.dialect.body(ask, server.model)
        if not timed:
            response = await self._pools.http.post(path, json=body)
            return response, document(response) if response.status_code == 200 else None, None
        first, pieces = None, []
        async with self._pools.http.stream("POST", path, json=server.dialect.streamed(body)) as response:
            if response.status_code != 200:
                await response.aread()
                return response, None, None
            async for event in exchanges.events(response.aiter_bytes()):
                data = exchanges.data_of(event).decode(errors="replace").strip()
                if data and data != "[DONE]":
                    pieces.append(piece(data))
                    if first is None and server.dialect.begun(pieces[-1]):
                        first = time.perf_counter()
        return response, server.dialect.joined(pieces), first

    def _read(self, server: Endpoint, content: Any, ask: Ask) -> Answer:
        answer = server.dialect.answer(content, ask)
        ids, stop = answer.output_ids, answer.stop
        if not isinstance(ids, list) or not all(type(token) is int and token >= 0 for token in ids):
            raise Malformed("its token ids are no list of numbers")
        if self._vocabulary is not None and max(ids, default=0) >= self._vocabulary:
            raise Malformed(f"token {max(ids)} is not one of the target's {self._vocabulary}")
        if not 0 < len(ids) <= ask.max_new_tokens or (stop == "length" and len(ids) < ask.max_new_tokens):
            raise Malformed(f"{len(ids)} tokens, ended by {stop}, where {ask.max_new_tokens} were asked for")
        return answer

    def _denied(self, server: Endpoint, response: httpx.Response) -> EngineError:
        if response.status_code in (401, 403):
            return EngineError(f"{server.url} asks for another key (status {response.status_code})", self._key_hint())
        return EngineError(f"{server.url} answers with status {response.status_code}: {said(response)}")

    def _key_hint(self) -> str:
        return f"put it into the environment: {self.recipe.api_key_env}=…"

    async def _same_weights(self, server: Endpoint) -> None:
        """EngineError where an address that was gone for a moment has come back with another model."""
        now = await questions.logprobs(self._pools.http, server, self.probe)
        if now or not server.logprobs:  # else it is still loading, and is asked again
            self._suspects.discard(server.url)
        if questions.distance(now, server.logprobs) > questions.SAME:
            raise EngineError(
                f"{server.url} was restarted with other weights while it was used",
                "what is finished is kept, and is of the first; name one server for each of them",
            )


async def _cancelled(tasks: list[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
