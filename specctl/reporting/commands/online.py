"""Report of `online`: mat, speed and loss per chunk, and the weights of the ensemble."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from specctl.reporting import curves
from specctl.reporting.collect import RunRecord
from specctl.reporting.contents import Contents, Picture, headline, labeled_rows, numbers, records
from specctl.reporting.curves import Curve, Panel
from specctl.reporting.style import Looks, grey

CHUNK = {
    "mat": "mat\n(tokens per pass of the target)",
    "accept_rate": "accepted share",
    "tokens_per_s": "tokens/s",
    "loss": "loss",
}
CONTENDER = {
    "label": "contender",
    "mat": "mat",
    "mat_interval": "mat, interval",
    "mat_first": "mat, first chunk",
    "mat_last": "mat, last chunk",
    "mat_over_static": "mat × static",
    "mat_over_static_interval": "mat × static, interval",
    "over_static": "tokens/s × static",
    "over_static_with_training": "× static, learning included",
    "over_static_with_training_interval": "× static, learning included, interval",
    "speedup": "× plain",
    "speedup_with_training": "× plain, learning included",
    "over_lookup_with_training": "× lookup, learning included",
    "learn_share": "learning, of the time",
    "rollbacks": "updates taken back",
    "unusable": "× plain not usable",
}
HEADLINE = ("mat", "mat_first", "mat_last", "speedup", "speedup_with_training", "over_lookup_with_training", "chunks")


def contents(runs: Sequence[RunRecord], looks: Looks) -> Contents:
    contenders = [_in_words(row) for row in labeled_rows(runs, "learners", "algo")]
    chunks: dict[str, list[Mapping[str, Any]]] = {}
    for run in runs:
        for row in run.result.get("per_chunk") or []:
            chunks.setdefault(run.named(row["algo"]), []).append(row)
    learners = Looks()
    panels = [Panel(label, _lines(chunks, key, learners)) for key, label in CHUNK.items()]
    panels[0].lines.extend(static_curves(chunks))
    titles = {key: CONTENDER.get(key, key) for key in HEADLINE}
    made = Contents(headline([run.result for run in runs], titles))
    caption = "Online drafters, chunk by chunk of the stream."
    made.pictures += curves.picture("chunks", caption, panels, "chunk")
    for name, found in chunks.items():
        made.pictures += _weights(name, found)
    rows = [{**chunk, "label": name, "chunk": n} for name, found in chunks.items() for n, chunk in enumerate(found, 1)]
    columns = {"label": "learner", "chunk": "chunk", **{key: key.replace("_per_", "/") for key in CHUNK}}
    columns["static_mat"] = "mat, not learning"
    made.tables = [
        records("online", "Contenders on the whole stream", contenders, CONTENDER),
        records("chunks", "Chunks of the first pass", rows, columns),
    ]
    return made


def _in_words(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a contender's row with its intervals formatted as text."""
    ends = {key: value for key, value in row.items() if key.endswith("_interval") and value}
    return {**row, **{key: f"{low:.3g} to {high:.3g}" for key, (low, high) in ends.items()}}


def _lines(chunks: Mapping[str, Sequence[Mapping[str, Any]]], key: str, learners: Looks) -> list[Curve]:
    return [
        Curve(name, list(range(1, len(mine) + 1)), numbers(chunk.get(key) for chunk in mine), learners[name])
        for name, mine in chunks.items()
        if any(chunk.get(key) is not None for chunk in mine)
    ]


def static_curves(chunks: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[Curve]:
    """Curves of mat without learning, and of drafters without weights.

    Learners that start from the same drafter share one curve.
    """
    once = {tuple(line.y): line for line in _lines(chunks, "static_mat", Looks())}.values()
    lines = [replace(line, name="not learning" if len(once) == 1 else f"{line.name}, not learning") for line in once]
    for run in chunks.values():
        rivals = {name: None for chunk in run for name in chunk.get("untrained_mat") or {}}
        for name in rivals:
            y = numbers((chunk.get("untrained_mat") or {}).get(name) for chunk in run)
            if all(line.y != y for line in lines):
                lines.append(Curve(name, list(range(1, len(run) + 1)), y, grey(0)))
    return [replace(line, look=grey(n)) for n, line in enumerate(lines)]


def _weights(name: str, chunks: Sequence[Mapping[str, Any]]) -> list[Picture]:
    weights = [chunk["weights"] for chunk in chunks if chunk.get("weights")]
    if not weights or {len(shares) for shares in weights} == {1} or len({len(shares) for shares in weights}) > 1:
        return []
    names = [f"learner {index}" for index in range(1, len(weights[0]) + 1)]
    members = Looks()
    figure = curves.stacked(
        list(range(1, len(weights) + 1)), list(zip(*weights, strict=True)), names, [members[name] for name in names],
        "chunk", "weight of each learner",
    )  # fmt: skip
    return [Picture(f"weights-{name.replace(' #', '-')}", f"{name}: weights of the ensemble's learners.", figure)]
