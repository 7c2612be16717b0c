"""Report of `reason`: kept steps and learning per chunk, and a comparison of the modes.

The comparison includes how often a mode's answers agree with the answers of the target alone.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from specctl.reporting import curves
from specctl.reporting.collect import RunRecord
from specctl.reporting.contents import Contents, labeled_rows, records
from specctl.reporting.curves import Panel
from specctl.reporting.style import Looks

CHUNK = {
    "step_acceptance": "drafted steps\naccepted",
    "avg_len": "steps kept\na round",
    "agreement": "answers of\nthe target alone",
    "loss": "loss\n(of DPO, of SFT)",
    "margin": "margin of\npreferences",
}
MODE = {
    "label": "mode",
    "prompts": "prompts",
    "step_acceptance": "steps accepted",
    "accepted_per_target_step": "accepted per target step",
    "depth": "steps drafted a round",
    "avg_len": "steps a round",
    "mat": "mat",
    "seconds": "seconds",
    "learning_s": "seconds of learning",
    "speedup": "× target alone",
    "speedup_with_learning": "× target alone, learning included",
    "tflops": "TFLOP",
    "agreement": "answers of the target alone",
    "accuracy": "right answers",
    "unanswered": "without an answer",
}
INTERVALS = ("step_acceptance", "speedup", "agreement", "accuracy")
"""Rates that are shown with their intervals."""


def contents(runs: Sequence[RunRecord], looks: Looks) -> Contents:
    made = Contents()
    modes = [_flat(row) for row in labeled_rows(runs, "modes", "mode")]
    chunks = labeled_rows(runs, "per_chunk", "mode")
    colors = Looks()
    drafted = [row for row in chunks if row["mode"] != "target"]
    panels = [Panel(title, curves.labeled(drafted, "chunk", key, colors)) for key, title in CHUNK.items()]
    caption = "Steps of the learning draft LM, chunk by chunk of the stream."
    made.pictures += curves.picture("steps", caption, panels, "chunk")
    columns: dict[str, str] = {}
    for key, title in MODE.items():
        columns |= {key: title} | ({f"{key}_interval": f"{title}, interval"} if key in INTERVALS else {})
    differences = [
        {"label": f"{run.named(gain['mode'])} − {gain['than']}", **_flat(gain)}
        for run in runs
        for gain in run.result.get("differences") or []
    ]
    difference = {"label": "modes", "step_acceptance": "steps accepted", "step_acceptance_interval": "interval"}
    chunk = {"label": "mode", "chunk": "chunk", **{key: title.replace("\n", " ") for key, title in CHUNK.items()}}
    made.tables = [
        records("modes", "Modes of lookahead reasoning: not lossless, so answers are compared", modes, columns),
        records("differences", "Gain of learning", differences, difference),
        records("steps", "Chunks", chunks, chunk),
    ]
    return made


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """Split each rate of a row into two fields: its value, and its interval as text."""
    fields: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, Mapping) and "interval" in value:
            ends = value["interval"]
            fields[name] = value["value"]
            fields[f"{name}_interval"] = f"{ends[0]:.3g} to {ends[1]:.3g}" if ends else None
        else:
            fields[name] = value
    return fields
