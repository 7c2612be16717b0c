"""`specctl serve`: answer requests in OpenAI's protocol with the target's own engine."""

import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

import uvicorn

from specctl import progress
from specctl.commands.serve_engines import answer_by_engines, onward_key
from specctl.commands.serve_learning import LearningSummary, learn_from_engines, learning_from
from specctl.decoding.controllers import Fixed
from specctl.decoding.engine import Engine, EngineOptions
from specctl.decoding.offline import decode
from specctl.decoding.prefix_cache import cpu_prefix_cache
from specctl.decoding.protocols import Drafter
from specctl.decoding.records import Request
from specctl.decoding.sampling import GREEDY
from specctl.decoding.target import Target, load_target
from specctl.drafters import names, pool
from specctl.drafters.hybrid.drafter import Hybrid
from specctl.drafters.hybrid.gate import GateStatistics
from specctl.drafters.names import labels
from specctl.errors import SpecctlError, UsageError
from specctl.gateway import server
from specctl.gateway.app import make_app
from specctl.gateway.choosing import controller_for
from specctl.gateway.engine_thread import EngineThread
from specctl.gateway.faults import where
from specctl.gateway.metrics import GatewayWork, Meter
from specctl.gateway.own_engine import OwnEngine
from specctl.gateway.proxy_process import ProxyOptions
from specctl.recipe.serve import ServeRecipe
from specctl.runs import Run
from specctl.selection.arms import learners_of, load_pool, pool_paths, trained_on
from specctl.selection.certificate import Certificate, explanation, serve_notes

PLAIN = "no draft"
WARM_TOKENS = 8
LOOPBACK = ("127.", "[::1]", "localhost")


@dataclass(frozen=True)
class ServedDrafter:
    """Work of one drafter, or of one server, which then has its address in the place of the name.

    Attributes:
        texts: texts of which it drafted most rounds, or that the server wrote.
        mat: mean tokens per pass of the target, or None without a round.
        share: fraction of all texts, or None without a text.
        engine: name of the engine, with its version unless a drafter learns; None for a drafter.
        failures: requests that this engine did not answer; another engine answered them if there was one.
        broken: streams that this engine broke off after their first event.
    """

    drafter: str
    texts: int
    rounds: int
    tokens: int
    accepted: int
    mat: float | None
    share: float | None = None
    engine: str | None = None
    failures: int | None = None
    broken: int | None = None


@dataclass(frozen=True)
class ServeResult:
    """The result document of `serve`. `choose` is None if one drafter drafts everything, `learning` if it does not
    learn. `learning_by_drafter` has the drafters that learn where a policy chooses.

    It has no regret, because the yield of the other servers on a text is unknown. `decide_us_p50`: median microseconds
    to choose a server, or None if no server was chosen. `speed_at_least`: lower bound of the speed over plain decoding
    where a policy chose, and `at_least` its meaning.
    """

    model: str
    choose: str | None
    tokens: int
    mat: float | None
    seconds: float
    drafters: list[ServedDrafter]
    requests: int = 0  # finished texts
    decide_us_p50: float | None = None
    learning: LearningSummary | None = None
    learning_by_drafter: dict[str, LearningSummary] = field(default_factory=dict)
    speed_at_least: float | None = None
    at_least: str | None = None


def serve(recipe: ServeRecipe, run: Run, *, target: Target | None = None) -> ServeResult:
    """Serve until SIGINT or SIGTERM. Requests in flight at that time are still answered, within `limits.stop_s`.

    `target`: passed by callers that have loaded it already.

    Raises:
        UsageError: the address cannot be listened on, or the policy cannot choose.
        CheckpointError: target or drafters cannot be used.
        SpecctlError: the engine has failed.
    """
    key = api_key(recipe)
    if recipe.learn.enabled:
        learners_of(recipe)
    if recipe.server.urls:
        return serve_by_engines(recipe, run, key)
    with ExitStack() as stack:
        place, address = stack.enter_context(server.listening(recipe.listen))
        target = target or load_target(**recipe.target.loading)
        run.annotate(target=target.identity)
        name = recipe.model or model_name(target.name)
        meter = Meter(name)
        drafters, places = load_drafters(recipe, target)
        warm_up(target, drafters)
        thread = make_thread(recipe, target, drafters, places, meter)
        backend = OwnEngine(thread, target, name, recipe)
        backend.warm_up()
        learning: Callable[[], dict[str, LearningSummary]] = dict
        if recipe.learn.enabled:
            learning = stack.enter_context(learning_from(thread, recipe, run, places))
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
    work = GatewayWork(meter.drafters, meter.certificate)
    return result_of(recipe, name, work, time.monotonic() - began, learning())


def serve_by_engines(recipe: ServeRecipe, run: Run, key: str | None) -> ServeResult:
    """Let running engines answer, and with `learn` a drafter learn from their texts.

    Raises UsageError, EngineError, CheckpointError as `answer_by_engines` and `learn_from_engines` do.
    """
    if not recipe.learn.enabled:
        work, seconds = answer_by_engines(recipe, run, key)
        return result_of(recipe, str(run.target), work, seconds, {})
    began = time.monotonic()
    found, work = learn_from_engines(recipe, run, ProxyOptions(recipe.limits, key, onward_key(recipe, key)))
    return result_of(recipe, str(run.target), work, time.monotonic() - began, found)


def api_key(recipe: ServeRecipe) -> str | None:
    """The key that clients must send, from the environment. UsageError if no client can send it."""
    key = os.environ.get(recipe.key_env)
    if key is not None and not key.strip():
        raise UsageError(f"{recipe.key_env} is empty", "give it a value, or unset it")
    if key is not None and (not key.isascii() or key.split() != [key]):
        raise UsageError(
            f"{recipe.key_env} has spaces, line ends or letters beyond ASCII", "no client can send such a key"
        )
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
        places = {name: path for path, name in labels(paths).items() if name in drafters}
    else:
        places = {names.name_of(path): path for path in recipe.drafters}
        drafters = {name: pool.load_drafter(path, target, recipe.drafting) for name, path in places.items()}
    for drafter in drafters.values():
        if isinstance(drafter, Hybrid):
            drafter.past = GateStatistics(drafter.quality)  # requests are one stream
    return drafters, places


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
    meter.prefix_cache = cpu_prefix_cache(target, int(recipe.prefix_cache_mb * 2**20))
    options = EngineOptions(slots=recipe.slots, keeps_hidden=learns, prefix_cache=meter.prefix_cache)
    if not recipe.chooses:
        name, drafter = next(iter(drafters.items()), (PLAIN, None))
        return EngineThread(Engine(target, Fixed.of(drafter), options), meter, name)
    kinds = trained_on(places, target)
    controller = controller_for(target, drafters, kinds, recipe)
    thread = EngineThread(Engine(target, controller, options), meter, None)
    meter.certificate = Certificate()
    controller.report_to(thread.note_round, lambda: meter.fault("policy"), meter.certify)
    return thread


def result_of(
    recipe: ServeRecipe, model: str, work: GatewayWork, seconds: float, learnt: Mapping[str, LearningSummary]
) -> ServeResult:
    """The result document. `learnt`: by name of the drafter; the name of the only drafter is empty."""
    texts = sum(one.texts for one in work.drafters.values())
    rows = [
        ServedDrafter(
            name,
            one.texts,
            one.rounds,
            one.tokens,
            one.accepted,
            one.mat,
            one.texts / texts if texts else None,
            work.engines.get(name),
            work.failures.get(name),
            work.broken.get(name),
        )
        for name, one in work.drafters.items()
    ]
    rounds, tokens = sum(row.rounds for row in rows), sum(row.tokens for row in rows)
    by_servers = len(recipe.server.urls) > 1 and not recipe.learn.enabled  # they may all learn one drafter
    made = work.certificate
    notes = serve_notes(by_passes=bool(work.engines))
    return ServeResult(
        model,
        recipe.choose if recipe.chooses or by_servers else None,
        tokens,
        tokens / rounds if rounds else None,
        seconds,
        rows,
        texts,
        work.decide_us_p50,
        learnt.get(""),
        {name: one for name, one in learnt.items() if name},
        speed_at_least=None if made is None else made.at_least,
        at_least=None if made is None else explanation(made.texts, *notes, most=made.most),
    )
