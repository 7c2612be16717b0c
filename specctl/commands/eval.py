"""`specctl eval`: measure every drafter in every domain, with both baselines in the same run."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from specctl import threads
from specctl.decoding.protocols import Drafter
from specctl.decoding.target import Target, load_target
from specctl.distillation.prompts import check_domains_of_drafters, read_domains
from specctl.distillation.rejections import Rejections
from specctl.drafters import names, pool
from specctl.errors import UsageError
from specctl.families import WEIGHTLESS_DRAFTERS
from specctl.measuring import lossless
from specctl.measuring.contenders import VANILLA, Case, RecordJournal, Shown, contenders, measure, prepare
from specctl.measuring.conversations import conversation_turns
from specctl.measuring.drafter_rows import LengthRow, Row, drafter_row, length_rows, records_by_question, with_agreement
from specctl.measuring.lossless import Losslessness
from specctl.measuring.matrix import Matrix, tabulate
from specctl.measuring.records import (
    Record,
    check_stamp,
    fingerprints,
    read_records,
    recipe_stamp,
    write_outputs,
    write_records,
)
from specctl.measuring.transformers_baseline import PLAIN, load_assistant
from specctl.recipe import EvalRecipe
from specctl.runs import Run, threads_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class EvalResult:
    """The result document of `eval`.

    `lossless` compares drafters with plain decoding. It has no sequences if texts may differ or without the vanilla
    baseline. `lossless_transformers` compares plain decoding with `generate`, greedy only. `lengths` has rows by prompt
    length, and is empty if all prompts are in one bucket.
    """

    rows: list[Row]
    lossless: Losslessness
    lossless_transformers: Losslessness
    rejected: int  # number of prompts
    matrix: Matrix | None = None  # if the recipe asks for it
    later_turns: int = 0  # follow-up turns of conversations, after plain decoding's answers
    lengths: list[LengthRow] = field(default_factory=list)


def with_domains_of_drafters(recipe: EvalRecipe) -> EvalRecipe:
    """Set the domains of a matrix to the domains that its drafters were made for, if the recipe names none.

    Raises UsageError if the drafters name no domain, or one without prompts; CheckpointError if a drafter cannot be
    read.
    """
    if not recipe.matrix or "domain" in recipe.data.model_fields_set:
        return recipe
    domains = list(dict.fromkeys(domain for path in named(recipe).values() for domain in pool.domains_of(path)))
    check_domains_of_drafters(domains, recipe.data)
    if not domains:
        raise UsageError("no drafter names the domain it was trained for", hint="name domains: --domain sql,math")
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"domain": domains})})


def evaluate(
    recipe: EvalRecipe, run: Run, *, target: Target | None = None, drafters: Mapping[str, Drafter] | None = None
) -> EvalResult:
    """Measure a recipe's drafters.

    `target` and `drafters` (by name) are passed by callers that have loaded them already.

    Raises DataError (no usable prompts), CheckpointError (target or drafter), UsageError (contradicting recipe),
    Interrupted (SIGTERM; the records are kept, and `resume` continues the run).
    """
    target = target or load_target(**recipe.target.loading)
    paths = named(recipe)
    stamp = recipe_stamp(recipe) | {"target": target.identity, "drafters": fingerprints(paths)}
    if recipe.resume:
        check_stamp(run.dir, stamp)
        threads.resume_threads(threads_of(run.dir))
    rejections = Rejections(run.dir / "rejected.jsonl", recipe.data.max_rejected, hold=run.replaces_earlier)
    data = recipe.data.model_copy(update={"limit": recipe.limit})
    prompts = read_domains(data, rejections, split=recipe.split, suite=True)
    asked = prepare(recipe, target, prompts, rejections)
    cases = conversation_turns(recipe, target, asked)
    assistants: dict[str, PreTrainedModel] = {}
    if drafters is None:
        drafters, assistants = _load(recipe, target, paths)
    keep = functools.partial(write_records, run.dir, stamp=stamp)  # every write has the stamp: `resume` checks it
    earlier = read_records(run.dir, stamp, {case.prompt.id: case.ids for case in cases}) if recipe.resume else []
    competing = contenders(recipe, target, drafters, assistants)
    run.annotate(target=target.identity)  # from here on, this run replaces an earlier one
    rejections.release()
    shown, journal = Shown("eval", set(drafters) or {VANILLA}), RecordJournal(keep, earlier)
    records = measure(recipe, [[case] for case in cases], competing, shown, journal)
    records, agreement = with_agreement(recipe, target, records, set(drafters))
    keep(records)
    if recipe.save_outputs:
        write_outputs(run.dir, records, target.tokenizer)
    rows = _rows(records, cases, [*drafters])
    matrix = None
    if recipe.matrix:
        matrix = tabulate(recipe.metric, rows, records, _competing(paths, drafters), _first_turn_ids(cases))
    return EvalResult(
        rows=rows,
        lossless=agreement,
        lossless_transformers=_agreement_with_transformers(recipe, target, records),
        rejected=rejections.count,
        matrix=matrix,
        later_turns=len(cases) - len(asked),
        lengths=length_rows(_names(records, [*drafters]), records, _first_turn_ids(cases)),
    )


def _load(
    recipe: EvalRecipe, target: Target, paths: Mapping[str, str]
) -> tuple[dict[str, Drafter], dict[str, PreTrainedModel]]:
    """Load the drafters by name, and language models among them also as assistants of `transformers`."""
    bases: dict[str, Drafter] = {}
    drafters = {name: pool.load_drafter(path, target, recipe.drafting, bases) for name, path in paths.items()}
    models = {name: load_assistant(path, target) for name, path in paths.items() if PLAIN in recipe.baselines}
    return drafters, {name: model for name, model in models.items() if model is not None}


def _rows(records: Sequence[Record], cases: Sequence[Case], drafters: list[str]) -> list[Row]:
    """Rows of all drafters and baselines, domain by domain, without rows that have no prompt."""
    names = _names(records, drafters)
    domains = dict.fromkeys(case.prompt.domain for case in cases)
    rows = [drafter_row(name, domain, records, _first_turn_ids(cases)) for domain in domains for name in names]
    return [row for row in rows if row.prompts]


def _names(records: Sequence[Record], drafters: list[str]) -> list[str]:
    return [*dict.fromkeys([*drafters, *(record.drafter for record in records)])]


def _first_turn_ids(cases: Sequence[Case]) -> dict[str, str]:
    """Id of the first turn, by the id of each later turn of a conversation."""
    return {case.prompt.id: case.prompt.first_turn_id for case in cases if case.prompt.first_turn_id is not None}


def named(recipe: EvalRecipe) -> dict[str, str]:
    """Drafters by the last part of their path, or by the whole path if that part is not unique or names a baseline."""
    members = map(str, pool.find_pool(recipe.pool)) if recipe.pool else ()
    paths = list(dict.fromkeys([*recipe.drafters, *members]))
    return {path if name in (VANILLA, PLAIN) else name: path for path, name in names.labels(paths).items()}


def _competing(paths: Mapping[str, str], drafters: Mapping[str, Drafter]) -> dict[str, list[str]]:
    """Trained drafters of a matrix, with their domains. All drafters, if none is trained or a caller passed them."""
    trained = {name: pool.domains_of(path) for name, path in paths.items() if path not in WEIGHTLESS_DRAFTERS}
    return trained or {name: [] for name in drafters}


def _agreement_with_transformers(recipe: EvalRecipe, target: Target, records: Sequence[Record]) -> Losslessness:
    """Compare our plain decoding with `generate`."""
    counts = Losslessness()
    if recipe.sampling.temperature > 0:
        return counts
    theirs, tolerance = records_by_question(records, PLAIN), lossless.tolerance_of_transformers(target)
    for question, record in records_by_question(records, VANILLA).items():
        if question in theirs:
            ids, ours = record.decoded.prompt_ids, record.decoded.output_ids
            counts.add(lossless.compare(target, ids, theirs[question].decoded.output_ids, ours, tolerance))
    return counts
