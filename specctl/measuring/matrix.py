"""The matrix of a pool, drafter × domain, and its diagonal: is every specialist the best in its own domain?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from specctl.decoding import metrics
from specctl.decoding.metrics import Interval, Metric
from specctl.measuring.contenders import VANILLA
from specctl.measuring.drafter_rows import Row, answers
from specctl.measuring.records import Record

Value = float | None


@dataclass(frozen=True)
class Specialist:
    """A drafter made for one domain, in that domain, against the best of the others (`rival`).

    `lead` is the difference of the metric, negative where the rival is better, with a paired bootstrap interval over
    prompts at 95 % (None for fewer than two prompts). The rival is chosen on the same prompts: with many drafters of
    equal worth the interval is a little too low.
    """

    drafter: str
    domain: str
    best: bool
    rival: str
    lead: float
    interval: Interval | None


@dataclass(frozen=True)
class Matrix:
    """`values[i][j]` of `metric`: row i of `drafters + baselines` in domain j; `macro[i]` is the row's mean.

    Drafters without weights count as baselines: `best` (per domain, and of the means) is among those that were trained.
    None where nothing was measured, or where a mean would leave out a domain.
    """

    metric: Metric
    drafters: list[str]
    baselines: list[str]
    domains: list[str]
    values: list[list[Value]]
    macro: list[Value]
    best: list[str | None]
    best_macro: str | None
    diagonal: list[Specialist]
    verdict: str


def tabulate(
    metric: Metric,
    rows: Sequence[Row],
    records: Sequence[Record],
    made_for: Mapping[str, Sequence[str]],
    begun: Mapping[str, str] = MappingProxyType({}),
) -> Matrix:
    """The matrix of measured rows; `made_for` names the drafters that compete, and the domains each was made for,
    `begun` the first turn of a conversation by a later one.

    Drafters are put in the order of the domains they were made for, generalists last, so that the diagonal is one.
    """
    domains = list(dict.fromkeys(row.domain for row in rows))
    cells = {(row.drafter, row.domain): getattr(row, metric) for row in rows}
    drafters = sorted(made_for, key=lambda name: _place(made_for[name], domains))
    baselines = list(dict.fromkeys(row.drafter for row in rows if row.drafter not in made_for))
    values = [[cells.get((name, domain)) for domain in domains] for name in [*drafters, *baselines]]
    macro = [mean(line) for line in values]
    columns = [{name: cells.get((name, domain)) for name in drafters} for domain in domains]
    specialists = [(name, made_for[name][0]) for name in drafters if len(made_for[name]) == 1]
    diagonal = [
        specialist
        for name, domain in specialists
        if domain in domains
        and (specialist := _specialist(metric, name, domain, columns[domains.index(domain)], records, begun))
    ]
    return Matrix(
        metric=metric,
        drafters=drafters,
        baselines=baselines,
        domains=domains,
        values=values,
        macro=macro,
        best=[best(column) for column in columns],
        best_macro=best(dict(zip(drafters, macro, strict=False))),
        diagonal=diagonal,
        verdict=verdict(diagonal),
    )


def best(column: Mapping[str, Value]) -> str | None:
    """The name with the largest value, the first one of equals."""
    known = {name: value for name, value in column.items() if value is not None}
    return max(known, key=known.__getitem__) if known else None


def mean(line: Sequence[Value]) -> Value:
    """Macro average: every domain weighs the same. None where one is missing: it would be the mean of other things."""
    known = [value for value in line if value is not None]
    return sum(known) / len(known) if known and len(known) == len(line) else None


def verdict(diagonal: Sequence[Specialist]) -> str:
    """One line about the diagonal."""
    if not diagonal:
        return "diagonal: no specialist that could be compared with another drafter in its own domain"
    leading = [specialist for specialist in diagonal if specialist.best]
    clear = sum(specialist.interval is not None and specialist.interval[0] > 0 for specialist in leading)
    noun = "specialist is" if len(diagonal) == 1 else "specialists are"
    return (
        f"diagonal: {len(leading)} of {len(diagonal)} {noun} the best in their own domain, "
        f"{clear} of them with the whole 95 % interval of the lead above 0"
    )


def _place(made_for: Sequence[str], domains: Sequence[str]) -> int:
    """Where a drafter's row belongs; `sorted` keeps the pool's order among equals."""
    return domains.index(made_for[0]) if len(made_for) == 1 and made_for[0] in domains else len(domains)


def _specialist(
    metric: Metric,
    name: str,
    domain: str,
    column: Mapping[str, Value],
    records: Sequence[Record],
    begun: Mapping[str, str],
) -> Specialist | None:
    """None where either side has no value."""
    rival = best({other: value for other, value in column.items() if other != name})
    score = column[name]
    if rival is None or score is None:
        return None
    lead = score - (column[rival] or 0.0)
    here = [record for record in records if record.domain == domain]
    ours, theirs, plain = (answers(here, who) for who in (name, rival, VANILLA))
    questions = [question for question in ours if question in theirs]
    interval = metrics.difference_interval(
        metric,
        [begun.get(prompt, prompt) for _, prompt, _ in questions],
        [ours[question].decoded for question in questions],
        [theirs[question].decoded for question in questions],
        [plain[question].decoded for question in questions] if metric == "speedup" else [],
    )
    return Specialist(name, domain, lead > 0, rival, lead, interval)
