"""A report's part for each command; of others it shows their results as tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from specctl.reporting.collect import RunRecord
from specctl.reporting.commands import bench, evaluation, online, selection, training
from specctl.reporting.contents import Contents, generic
from specctl.reporting.style import Looks

Maker = Callable[[Sequence[RunRecord], Looks], Contents]

MAKERS: dict[str, Maker] = {
    "train-drafter": training.contents,
    "eval": evaluation.contents,
    "bench": bench.contents,
    "select": selection.contents,
    "online": online.contents,
}


def contents(command: str, runs: Sequence[RunRecord], looks: Looks) -> Contents:
    """One command's part of a report; `looks` are shared by all parts, so that a drafter keeps its colour."""
    maker = MAKERS.get(command)
    return maker(runs, looks) if maker else generic(runs)
