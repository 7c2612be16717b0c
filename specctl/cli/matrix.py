"""Rendering of `eval --matrix` on a terminal: the matrix, then the test of its diagonal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specctl.cli.output import cell, table

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text


def render(matrix: dict[str, Any]) -> list[RenderableType]:
    """Render drafters above baselines, by domain and macro average, then the test of the diagonal and the verdict.

    The best drafter of a column is bold and has a star.
    """
    diagonal = [_diagonal(matrix["diagonal"])] if matrix["diagonal"] else []
    return [_cells(matrix), *diagonal, cell(matrix["verdict"]), *_baseline_wins(matrix)]


def _cells(matrix: dict[str, Any]) -> Table:
    from rich import box
    from rich.table import Table

    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    made.add_column(matrix["metric"])
    for column in (*matrix["domains"], "macro"):
        made.add_column(column, justify="right")
    best = [*matrix["best"], matrix["best_macro"]]
    names = [*matrix["drafters"], *matrix["baselines"]]
    for name, values, macro in zip(names, matrix["values"], matrix["macro"], strict=True):
        line = [_value(value, name == first) for value, first in zip([*values, macro], best, strict=True)]
        made.add_row(cell(name), *line, end_section=name == matrix["drafters"][-1])
    return made


def _value(value: float | None, best: bool) -> Text:
    from rich.text import Text

    # Values without a star get a space, so that digits stay aligned.
    return Text(cell(value) + ("*" if best else " "), style="bold" if best else "")


def _baseline_wins(matrix: dict[str, Any]) -> list[str]:
    """Return a line with the domains in which a baseline beats every trained drafter, which the stars do not show."""
    count = len(matrix["drafters"])
    outdone = []
    for domain, column in zip(matrix["domains"], zip(*matrix["values"], strict=True), strict=True):
        known = [(value, name) for value, name in zip(column[count:], matrix["baselines"], strict=True) if value]
        top = max((value for value in column[:count] if value), default=None)
        if known and top is not None and max(known)[0] > top:
            outdone.append(f"{max(known)[1]} in {domain}")
    return [cell(f"better than every trained drafter: {', '.join(outdone)}")] if outdone else []


def _interval(specialist: dict[str, Any]) -> str | None:
    return "{:+.2f} … {:+.2f}".format(*specialist["interval"]) if specialist["interval"] else None


def _diagonal(diagonal: list[dict[str, Any]]) -> RenderableType:
    rows = [
        [
            *(specialist[key] for key in ("drafter", "domain", "best", "rival")),
            f"{specialist['lead']:+.2f}",
            _interval(specialist),
        ]
        for specialist in diagonal
    ]
    return table("specialist", "its domain", "best there", "best of the others", "lead", "95 %", rows=rows)
