"""`specctl learn-from-server`: a drafter that learns from the texts of running engines, and is published into them."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specctl import progress, regular_files
from specctl.adaptation.online_drafter import OnlineDrafter
from specctl.adaptation.publication import VERSIONS, Publisher
from specctl.adaptation.served_learner import ServedChunk, ServedLearner
from specctl.adaptation.stream import PromptStream
from specctl.adaptation.traffic import LogTraffic, RequestedTraffic, ServedText
from specctl.commands.export import export
from specctl.decoding import metrics
from specctl.decoding.models.loading import load_config
from specctl.decoding.models.supported import WITH_ENGINES, engine_only_reason
from specctl.decoding.target import Target, load_target
from specctl.distillation import logs
from specctl.distillation.rejections import Rejections
from specctl.drafters import checkpoint
from specctl.engines.client import Client
from specctl.errors import CheckpointError, UsageError, near_path
from specctl.gateway import proxy_process
from specctl.gateway.metrics import LearningCounts
from specctl.gateway.proxy_process import DEFAULT_OPTIONS, ProxyOptions
from specctl.measuring.measured import Measured, Parts, columns, relative
from specctl.measuring.records import recipe_stamp
from specctl.measuring.resumable_run import CHUNKS, REJECTED, ResumableRun
from specctl.recipe import ExportRecipe, LearnFromServerRecipe
from specctl.runs import Run

SHOWN = ("chunk", "mat", "loss", "learn_s")
LOG = "traffic.jsonl"
COUNTS = "counts.jsonl"  # one line per text: the counters of its drafts, and of the baseline's drafts
LEARNT_DIR = "learnt"  # directory of the current drafter, in the run directory

Traffic = RequestedTraffic | LogTraffic


@dataclass(frozen=True)
class LearnFromServerResult:
    """The result document of `learn-from-server`.

    Attributes:
        over_baseline: mat ÷ the mat of a server that keeps its drafter, on the same prompts, over all texts; the
            interval is over prompts.
        over_baseline_last: the same ratio over the last chunk.
        version: published version that the engines have.
        drafter: directory of the learned drafter.
        passed_over: texts that were skipped because learning was slower than the traffic.
        per_chunk: fields of `ServedChunk`.
    """

    algo: str
    family: str
    engines: list[str]
    chunks: int
    prompts: int
    mat: float | None
    mat_first: float | None
    mat_last: float | None
    over_baseline: float | None
    over_baseline_interval: metrics.Interval | None
    over_baseline_last: float | None
    published: int
    rolled_back: int
    restored: int
    version: str
    drafter: str
    learn_s: float
    passed_over: int
    rejected: int
    per_chunk: list[dict[str, Any]]


def learn_from_server(
    recipe: LearnFromServerRecipe,
    run: Run,
    *,
    target: Target | None = None,
    guard: ProxyOptions = DEFAULT_OPTIONS,
    counts: LearningCounts | None = None,
) -> LearnFromServerResult:
    """Learn from the texts that a recipe's servers write, and publish updates that prove themselves there.

    Args:
        target: passed by callers that have loaded it already. It runs over the texts to compute the learner's inputs.
        guard: protection of the proxy, if clients send their requests to one.
        counts: of the learning, kept up to date after every chunk.

    Raises:
        EngineError: a server is gone, or does not take a drafter.
        DataError, CheckpointError, UsageError: prompts or drafters cannot be used, or the run cannot be resumed.
        Interrupted: a signal; the state after the last chunk is saved.
        SpecctlError: updates keep doing harm, or the disk is full.
    """
    recipe.check_server()
    if target is None:
        check_target(recipe)
    # A copy, because its context length is cut to the engines' context length.
    target = copy.copy(target) if target is not None else load_target(**recipe.target.loading)
    (algo,), (seed,) = recipe.algo, recipe.seeds
    start = recipe.initial_drafter(recipe.family_of(algo))
    stamp = recipe_stamp(recipe) | {"target": target.identity, "drafters": {str(start): checkpoint.fingerprint(start)}}
    journal = ResumableRun(recipe, run, stamp, VERSIONS, SHOWN, (CHUNKS, COUNTS))
    journal.start()
    with Client(recipe.server) as client, Client(recipe.baseline_server) as other:  # which may have no URLs
        for one in (client, other):
            one.check(target)
        online_drafter = OnlineDrafter(recipe, algo, target, seed)
        options = recipe.publication
        publisher = Publisher(client, make_exporter(client), options.dir or run.dir / VERSIONS, options)
        rejections = logs.rejections_of(run.dir / REJECTED, recipe.data.max_rejected, hold=run.replaces_earlier)
        told = counts or LearningCounts()
        told.on = True
        clients = client, other
        with open_traffic(recipe, run, target, clients, rejections, guard) as (traffic, show):
            learner = ServedLearner(recipe, online_drafter, publisher, run.dir / LEARNT_DIR)
            if journal.mark.stage is not None:
                with journal.restoring():
                    traffic.resume(journal.mark.stream or {})
                    learner.restore(journal.mark.stage, journal.tensors)
            journal.begin(target, rejections)
            learner.begin(start)
            with journal.tracking(recipe.seeds[0], traffic) as bar:
                for chunk in traffic.chunks():
                    row = learner.learn(chunk, journal.number, traffic.passed_over)
                    bar.update(len(chunk), chunk=row.chunk, mat=row.mat)
                    count_chunk(told, row, learner.ended)
                    show({"": told})
                    with journal.writing():
                        journal.write_chunk([row])
                        journal.append(COUNTS, [counts_of(text) for text in chunk])
                    journal.advance(traffic, *learner.state())
            journal.save()
        engines = [f"{one.facts.engine} {one.facts.version}" for one in client.servers]
    rows, texts = list(journal.read(CHUNKS)), list(journal.read(COUNTS))
    return LearnFromServerResult(
        algo=recipe.algo[0],
        family=recipe.family_of(recipe.algo[0]),
        engines=engines,
        version=publisher.version,
        drafter=str(learner.save(start)),
        rejected=rejections.count,
        **_figures(rows, texts),
    )


def check_target(recipe: LearnFromServerRecipe) -> None:
    """Raise CheckpointError if only an engine can run the target: learning needs its forward over the texts."""
    reason = engine_only_reason(load_config(**recipe.target.described))
    if reason is not None:
        raise CheckpointError(
            f"learn-from-server runs target {recipe.target.name} over the servers' texts, but only an engine can run "
            f"it: {reason}",
            WITH_ENGINES,
        )


def make_exporter(client: Client) -> Callable[[Path, Path], None]:
    """Make the function that writes a drafter for the engine of the servers: (drafter directory, output directory).

    Raises UsageError if the servers run different engines.
    """
    engine, *others = {server.facts.engine for server in client.servers}
    if others:
        raise UsageError("the servers run different engines", "name only vLLM servers, or only SGLang servers")

    def write(drafter: Path, place: Path) -> None:
        export(ExportRecipe(drafter=drafter, to=engine, output_dir=place, overwrite=True))

    return write


def check_log(log: Path | None) -> None:
    """Raise UsageError if the log of requests, if one is named, does not exist."""
    if log is not None and not log.is_file():
        hint = f"{near_path(log)}name the file to which requests of the engines are logged"
        raise UsageError(f"log file {log} {regular_files.fault(log)}", hint)


@contextmanager
def open_traffic(
    recipe: LearnFromServerRecipe,
    run: Run,
    target: Target,
    clients: tuple[Client, Client],
    rejections: Rejections,
    guard: ProxyOptions,
) -> Iterator[tuple[Traffic, Callable[[Mapping[str, LearningCounts]], None]]]:
    """Context of the texts to learn from: prompts sent to the servers, a log, or a proxy that runs meanwhile. Also
    yields a function that shows counts on the proxy's page."""
    (client, other), options, source = clients, recipe.target.chat_template_kwargs, recipe.traffic
    if source.listen is None and source.log is None:
        stream = PromptStream.of_pass(recipe, target, rejections, recipe.seeds[0])
        yield RequestedTraffic(stream, recipe, client, other), _unseen
        return
    log = source.log or run.dir / LOG
    check_log(source.log)
    following = source.follow or source.listen is not None
    traffic = LogTraffic(log, target, options, rejections, recipe.chunk, following, recipe.data.limit)
    if source.listen is None:
        yield traffic, _unseen
        return
    servers = {server.url: server.facts.engine for server in client.servers}
    size, fresh = int(source.max_log_mb * 2**20), not recipe.resume
    with proxy_process.running(source.listen, servers, log, size, guard, fresh=fresh) as gateway:
        traffic.check = gateway.check
        gateway.show({"": LearningCounts(on=True)})
        progress.log(f"requests that go to {gateway.address} are forwarded to the servers and learned from")
        yield traffic, gateway.show


def count_chunk(counts: LearningCounts, row: ServedChunk, ended: bool) -> None:
    counts.on = not ended
    sent = row.publication
    counts.version = int((sent.version if sent and sent.verdict == "published" else row.version).lstrip("v") or 0)
    counts.lessons[row.status] += 1
    counts.rollbacks += row.ruling == "rollback" or (sent is not None and sent.verdict == "rolled back")
    counts.texts += row.texts
    counts.dropped = row.passed_over
    counts.learn_s += row.learn_s
    if row.mat is not None:
        last = counts.mat.get("present", row.mat)
        counts.mat = {"first": counts.mat.get("first", row.mat), "last": last, "present": row.mat}


def _unseen(counts: Mapping[str, LearningCounts]) -> None:
    """Ignore counts: there is no page to show them."""


def _figures(rows: list[dict[str, Any]], texts: list[dict[str, Any]]) -> dict[str, Any]:
    """Fields of the result that follow from the rows of the chunks and from the texts."""
    verdicts = [row["publication"]["verdict"] for row in rows if row["publication"] is not None]
    last = rows[-1] if rows else None
    known = [row["mat"] for row in rows if row["mat"] is not None]
    return dict(
        chunks=len(rows),
        prompts=sum(row["prompts"] for row in rows),
        mat=mat_of(texts),
        mat_first=known[0] if known else None,
        mat_last=known[-1] if known else None,
        **columns(over_baseline=over_baseline(texts)),
        over_baseline_last=last["mat"] / last["baseline_mat"]
        if last and last["mat"] and last["baseline_mat"]
        else None,
        published=verdicts.count("published"),
        rolled_back=verdicts.count("rolled back"),
        restored=sum(row["restored"] for row in rows),
        learn_s=sum(row["learn_s"] for row in rows),
        passed_over=last["passed_over"] if last else 0,
        per_chunk=rows,
    )


def counts_of(text: ServedText) -> dict[str, Any]:
    """A text's line of `counts.jsonl`: rounds and accepted tokens, null if the engine does not report them."""
    sides = {"": text.drafting, "baseline_": text.baseline}
    return {"id": text.id, "domain": text.domain} | {
        f"{side}{name}": getattr(drafting, name, None)
        for side, drafting in sides.items()
        for name in ("rounds", "accepted")
    }


def mat_of(texts: Sequence[Mapping[str, Any]]) -> float | None:
    """Tokens per round, bonus token included, over the lines of `counts.jsonl` with counters."""
    told = [text for text in texts if text["rounds"]]
    rounds = sum(text["rounds"] for text in told)
    return 1 + sum(text["accepted"] for text in told) / rounds if rounds else None


def over_baseline(texts: Sequence[Mapping[str, Any]]) -> Measured:
    """mat relative to a server that keeps its drafter, paired by prompt."""
    both = [text for text in texts if text["rounds"] and text["baseline_rounds"]]

    def parts(side: str) -> Parts:
        rounds = [text[f"{side}rounds"] for text in both]
        return [n + text[f"{side}accepted"] for n, text in zip(rounds, both, strict=True)], rounds

    return relative([text["id"] for text in both], parts(""), parts("baseline_"))
