"""Report of `learn-from-server`: mat per chunk compared with a fixed drafter, and the published versions."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from specctl.reporting import curves
from specctl.reporting.collect import RunRecord
from specctl.reporting.contents import Contents, records
from specctl.reporting.curves import Panel
from specctl.reporting.style import Looks, grey
from specctl.reporting.tables import headings, usable_value

HEADLINE = headings(
    "mat",
    mat_first="mat, first chunk",
    mat_last="mat, last chunk",
    over_baseline="mat × fixed drafter",
    over_baseline_last="mat × fixed drafter, last chunk",
    published="versions published",
    rolled_back="versions rolled back",
)
CHUNK = headings(
    *("label", "chunk", "version", "prompts", "mat", "baseline_mat", "status", "loss", "published", "verdict"),
    label="run",
    version="drafted by",
    prompts="texts",
    baseline_mat="mat, the drafter that stays",
    status="learned",
    mat_before="mat of the probes before",
    mat_after="after",
)


def contents(runs: Sequence[RunRecord], looks: Looks) -> Contents:
    rows = [{**_row(row), "label": run.named(run.result["algo"])} for run in runs for row in run.result["per_chunk"]]
    learners = Looks()
    lines = curves.labeled(rows, "chunk", "mat", learners)
    for n, line in enumerate(curves.labeled(rows, "chunk", "baseline_mat", learners)):
        lines.append(replace(line, name=f"{line.name}, fixed drafter", look=grey(n)))
    made = Contents()
    if len(runs) == 1:
        made.headline = {title: usable_value(runs[0].result, key) for key, title in HEADLINE.items()}
    caption = "An online drafter, chunk by chunk: the engine drafts with it, and it learns from the engine's texts."
    losses = curves.labeled(rows, "chunk", "loss", learners)
    panels = [Panel("mat\n(tokens per pass of the target)", lines), Panel("loss", losses)]
    made.pictures += curves.picture("served", caption, panels, "chunk")
    made.tables = [records("served", "Chunks and published versions", rows, CHUNK)]
    return made


def _row(chunk: Mapping[str, Any]) -> dict[str, Any]:
    sent = chunk["publication"] or {}
    about = {key: sent.get(key) for key in ("verdict", "mat_before", "mat_after")}
    return {**chunk, **about, "published": sent.get("version")}
