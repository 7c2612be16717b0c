"""Report of `serve`: texts and acceptance by drafter or by running engine, also of runs of the former `route`."""

from collections.abc import Mapping, Sequence
from typing import Any

from specctl.reporting.collect import RunRecord
from specctl.reporting.contents import Contents, records
from specctl.reporting.style import Looks
from specctl.reporting.tables import headings

SUMMARY = headings(
    *("label", "choose", "requests", "tokens", "mat", "decide_us_p50", "seconds"),
    label="model",
    choose="policy",
    requests="texts",
    decide_us_p50="decision µs, median",
)
ROWS = headings(
    *("label", "engine", "texts", "share", "rounds", "tokens", "accepted", "mat"),
    label="drafter or server",
    failures="requests not answered",
    broken="streams broken off",
)


def contents(runs: Sequence[RunRecord], looks: Looks) -> Contents:
    summary = [_summary(run) for run in runs if run.result]
    rows = [row | {"label": run.named(row["label"])} for run in runs for row in _rows(run.result)]
    headline = {SUMMARY[key]: summary[0][key] for key in ("requests", "mat") if len(summary) == 1 and key in summary[0]}
    tables = [records("serve", "Gateway", summary, SUMMARY), records("drafters", "Texts by drafter", rows, ROWS)]
    return Contents(headline=headline, tables=tables)


def _summary(run: RunRecord) -> dict[str, Any]:
    result = run.result
    label = run.named(str(result.get("model") or result.get("target")))
    return {**result, "label": label, "choose": result.get("choose") or result.get("algo")}


def _rows(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows of a result; `route` had other names for some fields."""
    rows = [{**row, "label": row["drafter"]} for row in result.get("drafters") or []]
    return rows + [{**row, "label": row["server"], "texts": row["requests"]} for row in result.get("servers") or []]
