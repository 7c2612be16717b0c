"""Report of `bench`: decoding by batch size, target steps by rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from specctl.reporting import curves
from specctl.reporting.collect import RunRecord
from specctl.reporting.contents import Contents, Picture, numbers, records
from specctl.reporting.curves import Curve, Panel
from specctl.reporting.style import Looks
from specctl.reporting.tables import headings, usable_value

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DECODING = headings(
    *("label", "batch", "mat", "tokens_per_s", "with_prefill", "speedup", "of_batch_1", "speedup_transformers"),
    *("tokens", "unusable"),
    label="drafter",
    with_prefill="tokens/s with prefill",
    unusable="speed-up not usable",
)
STEPS = headings(
    *("label", "rows", "context", "ours_ms", "transformers_ms", "ratio", "of_one_row"),
    label="",
    ours_ms="step ms",
    ratio="transformers / ours",
    weights_ms="reading weights ms",
)

Row = Mapping[str, Any]


def contents(runs: Sequence[RunRecord], looks: Looks) -> Contents:
    decoding = [
        {**row, "label": run.named(_contender(row))} for run in runs for row in run.result.get("decoding") or []
    ]
    steps = [{**row, "label": run.named("step")} for run in runs for row in run.result.get("steps") or []]
    pictures = []
    if decoding:
        caption = "Speed of decoding all prompts in batches; plain decoding in the same batch is 1."
        pictures.append(Picture("decoding", caption, _decoding(decoding, looks)))
    if steps:
        caption = "Time of one forward of the target over several rows, and of reading its weights once."
        pictures.append(Picture("steps", caption, _steps(steps)))
    tables = [
        records("decoding", "Decoding", decoding, DECODING),
        records("steps", "Target steps", steps, STEPS),
    ]
    return Contents(_headline(runs), pictures, tables)


def _contender(row: Row) -> str:
    length = row.get("draft_length")
    return row["drafter"] if length is None else f"{row['drafter']}, {length} nodes"


def _headline(runs: Sequence[RunRecord]) -> dict[str, Any]:
    if len(runs) > 1:
        return {}
    keys = ("target", "device", "dtype", "threads")
    return {key: runs[0].result[key] for key in keys if runs[0].result.get(key) is not None}


def _decoding(rows: Sequence[Row], looks: Looks) -> Figure:
    speeds = curves.labeled(rows, "batch", "tokens_per_s", looks)
    panels = [Panel("tokens/s, decode phase", speeds, limits=(0, None))]
    faster = [row for row in rows if usable_value(row, "speedup") is not None]
    if lines := curves.labeled(faster, "batch", "speedup", looks):
        panels.append(Panel("speed-up\n(over plain, same batch)", lines, reference=(1.0, "plain decoding")))
    return curves.lines(panels, "batch (sequences)", powers_of_two=True)


def _steps(rows: Sequence[Row]) -> Figure:
    looks, lines = Looks(), []
    for key, name in (("ours_ms", "ours"), ("transformers_ms", "transformers"), ("weights_ms", "reading the weights")):
        for label in dict.fromkeys(row["label"] for row in rows):
            mine = [row for row in rows if row["label"] == label]
            full = label.replace("step", name, 1)
            lines.append(Curve(full, numbers(r["rows"] for r in mine), numbers(r.get(key) for r in mine), looks[full]))
    return curves.lines(
        [Panel("milliseconds", lines, limits=(0, None))], "rows of the step (tokens)", powers_of_two=True
    )
