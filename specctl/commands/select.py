"""`specctl select`: policies that choose among the drafters of a pool, side by side on one stream of prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from specctl import progress, regular
from specctl.commands.select_router import router_of, save_router
from specctl.commands.select_tables import PoolSize, Replayed, record_table, replay_table
from specctl.decoding.protocols import Drafter
from specctl.decoding.target import Target, load_target
from specctl.distillation.prompts import Rejections, read_domains
from specctl.drafters import pool
from specctl.measuring.contenders import VANILLA, prepare
from specctl.measuring.drafter_rows import Row, answers, compared, summarise
from specctl.measuring.lossless import Losslessness
from specctl.measuring.policy_rows import ArmReward, PolicyRow, Stream
from specctl.measuring.records import Record, fingerprints, write_outputs, write_records
from specctl.measuring.select_contenders import SelectContenders, companion_of, sessions
from specctl.recipe import SelectRecipe
from specctl.runs import Run
from specctl.selection.arms import load_pool, members, named, trained_on
from specctl.selection.game.rules import overruled
from specctl.selection.recorded import hindsight
from specctl.selection.recorded.pieces import check_free
from specctl.selection.routing.labels import RouterReport

if TYPE_CHECKING:
    from specctl.commands.select_served import ServedSelectResult

ROUNDS = "rounds.jsonl"
OWN = ("algo", "rounds", "mat", "tokens_per_s", "regret", "best_arm_ratio", "pulls", "decide_us_p50", "score_ms_p50")
"""Fields of the first policy's row that the document has at its top, too."""


@dataclass(frozen=True)
class DomainMat:
    """Replay: tokens ÷ rounds of the first policy in a domain."""

    domain: str
    mat: float


@dataclass(frozen=True)
class SelectResult:
    """The result document of `select`: the first policy's own numbers, then all contenders side by side.

    `mode` is live, replay or record. `oracle_mat` is the mat of playing each game's best arm from reset to reset; it,
    `regret` and `best_arm_ratio` need the baseline `fixed`, which a replay always has. `curves` are by prompt; of a
    replay means over its games, by token since the reset.

    Attributes:
        seeds: how often everything was played, each time with other draws.
        yardstick: what the best arm of a game is best in, mat or throughput.
        intervals_over: what is drawn anew for the intervals.
        speeds: what they are: measured, or modelled by what the table knows the costs of.
        table, table_sha256: that was recorded or replayed.
        rounds_on: where the rounds of those who draft ran; both, where a device has given some back to the host.
        beside: the text drafter that heads draft with; `store_s`: seconds that its store took to take texts in.
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
    """The recipe with the domains that the pool's drafters were made for, where none was named."""
    if "domain" in recipe.data.model_fields_set:
        return recipe
    domains = list(dict.fromkeys(domain for path in paths for domain in pool.domains_of(path)))
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"domain": domains})}) if domains else recipe


def select(
    recipe: SelectRecipe, run: Run, *, target: Target | None = None, drafters: dict[str, Drafter] | None = None
) -> SelectResult | ServedSelectResult:
    """Decode one stream with every policy, arm and baseline of the recipe; all answer a prompt before the next one.

    Or record the pool on the stream, or play the policies on such a table, or route the requests of clients among
    servers (`select_served`). `target` and `drafters` (by name) are given
    by callers that hold them already; such drafters draft as they are. Raises DataError (no usable prompts),
    CheckpointError (target, pool, table or router), UsageError (contradicting recipe).
    """
    if recipe.server.urls:
        from specctl.commands.select_served import select_served

        return select_served(recipe, run)
    for line in overruled(recipe.algo, recipe.game):
        progress.log(line)
    if recipe.replay is not None and not recipe.train_router:
        return _replayed(recipe, replay_table(recipe))
    rejections, unlabelled = (
        Rejections(run.dir / name, recipe.data.max_rejected, hold=run.replaces)
        for name in ("rejected.jsonl", "router-rejected.jsonl")
    )
    data = recipe.data.model_copy(update={"limit": recipe.limit})
    prompts = read_domains(data, rejections, split=recipe.split, sample=True)
    paths = members(recipe) if drafters is None else []
    target = target or load_target(**recipe.target.loading)
    stream = sessions(prepare(recipe, target, prompts, rejections), recipe)
    companion = companion_of(recipe, target)
    if drafters is None:
        drafters = load_pool(recipe, target, paths, companion)
        if recipe.companion_arm and companion.text:
            drafters.setdefault(recipe.companion_arm, companion.text)
    place_of = {name: path for path, name in named(paths).items()}
    places = {name: place_of[name] for name in drafters if name in place_of}  # in the order of the arms
    kinds = trained_on(places, target, drafters)

    def begin() -> None:
        """From here on an earlier run gives way."""
        run.annotate(target=target.identity)
        rejections.release()
        unlabelled.release()

    if recipe.record is not None:
        check_free(recipe.record, resume=recipe.resume, overwrite=recipe.overwrite)
        if not recipe.resume:  # else only the recording itself can tell whether it is another one
            begin()
        _, failures = record_table(recipe, target, stream, drafters, _made_of(recipe, places), kinds)
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
    """Everybody's answers, written into the run's directory with their rounds, and compared with plain decoding's."""
    recipe, target = stage.recipe, stage.target

    def keep(records: Sequence[Record]) -> Path:
        return write_records(
            run.dir, [replace(record, session=stage.session_of[record.question[:2]]) for record in records], stamp={}
        )

    with regular.created(run.dir / ROUNDS, "x", encoding="utf-8") as file:
        records = stage.play(file, keep)
    records, agreement = compared(recipe, target, records, {record.drafter for record in records} - {VANILLA})
    keep(records)
    if recipe.save_outputs:
        write_outputs(run.dir, records, target.tokenizer)
    return records, agreement


def _decoded(
    stage: SelectContenders, records: Sequence[Record], agreement: Losslessness, rejected: int
) -> SelectResult:
    """The result of live decoding, from its records."""
    recipe, first = stage.recipe, stage.recipe.algo[0]
    names = list(dict.fromkeys(record.drafter for record in records))
    questions = [record.question for record in records if record.drafter == first]
    by_name = {name: answers(records, name) for name in names}
    stream = Stream(
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
        **_own(policies[0]),
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
        per_domain=[summarise(first, domain, records) for domain in recipe.data.domain],
        policies=policies,
        curves={name: {"stopping_regret": stream.regret(name)} for name in recipe.algo} if stream.judged else {},
        rewards=stage.rewards(),
        pool_size=[],
        lossless=agreement,
        rejected=rejected,
        rounds_on=rounds_on(records),
        beside=recipe.companion,
        store_s=stage.store_s,
    )


def rounds_on(records: Sequence[Record]) -> Literal["host", "device", "both"]:
    """Where the rounds of these answers ran, those of plain decoding aside."""
    drafted = [record.decoded for record in records if record.drafter != VANILLA]
    ran = [(decoded.ahead, decoded.rounds) for decoded in drafted if decoded.rounds]
    if all(ahead == 0 for ahead, _ in ran):
        return "host"
    return "device" if all(ahead == rounds for ahead, rounds in ran) else "both"


def _own(row: PolicyRow) -> dict[str, Any]:
    return {name: getattr(row, name) for name in OWN}


def _made_of(recipe: SelectRecipe, places: dict[str, str]) -> dict[str, object]:
    """The part of a table's stamp that is neither target nor stream."""
    return {"drafters": fingerprints(places), "drafting": recipe.drafting.model_dump()}


def _recorded(recipe: SelectRecipe, failures: dict[str, int]) -> SelectResult:
    """A table that was just recorded, and what every arm by itself does on it."""
    replayed = replay_table(recipe.model_copy(update={"replay": recipe.record, "algo": ["fixed"], "pool_sizes": []}))
    arms = [replace(row, failures=failures.get(row.algo, 0)) for row in replayed.rows if row.algo != "fixed"]
    best = max((row for row in arms if row.kind == "arm"), key=lambda row: row.mat or 0.0)
    return replace(_replayed(recipe, replace(replayed, rows=[best, *arms])), mode="record", policies=arms, curves={})


def _replayed(recipe: SelectRecipe, done: Replayed) -> SelectResult:
    shown = done.rows[0]
    games = hindsight.games(done.table.traces, "session", recipe.session)
    unit = {"query": "queries", "session": "sessions", "stream": "streams"}[recipe.reset]
    overheads = ", reading up and scoring" if done.table.overheads else " alone"
    return SelectResult(
        **_own(shown),
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
