"""`specctl select --server`: requests of clients, each routed to the server whose drafter suits its prompt."""

from __future__ import annotations

import json
import time
from collections import deque
from contextlib import suppress
from dataclasses import asdict, dataclass
from statistics import median
from typing import Literal

from specctl import progress
from specctl.decoding.target_text import load_target_text
from specctl.engines import proxy
from specctl.engines.client import Client
from specctl.recipe import SelectRecipe
from specctl.redaction import without_passwords
from specctl.runs import Run
from specctl.selection import dispatch
from specctl.selection.dispatch import Dispatcher, Routed

REQUESTS = "requests.jsonl"
"""A line for every text: when, who wrote it, tokens and passes; none of its words."""
MOST_BYTES = 2**26  # of that file, which is then put aside, once
DECISIONS = 10_000  # that the median is of
POLL_S = 0.1  # how long a signal waits


@dataclass(frozen=True)
class ServedShare:
    """A server's part of the texts that were routed.

    Attributes:
        share: of all texts.
        mat: tokens of a pass of the target over its texts, passes without a draft included; None without texts.
        failures: requests that it did not answer, and others did where there were any.
    """

    server: str
    engine: str
    requests: int
    share: float | None
    mat: float | None
    tokens: int
    failures: int


@dataclass(frozen=True)
class ServedSelectResult:
    """The result document of `select --server`.

    What the other servers would have made of a text is not known, so there is no regret in it. `decide_us_p50`: median
    microseconds of a choice.
    """

    mode: Literal["served"]
    algo: str
    requests: int
    mat: float | None
    decide_us_p50: float | None
    seconds: float
    servers: list[ServedShare]


@dataclass
class PassTotals:
    """Texts added up: of how many tokens, in how many passes of the target."""

    texts: int = 0
    tokens: int = 0
    passes: int = 0

    def add(self, one: Routed) -> None:
        """Count one more."""
        self.texts, self.tokens, self.passes = self.texts + 1, self.tokens + one.tokens, self.passes + one.passes

    @property
    def mat(self) -> float | None:
        """Tokens of a pass; None without any."""
        return self.tokens / self.passes if self.passes else None


def select_served(recipe: SelectRecipe, run: Run) -> ServedSelectResult:
    """Route requests among a recipe's servers until a signal comes; those that are there then are still answered.

    Raises:
        UsageError: a policy that cannot route, an address that cannot be listened on.
        EngineError, CheckpointError: a server that is not there, servers of different models.
    """
    dispatch.check(recipe.algo)
    with Client(recipe.server) as client:
        client.compare_servers()
        if "target" in recipe.model_fields_set:
            client.compare(load_target_text(**recipe.target.described))
        engines = {one.url: f"{one.facts.engine} {one.facts.version}" for one in client.servers}
        kinds = {one.url: one.facts.engine for one in client.servers}
        run.target = client.servers[0].model
    assert recipe.listen is not None
    total, by_server = PassTotals(), {url: PassTotals() for url in kinds}
    decisions: deque[float] = deque(maxlen=DECISIONS)
    with proxy.listening(recipe.listen) as (place, address):
        run.annotate()
        (run.dir / REQUESTS).unlink(missing_ok=True)
        log = proxy.opened(run.dir / REQUESTS, MOST_BYTES)
        with progress.track(f"requests to {address}", unit="requests") as bar:

            def note(one: Routed) -> None:
                total.add(one)
                by_server[one.url].add(one)
                decisions.append(one.decide_us)
                log.info(json.dumps({"time": time.time()} | without_passwords(asdict(one))))
                bar.update(1)

            dispatcher = Dispatcher([*kinds], recipe.algo[0], recipe.policy, recipe.seeds[0], note)
            through = proxy.Proxy(kinds, None, dispatcher)
            progress.log(f"requests that go to {address} are routed among {', '.join(kinds)}; Ctrl-C ends it")
            started = time.monotonic()
            with suppress(KeyboardInterrupt):  # it is how such a run ends
                proxy.serve(place, through, until_stopped)
            progress.interrupts.reset()
            seconds = time.monotonic() - started
    return ServedSelectResult(
        mode="served",
        algo=recipe.algo[0],
        requests=total.texts,
        mat=total.mat,
        decide_us_p50=median(decisions) if decisions else None,
        seconds=seconds,
        servers=[
            ServedShare(
                server=url,
                engine=engines[url],
                requests=own.texts,
                share=own.texts / total.texts if total.texts else None,
                mat=own.mat,
                tokens=own.tokens,
                failures=through.failures[url],
            )
            for url, own in by_server.items()
        ],
    )


def until_stopped() -> None:
    """Wait for a signal."""
    while not progress.interrupts.requested():
        time.sleep(POLL_S)
