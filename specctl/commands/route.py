"""`specctl route`: route each request of a client to the server with the drafter that suits its prompt."""

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
from specctl.engines.client import Client
from specctl.gateway import server, traffic_log
from specctl.gateway.metrics import Meter
from specctl.gateway.running_engines import RunningEngines, engines_app
from specctl.recipe.route import RouteRecipe
from specctl.recipe.serve import LimitsRecipe
from specctl.redaction import without_passwords
from specctl.runs import Run
from specctl.selection import dispatch
from specctl.selection.dispatch import Dispatcher, RoutedText

REQUESTS = "requests.jsonl"
"""File with one line per text: time, server, tokens and passes, but no words of the text."""
MAX_LOG_BYTES = 2**26  # limit of that file; at the limit it is rotated, with one old file kept
MEDIAN_WINDOW = 10_000  # latest decisions that the median is taken over


@dataclass(frozen=True)
class ServedShare:
    """Share of one server in the routed texts.

    Attributes:
        share: fraction of all texts.
        mat: tokens per target pass over its texts, counting passes without a draft, or None without texts.
        failures: requests that this server did not answer; another server answered them if there was one.
    """

    server: str
    engine: str
    requests: int
    share: float | None
    mat: float | None
    tokens: int
    failures: int


@dataclass(frozen=True)
class RouteResult:
    """The result document of `route`.

    It has no regret, because the yield of the other servers on a text is unknown. `decide_us_p50`: median microseconds
    per decision.
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
    """Sums over texts: their number, tokens, and target passes."""

    texts: int = 0
    tokens: int = 0
    passes: int = 0

    def add(self, one: RoutedText) -> None:
        """Count one more text."""
        self.texts, self.tokens, self.passes = self.texts + 1, self.tokens + one.tokens, self.passes + one.passes

    @property
    def mat(self) -> float | None:
        """Tokens per target pass, or None before the first pass."""
        return self.tokens / self.passes if self.passes else None


def route(recipe: RouteRecipe, run: Run) -> RouteResult:
    """Route requests among a recipe's servers until a signal comes. Requests in flight at that time are still answered.

    Raises:
        UsageError: a policy that cannot route, or an address that cannot be listened on.
        EngineError, CheckpointError: a server that cannot be reached, or servers with different models.
    """
    dispatch.check(recipe.algo)
    recipe.check_servers()
    with Client(recipe.server) as client:
        client.compare_servers()
        if "target" in recipe.model_fields_set:
            client.compare(load_target_text(**recipe.target.described))
        engines = {one.url: f"{one.facts.engine} {one.facts.version}" for one in client.servers}
        kinds = {one.url: one.facts.engine for one in client.servers}
        run.target = client.servers[0].model
    assert recipe.listen is not None
    total, by_server = PassTotals(), {url: PassTotals() for url in kinds}
    decisions: deque[float] = deque(maxlen=MEDIAN_WINDOW)
    with server.listening(recipe.listen) as (place, address):
        run.annotate()
        (run.dir / REQUESTS).unlink(missing_ok=True)
        log = traffic_log.opened(run.dir / REQUESTS, MAX_LOG_BYTES)
        with progress.track(f"requests to {address}", unit="requests") as bar:

            def note(one: RoutedText) -> None:
                total.add(one)
                by_server[one.url].add(one)
                decisions.append(one.decide_us)
                log.info(json.dumps({"time": time.time()} | without_passwords(asdict(one))))
                bar.update(1)

            dispatcher = Dispatcher([*kinds], recipe.algo[0], recipe.policy, recipe.seeds[0], note)
            through = RunningEngines(kinds, Meter(run.target), dispatch=dispatcher)
            progress.log(f"requests that go to {address} are routed among {', '.join(kinds)}; Ctrl-C ends the run")
            started = time.monotonic()
            with suppress(KeyboardInterrupt):  # the normal end of such a run
                server.run(engines_app(through, LimitsRecipe()), place, server.stop_after(server.until_stopped))
            progress.interrupts.reset()
            seconds = time.monotonic() - started
    return RouteResult(
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
