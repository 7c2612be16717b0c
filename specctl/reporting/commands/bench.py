"""Report of `bench`: decoding by batch size, target steps by rows."""

from collections.abc import Mapping, Sequence
from typing import Any

from specctl.reporting import curves
from specctl.reporting.collect import RunRecord
from specctl.reporting.contents import Contents, Picture, headline, numbers, records
from specctl.reporting.curves import Curve, Panel
from specctl.reporting.style import Looks
from specctl.reporting.tables import headings, usable_value

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
    tables = [records("decoding", "Decoding", decoding, DECODING), records("steps", "Target steps", steps, STEPS)]
    titles = {key: key for key in ("target", "device", "dtype", "threads")}
    return Contents(headline([run.result for run in runs], titles), _decoding(decoding, looks) + _steps(steps), tables)


def _contender(row: Row) -> str:
    length = row.get("draft_length")
    return row["drafter"] if length is None else f"{row['drafter']}, {length} nodes"


def _decoding(rows: Sequence[Row], looks: Looks) -> list[Picture]:
    speeds = curves.labeled(rows, "batch", "tokens_per_s", looks)
    usable = [row for row in rows if usable_value(row, "speedup") is not None]
    faster = curves.labeled(usable, "batch", "speedup", looks)
    panels = [
        Panel("tokens/s, decode phase", speeds, limits=(0, None)),
        Panel("speed-up\n(over plain, same batch)", faster, reference=(1.0, "plain decoding")),
    ]
    caption = "Speed of decoding all prompts in batches; plain decoding in the same batch is 1."
    return curves.picture("decoding", caption, panels, "batch (sequences)", powers_of_two=True)


def _steps(rows: Sequence[Row]) -> list[Picture]:
    looks, lines = Looks(), []
    for key, name in (("ours_ms", "ours"), ("transformers_ms", "transformers"), ("weights_ms", "reading the weights")):
        for label in dict.fromkeys(row["label"] for row in rows):
            mine = [row for row in rows if row["label"] == label]
            full = label.replace("step", name, 1)
            lines.append(Curve(full, numbers(r["rows"] for r in mine), numbers(r.get(key) for r in mine), looks[full]))
    caption = "Time of one forward of the target over several rows, and of reading its weights once."
    panel = Panel("milliseconds", lines, limits=(0, None))
    return curves.picture("steps", caption, [panel], "rows of the step (tokens)", powers_of_two=True)
