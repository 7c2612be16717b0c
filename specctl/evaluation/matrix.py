"""`specctl eval`: drafter × domain, with both baselines in the same run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from specctl.decoding.draft import Drafter
from specctl.decoding.target import Target, load_target
from specctl.distillation.prompts import Prompt, Rejections, read_prompts
from specctl.drafters import pool
from specctl.errors import UsageError
from specctl.evaluation import lossless, metrics
from specctl.evaluation.baselines import PLAIN, load_assistant
from specctl.evaluation.lossless import Losslessness
from specctl.evaluation.measure import VANILLA, contenders, measure, prepare
from specctl.evaluation.records import Record, agreeing, write_outputs, write_records
from specctl.recipe import EvalRecipe
from specctl.runs import Run


@dataclass(frozen=True)
class Row:
    """One drafter (or baseline) on one domain; definitions in `metrics`. Intervals are over prompts, at 95 %.

    None where there is nothing to measure: acceptance without drafts, a ratio to a baseline that was not run.
    """

    drafter: str
    domain: str
    prompts: int
    mat: float | None
    mat_interval: metrics.Interval | None
    mat_macro: float | None
    accept_rate: float | None
    acceptance_by_position: list[float | None]
    tokens_per_s: float | None
    vanilla_tokens_per_s: float | None
    speedup: float | None  # over plain decoding by the same engine
    speedup_interval: metrics.Interval | None
    transformers_tokens_per_s: float | None
    speedup_transformers: float | None  # over plain `generate` of transformers
    speedup_transformers_interval: metrics.Interval | None
    prefill_s: float | None  # mean per prompt
    target_passes: int
    tokens: int


@dataclass(frozen=True)
class EvalResult:
    """The result document of `eval`.

    `lossless` compares drafters with plain decoding (no sequences where texts may differ, or without the vanilla
    baseline); `lossless_transformers` compares plain decoding with `generate`, greedy only.
    """

    rows: list[Row]
    lossless: Losslessness
    lossless_transformers: Losslessness
    rejected: int  # prompts


def evaluate(
    recipe: EvalRecipe, run: Run, *, target: Target | None = None, drafters: Mapping[str, Drafter] | None = None
) -> EvalResult:
    """Measure a recipe's drafters; `target` and `drafters` (by name) are given by callers that hold them already.

    Raises DataError (no usable prompts), CheckpointError (target or drafter), UsageError (contradicting recipe),
    Interrupted (SIGTERM; the records so far are kept).
    """
    rejections = Rejections(run.dir / "rejected.jsonl", recipe.data.max_rejected)
    prompts = _prompts(recipe, rejections)
    target = target or load_target(**recipe.target.loading)
    run.annotate(target=target.identity)
    cases = prepare(recipe, target, prompts, rejections)
    assistants = {}
    if drafters is None:
        paths = _named(recipe)
        bases: dict[str, Drafter] = {}
        drafters = {name: pool.load_drafter(path, target, recipe.drafting, bases) for name, path in paths.items()}
        models = {name: load_assistant(path, target) for name, path in paths.items() if PLAIN in recipe.baselines}
        assistants = {name: model for name, model in models.items() if model is not None}
    found = contenders(recipe, target, drafters, assistants)
    records = measure(recipe, run, cases, found, set(drafters) or {VANILLA})
    records, agreement = _compare(recipe, target, records, set(drafters))
    write_records(run.dir, records)
    if recipe.save_outputs:
        write_outputs(run.dir, records, target.tokenizer)
    names = dict.fromkeys([*drafters, *(record.drafter for record in records)])
    rows = [_row(name, domain, records) for domain in recipe.data.domain for name in names]
    return EvalResult(
        rows=[row for row in rows if row.prompts],
        lossless=agreement,
        lossless_transformers=_agreement_with_transformers(recipe, target, records),
        rejected=rejections.count,
    )


def _prompts(recipe: EvalRecipe, rejections: Rejections) -> list[Prompt]:
    domains, data = recipe.data.domain, recipe.data.model_copy(update={"limit": recipe.limit})
    if data.prompts is not None and len(domains) > 1:
        raise UsageError("a prompts file is one domain", hint=f"name one of {', '.join(domains)} with --domain")
    return [p for domain in domains for p in read_prompts(data, domain, split=recipe.split, rejected_to=rejections)]


def _named(recipe: EvalRecipe) -> dict[str, str]:
    """Drafters by the last part of their path; by all of it where that is not unique or names a baseline."""
    members = map(str, pool.find_pool(recipe.pool)) if recipe.pool else ()
    paths = list(dict.fromkeys([*recipe.drafters, *members]))
    taken = [VANILLA, PLAIN, *(Path(path).name for path in paths)]
    return {Path(path).name if taken.count(Path(path).name) == 1 else path: path for path in paths}


def _compare(
    recipe: EvalRecipe, target: Target, records: Sequence[Record], drafters: set[str]
) -> tuple[list[Record], Losslessness]:
    """Records with the drafters' agreement with plain decoding filled in, and the counts."""
    counts, compared = Losslessness(), []
    plain = _answers(records, VANILLA) if lossless.comparable(recipe.sampling, recipe.drafting) else {}
    tolerance = lossless.tolerance(target, recipe.sampling)
    for record in records:
        if record.drafter in drafters and record.question in plain:
            ours, theirs = record.decoded, plain[record.question].decoded
            verdict = lossless.compare(target, ours.prompt_ids, theirs.output_ids, ours.output_ids, tolerance)
            counts.add(verdict)
            record = agreeing(record, verdict)
        compared.append(record)
    return compared, counts


def _agreement_with_transformers(recipe: EvalRecipe, target: Target, records: Sequence[Record]) -> Losslessness:
    """Our plain decoding against theirs: two implementations, so never bitwise equal, whatever `exact` says."""
    counts = Losslessness()
    if recipe.sampling.temperature > 0:
        return counts
    theirs, tolerance = _answers(records, PLAIN), lossless.TOLERANCE[target.dtype]
    for question, record in _answers(records, VANILLA).items():
        if question in theirs:
            ids, ours = record.decoded.prompt_ids, record.decoded.output_ids
            counts.add(lossless.compare(target, ids, theirs[question].decoded.output_ids, ours, tolerance))
    return counts


def _answers(records: Sequence[Record], name: str) -> dict[tuple[str, str, int], Record]:
    return {record.question: record for record in records if record.drafter == name}


def _row(name: str, domain: str, records: Sequence[Record]) -> Row:
    mine = [record for record in records if record.drafter == name and record.domain == domain]
    decoded, prompts = [record.decoded for record in mine], [record.id for record in mine]
    vanilla, generate = (
        [found[record.question].decoded for record in mine if record.question in found]
        for found in (_answers(records, VANILLA), _answers(records, PLAIN))
    )
    return Row(
        drafter=name,
        domain=domain,
        prompts=len(set(prompts)),
        mat=metrics.mat(decoded),
        mat_interval=metrics.mat_interval(prompts, decoded),
        mat_macro=metrics.mat_macro(decoded),
        accept_rate=metrics.accept_rate(decoded),
        acceptance_by_position=metrics.acceptance_by_position(decoded),
        tokens_per_s=metrics.tokens_per_s(decoded),
        vanilla_tokens_per_s=metrics.tokens_per_s(vanilla),
        speedup=metrics.speedup(decoded, vanilla),
        speedup_interval=metrics.speedup_interval(prompts, decoded, vanilla) if vanilla else None,
        transformers_tokens_per_s=metrics.tokens_per_s(generate),
        speedup_transformers=metrics.speedup(decoded, generate),
        speedup_transformers_interval=metrics.speedup_interval(prompts, decoded, generate) if generate else None,
        prefill_s=metrics.prefill_s(decoded),
        target_passes=sum(d.target_passes for d in decoded),
        tokens=sum(d.decoded_tokens for d in decoded),
    )
