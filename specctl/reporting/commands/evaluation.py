"""Report of `eval`: mat and speed-up with intervals, drafter × domain, acceptance by depth."""

from collections.abc import Mapping, Sequence
from typing import Any

from specctl import regular_files
from specctl.reporting import bars, plots
from specctl.reporting.bars import Bar
from specctl.reporting.collect import RunRecord
from specctl.reporting.commands import acceptance
from specctl.reporting.contents import Contents, Picture, ReportTable, add, labeled_rows, records
from specctl.reporting.style import BASELINES, Looks, is_baseline
from specctl.reporting.tables import headings, usable_value

RECORDS = "records.parquet"
COLUMNS = headings(
    *("drafter", "domain", "prompts", "mat", "mat_interval", "mat_macro", "accept_rate", "tokens_per_s", "speedup"),
    *("speedup_interval", "speedup_transformers", "speedup_transformers_interval", "tokens", "target_passes"),
    mat_macro="mat, mean of texts",
    unusable="speeds not usable",
)
TRIVIAL_ONES = {"mat": BASELINES, "speedup": ("vanilla",), "speedup_transformers": ("transformers",)}
"""Contenders that have the value 1 in a metric by definition; their bars are left out."""
METRICS = {
    "mat": ("mat (tokens per pass of the target)", "Tokens per pass of the target; plain decoding has 1."),
    "speedup": ("speed-up (tokens/s over plain decoding)", "Speed relative to plain decoding by the same engine (1)."),
    "speedup_transformers": (
        "speed-up (tokens/s over transformers)",
        "Speed relative to plain `generate` of transformers (1).",
    ),
}
"""Axis labels and captions of the bar charts per metric."""
MIN_DRAFT_TOKENS = 20
"""Minimal number of draft tokens at a depth; below, the accepted share is noise and left out of the picture."""

Row = Mapping[str, Any]


def contents(runs: Sequence[RunRecord], looks: Looks) -> Contents:
    rows = _rows(runs)
    made = Contents(headline=_headline(rows) if len(runs) == 1 else {})
    for metric, (label, caption) in METRICS.items():
        panels = _panels(rows, metric, looks)
        if panels:
            whiskers = " Whiskers: 95 % bootstrap intervals over prompts."
            made.pictures.append(Picture(metric, caption + whiskers, bars.bars(panels, label, reference=1.0)))
    for run in runs:
        for metric, matrix in _matrices(run).items():
            verdict = f" {matrix['verdict'].capitalize()}." if matrix.get("verdict") else ""
            caption = f"{run.named('Drafter × domain')}: {plots.LABELS[metric][1]}.{verdict}"
            made.pictures.append(Picture(run.stem(f"matrix-{metric}"), caption, plots.heat_map(matrix)))
    shares = {name: values for run in runs for name, values in _acceptance(run).items()}
    pooled = {name: shares[name] for name in dict.fromkeys(row["label"] for row in rows) if name in shares}
    if pooled:
        texts = f"all texts; depths with fewer than {MIN_DRAFT_TOKENS} drafts are left out"
        made.pictures.append(acceptance.picture(pooled, looks, texts))
    made.tables += _tables(runs, rows)
    if pooled:
        made.tables.append(acceptance.by_position(pooled))
    return made


def _rows(runs: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """Return all rows with labels, sorted so that one drafter's rows in one domain are adjacent across runs."""
    rows = labeled_rows(runs, "rows", "drafter")
    domains, drafters = (list(dict.fromkeys(row[key] for row in rows)) for key in ("domain", "drafter"))
    return sorted(rows, key=lambda row: (domains.index(row["domain"]), drafters.index(row["drafter"])))


def _tables(runs: Sequence[RunRecord], rows: Sequence[Row]) -> list[ReportTable]:
    tables = [records("rows", "Drafters and domains", [{**row, "drafter": row["label"]} for row in rows], COLUMNS)]
    if len(runs) > 1:
        tables.append(_side_by_side(runs, rows))
    diagonal = [
        {**specialist, "drafter": run.named(specialist["drafter"])}
        for run in runs
        for specialist in (run.result.get("matrix") or {}).get("diagonal") or []
    ]
    columns = ("drafter", "domain", "best", "rival", "lead", "interval")
    tables.append(records("diagonal", "Specialists in their own domains", diagonal, {key: key for key in columns}))
    verdicts = [
        [run.named(against), *(run.result[key].get(count) for count in ("sequences", "mismatches", "ties"))]
        for run in runs
        for key, against in (
            ("lossless", "drafters against plain decoding"),
            ("lossless_transformers", "plain decoding against transformers"),
        )
        if (run.result.get(key) or {}).get("sequences")
    ]
    tables.append(ReportTable("lossless", "Texts compared", ["", "sequences", "mismatches", "ties"], verdicts))
    return tables


def _side_by_side(runs: Sequence[RunRecord], rows: Sequence[Row]) -> ReportTable:
    mats = {(row["drafter"], row["domain"], row["label"]): row.get("mat") for row in rows}
    cases = dict.fromkeys((drafter, domain) for drafter, domain, _ in mats)
    lines = [
        [drafter, domain, *(mats.get((drafter, domain, run.named(drafter))) for run in runs)]
        for drafter, domain in cases
    ]
    return ReportTable("mat", "mat side by side", ["drafter", "domain", *(f"#{run.number}" for run in runs)], lines)


def _headline(rows: Sequence[Row]) -> dict[str, Any]:
    """Best drafter by mat and by speed-up, excluding baselines, averaged over domains."""
    shown = {}
    for metric, name in (("mat", "mat"), ("speedup", "× plain")):
        if means := _means(rows, metric):
            best = max(means, key=means.__getitem__)
            shown[f"best {name}: {best}"] = means[best]
    return shown


def _means(rows: Sequence[Row], metric: str) -> dict[str, float]:
    """Mean over domains, for drafters that were measured in all domains."""
    domains = {row["domain"] for row in rows}
    values: dict[str, list[float]] = {}
    for row in rows:
        value = usable_value(row, metric)
        if not is_baseline(row["drafter"]) and value is not None:
            values.setdefault(row["drafter"], []).append(value)
    complete = {name: measured for name, measured in values.items() if len(measured) == len(domains)}
    return {name: sum(measured) / len(measured) for name, measured in complete.items()}


def _panels(rows: Sequence[Row], metric: str, looks: Looks) -> dict[str, list[Bar]]:
    panels: dict[str, list[Bar]] = {}
    for row in rows:
        if usable_value(row, metric) is not None and row["drafter"] not in TRIVIAL_ONES[metric]:
            bar = Bar(row["label"], row[metric], row.get(f"{metric}_interval"), looks[row["label"]])
            panels.setdefault(row["domain"], []).append(bar)
    return panels


def _matrices(run: RunRecord) -> dict[str, dict[str, Any]]:
    """Matrices by metric: the result's own, and matrices built from its rows if there are two domains and drafters."""
    rows = run.result.get("rows") or []
    domains, drafters = (list(dict.fromkeys(row[key] for row in rows)) for key in ("domain", "drafter"))
    given = run.result.get("matrix")
    matrices = {given["metric"]: given} if given else {}
    competing = given["drafters"] if given else [name for name in drafters if not is_baseline(name)]
    others = [name for name in drafters if name not in competing]
    for metric in ("mat", "speedup"):
        measured = {(row["drafter"], row["domain"]): usable_value(row, metric) for row in rows}
        enough = len(domains) > 1 and len(competing) > 1 and any(value is not None for value in measured.values())
        if metric not in matrices and enough:
            matrices[metric] = _matrix(metric, measured, domains, competing, others)
    return matrices


def _matrix(
    metric: str, measured: Mapping[tuple[str, str], Any], domains: list[str], competing: list[str], others: list[str]
) -> dict[str, Any]:
    """Build the fields of the matrix of `eval --matrix` that the heat map needs."""
    values: list[list[Any]] = [[measured.get((name, domain)) for domain in domains] for name in [*competing, *others]]
    macro = [None if None in line else sum(line) / len(line) for line in values]
    return {
        "metric": metric,
        "drafters": competing,
        "baselines": others,
        "domains": domains,
        "values": values,
        "macro": macro,
        "best": [_best(competing, column) for column in zip(*values, strict=True)],
        "best_macro": _best(competing, macro),
    }


def _best(names: Sequence[str], values: Sequence[Any]) -> str | None:
    known = [(value, name) for name, value in zip(names, values, strict=False) if value is not None]
    return max(known, key=lambda pair: pair[0])[1] if known else None


def _acceptance(run: RunRecord) -> dict[str, list[Any]]:
    """Accepted share by depth of each drafter over all domains, from the records.

    Without records, a result with a single domain supplies it.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = run.dir / RECORDS
    counts: dict[str, tuple[list[int], list[int]]] = {}
    try:
        regular_files.check(path)
        rows = pq.read_table(path, columns=["drafter", "accepted_by_depth", "offered_by_depth"]).to_pylist()
    except (OSError, pa.ArrowException) as error:
        if path.exists():
            run.notes.append(f"{RECORDS} cannot be read: {str(error).splitlines()[0]}")
        rows = []
    for row in rows:
        accepted, offered = counts.get(row["drafter"], ([], []))
        counts[row["drafter"]] = add(accepted, row["accepted_by_depth"]), add(offered, row["offered_by_depth"])
    rates = {
        name: [
            hits / number if number >= MIN_DRAFT_TOKENS else None
            for hits, number in zip(accepted, offered, strict=True)
        ]
        for name, (accepted, offered) in counts.items()
    }
    result = run.result.get("rows") or []
    if not rates and len({row["domain"] for row in result}) == 1:
        rates = {row["drafter"]: row.get("acceptance_by_position") or [] for row in result}
    return {run.named(name): values for name, values in rates.items() if any(value is not None for value in values)}
