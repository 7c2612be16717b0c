"""`specctl select`: policies that choose among the drafters of a pool, side by side on one stream of prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from specctl import progress, regular_files
from specctl.commands.select_router import router_of, save_router
from specctl.commands.select_tables import PoolSize, Replayed, record_table, replay_table
from specctl.decoding.protocols import Drafter
from specctl.decoding.target import Target, load_target
from specctl.distillation.prompts import Rejections, read_domains
from specctl.drafters import pool
from specctl.measuring.contenders import VANILLA, prepare
from specctl.measuring.drafter_rows import Row, drafter_row, records_by_question, with_agreement
from specctl.measuring.lossless import Losslessness
from specctl.measuring.policy_rows import ArmReward, PolicyRow, StreamAnswers
from specctl.measuring.records import Record, fingerprints, write_outputs, write_records
from specctl.measuring.select_contenders import SelectContenders, companion_of, make_sessions
from specctl.recipe import SelectRecipe
from specctl.runs import Run
from specctl.selection.arms import load_pool, named, pool_paths, trained_on
from specctl.selection.game.rules import overridden_options
from specctl.selection.recorded import hindsight
from specctl.selection.recorded.recording import check_free
from specctl.selection.routing.labels import RouterReport

if TYPE_CHECKING:
    from specctl.commands.select_served import ServedSelectResult

ROUNDS = "rounds.jsonl"
TOP_FIELDS = (
    "algo",
    "rounds",
    "mat",
    "tokens_per_s",
    "regret",
    "best_arm_ratio",
    "pulls",
    "decide_us_p50",
    "score_ms_p50",
)
"""Fields of the first policy's row that are repeated at the top of the document."""


@dataclass(frozen=True)
class DomainMat:
    """Replay: mat of the first policy in a domain."""

    domain: str
    mat: float


@dataclass(frozen=True)
class SelectResult:
    """The result document of `select`: the first policy's numbers, then all contenders side by side.

    Attributes:
        mode: live, replay or record.
        seeds: number of repetitions, each with other random draws.
        yardstick: measure that decides the best arm of a game: mat or throughput.
        intervals_over: unit that is resampled for the intervals.
        speeds: whether speeds are measured, or modelled from the costs in the table.
        oracle_mat: mat of playing each game's best arm. Like `regret` and `best_arm_ratio` it needs the baseline
            `fixed`, which a replay always has.
        curves: by policy; live by prompt, in a replay by token since the reset, as means over its games.
        table, table_sha256: the table that was recorded or replayed.
        rounds_on: where the rounds of drafting contenders ran; both = a device has handed some back to the host.
        beside: the text drafter that heads draft with in one tree.
        store_s: seconds spent on adding texts to its store.
    """

    mode: str
    algo: str
    arms: list[str]
    reset: str
    seeds: int
    yardstick: str
    intervals_over: str
    speeds: str
    queries: int
    sessions: int
    rounds: int
    mat: float | None
    tokens_per_s: float | None
    oracle_mat: float | None
    regret: int | None
    best_arm_ratio: float | None
    pulls: dict[str, int]
    decide_us_p50: float | None
    score_ms_p50: float | None
    per_domain: list[Row] | list[DomainMat]
    policies: list[PolicyRow]
    curves: dict[str, dict[str, list[float]]]
    rewards: list[ArmReward]
    pool_size: list[PoolSize]
    lossless: Losslessness
    rejected: int
    table: str | None = None
    table_sha256: str | None = None
    router: RouterReport | None = None
    rounds_on: Literal["host", "device", "both"] = "host"
    beside: str | None = None
    store_s: float | None = None


def with_domains_of_pool(recipe: SelectRecipe, paths: list[str]) -> SelectRecipe:
    """The recipe, with the domains that the pool's drafters were made for if it names none."""
    if "domain" in recipe.data.model_fields_set:
        return recipe
    domains = list(dict.fromkeys(domain for path in paths for domain in pool.domains_of(path)))
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"domain": domains})}) if domains else recipe


def select(
    recipe: SelectRecipe, run: Run, *, target: Target | None = None, drafters: dict[str, Drafter] | None = None
) -> SelectResult | ServedSelectResult:
    """Decode one stream with every policy, arm and baseline of the recipe, prompt by prompt.

    All contenders answer a prompt before the next prompt starts. Other modes: record the pool on the stream as a table,
    play the policies on such a table, or route the requests of clients among servers (`select_served`). `target` and
    `drafters` (by name) are passed by callers that have loaded them already; these drafters are used unchanged.

    Raises DataError (no usable prompts), CheckpointError (target, pool, table or router), UsageError (contradicting
    recipe).
    """
    if recipe.server.urls:
        from specctl.commands.select_served import select_served

        return select_served(recipe, run)
    for line in overridden_options(recipe.algo, recipe.game):
        progress.log(line)
    if recipe.replay is not None and not recipe.train_router:
        return _replayed(recipe, replay_table(recipe))
    rejections, unlabelled = (
        Rejections(run.dir / name, recipe.data.max_rejected, hold=run.replaces_earlier)
        for name in ("rejected.jsonl", "router-rejected.jsonl")
    )
    data = recipe.data.model_copy(update={"limit": recipe.limit})
    prompts = read_domains(data, rejections, split=recipe.split, sample=True)
    paths = pool_paths(recipe) if drafters is None else []
    target = target or load_target(**recipe.target.loading)
    stream = make_sessions(prepare(recipe, target, prompts, rejections), recipe)
    companion = companion_of(recipe, target)
    if drafters is None:
        drafters = load_pool(recipe, target, paths, companion)
        if recipe.companion_arm and companion.text:
            drafters.setdefault(recipe.companion_arm, companion.text)
    place_of = {name: path for path, name in named(paths).items()}
    places = {name: place_of[name] for name in drafters if name in place_of}  # in the order of the arms
    kinds = trained_on(places, target, drafters)

    def begin() -> None:
        """Let this run take the place of an earlier one in its directory."""
        run.annotate(target=target.identity)
        rejections.release()
        unlabelled.release()

    if recipe.record is not None:
        check_free(recipe.record, resume=recipe.resume, overwrite=recipe.overwrite)
        if not recipe.resume:  # if resumed, the recording must be compared first
            begin()
        _, failures = record_table(recipe, target, stream, drafters, _pool_stamp(recipe, places), kinds)
        begin()
        return replace(_recorded(recipe, failures), rejected=rejections.count)
    router, report = router_of(recipe, run, target, places, unlabelled)
    stage = SelectContenders(recipe, target, stream, drafters, router, companion, kinds)
    begin()
    if router is not None and report is not None:
        save_router(recipe, run, target, router, report)
    records, agreement = _played(stage, run)
    return replace(_decoded(stage, records, agreement, rejections.count), router=report)


def _played(stage: SelectContenders, run: Run) -> tuple[list[Record], Losslessness]:
    """Decode with all contenders, write records and rounds, and compare the answers with plain decoding."""
    recipe, target = stage.recipe, stage.target

    def keep(records: Sequence[Record]) -> Path:
        return write_records(
            run.dir, [replace(record, session=stage.session_of[record.question[:2]]) for record in records], stamp={}
        )

    with regular_files.create_file(run.dir / ROUNDS, "x", encoding="utf-8") as file:
        records = stage.play(file, keep)
    records, agreement = with_agreement(recipe, target, records, {record.drafter for record in records} - {VANILLA})
    keep(records)
    if recipe.save_outputs:
        write_outputs(run.dir, records, target.tokenizer)
    return records, agreement


def _decoded(
    stage: SelectContenders, records: Sequence[Record], agreement: Losslessness, rejected: int
) -> SelectResult:
    """Build the result of live decoding from its records."""
    recipe, first = stage.recipe, stage.recipe.algo[0]
    names = list(dict.fromkeys(record.drafter for record in records))
    questions = [record.question for record in records if record.drafter == first]
    by_name = {name: records_by_question(records, name) for name in names}
    stream = StreamAnswers(
        {name: [by_question[question].decoded for question in questions] for name, by_question in by_name.items()},
        [stage.session_of[domain, id] for domain, id, _ in questions],
        [stage.game_of(*question) for question in questions],
        [arm.name for arm in stage.arms] if "fixed" in recipe.baselines else [],
        VANILLA if VANILLA in names else None,
        recipe.sampling.temperature == 0 or recipe.drafting.proposal == "deterministic",
        recipe.game.yardstick,
    )
    policies = [stage.row(stream, name) for name in [*recipe.algo, *(n for n in names if n not in recipe.algo)]]
    return SelectResult(
        **_top_fields(policies[0]),
        mode="live",
        arms=[arm.name for arm in stage.arms],
        reset=recipe.reset,
        seeds=len(recipe.seeds),
        yardstick=recipe.game.yardstick,
        intervals_over=f"{len(stage.stream)} sessions",
        speeds="measured",
        queries=len(questions),
        sessions=len(stage.stream),
        oracle_mat=stream.oracle_mat,
        per_domain=[drafter_row(first, domain, records) for domain in recipe.data.domain],
        policies=policies,
        curves={name: {"stopping_regret": stream.regret(name)} for name in recipe.algo} if stream.has_regret else {},
        rewards=stage.rewards(),
        pool_size=[],
        lossless=agreement,
        rejected=rejected,
        rounds_on=rounds_on(records),
        beside=recipe.companion,
        store_s=stage.store_s,
    )


def rounds_on(records: Sequence[Record]) -> Literal["host", "device", "both"]:
    """Whether the rounds of these answers ran on the host or the device; plain decoding is left out."""
    drafted = [record.decoded for record in records if record.drafter != VANILLA]
    ran = [(decoded.ahead, decoded.rounds) for decoded in drafted if decoded.rounds]
    if all(ahead == 0 for ahead, _ in ran):
        return "host"
    return "device" if all(ahead == rounds for ahead, rounds in ran) else "both"


def _top_fields(row: PolicyRow) -> dict[str, Any]:
    return {name: getattr(row, name) for name in TOP_FIELDS}


def _pool_stamp(recipe: SelectRecipe, places: dict[str, str]) -> dict[str, object]:
    """The part of a table's stamp that describes drafters and drafting options."""
    return {"drafters": fingerprints(places), "drafting": recipe.drafting.model_dump()}


def _recorded(recipe: SelectRecipe, failures: dict[str, int]) -> SelectResult:
    """Result of a recording: the new table, and a replay of every arm by itself on the table."""
    replayed = replay_table(recipe.model_copy(update={"replay": recipe.record, "algo": ["fixed"], "pool_sizes": []}))
    arms = [replace(row, failures=failures.get(row.algo, 0)) for row in replayed.rows if row.algo != "fixed"]
    best = max((row for row in arms if row.kind == "arm"), key=lambda row: row.mat or 0.0)
    return replace(_replayed(recipe, replace(replayed, rows=[best, *arms])), mode="record", policies=arms, curves={})


def _replayed(recipe: SelectRecipe, done: Replayed) -> SelectResult:
    shown = done.rows[0]
    games = hindsight.games(done.table.traces, "session", recipe.session)
    unit = {"query": "queries", "session": "sessions", "stream": "streams"}[recipe.reset]
    overheads = ", catching up and scoring" if done.table.overheads else " alone"
    return SelectResult(
        **_top_fields(shown),
        mode="replay",
        arms=done.table.arms,
        reset=recipe.reset,
        seeds=len(recipe.seeds),
        yardstick=recipe.game.yardstick,
        intervals_over=f"{len(recipe.seeds)} seed{'s' * (len(recipe.seeds) > 1)} × {done.games} {unit}",
        speeds=f"modelled: rounds{overheads}",
        queries=len(recipe.seeds) * len(done.table.traces),
        sessions=len(games),
        oracle_mat=done.oracle_mat,
        per_domain=[DomainMat(domain, mat) for domain, mat in done.per_domain.get(shown.algo, {}).items()],
        policies=done.rows,
        curves=done.curves,
        rewards=[],
        pool_size=done.pool_size,
        lossless=Losslessness(),
        rejected=0,
        table=str(recipe.replay or recipe.record),
        table_sha256=done.table.digest,
    )
