"""`specctl serve --server`: running engines answer, and a policy chooses one of them for every text."""

import json
import os
import time
from contextlib import suppress
from dataclasses import replace

from specctl import progress
from specctl.decoding.target_text import load_target_text
from specctl.engines import vllm
from specctl.engines.client import Client
from specctl.gateway import server, traffic_log
from specctl.gateway.metrics import GatewayWork, Meter
from specctl.gateway.running_engines import RunningEngines, engines_app
from specctl.recipe.serve import ServeRecipe
from specctl.runs import Run
from specctl.selection import dispatch
from specctl.selection.dispatch import Dispatcher

REQUESTS = "requests.jsonl"
"""File with one line per text: time, server, tokens and passes, but no words of the text."""
MAX_LOG_BYTES = 2**26  # limit of that file; at the limit it is rotated, with one old file kept


def onward_key(recipe: ServeRecipe, key: str | None) -> str | None:
    """API key for the engines, or None to pass the clients' keys on. These are for this gateway if it has one."""
    return None if key is None else os.environ.get(recipe.server.api_key_env, "")


def answer_by_engines(recipe: ServeRecipe, run: Run, key: str | None) -> tuple[GatewayWork, float]:
    """Answer until a signal comes. Returns the work of the engines, and the seconds.

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
        models = {
            one.url: {name: {"id": name, "object": "model"} for name in one.facts.models}
            for one in client.servers
            if one.facts.engine == vllm.NAME  # the others answer to every name
        }
        versions = [f"{one.facts.engine} {one.facts.version}" for one in client.servers]
        run.target = recipe.model or client.servers[0].model
    with server.listening(recipe.listen) as (place, address):
        run.annotate()
        traffic_log.delete(run.dir / REQUESTS)
        meter, log = Meter(str(run.target)), traffic_log.opened(run.dir / REQUESTS, MAX_LOG_BYTES)
        chooser = Dispatcher([*kinds], recipe.choose, recipe.policy, recipe.seed) if chooses else None
        backend = RunningEngines(kinds, meter, dispatch=chooser, key=onward_key(recipe, key))
        backend.models = models
        backend.on_text = lambda text: log.info(json.dumps({"time": time.time()} | text))
        how = f", choosing by {recipe.choose}" if chooses else ""
        progress.log(f"serving {run.target} at {address} by {', '.join(kinds)}{how}; Ctrl-C ends it")
        began = time.monotonic()
        with suppress(KeyboardInterrupt):  # the normal end
            server.run(engines_app(backend, recipe.limits, key), place, server.stop_after(server.until_stopped))
        progress.interrupts.reset()
        seconds = time.monotonic() - began
        traffic_log.close(log)
    work = backend.work()
    return replace(work, engines=dict(zip(work.engines, versions, strict=True))), seconds
