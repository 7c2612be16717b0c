"""Report of `serve`: texts and acceptance by drafter or by running engine."""

from collections.abc import Sequence

from specctl.reporting.collect import RunRecord
from specctl.reporting.contents import Contents, labeled_rows, records
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
    summary = [{**run.result, "label": run.named(str(run.result.get("model")))} for run in runs if run.result]
    headline = {SUMMARY[key]: summary[0][key] for key in ("requests", "mat") if len(summary) == 1 and key in summary[0]}
    rows = labeled_rows(runs, "drafters", "drafter")
    tables = [records("serve", "Gateway", summary, SUMMARY), records("drafters", "Texts by drafter", rows, ROWS)]
    return Contents(headline=headline, tables=tables)
