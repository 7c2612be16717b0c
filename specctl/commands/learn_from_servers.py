"""Learning from several running engines with a drafter each: a policy chooses the engine of a text, and the drafter of
that engine learns from it. All drafters learn in this process, in turns, with one copy of the target."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

from specctl import progress
from specctl.adaptation.online_drafter import OnlineDrafter
from specctl.adaptation.publication import VERSIONS, Publisher
from specctl.adaptation.served_learner import ServedLearner
from specctl.adaptation.traffic import ServedText, TrafficByServer
from specctl.commands.learn_from_server import LOG, check_target, count_chunk, make_exporter
from specctl.decoding.target import Target, load_target
from specctl.distillation import logs
from specctl.drafters import names
from specctl.engines.client import Client
from specctl.errors import Interrupted, SpecctlError, redacted
from specctl.gateway import proxy_process
from specctl.gateway.faults import where
from specctl.gateway.metrics import LearningCounts
from specctl.gateway.proxy_process import ProxyOptions
from specctl.measuring.resumable_run import REJECTED
from specctl.recipe import LearnFromServerRecipe
from specctl.recipe.server import ServerRecipe
from specctl.runs import Run

LEARNT_POOL = "drafters"
"""Directory of the learned drafters, which is a pool again."""


@dataclass
class LearningServer:
    """A server with the learner of its drafter.

    Attributes:
        start: directory of the drafter to start from.
        chunks: number of chunks that were learned from.
    """

    learner: ServedLearner
    start: Path
    counts: LearningCounts = field(default_factory=lambda: LearningCounts(on=True))
    chunks: int = 0

    def learn(self, texts: list[ServedText], passed_over: int, run: Run) -> None:
        """Learn from a chunk. A failure ends the learning of this drafter alone: clients must be served."""
        name = texts[0].server
        try:
            row = self.learner.learn(texts, self.chunks, passed_over)
            self.chunks += 1
            count_chunk(self.counts, row, self.learner.ended)
            run.metrics(server=name, **asdict(row))
        except (Interrupted, KeyboardInterrupt):
            raise
        except Exception as error:
            self.counts.on = False
            told = error.message if isinstance(error, SpecctlError) else where(error)
            progress.warn(f"learning of {name} has failed and ends; it goes on with its present drafter: {told}")

    def save(self) -> None:
        """Save the learned drafter. A failure is only reported: the other drafters are to be saved, too."""
        try:
            self.learner.save(self.start)
        except (SpecctlError, OSError) as error:
            progress.warn(f"the drafter learned from {self.start} is not saved: {error}")


def learn_from_servers(
    server: ServerRecipe,
    recipes: Mapping[str, LearnFromServerRecipe],
    run: Run,
    guard: ProxyOptions,
    learners: dict[str, LearningServer],
) -> None:
    """Forward requests to servers, and learn from their texts until a signal. At the end each drafter is saved in a
    directory of its own.

    Args:
        server: all servers.
        recipes: by address, for the servers with a drafter that learns.
        guard: protection of the proxy, with the policy that chooses servers.
        learners: filled with the learners, by address without a password.

    Raises:
        EngineError: a server is gone, or does not take the drafter that learning starts from.
        CheckpointError: a drafter cannot be used.
        Interrupted: a signal.
    """
    first = next(iter(recipes.values()))
    check_target(first)
    target = load_target(**first.target.loading)
    run.annotate(target=target.identity)
    with ExitStack() as stack:
        client = stack.enter_context(Client(server))
        client.check(target)
        folders = names.labels(str(one.init) for one in recipes.values())
        for url, recipe in recipes.items():
            folder = folders[str(recipe.init)] if len(folders) == len(recipes) else redacted(url).partition("://")[2]
            own = stack.enter_context(Client(recipe.server))
            learners[redacted(url)] = new_learner(recipe, own, target, run, names.place_of(folder))
        for one in learners.values():
            one.learner.begin(one.start)
        traffic = TrafficByServer(
            run.dir / LOG,
            target,
            first.target.chat_template_kwargs,
            logs.rejections_of(run.dir / REJECTED, first.data.max_rejected),
            {redacted(url): recipe.chunk for url, recipe in recipes.items()},
        )
        kinds = {one.url: one.facts.engine for one in client.servers}
        size = int(first.traffic.max_log_mb * 2**20)
        listen = first.traffic.listen
        assert listen is not None
        gateway = stack.enter_context(proxy_process.running(listen, kinds, traffic.path, size, guard, fresh=True))
        traffic.check = gateway.check
        gateway.show({name: one.counts for name, one in learners.items()})
        progress.log(f"requests that go to {gateway.address} are forwarded to the servers and learned from")
        try:
            for texts in traffic.chunks():
                server_name = texts[0].server
                if learners[server_name].counts.on:
                    learners[server_name].learn(texts, traffic.passed_over_of[server_name], run)
                    gateway.show({name: one.counts for name, one in learners.items()})
        finally:
            for one in learners.values():
                if one.counts.on:  # a failure may have left its weights half changed
                    one.save()


def new_learner(
    recipe: LearnFromServerRecipe, client: Client, target: Target, run: Run, folder: Path
) -> LearningServer:
    """Make the learner of a server's drafter, which is saved in `folder` of the pool of learned drafters."""
    (algo,), (seed,), start = recipe.algo, recipe.seeds, recipe.init
    assert start is not None
    options = recipe.publication
    publisher = Publisher(client, make_exporter(client), (options.dir or run.dir / VERSIONS) / folder, options)
    online_drafter = OnlineDrafter(recipe, algo, target, seed)
    return LearningServer(ServedLearner(recipe, online_drafter, publisher, run.dir / LEARNT_POOL / folder), start)
