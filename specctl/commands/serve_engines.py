"""`specctl serve --server`: running engines answer, and a policy chooses one of them for every text."""

import json
import os
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from logging import Logger
from statistics import median

from specctl import progress
from specctl.decoding.target_text import load_target_text
from specctl.engines.client import Client
from specctl.engines.server_choice import ServedByEngine
from specctl.gateway import server, traffic_log
from specctl.gateway.metrics import Meter
from specctl.gateway.running_engines import RunningEngines, engines_app
from specctl.recipe.serve import ServeRecipe
from specctl.runs import Run
from specctl.selection import dispatch
from specctl.selection.dispatch import Dispatcher

REQUESTS = "requests.jsonl"
"""File with one line per text: time, server, tokens and passes, but no words of the text."""
MAX_LOG_BYTES = 2**26  # limit of that file; at the limit it is rotated, with one old file kept
MEDIAN_WINDOW = 10_000  # latest decisions that the median is taken over


@dataclass(frozen=True)
class EngineWork:
    """Facts about the running engines of a gateway, by address, which the meter does not count.

    Attributes:
        engines: name and version of every engine.
        failures: requests that an engine did not answer; another engine answered them if there was one.
        broken: streams that an engine broke off after their first event.
        decide_us_p50: median microseconds of a choice, or None without a choice.
    """

    engines: dict[str, str]
    failures: dict[str, int]
    broken: dict[str, int]
    decide_us_p50: float | None


@dataclass
class TextLog:
    """Log of finished texts, without their words, and the latest times of a choice."""

    log: Logger
    decisions: deque[float] = field(default_factory=lambda: deque(maxlen=MEDIAN_WINDOW))

    def add(self, text: ServedByEngine) -> None:
        """Write the line of a text."""
        if text.decide_us is not None:
            self.decisions.append(text.decide_us)
        self.log.info(json.dumps({"time": time.time()} | vars(text)))


def onward_key(recipe: ServeRecipe, key: str | None) -> str | None:
    """API key for the engines, or None to pass the clients' keys on. These are for this gateway if it has one."""
    return None if key is None else os.environ.get(recipe.server.api_key_env, "")


def answer_by_engines(recipe: ServeRecipe, run: Run, key: str | None) -> tuple[Meter, EngineWork, float]:
    """Answer until a signal comes. Returns the counts, by address of the engine, and the seconds.

    `key`: API key that clients must send, or None.

    Raises:
        UsageError: a policy that cannot choose a server, or an address that cannot be listened on.
        EngineError, CheckpointError: a server that cannot be reached, or servers with different models.
    """
    chooses = len(recipe.server.urls) > 1
    if chooses:
        dispatch.check(recipe.choose)
    with Client(recipe.server) as client:
        client.compare_servers()
        if "target" in recipe.model_fields_set:
            client.compare(load_target_text(**recipe.target.text))
        kinds = {one.url: one.facts.engine for one in client.servers}
        versions = [f"{one.facts.engine} {one.facts.version}" for one in client.servers]
        run.target = recipe.model or client.servers[0].model
    with server.listening(recipe.listen) as (place, address):
        run.annotate()
        traffic_log.delete(run.dir / REQUESTS)
        meter, texts = Meter(str(run.target)), TextLog(traffic_log.opened(run.dir / REQUESTS, MAX_LOG_BYTES))
        chooser = Dispatcher([*kinds], recipe.choose, recipe.policy, recipe.seed) if chooses else None
        backend = RunningEngines(kinds, meter, dispatch=chooser, key=onward_key(recipe, key))
        backend.on_text = texts.add
        how = f", choosing by {recipe.choose}" if chooses else ""
        progress.log(f"serving {run.target} at {address} by {', '.join(kinds)}{how}; Ctrl-C ends it")
        began = time.monotonic()
        with suppress(KeyboardInterrupt):  # the normal end
            server.run(engines_app(backend, recipe.limits, key), place, server.stop_after(server.until_stopped))
        progress.interrupts.reset()
        seconds = time.monotonic() - began
        traffic_log.close(texts.log)
    for name in backend.names.values():
        meter.drafter(name)  # a row also for a server without a text
    work = EngineWork(
        dict(zip(backend.names.values(), versions, strict=True)),
        {backend.names[url]: count for url, count in backend.failures.items()},
        {backend.names[url]: count for url, count in backend.broken.items()},
        median(texts.decisions) if texts.decisions else None,
    )
    return meter, work, seconds
