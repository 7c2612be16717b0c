"""`specctl serve --learn`: drafters of the own engine, or of running engines, learn from served texts."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from specctl import progress
from specctl.adaptation.remote import start_process
from specctl.adaptation.stream_learner import Lesson
from specctl.commands.learn_from_server import LEARNT_DIR as SERVED_DIR
from specctl.commands.learn_from_server import learn_from_server
from specctl.drafters import checkpoint, names, pool
from specctl.errors import Interrupted
from specctl.gateway.engine_thread import EngineThread
from specctl.gateway.learning import (
    BackgroundOnlineDrafter,
    LearningPlan,
    LiveLearner,
    PoolLearner,
    PoolMember,
    ServingLearner,
)
from specctl.gateway.metrics import LearningCounts
from specctl.gateway.proxy_process import ProxyOptions
from specctl.recipe import LearnFromServerRecipe, OnlineRecipe, StreamRecipe
from specctl.recipe.learn_from_server import TrafficRecipe
from specctl.recipe.serve import ServeRecipe
from specctl.runs import Run
from specctl.training.logging import Trackers

LEARNT_DIR = "drafter"
LEARNT_POOL = "drafters"
"""Directory of the learnt drafters of a pool, which is a pool again."""


@dataclass(frozen=True)
class LearningSummary:
    """Learning of a drafter of a gateway, from its start to its end.

    Attributes:
        drafter: directory of the learnt drafter, or None if no weights have changed.
        version: number of the weights that drafted at the end; 0 = the weights of the start.
        lessons: lessons that changed weights.
        mat_first, mat: tokens per pass with the weights of the start, and with the weights of the end.
        learn_s, serve_s: seconds of lessons, and seconds in which texts were decoded.
        failed: whether learning has ended by an error.
    """

    drafter: str | None
    version: int
    lessons: int
    rollbacks: int
    texts: int
    mat_first: float | None
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
            counts.mat.get("present"),
            counts.learn_s,
            counts.serve_s,
            not counts.on,
        )


def online_recipe(recipe: ServeRecipe, start: Path, learners: int = 1) -> OnlineRecipe:
    """The recipe of `online` with which the drafter `start` learns; `learners` share the buffer's memory."""
    keys = shared_keys(recipe, start)
    buffer = recipe.learn.buffer
    return OnlineRecipe(
        **keys | {"buffer": buffer.model_copy(update={"max_mb": buffer.max_mb / learners})},
        beside="none",
        baselines=[],
        asynchronous=True,
        learner_device=[recipe.learn.device],
    )


def shared_keys(recipe: ServeRecipe, start: Path) -> dict[str, Any]:
    """Keys that `online` and `learn-from-server` share, for the drafter `start`."""
    learn = recipe.learn
    return {
        "target": recipe.target,
        "drafting": recipe.drafting,
        "algo": [learn.algo],
        "arch": checkpoint.family(start),
        "init": start,
        "learner": learn.learner,
        "buffer": learn.buffer,
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
    drafters: dict[str, BackgroundOnlineDrafter] = {}
    plans: dict[str, LearningPlan] = {}
    for start in starts:
        name, made = titles[str(start)], online_recipe(recipe, start, len(starts))
        info = checkpoint.read_info(start) | {"learnt": f"{recipe.learn.algo} while serving, from {start}", "mat": {}}
        place = run.dir / LEARNT_POOL / folder_of(name) if name else run.dir / LEARNT_DIR
        plans[name] = LearningPlan(made.chunk, recipe.learn.longest, place, recipe.learn.save_s, info, name)
        drafters[name] = BackgroundOnlineDrafter(made, recipe.learn.algo, engine.target, recipe.learn.seed, start)
        drafters[name].name = name
    start_process([*drafters.values()])
    learner: ServingLearner
    if recipe.chooses:
        members = {titles[str(start)]: [arms[path] for path in paths] for start, paths in starts.items()}
        learner = PoolLearner(
            {
                name: PoolMember(drafters[name], own, plans[name], meter, partial(report, name))
                for name, own in members.items()
            },
            engine.target,
        )
    else:
        drafter = engine.controller.drafter  # type: ignore[attr-defined]
        learner = LiveLearner(drafters[""], drafter, plans[""], meter, partial(report, ""))
    thread.learner = learner
    learner.start()
    try:
        yield lambda: {name: LearningSummary.of(counts, plans[name].place) for name, counts in meter.learning.items()}
    finally:
        learner.stop()
        trackers.close()


def folder_of(name: str) -> str:
    """Name of a drafter's directory: some drafters are named by their path, and some by an address."""
    return re.sub(r"[^\w.+-]+", "-", name).strip("-.")


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


def learn_from_engines(recipe: ServeRecipe, run: Run, guard: ProxyOptions) -> dict[str, LearningSummary]:
    """Serve by running engines, and learn from their texts until SIGINT or SIGTERM: `learn-from-server` with a proxy.
    Returns the summary under an empty name.

    Raises the errors of `learn_from_server`.
    """
    learn, start = recipe.learn, pool.learnable_part(recipe.drafters[0])
    made = LearnFromServerRecipe(
        **shared_keys(recipe, start),
        server=recipe.server,
        traffic=TrafficRecipe(listen=recipe.listen, max_log_mb=learn.max_log_mb),
        publication=learn.publication,
    )
    counts = LearningCounts()
    with suppress(Interrupted, KeyboardInterrupt):  # the normal end
        learn_from_server(made, run, guard=guard, counts=counts)
    progress.interrupts.reset()
    return {"": LearningSummary.of(counts, run.dir / SERVED_DIR)}
