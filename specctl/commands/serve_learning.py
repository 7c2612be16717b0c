"""`specctl serve --learn`: the drafter of the own engine, or of running engines, learns from served texts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specctl import progress
from specctl.adaptation.stream_learner import Lesson
from specctl.commands.learn_from_server import LEARNT_DIR as SERVED_DIR
from specctl.commands.learn_from_server import learn_from_server
from specctl.drafters import checkpoint, pool
from specctl.errors import Interrupted
from specctl.gateway.engine_thread import EngineThread
from specctl.gateway.learning import BackgroundOnlineDrafter, LearningPlan, LiveLearner
from specctl.gateway.metrics import LearningCounts
from specctl.gateway.proxy_process import ProxyOptions
from specctl.recipe import LearnFromServerRecipe, OnlineRecipe, StreamRecipe
from specctl.recipe.learn_from_server import TrafficRecipe
from specctl.recipe.serve import ServeRecipe
from specctl.runs import Run
from specctl.training.logging import Trackers

LEARNT_DIR = "drafter"


@dataclass(frozen=True)
class LearningSummary:
    """Learning of a gateway's drafter, from its start to its end.

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


def online_recipe(recipe: ServeRecipe, start: Path) -> OnlineRecipe:
    """The recipe of `online` with which the drafter `start` learns."""
    return OnlineRecipe(
        **shared_keys(recipe, start),
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
def learning_from(thread: EngineThread, recipe: ServeRecipe, run: Run) -> Iterator[Callable[[], LearningSummary]]:
    """Let the drafter of a thread's engine learn during the block, which starts the thread. Yields the summary.

    Raises CheckpointError if the drafter cannot be used, and SpecctlError if the learner's process cannot start.
    """
    engine = thread.engine
    start = pool.learnable_part(recipe.drafters[0])
    made, place = online_recipe(recipe, start), run.dir / LEARNT_DIR
    info = checkpoint.read_info(start) | {"learnt": f"{recipe.learn.algo} while serving, from {start}", "mat": {}}
    drafter = engine.controller.drafter  # type: ignore[attr-defined]
    plan = LearningPlan(made.chunk, recipe.learn.longest, place, recipe.learn.save_s, info)

    def report(lesson: Lesson, counts: LearningCounts) -> None:
        values = lesson_values(lesson, counts)
        run.metrics(**values, status=lesson.outcome.status, ruling=lesson.ruling)
        trackers.log(sum(counts.lessons.values()), **values)

    progress.log("starting the process that learns")
    online_drafter = BackgroundOnlineDrafter(made, recipe.learn.algo, engine.target, recipe.learn.seed, start)
    trackers = Trackers(recipe.log, run, recipe)
    learner = thread.learner = LiveLearner(online_drafter, drafter, plan, thread.meter, report)
    learner.start()
    try:
        yield lambda: LearningSummary.of(learner.counts, place)
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


def learn_from_engines(recipe: ServeRecipe, run: Run, guard: ProxyOptions) -> tuple[LearningCounts, Path]:
    """Serve by running engines, and learn from their texts until SIGINT or SIGTERM: `learn-from-server` with a proxy.
    Returns the counts, and the directory of the learnt drafter.

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
    return counts, run.dir / SERVED_DIR
