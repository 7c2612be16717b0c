"""`specctl online`: drafters that learn along a stream of prompts, side by side with fixed drafters and baselines."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from specctl import progress
from specctl.adaptation.stream import PromptStream
from specctl.decoding import metrics
from specctl.decoding.target import Target, load_target
from specctl.drafters import checkpoint, pool
from specctl.measuring.contenders import VANILLA
from specctl.measuring.drafter_rows import with_agreement
from specctl.measuring.lossless import Losslessness
from specctl.measuring.online_contenders import ChunkRow, OnlineContenders
from specctl.measuring.online_journal import Journal
from specctl.measuring.online_rows import DomainRow, LearnerRow, OnlineResults, SeedRow
from specctl.measuring.records import Record, recipe_stamp, write_outputs
from specctl.recipe import OnlineRecipe
from specctl.recipe.learner import rule_and_family
from specctl.recipe.stream import parse_schedule
from specctl.runs import Run
from specctl.training.logging import Trackers

TRACKED = ("mat", "static_mat", "accept_rate", "loss", "learn_s", "tokens_per_s")
FEW_JUDGES = 10  # held-out texts that tell usual gains from chance
TOP_FIELDS = (
    *("algo", "family", "mat", "mat_first", "mat_last", "speedup", "speedup_with_training"),
    *("over_lookup_with_training", "unusable"),
)
"""Fields of the first learner's row that are repeated at the top of the document."""


@dataclass(frozen=True)
class OnlineResult:
    """The result document of `online`: the first learner's numbers, then all contenders side by side.

    Attributes:
        beside: the text drafter in the draft tree of every head.
        static: row of the same drafter without learning, or None if it was not asked for.
        per_chunk: rows of all learners on the first pass; chunks.jsonl has all passes.
        drafters: directory of each learner's drafter, in its state after the first pass.
        rounds_on: where the rounds of drafting contenders ran; device = CUDA graphs replayed them, which needs drafts
            of a fixed shape. Hybrids, pools and text drafters need rounds on the host, and a single such contender
            moves all drafting contenders there.
    """

    algo: str
    family: str | None
    beside: str | None
    chunks: int
    prompts: int
    mat: float | None
    mat_first: float | None
    mat_last: float | None
    speedup: float | None
    speedup_with_training: float | None
    over_lookup_with_training: float | None
    unusable: str | None
    static: LearnerRow | None
    per_chunk: list[ChunkRow]
    learners: list[LearnerRow]
    per_domain: list[DomainRow]
    per_seed: list[SeedRow]
    drafters: dict[str, str]
    lossless: Losslessness
    rejected: int
    rounds_on: Literal["host", "device"]


def online(recipe: OnlineRecipe, run: Run, *, target: Target | None = None) -> OnlineResult:
    """Answer the stream with all contenders, once per seed. Learners learn after every chunk.

    `target`: passed by callers that have loaded it already.

    Raises:
        DataError, CheckpointError, UsageError: prompts or drafters cannot be used, or the run cannot be resumed.
        Interrupted: a signal; the state after the last chunk is saved.
        SpecctlError: a learner keeps failing to learn, or the disk is full.
    """
    if note := few_judges(recipe):
        progress.log(note)
    target = target or load_target(**recipe.target.loading)
    weights = {str(path): checkpoint.fingerprint(path) for path in _starts(recipe)}
    journal = Journal(recipe, run, recipe_stamp(recipe) | {"target": target.identity, "drafters": weights})
    journal.start()
    with closing(Trackers(recipe.log, run, recipe)) as trackers:
        for seed, stream in journal.remaining_passes(target):
            _pass(recipe, target, seed, stream, journal, trackers)
    journal.begin(target)  # in case every pass was finished already
    records = journal.records()
    journal.finish(records)
    if recipe.save_outputs:
        with journal.writing():
            write_outputs(run.dir, records, target.tokenizer)
    drafters = {name: str(journal.drafter_dir(name, recipe.seeds[0])) for name in recipe.algo}
    return _result(recipe, records, journal.rows(), drafters, journal.rejected)


def few_judges(recipe: OnlineRecipe) -> str | None:
    """A note if the held-out texts of a chunk are too few to tell a usual gain from chance, or None.

    With SmolLM2-135M, 5 texts refused all updates after a change of domain, and 10 accepted them.
    """
    judges = round(recipe.learner.holdout * recipe.chunk)
    if not 0 < judges < FEW_JUDGES or all(rule_and_family(algo)[0] == "static" for algo in recipe.algo):
        return None
    return (
        f"only {judges} of {recipe.chunk} prompts judge an update, so most gains are refused as chance: use chunks of "
        f"{round(FEW_JUDGES / recipe.learner.holdout)} prompts or more"
    )


def _starts(recipe: OnlineRecipe) -> list[Path]:
    if recipe.pool is not None:
        return pool.find_pool(recipe.pool)
    return [recipe.initial_drafter(family) for family in recipe.families]


def _pass(
    recipe: OnlineRecipe, target: Target, seed: int, stream: PromptStream, journal: Journal, trackers: Trackers
) -> None:
    """Run one pass over the stream, and save the learned drafters after it."""
    stage = OnlineContenders(recipe, target, seed)
    mark = journal.mark
    try:
        if mark.stage is not None:
            with journal.restoring():
                name, known = mark.stage["target"], {name for name, _ in parse_schedule(recipe.target_schedule)}
                if known and name not in known:  # a saved state must not decide which model is loaded
                    raise ValueError(f"target {name!r:.100} is not in target_schedule")
                _use_target(recipe, stage, name)
                stage.restore(mark.stage, journal.tensors)
        journal.begin(target, stream.rejections)
        with journal.tracking(seed, stream) as bar:
            shown = recipe.algo[0]

            def done(count: int, records: Sequence[Record]) -> None:
                shown_texts = [record.decoded for record in records if record.drafter == shown]
                bar.update(count, chunk=stage.chunks + 1, mat=metrics.mat(shown_texts))

            for chunk in stream.chunks():
                _use_target(
                    recipe, stage, recipe.target_at(journal.answered), f"from prompt {journal.answered + 1} on, "
                )
                records = stage.answer(chunk, done)
                rows = stage.learn(chunk, records)
                records, _ = with_agreement(recipe, stage.target, records, {r.drafter for r in records} - {VANILLA})
                journal.keep(records, rows)
                trackers.log(journal.number, **_tracked(rows))
                journal.advance(stream, *stage.state())
            stage.finish()
    finally:
        stage.close()
    for name in recipe.algo:
        _save(recipe, stage, name, journal.drafter_dir(name, seed))
    journal.finish_pass()


def _tracked(rows: Sequence[ChunkRow]) -> dict[str, float]:
    """The numbers of a chunk that trackers show, by learner."""
    values = {f"{row.algo}/{name}": getattr(row, name) for row in rows for name in TRACKED}
    return {name: value for name, value in values.items() if value is not None}


def _use_target(recipe: OnlineRecipe, stage: OnlineContenders, name: str, since: str = "") -> None:
    if recipe.target_schedule and name != stage.target.name:
        progress.log(f"{since}the target is {name}")
        stage.retarget(load_target(**(recipe.target.loading | {"name": name})))


def _save(recipe: OnlineRecipe, stage: OnlineContenders, name: str, place: Path) -> None:
    """Write a learner's drafter in its state after the stream."""
    start = recipe.pool or recipe.initial_drafter(recipe.family_of(name))
    info: dict[str, Any] = {"learnt": f"{name}, {stage.chunks} chunks, from {start}", "mat": {}}
    if recipe.pool is None:
        domains = dict.fromkeys([*pool.domains_of(str(start)), *recipe.stream_domains])
        info = {**checkpoint.read_info(start), "domain": list(domains), **info}
    stage.learners[name].save(place, info)


def _result(
    recipe: OnlineRecipe, records: Sequence[Record], chunks: Sequence[ChunkRow], drafters: dict[str, str], rejected: int
) -> OnlineResult:
    passes = OnlineResults(recipe, records, chunks)
    others = [name for name in passes.by_name if name not in recipe.algo]
    learners = [passes.row(name) for name in [*recipe.algo, *others]]
    first = learners[0]
    static = next((row for row in learners if row.algo == passes.static_of(recipe.algo[0])), None)
    counts = Losslessness()
    for record in records:
        if record.agreement is not None:
            counts.add(record.agreement)
    domains = dict.fromkeys(record.domain for record in records)
    return OnlineResult(
        **{name: getattr(first, name) for name in TOP_FIELDS},
        beside=recipe.companion,
        chunks=len(chunks) // len(recipe.algo),
        prompts=sum(row.prompts for row in chunks if row.algo == first.algo),
        static=static,
        per_chunk=[row for row in chunks if row.seed == recipe.seeds[0]],
        learners=learners,
        per_domain=[passes.domain_row(name, domain) for domain in domains for name in passes.by_name],
        per_seed=[passes.seed_row(name, seed) for seed in recipe.seeds for name in recipe.algo],
        drafters=drafters,
        lossless=counts,
        rejected=rejected,
        rounds_on="device" if any(one.decoded.replays for one in records if one.drafter != VANILLA) else "host",
    )
