"""`specctl serve`: answer requests in OpenAI's protocol with the target's own engine."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import uvicorn

from specctl import progress
from specctl.commands.serve_learning import LearningSummary, learn_from_engines, learning_from
from specctl.decoding.controllers import Fixed
from specctl.decoding.engine import Engine
from specctl.decoding.engine_options import EngineOptions
from specctl.decoding.offline import decode
from specctl.decoding.protocols import Drafter
from specctl.decoding.records import Request
from specctl.decoding.sampling import GREEDY
from specctl.decoding.target import Target, load_target
from specctl.decoding.target_text import load_target_text
from specctl.drafters import names, pool
from specctl.engines.client import Client
from specctl.errors import SpecctlError, UsageError
from specctl.gateway import server
from specctl.gateway.app import make_app
from specctl.gateway.choosing import controller_for
from specctl.gateway.engine_thread import EngineThread
from specctl.gateway.faults import where
from specctl.gateway.metrics import Meter
from specctl.gateway.own_engine import Offer, OwnEngine
from specctl.gateway.proxy_process import ProxyOptions
from specctl.gateway.running_engines import RunningEngines, engines_app, engines_of
from specctl.recipe.serve import ServeRecipe
from specctl.runs import Run
from specctl.selection import dispatch
from specctl.selection.arms import load_pool, named, pool_paths, trained_on
from specctl.selection.dispatch import Dispatcher

PLAIN = "no draft"
WARM_TOKENS = 8
LOOPBACK = ("127.", "[::1]", "localhost")


@dataclass(frozen=True)
class ServedDrafter:
    """Work of one drafter, or of one server, which then has its address in the place of the name.

    Attributes:
        texts: texts of which it drafted most rounds, or that the server wrote.
        mat: mean tokens per pass of the target, or None without a round.
    """

    drafter: str
    texts: int
    rounds: int
    tokens: int
    accepted: int
    mat: float | None


@dataclass(frozen=True)
class ServeResult:
    """The result document of `serve`. `choose` is None if one drafter drafts everything, `learning` if none learns."""

    model: str
    choose: str | None
    tokens: int
    mat: float | None
    seconds: float
    drafters: list[ServedDrafter]
    learning: LearningSummary | None = None


def serve(recipe: ServeRecipe, run: Run, *, target: Target | None = None) -> ServeResult:
    """Serve until SIGINT or SIGTERM. Requests in flight at that time are still answered, within `limits.stop_s`.

    `target`: passed by callers that have loaded it already.

    Raises:
        UsageError: the address cannot be listened on, or the policy cannot choose.
        CheckpointError: target or drafters cannot be used.
        SpecctlError: the engine has failed.
    """
    if recipe.server.urls:
        return serve_engines(recipe, run)
    key = api_key(recipe)
    if recipe.learn.enabled:
        pool.learnable_part(recipe.drafters[0])
    with ExitStack() as stack:
        place, address = stack.enter_context(server.listening(recipe.listen))
        target = target or load_target(**recipe.target.loading)
        run.annotate(target=target.identity)
        name = recipe.model or model_name(target.name)
        meter = Meter(name)
        drafters, places = load_drafters(recipe, target)
        warm_up(target, drafters)
        thread = make_thread(recipe, target, drafters, places, meter)
        backend = OwnEngine(
            thread,
            target,
            [name],
            Offer(
                recipe.waiting,
                recipe.max_new_tokens,
                has_logprobs=target.device.type == "cpu" or recipe.chooses,
                template_kwargs=recipe.target.chat_template_kwargs,
            ),
        )
        backend.warm_up()
        learning = stack.enter_context(learning_from(thread, recipe, run)) if recipe.learn.enabled else None
        failures: list[BaseException] = []

        def watch(http: uvicorn.Server) -> None:
            server.stop_after(server.until_stopped)(http)

            def died(error: BaseException) -> None:
                failures.append(error)
                backend.died()
                http.should_exit = True

            thread.on_death = died
            thread.start()

        how = f"choosing by {recipe.choose} among" if recipe.chooses else "drafting with"
        how = f"learning, {how}" if recipe.learn.enabled else how
        progress.log(f"serving {name} at {address}, {how} {', '.join(drafters) or 'no drafter'}; Ctrl-C ends it")
        began = time.monotonic()
        with suppress(KeyboardInterrupt):  # the normal end
            server.run(make_app(backend, recipe.limits, key), place, watch)
        progress.interrupts.reset()
        thread.stop()
        if failures:
            raise SpecctlError(f"the engine has failed: {where(failures[0])}", "start it again") from failures[0]
    result = result_of(recipe, meter, time.monotonic() - began)
    return result if learning is None else replace(result, learning=learning())


def serve_engines(recipe: ServeRecipe, run: Run) -> ServeResult:
    """Serve by running engines. Raises EngineError, CheckpointError, UsageError as `route` does."""
    key = api_key(recipe)
    # Clients' keys are for this gateway if it has one, otherwise for the engines.
    onward = None if key is None else os.environ.get(recipe.server.api_key_env, "")
    if recipe.learn.enabled:
        began = time.monotonic()
        counts, learnt = learn_from_engines(recipe, run, ProxyOptions(recipe.limits, key, onward))
        result = result_of(recipe, Meter(str(run.target)), time.monotonic() - began)
        return replace(result, learning=LearningSummary.of(counts, learnt))
    chooses = len(recipe.server.urls) > 1
    if chooses:
        dispatch.check([recipe.choose])
    with Client(recipe.server) as client:
        client.compare_servers()
        if "target" in recipe.model_fields_set:
            client.compare(load_target_text(**recipe.target.described))
        kinds = engines_of(client)
        run.target = recipe.model or client.servers[0].model
    with server.listening(recipe.listen) as (place, address):
        run.annotate()
        meter = Meter(str(run.target))
        chooser = Dispatcher([*kinds], recipe.choose, recipe.policy, 0, lambda text: None) if chooses else None
        backend = RunningEngines(kinds, meter, dispatch=chooser, key=onward)
        how = f", choosing by {recipe.choose}" if chooses else ""
        progress.log(f"serving {run.target} at {address} by {', '.join(kinds)}{how}; Ctrl-C ends it")
        began = time.monotonic()
        with suppress(KeyboardInterrupt):  # the normal end
            server.run(engines_app(backend, recipe.limits, key), place, server.stop_after(server.until_stopped))
        progress.interrupts.reset()
    return result_of(recipe, meter, time.monotonic() - began)


def api_key(recipe: ServeRecipe) -> str | None:
    """The key that clients must send, from the environment. UsageError if it is empty."""
    key = os.environ.get(recipe.key_env)
    if key is not None and not key.strip():
        raise UsageError(f"{recipe.key_env} is empty", "give it a value, or unset it")
    if key is None and not recipe.listen.startswith(LOOPBACK):
        progress.warn(f"anybody who reaches {recipe.listen} can use it: set {recipe.key_env}, and put TLS in front")
    return key


def model_name(target: str) -> str:
    """Name of a target for clients: a hub id, or the last part of a path."""
    return Path(target).name if os.path.exists(target) else target


def load_drafters(recipe: ServeRecipe, target: Target) -> tuple[dict[str, Drafter], dict[str, str]]:
    """Load the drafters, and name the directory of each. Raises CheckpointError."""
    if recipe.chooses:
        paths = pool_paths(recipe)
        drafters = load_pool(recipe, target, paths)
        return drafters, {name: path for path, name in named(paths).items() if name in drafters}
    places = {names.name_of(path): path for path in recipe.drafters}
    return {name: pool.load_drafter(path, target, recipe.drafting) for name, path in places.items()}, places


def warm_up(target: Target, drafters: Mapping[str, Drafter]) -> None:
    """Decode a few tokens with every drafter: first calls compile code, and take seconds."""
    prompt = [min(target.eos_ids, default=0)] * 4
    for drafter in drafters.values() or (None,):
        decode(Engine(target, Fixed.of(drafter)), [Request(prompt, GREEDY, WARM_TOKENS)])


def make_thread(
    recipe: ServeRecipe, target: Target, drafters: dict[str, Drafter], places: dict[str, str], meter: Meter
) -> EngineThread:
    """Make the thread with the engine of a recipe. UsageError for a policy that cannot choose."""
    learns = recipe.learn.enabled and not recipe.learn.buffer.reruns
    options = EngineOptions(slots=recipe.slots, keeps_hidden=learns)
    if not recipe.chooses:
        name, drafter = next(iter(drafters.items()), (PLAIN, None))
        return EngineThread(Engine(target, Fixed.of(drafter), options), meter, name)
    kinds = trained_on(places, target, drafters)
    controller = controller_for(target, drafters, kinds, recipe.choose, recipe.policy, recipe.game)
    thread = EngineThread(Engine(target, controller, options), meter, None)
    controller.report_to(thread.note_round, lambda: meter.fault("policy"))
    return thread


def result_of(recipe: ServeRecipe, meter: Meter, seconds: float) -> ServeResult:
    """The result document."""
    rows = [
        ServedDrafter(name, one.texts, one.rounds, one.tokens, one.accepted, one.mat)
        for name, one in meter.drafters.items()
    ]
    rounds, tokens = sum(row.rounds for row in rows), sum(row.tokens for row in rows)
    choose = recipe.choose if recipe.chooses or len(recipe.server.urls) > 1 else None
    return ServeResult(meter.model, choose, tokens, tokens / rounds if rounds else None, seconds, rows)
