"""`specctl select`: policies that choose among the drafters of a pool, side by side on one stream of prompts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeVar

from specctl import regular_files
from specctl.decoding.protocols import Drafter
from specctl.decoding.target import Target, load_target
from specctl.distillation.prompts import check_domains_of_drafters, read_domains
from specctl.distillation.rejections import Rejections
from specctl.drafters import pool
from specctl.drafters.names import labels
from specctl.measuring.contenders import VANILLA, Case, prepare
from specctl.measuring.drafter_rows import drafter_row, records_by_question, with_agreement
from specctl.measuring.lossless import Losslessness
from specctl.measuring.policy_rows import Grouping, StreamAnswers
from specctl.measuring.records import Record, write_outputs, write_records
from specctl.measuring.select_contenders import DrafterPool, SelectContenders, companion_of, make_sessions
from specctl.measuring.select_result import SelectResult, top_fields
from specctl.recipe import PoolRecipe, SelectRecipe
from specctl.runs import Run
from specctl.selection.arms import load_pool, pool_paths, trained_on
from specctl.selection.certificate import explanation, select_notes
from specctl.selection.game.rules import log_overridden_options
from specctl.threads import counted

Pooled = TypeVar("Pooled", bound=PoolRecipe)

ROUNDS = "rounds.jsonl"


def with_domains_of_pool(recipe: Pooled, paths: list[str]) -> Pooled:
    """The recipe, with the domains that the pool's drafters were made for if it names none.

    Raises UsageError if a domain has no prompts.
    """
    if "domain" in recipe.data.model_fields_set:
        return recipe
    domains = list(dict.fromkeys(domain for path in paths for domain in pool.domains_of(path)))
    check_domains_of_drafters(domains, recipe.data)
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"domain": domains})}) if domains else recipe


@dataclass(frozen=True)
class PoolOnStream:
    """A loaded pool, and the sessions of prompts that it is measured on.

    Attributes:
        places: directory or name of each drafter, by its name as an arm.
    """

    target: Target
    stream: list[list[Case]]
    pool: DrafterPool
    places: dict[str, str]
    rejections: Rejections

    def begin(self, run: Run) -> None:
        """Let the run take the place of an earlier one in its directory."""
        run.annotate(target=self.target.identity)
        self.rejections.release()


def load_stream(
    recipe: PoolRecipe, run: Run, target: Target | None = None, drafters: dict[str, Drafter] | None = None
) -> PoolOnStream:
    """Read the prompts, and load target and pool.

    `target` and `drafters` (by name) are passed by callers that have loaded them already; these drafters are used
    unchanged. Raises DataError (no usable prompts), CheckpointError (target or pool).
    """
    rejections = Rejections(run.dir / "rejected.jsonl", recipe.data.max_rejected, hold=run.replaces_earlier)
    data = recipe.data.model_copy(update={"limit": recipe.limit})
    prompts = read_domains(data, rejections, split=recipe.split)
    paths = pool_paths(recipe) if drafters is None else []
    target = target or load_target(**recipe.target.loading)
    stream = make_sessions(prepare(recipe, target, prompts, rejections), recipe)
    companion = companion_of(recipe, target) if isinstance(recipe, SelectRecipe) else None
    if drafters is None:
        drafters = load_pool(recipe, target, paths, companion)
        if isinstance(recipe, SelectRecipe) and companion and companion.text and recipe.companion_arm:
            drafters.setdefault(recipe.companion_arm, companion.text_drafter(recipe.companion_arm))
    place_of = {name: path for path, name in labels(paths).items()}
    places = {name: place_of[name] for name in drafters if name in place_of}  # in the order of the arms
    kinds = trained_on(places, target)
    return PoolOnStream(target, stream, DrafterPool(drafters, companion, kinds), places, rejections)


def select(
    recipe: SelectRecipe, run: Run, *, target: Target | None = None, drafters: dict[str, Drafter] | None = None
) -> SelectResult:
    """Decode one stream with every policy, arm and baseline of the recipe, prompt by prompt.

    All contenders answer a prompt before the next prompt starts. `target` and `drafters`: see `load_stream`.

    Raises DataError (no usable prompts), CheckpointError (target or pool), UsageError (contradicting recipe).
    """
    log_overridden_options(recipe.algo, recipe.game)
    pooled = load_stream(recipe, run, target, drafters)
    stage = SelectContenders(recipe, pooled.target, pooled.stream, pooled.pool)
    pooled.begin(run)
    return play(stage, run, pooled.rejections.count)


def play(stage: SelectContenders, run: Run, rejected: int) -> SelectResult:
    """Decode with all contenders, write records and rounds, and compare the answers with plain decoding.

    `rejected`: number of prompts that cannot be used.
    """
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
    return _decoded(stage, records, agreement, rejected)


def _decoded(
    stage: SelectContenders, records: Sequence[Record], agreement: Losslessness, rejected: int
) -> SelectResult:
    recipe, first = stage.recipe, stage.recipe.algo[0]
    names = list(dict.fromkeys(record.drafter for record in records))
    questions = [record.question for record in records if record.drafter == first]
    by_name = {name: records_by_question(records, name) for name in names}
    stream = StreamAnswers(
        {name: [by_question[question].decoded for question in questions] for name, by_question in by_name.items()},
        Grouping(
            [stage.session_of[domain, id] for domain, id, _ in questions],
            [stage.game_of(*question) for question in questions],
            [question[:2] for question in questions],
        ),
        [arm.name for arm in stage.arms] if "fixed" in recipe.baselines else [],
        VANILLA if VANILLA in names else None,
        recipe.sampling.temperature == 0 or recipe.drafting.proposal == "deterministic",
        recipe.game.yardstick,
    )
    policies = [stage.row(stream, name) for name in [*recipe.algo, *(n for n in names if n not in recipe.algo)]]
    return SelectResult(
        **top_fields(policies[0]),
        mode="live",
        arms=[arm.name for arm in stage.arms],
        reset=recipe.reset,
        seeds=len(recipe.seeds),
        yardstick=recipe.game.yardstick,
        intervals_over=counted(len(stage.stream), "session"),
        speeds="measured",
        queries=len(questions),
        sessions=len(stage.stream),
        oracle_mat=stream.oracle_mat,
        per_domain=[drafter_row(name, domain, records) for domain in recipe.data.domain for name in names],
        policies=policies,
        curves={name: {"stopping_regret": stream.regret(name)} for name in recipe.algo} if stream.has_regret else {},
        rewards=stage.rewards(),
        pool_size=[],
        lossless=agreement,
        rejected=rejected,
        rounds_on=rounds_on(records),
        beside=recipe.companion,
        store_s=stage.store_s,
        at_least=explanation(
            len({question[:2] for question in questions}), *select_notes(stream.plain is not None, bool(stream.arms))
        ),
    )


def rounds_on(records: Sequence[Record]) -> Literal["host", "device", "both"]:
    """Whether the rounds of these answers ran on the host or the device; plain decoding is left out."""
    drafted = [record.decoded for record in records if record.drafter != VANILLA]
    ran = [(decoded.ahead, decoded.rounds) for decoded in drafted if decoded.rounds]
    if all(ahead == 0 for ahead, _ in ran):
        return "host"
    return "device" if all(ahead == rounds for ahead, rounds in ran) else "both"
