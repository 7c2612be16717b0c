"""`online` in a report: mat, speed and loss chunk by chunk, and the weights of the ensemble."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specctl.reporting import curves
from specctl.reporting.collect import RunRecord
from specctl.reporting.commands import reasoning
from specctl.reporting.contents import Contents, Picture, numbers, records
from specctl.reporting.curves import Line, Panel
from specctl.reporting.style import Looks

CHUNK = {
    "mat": "mat\n(tokens per target pass)",
    "accept_rate": "accepted share",
    "tokens_per_s": "tokens/s",
    "loss": "loss",
}
SUMMARY = {
    "label": "learner",
    "mat": "mat",
    "mat_first": "mat, first chunk",
    "mat_last": "mat, last chunk",
    "static_mat": "mat, not learning",
    "speedup": "× plain",
    "speedup_with_training": "× plain, training included",
    "chunks": "chunks",
}


def contents(runs: Sequence[RunRecord], looks: Looks) -> Contents:
    """Learners of tokens, then modes of lookahead reasoning."""
    steps = [run for run in runs if run.result.get("modes")]
    tokens = [run for run in runs if run not in steps]
    found = [make(some, looks) for make, some in ((_tokens, tokens), (reasoning.contents, steps)) if some]
    made = Contents(headline=found[0].headline)
    for one in found:
        made.pictures += one.pictures
        made.tables += one.tables
    return made


def _tokens(runs: Sequence[RunRecord], looks: Looks) -> Contents:
    summary = [
        {**run.result, "label": _algo(run), "static_mat": (run.result.get("static") or {}).get("mat")} for run in runs
    ]
    chunks = {_algo(run): run.result.get("per_chunk") or [] for run in runs}
    learners = Looks()
    panels = [
        Panel(label, _lines(chunks, key, learners), _static(summary) if key == "mat" else None)
        for key, label in CHUNK.items()
    ]
    panels = [panel for panel in panels if panel.lines]
    made = Contents()
    if len(runs) == 1:
        made.headline = {
            SUMMARY[key]: summary[0][key] for key in SUMMARY if key != "label" and summary[0].get(key) is not None
        }
    if panels:
        figure = curves.lines(panels, "chunk", whole=True)
        made.pictures.append(Picture("chunks", "The drafter while it learns, chunk by chunk of the stream.", figure))
    for run in runs:
        made.pictures += _weights(run)
    rows = [{"label": name, "chunk": n, **chunk} for name, found in chunks.items() for n, chunk in enumerate(found, 1)]
    columns = {"label": "learner", "chunk": "chunk", **{key: key.replace("_per_", "/") for key in CHUNK}}
    tables = [records("online", "Learning", summary, SUMMARY), records("chunks", "Chunks", rows, columns)]
    made.tables = [table for table in tables if table.rows]
    return made


def _algo(run: RunRecord) -> str:
    return run.named(str(run.result.get("algo") or "learner"))


def _lines(chunks: Mapping[str, Sequence[Mapping[str, Any]]], key: str, learners: Looks) -> list[Line]:
    return [
        Line(name, list(range(1, len(found) + 1)), numbers(chunk.get(key) for chunk in found), learners[name])
        for name, found in chunks.items()
        if any(chunk.get(key) is not None for chunk in found)
    ]


def _static(summary: Sequence[Mapping[str, Any]]) -> tuple[float, str] | None:
    """mat without learning; of several runs none, theirs differ."""
    mat = summary[0]["static_mat"] if len(summary) == 1 else None
    return None if mat is None else (mat, "the same drafter, not learning")


def _weights(run: RunRecord) -> list[Picture]:
    weights = [chunk["weights"] for chunk in run.result.get("per_chunk") or [] if chunk.get("weights")]
    if not weights or {len(one) for one in weights} == {1} or len({len(one) for one in weights}) > 1:
        return []
    names = [f"member {index}" for index in range(1, len(weights[0]) + 1)]
    members = Looks()
    figure = curves.stacked(
        list(range(1, len(weights) + 1)), list(zip(*weights, strict=True)), names, [members[name] for name in names],
        "chunk", "weight of each member",
    )  # fmt: skip
    suffix = f"-{run.number}" if run.number else ""
    return [Picture(f"weights{suffix}", f"{_algo(run)}: weights of the ensemble's members.", figure)]
