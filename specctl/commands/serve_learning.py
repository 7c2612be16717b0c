"""`specctl serve --learn`: drafters of the own engine, or of running engines, learn from served texts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from specctl import progress
from specctl.adaptation.remote import start_process
from specctl.adaptation.stream_learner import Lesson
from specctl.commands.learn_from_server import LEARNT_DIR as SERVED_DIR
from specctl.commands.learn_from_server import learn_from_server
from specctl.commands.learn_from_servers import LEARNT_POOL, LearningServer, learn_from_servers
from specctl.drafters import checkpoint, names, pool
from specctl.errors import Interrupted
from specctl.gateway.engine_thread import EngineThread
from specctl.gateway.learning import BackgroundOnlineDrafter, HeadLearner, LearningPlan, ServingLearner
from specctl.gateway.metrics import GatewayWork, LearningCounts
from specctl.gateway.proxy_process import ProxyOptions
from specctl.recipe import LearnFromServerRecipe, OnlineRecipe, StreamRecipe
from specctl.recipe.learn_from_server import TrafficRecipe
from specctl.recipe.serve import ServeRecipe
from specctl.recipe.server import ServerRecipe
from specctl.runs import Run
from specctl.selection.arms import learners_of
from specctl.training.logging import Trackers

LEARNT_DIR = "drafter"


@dataclass(frozen=True)
class LearningSummary:
    """Learning of a drafter of a gateway, from its start to its end.

    Attributes:
        drafter: directory of the learned drafter, or None if no weights have changed.
        version: number of the weights that drafted at the end; 0 = the weights of the start.
        lessons: lessons that changed weights.
        mat_first, mat_last, mat: tokens per pass with the weights of the start, with the weights before the last ones,
            and with the last ones, which drafted at the end.
        learn_s, serve_s: seconds of lessons, and seconds in which texts were decoded.
        failed: whether learning has ended by an error.
    """

    drafter: str | None
    version: int
    lessons: int
    rollbacks: int
    texts: int
    mat_first: float | None
    mat_last: float | None
    mat: float | None
    learn_s: float
    serve_s: float
    failed: bool

    @classmethod
    def of(cls, counts: LearningCounts, place: Path) -> LearningSummary:
        """The summary of counts, for a drafter that is saved at `place`."""
        return cls(
            str(place) if checkpoint.is_drafter(place) and counts.lessons["updated"] else None,
            counts.version,
            counts.lessons["updated"],
            counts.rollbacks,
            counts.texts,
            counts.mat.get("first"),
            counts.mat.get("last"),
            counts.mat.get("present"),
            counts.learn_s,
            counts.serve_s,
            not counts.on,
        )


def online_recipe(recipe: ServeRecipe, start: Path, learners: int = 1) -> OnlineRecipe:
    """The recipe of `online` with which the drafter `start` learns; `learners` share the buffer's memory."""
    return OnlineRecipe(
        **shared_keys(recipe, start, learners),
        beside="none",
        baselines=[],
        asynchronous=True,
        learner_device=[recipe.learn.device],
    )


def shared_keys(recipe: ServeRecipe, start: Path, learners: int) -> dict[str, Any]:
    """Keys that `online` and `learn-from-server` share, for the drafter `start`; `learners` share the buffer."""
    learn = recipe.learn
    buffer = learn.buffer.model_copy(update={"max_mb": learn.buffer.max_mb / learners})
    return {
        "target": recipe.target,
        "drafting": recipe.drafting,
        "algo": [learn.algo],
        "arch": checkpoint.family(start),
        "init": start,
        "learner": learn.learner,
        "buffer": buffer,
        "stream": StreamRecipe(chunk=learn.chunk),
        "seeds": [learn.seed],
    }


@contextmanager
def learning_from(
    thread: EngineThread, recipe: ServeRecipe, run: Run, places: Mapping[str, str]
) -> Iterator[Callable[[], dict[str, LearningSummary]]]:
    """Let the drafters of a thread's engine that have weights learn during the block, which starts the thread. Yields
    the summaries by name of the drafter; the name of the only drafter is empty.

    `places`: path by name of the engine's drafters.

    Raises CheckpointError if a drafter cannot be used, UsageError if none has weights that learn, and SpecctlError if
    the learner's process cannot start.
    """
    engine, meter = thread.engine, thread.meter
    arms = {path: name for name, path in places.items()}
    starts = pool.learnable_parts(arms)
    titles = names.labels(map(str, starts)) if recipe.chooses else {str(start): "" for start in starts}
    trackers = Trackers(recipe.log, run, recipe)
    lessons = itertools.count(1)

    def report(name: str, lesson: Lesson, counts: LearningCounts) -> None:
        values = lesson_values(lesson, counts)
        of = {"drafter": name} if name else {}
        run.metrics(**values, **of, status=lesson.outcome.status, ruling=lesson.ruling)
        trackers.log(next(lessons), **{f"{name}/{key}" if name else key: value for key, value in values.items()})

    progress.log("starting the process that learns")
    members: dict[str, HeadLearner] = {}
    for start, paths in starts.items():
        name, made = titles[str(start)], online_recipe(recipe, start, len(starts))
        info = checkpoint.read_info(start) | {"learnt": f"{recipe.learn.algo} while serving, from {start}", "mat": {}}
        place = run.dir / LEARNT_POOL / names.place_of(name) if name else run.dir / LEARNT_DIR
        plan = LearningPlan(made.chunk, recipe.learn.longest, place, recipe.learn.save_s, info, name)
        drafter = BackgroundOnlineDrafter(made, recipe.learn.algo, engine.target, recipe.learn.seed, start)
        drafter.name = name
        members[name] = HeadLearner(drafter, [arms[path] for path in paths], plan, meter, partial(report, name))
    start_process([member.online_drafter for member in members.values()])
    thread.learner = learner = ServingLearner(members, engine.target)
    learner.start()
    try:
        yield lambda: {name: LearningSummary.of(one.counts, one.plan.place) for name, one in members.items()}
    finally:
        learner.stop()
        trackers.close()


def lesson_values(lesson: Lesson, counts: LearningCounts) -> dict[str, float]:
    """The numbers of a lesson that trackers show."""
    values = {
        "version": float(counts.version),
        "texts": float(lesson.texts),
        "learn_s": lesson.learn_s,
        "learn_share": counts.learn_s / counts.serve_s if counts.serve_s else 0.0,
        "rollbacks": float(counts.rollbacks),
    }
    if lesson.outcome.loss is not None:
        values["loss"] = lesson.outcome.loss
    return values | {f"mat_{name}": mat for name, mat in counts.mat.items()}


def learn_from_engines(
    recipe: ServeRecipe, run: Run, guard: ProxyOptions
) -> tuple[dict[str, LearningSummary], GatewayWork]:
    """Serve by running engines, and learn from their texts until SIGINT or SIGTERM: `learn-from-server` with a proxy.
    Returns the summaries by address of the server, or one under an empty name if all servers have one drafter; and the
    work of the proxy, which is empty if its process was killed.

    Raises the errors of `learn_from_server`.
    """
    learners: dict[str, LearningServer] = {}
    counts = LearningCounts()
    ended: list[GatewayWork] = []
    guard = replace(guard, on_end=ended.append)
    with suppress(Interrupted, KeyboardInterrupt):  # the normal end
        if recipe.chooses:
            guard = replace(guard, policy=(recipe.choose, recipe.policy, recipe.seed))
            learn_from_servers(recipe.server, server_recipes(recipe), run, guard, learners)
        else:
            learn_from_server(server_recipe(recipe, recipe.drafters[0], recipe.server), run, guard=guard, counts=counts)
    progress.interrupts.reset()
    work = ended[0] if ended else GatewayWork({})
    if recipe.chooses:
        return {name: LearningSummary.of(one.counts, one.learner.place) for name, one in learners.items()}, work
    return {"": LearningSummary.of(counts, run.dir / SERVED_DIR)}, work


def server_recipe(recipe: ServeRecipe, drafter: str, server: ServerRecipe, learners: int = 1) -> LearnFromServerRecipe:
    """The recipe of `learn-from-server` for servers with one drafter; `learners` share the buffer's memory."""
    learn = recipe.learn
    return LearnFromServerRecipe(
        **shared_keys(recipe, next(iter(pool.learnable_parts([drafter]))), learners),
        server=server,
        traffic=TrafficRecipe(listen=recipe.listen, max_log_mb=learn.max_log_mb),
        publication=learn.publication,
    )


def server_recipes(recipe: ServeRecipe) -> dict[str, LearnFromServerRecipe]:
    """The recipes of the servers with a drafter that can learn, by address."""
    learning = {drafter for drafters in learners_of(recipe).values() for drafter in drafters}
    places = [
        (url, drafter) for url, drafter in zip(recipe.server.urls, recipe.drafters, strict=True) if drafter in learning
    ]
    return {
        url: server_recipe(recipe, drafter, recipe.server.model_copy(update={"urls": [url]}), len(places))
        for url, drafter in places
    }
