"""Target features of the texts that training asks for next, computed by servers a bounded number of texts ahead.

No features are kept: the file with a text's states is deleted once it is read, and every epoch asks again. A thread
runs the requests, so the servers compute while a step does. A text is asked for when an earlier one is taken: servers
that are faster than the training wait for it.
"""

import asyncio
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, wait
from functools import partial
from itertools import count, islice
from threading import Thread, get_ident

from torch import Tensor

from specctl.engines.client import Client
from specctl.engines.endpoints import Endpoint
from specctl.engines.records import EngineError, NoResponse, Refusal
from specctl.errors import CheckpointError, UsageError
from specctl.progress import interrupts, log, warn
from specctl.recipe import FeatureRecipe, ServerRecipe
from specctl.training import served_features
from specctl.training.example import Example
from specctl.training.feature_files import GB, Features
from specctl.training.served_features import MAX_STATE_DIFFERENCE, OwnForward

POLL_S = 0.2  # seconds until a signal is noticed while servers are slow
FOLLOW_S = 5.0  # seconds between two looks at which servers there are
STOP_S = 30.0  # seconds that a step may wait for its texts after a signal: a checkpoint follows the step
DRAIN_S = 5.0  # seconds in which requests in flight may end, so that their files are deleted
TRIES = 3  # of a text for which a server gives unusable states, before the training ends


class FeatureStream:
    """{example index: Features} for a training that takes the texts of `upcoming` in this order, each once.

    The texts may be taken by one thread at a time.

    Attributes:
        client: the client of the servers. Once the stream has been started, requests are made in another thread.
        clients: the same by name of the model that wrote a text.
        waited: seconds that the thread which made this object has waited for texts.
    """

    def __init__(
        self,
        store: OwnForward,
        recipe: FeatureRecipe,
        examples: list[Example],
        upcoming: Iterator[Example],
        processes: int,
    ):
        """
        Args:
            examples: all texts of the training.
            processes: they share the concurrent requests and the texts ahead that the recipe allows.

        Raises:
            UsageError: the recipe names no server, or a server does not list a model that wrote texts.
            EngineError: no server responds within `server.wait_s`.
        """
        self.store, self.recipe, self.examples = store, recipe, examples
        self.states = served_features.states_of(store, examples)
        self.bound = max(1, recipe.ahead // processes)
        self.waited = 0.0
        self._upcoming = upcoming
        self._ahead: deque[tuple[Example, Future[Tensor | Refusal]]] = deque()
        self._owner, self._closing = get_ident(), False
        share = served_features.own_share(recipe.server, processes)
        self._limit = asyncio.Semaphore(share.concurrency)
        self._left_out: dict[str, str] = {}
        self.client = Client(share.model_copy(update={"urls": []})).__enter__()
        self._thread: Thread | None = None
        try:
            self._connect()
        except BaseException:
            self.close()
            raise

    def _connect(self) -> None:
        """Connect to the servers that respond, and wait for the first one."""
        until = time.monotonic() + self.recipe.server.wait_s
        self.client.servers = []
        while True:
            urls = served_features.addresses(self.recipe)
            if not urls and self.recipe.servers is None:
                raise served_features.no_server("stream", self.recipe.server, self.states)
            left_out = self.client.loop.run_until_complete(self.client.follow(urls, _any))
            if self.client.servers:
                self.clients = served_features.by_model(self.client, self.examples, self.states)
                return self._tell(left_out)
            interrupts.check()
            if time.monotonic() > until:
                raise EngineError(
                    "; ".join(left_out.values()) or f"{self.recipe.servers} names no server",
                    served_features.start_hint(self.recipe.server, self.states),
                )
            time.sleep(POLL_S)

    def start(self) -> None:
        """Check the servers' states on some of the texts, and ask for the first ones.

        Raises the errors of `served_features.check_states`.
        """
        for tried in range(1, TRIES + 1):
            try:
                for model, client in self.clients.items():
                    written = [example for example in self.examples if example.model == model]
                    served_features.check_states(self.store, client, self.states, written)
                break
            except NoResponse:  # from a server that has just left
                if tried == TRIES:
                    raise
                self._connect()
        self._probes: dict[str | None, Tensor] = {}
        for model, client in self.clients.items():
            rows = client.loop.run_until_complete(client.read_states(client.probe, self.states))
            if isinstance(rows, Refusal):
                raise EngineError(f"{client.servers[0].url} refuses a short text: {rows.reason}")
            self._probes[model] = rows
        self._thread = Thread(target=self._run, name="feature-stream", daemon=True)
        self._thread.start()
        self._following = asyncio.run_coroutine_threadsafe(self._follow(), self.client.loop)
        longest = max(len(example.tokens) - 1 for example in self.examples)
        most = self.bound * longest * next(iter(self._probes.values()))[0].nbytes
        log(f"target features are streamed: at most {self.bound} texts ({most / GB:.2g} GB) ahead of each process")
        self._ask()

    def _run(self) -> None:
        asyncio.set_event_loop(self.client.loop)
        self.client.loop.run_forever()

    def __contains__(self, index: int) -> bool:
        return True

    def __getitem__(self, index: int) -> Features:
        """Features of the next text, on the target's device. EngineError if no server gives them."""
        example, asked = self._ahead.popleft()
        assert example.index == index
        started = time.perf_counter()
        self._wait(asked)
        if get_ident() == self._owner:
            self.waited += time.perf_counter() - started
        rows = asked.result()
        self._ask()
        return served_features.to_features(self.store, self.clients[example.model], self.states, example, rows)

    @property
    def ready(self) -> int:
        """Number of texts that have arrived and wait for the training."""
        return sum(asked.done() for _, asked in self._ahead)

    def _wait(self, asked: Future[Tensor | Refusal]) -> None:
        until = 0.0
        while not wait([asked], POLL_S).done:
            if self._following.done():
                self._following.result()
            if interrupts.requested():
                until = until or time.monotonic() + STOP_S
                if time.monotonic() > until:
                    interrupts.check()

    def _ask(self) -> None:
        """Ask for as many further texts as may be ahead. While the stream closes, a thread may still read texts."""
        if self._closing:
            return
        for example in islice(self._upcoming, self.bound - len(self._ahead)):
            self._ahead.append((example, asyncio.run_coroutine_threadsafe(self._rows(example), self.client.loop)))

    async def _rows(self, example: Example) -> Tensor | Refusal:
        """States of a text. It is asked for again if the states are unusable, or as long as a server may take to start.
        The EngineError after that names the text."""
        async with self._limit:
            if self._closing:
                raise asyncio.CancelledError
            until = time.monotonic() + self.recipe.server.wait_s
            for tried in count(1):
                try:
                    sent = served_features.tokens_to_send(example)
                    rows = await self.clients[example.model].read_states(sent, self.states)
                    break
                except EngineError as error:
                    message = f"no hidden states for the sequence of prompt {example.prompt_id}: {error.message}"
                    again = time.monotonic() < until if isinstance(error, NoResponse) else tried < TRIES
                    if not again:
                        raise EngineError(message, error.hint) from error
                    warn(f"{message}; they are asked for again")
            rows = served_features.own_rows(example, rows)
            # A tensor of safetensors maps its file: without a copy, the deleted file would still take up disk space.
            return rows if isinstance(rows, Refusal) else await asyncio.to_thread(rows.clone)

    async def _follow(self) -> None:
        """Use servers that join or come back, and leave out others, as long as the training lasts."""
        while True:
            await asyncio.sleep(FOLLOW_S)
            try:
                urls = await asyncio.to_thread(served_features.addresses, self.recipe)
            except UsageError as error:  # the file may be half written: the servers stay
                self._tell({"servers": error.message})
                continue
            left_out: dict[str, str] = {}
            for model, client in self.clients.items():
                before = {server.url for server in client.servers}
                left_out |= await client.follow(urls, partial(self._accept, client, self._probes[model]))
                now = {server.url for server in client.servers}
                of = f" of {model}" if model is not None else ""
                for url in sorted(before ^ now):
                    log(f"{url} {'joined' if url in now else 'left'}: {len(now)} servers compute hidden states{of}")
            self._tell(left_out)

    def _tell(self, left_out: dict[str, str]) -> None:
        for url, why in left_out.items():
            if self._left_out.get(url) != why:
                warn(f"a server is not used: {why}")
        self._left_out = left_out

    async def _accept(self, client: Client, probe: Tensor, server: Endpoint) -> None:
        """Raise an error unless a server that joins gives the states of the servers before it."""
        rows = await client.probe_states(server, self.states)
        distance = (rows.float() - probe.float()).norm(dim=-1) / probe.float().norm(dim=-1).clamp_min(1e-12)
        if distance.median(0).values.max() > MAX_STATE_DIFFERENCE:
            raise CheckpointError(f"{server.url} gives other hidden states than the servers before it")

    def held_out_recipe(self) -> FeatureRecipe:
        """The recipe for the features of held-out texts: they are kept on disk, since every evaluation reads them."""
        server: ServerRecipe = self.recipe.server.model_copy(update={"urls": [one.url for one in self.client.servers]})
        return self.recipe.model_copy(update={"mode": "server", "server": server})

    def close(self) -> None:
        """End the stream. Requests in flight may still delete their files."""
        self._closing = True
        if self._thread is not None:
            wait([asked for _, asked in list(self._ahead)], DRAIN_S)
            self.client.loop.call_soon_threadsafe(self.client.loop.stop)
            self._thread.join(DRAIN_S)
            if self._thread.is_alive():  # a file system hangs
                return
        self.client.__exit__()


async def _any(server: Endpoint) -> None:
    """Accept every server: they are checked together afterwards."""
