"""Matrix of a pool, drafter × domain, and its diagonal: whether every specialist is the best in its domain."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from specctl.decoding import metrics
from specctl.decoding.metrics import Interval, Metric
from specctl.measuring.contenders import VANILLA
from specctl.measuring.drafter_rows import Row, records_by_question
from specctl.measuring.records import Record

Value = float | None


@dataclass(frozen=True)
class Specialist:
    """A drafter made for one domain, compared in that domain with the best other drafter (`rival`).

    `lead`: difference of the metric, negative if the rival is better. `interval`: paired 95 % bootstrap over prompts,
    None for fewer than two. The rival is chosen on the same prompts, so among many equally good drafters the interval
    is slightly too low.
    """

    drafter: str
    domain: str
    best: bool
    rival: str
    lead: float
    interval: Interval | None


@dataclass(frozen=True)
class Matrix:
    """Matrix of `metric`: `values[i][j]` is row i of `drafters + baselines` in domain j, `macro[i]` the mean of row i.

    Drafters without weights count as baselines: `best`, of each domain, and `best_macro` are chosen among trained
    drafters. A value is None if it was not measured, a mean also if any domain is missing.
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
    first_turn_ids: Mapping[str, str] = MappingProxyType({}),
) -> Matrix:
    """Build the matrix from measured rows.

    Drafters are sorted by the domains they were made for, generalists last, so that the specialists form the diagonal.

    Args:
        made_for: the competing drafters, with the domains each was made for.
        first_turn_ids: for each later turn of a conversation, the id of its first turn.
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
        and (specialist := _specialist(metric, name, domain, columns[domains.index(domain)], records, first_turn_ids))
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
    """Name with the largest known value; the first one in a tie."""
    known = {name: value for name, value in column.items() if value is not None}
    return max(known, key=known.__getitem__) if known else None


def mean(line: Sequence[Value]) -> Value:
    """Macro average with equal weight for every domain, or None if any value is missing."""
    known = [value for value in line if value is not None]
    return sum(known) / len(known) if known and len(known) == len(line) else None


def verdict(diagonal: Sequence[Specialist]) -> str:
    if not diagonal:
        return "diagonal: no specialist can be compared with another drafter in its own domain"
    leading = [specialist for specialist in diagonal if specialist.best]
    clear = sum(specialist.interval is not None and specialist.interval[0] > 0 for specialist in leading)
    noun = "specialist is" if len(diagonal) == 1 else "specialists are"
    return (
        f"diagonal: {len(leading)} of {len(diagonal)} {noun} the best in their own domain, "
        f"{clear} of them with the whole 95 % interval of the lead above 0"
    )


def _place(made_for: Sequence[str], domains: Sequence[str]) -> int:
    """Sort key of a drafter's row: its domain, or the end for generalists; `sorted` keeps the pool's order in a tie."""
    return domains.index(made_for[0]) if len(made_for) == 1 and made_for[0] in domains else len(domains)


def _specialist(
    metric: Metric,
    name: str,
    domain: str,
    column: Mapping[str, Value],
    records: Sequence[Record],
    first_turn_ids: Mapping[str, str],
) -> Specialist | None:
    """Compare a specialist with its rival in its domain. Returns None if either has no value."""
    rival = best({other: value for other, value in column.items() if other != name})
    score = column[name]
    if rival is None or score is None:
        return None
    lead = score - (column[rival] or 0.0)
    here = [record for record in records if record.domain == domain]
    ours, theirs, plain = (records_by_question(here, who) for who in (name, rival, VANILLA))
    questions = [question for question in ours if question in theirs]
    interval = metrics.difference_interval(
        metric,
        [first_turn_ids.get(prompt, prompt) for _, prompt, _ in questions],
        [ours[question].decoded for question in questions],
        [theirs[question].decoded for question in questions],
        [plain[question].decoded for question in questions] if metric == "speedup" else [],
    )
    return Specialist(name, domain, lead > 0, rival, lead, interval)
