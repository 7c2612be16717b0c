"""Report of `learn-from-server`: mat per chunk compared with a fixed drafter, and the published versions."""

from collections.abc import Mapping, Sequence
from typing import Any

from specctl.reporting import curves
from specctl.reporting.collect import RunRecord
from specctl.reporting.contents import Contents, numbers, records
from specctl.reporting.curves import Curve, Panel
from specctl.reporting.style import Looks, grey
from specctl.reporting.tables import usable_value

HEADLINE = {
    "mat": "mat",
    "mat_first": "mat, first chunk",
    "mat_last": "mat, last chunk",
    "over_baseline": "mat × fixed drafter",
    "over_baseline_last": "mat × fixed drafter, last chunk",
    "published": "versions published",
    "rolled_back": "versions rolled back",
}
CHUNK = {
    "label": "run",
    "chunk": "chunk",
    "version": "drafted by",
    "prompts": "texts",
    "mat": "mat",
    "baseline_mat": "mat, the drafter that stays",
    "status": "learnt",
    "loss": "loss",
    "published": "published",
    "verdict": "verdict",
    "mat_before": "mat of the probes before",
    "mat_after": "after",
}


def contents(runs: Sequence[RunRecord], looks: Looks) -> Contents:
    """Build pictures and tables of runs against servers."""
    rows = [{**_row(row), "label": run.named(run.result["algo"])} for run in runs for row in run.result["per_chunk"]]
    names = list(dict.fromkeys(row["label"] for row in rows))
    learners = Looks()
    lines = [_line(rows, name, "mat", name, learners[name]) for name in names]
    stays = [_line(rows, name, "baseline_mat", f"{name}, fixed drafter", grey(n)) for n, name in enumerate(names)]
    known = [line for line in [*lines, *stays] if any(y == y for y in line.y)]
    made = Contents()
    if len(runs) == 1:
        made.headline = {title: usable_value(runs[0].result, key) for key, title in HEADLINE.items()}
    caption = "An online drafter, chunk by chunk: the engine drafts with it, and it learns from the engine's texts."
    losses = [_line(rows, name, "loss", name, learners[name]) for name in names]
    panels = [Panel("mat\n(tokens per pass of the target)", known), Panel("loss", losses)]
    made.pictures += curves.picture("served", caption, panels, "chunk")
    made.tables = [records("served", "Chunks and published versions", rows, CHUNK)]
    return made


def _row(chunk: Mapping[str, Any]) -> dict[str, Any]:
    """Merge a chunk with the publication that followed it."""
    sent = chunk["publication"] or {}
    about = {key: sent.get(key) for key in ("verdict", "mat_before", "mat_after")}
    return {**chunk, **about, "published": sent.get("version")}


def _line(rows: Sequence[Mapping[str, Any]], name: str, key: str, label: str, look: Any) -> Curve:
    mine = [row for row in rows if row["label"] == name]
    return Curve(label, [row["chunk"] for row in mine], numbers(row[key] for row in mine), look)
