"""Result row of one drafter in one domain, and the comparison of drafters with plain decoding."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from specctl.decoding import metrics
from specctl.decoding.target import Target
from specctl.measuring import lossless, measured
from specctl.measuring.contenders import VANILLA
from specctl.measuring.lossless import Losslessness
from specctl.measuring.records import Question, Record
from specctl.measuring.transformers_baseline import PLAIN
from specctl.recipe import EvalRecipe, OnlineRecipe, SelectRecipe

EVERY = "every"
"""Domain in rows of all domains together."""


@dataclass(frozen=True)
class Row:
    """Results of one drafter or baseline in one domain; `metrics` defines the numbers.

    Intervals are over prompts, at 95 %; the turns of a conversation are drawn together. A field is None if there is
    nothing to measure: acceptance without drafts, or a ratio to a baseline that was not run.
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
    unusable: str | None  # why the speed-ups cannot be used (`metrics.why_unusable`), if they cannot


@dataclass(frozen=True)
class LengthRow(Row):
    """Results of one drafter or baseline for prompts of `over` < tokens ≤ `up_to`, all domains together."""

    over: int
    up_to: int


def records_by_question(records: Sequence[Record], name: str) -> dict[Question, Record]:
    return {record.question: record for record in records if record.drafter == name}


def with_agreement(
    recipe: EvalRecipe | SelectRecipe | OnlineRecipe, target: Target, records: Sequence[Record], drafters: set[str]
) -> tuple[list[Record], Losslessness]:
    """Fill in the agreement of `drafters` with plain decoding; return all records and the counts."""
    counts, filled = Losslessness(), []
    plain = records_by_question(records, VANILLA) if lossless.comparable(recipe.sampling, recipe.drafting) else {}
    tolerance = lossless.tolerance(target, recipe.sampling)
    for record in records:
        if record.drafter in drafters and record.question in plain:
            ours, theirs = record.decoded, plain[record.question].decoded
            verdict = lossless.compare(target, ours.prompt_ids, theirs.output_ids, ours.output_ids, tolerance)
            counts.add(verdict)
            record = replace(record, agreement=verdict)
        filled.append(record)
    return filled, counts


def drafter_row(
    name: str, domain: str, records: Sequence[Record], first_turn_ids: Mapping[str, str] = MappingProxyType({})
) -> Row:
    """Build the row of a drafter or baseline in a domain from the records of all.

    `first_turn_ids`: for each later turn of a conversation, the id of its first turn.
    """
    mine = [record for record in records if record.drafter == name and record.domain == domain]
    decoded = [record.decoded for record in mine]
    prompts = [first_turn_ids.get(record.id, record.id) for record in mine]
    vanilla, generate = (
        [theirs[record.question].decoded for record in mine if record.question in theirs]
        for theirs in (records_by_question(records, VANILLA), records_by_question(records, PLAIN))
    )
    mat = measured.mat(prompts, decoded)
    over_plain, over_theirs = (measured.speedup(prompts, decoded, theirs) for theirs in (vanilla, generate))
    return Row(
        drafter=name,
        domain=domain,
        prompts=len({record.id for record in mine}),
        mat_macro=metrics.mat_macro(decoded),
        accept_rate=metrics.accept_rate(decoded),
        acceptance_by_position=metrics.acceptance_by_position(decoded),
        tokens_per_s=metrics.tokens_per_s(decoded),
        vanilla_tokens_per_s=metrics.tokens_per_s(vanilla),
        transformers_tokens_per_s=metrics.tokens_per_s(generate),
        prefill_s=metrics.prefill_s(decoded),
        target_passes=sum(d.target_passes for d in decoded),
        tokens=sum(d.decoded_tokens for d in decoded),
        unusable=measured.unusable(over_plain, mat) or measured.unusable(over_theirs),
        **measured.columns(mat=mat, speedup=over_plain, speedup_transformers=over_theirs),
    )


def length_rows(
    names: Sequence[str], records: Sequence[Record], first_turn_ids: Mapping[str, str] = MappingProxyType({})
) -> list[LengthRow]:
    """Rows of every drafter and baseline by bucket of prompt lengths, the shortest first. There are none if all prompts
    are in one bucket."""
    buckets: dict[int, list[Record]] = {}
    for record in records:
        limit = measured.bucket(len(record.decoded.prompt_ids))
        buckets.setdefault(limit, []).append(replace(record, domain=EVERY))
    if len(buckets) < 2:
        return []
    return [
        LengthRow(**vars(row), over=measured.bucket_start(limit), up_to=limit)
        for limit, some in sorted(buckets.items())
        for name in names
        if (row := drafter_row(name, EVERY, some, first_turn_ids)).prompts
    ]
