"""Tables of result documents as CSV, and values as people read them."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from typing import Any


def text(value: Any) -> str:
    """A value in a few characters: floats rounded, thousands set apart, nothing (None, NaN) as a dash."""
    if value is None or value != value:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.1f}" if abs(value) >= 100 else f"{value:.3g}" if abs(value) < 0.01 else f"{value:.2f}"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, list):
        return ", ".join(map(text, value)) or "–"
    return str(value)


def to_csv(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Values as they are, unrounded; nothing is an empty cell, a list its items with `;` between them.

    A text that a spreadsheet would compute has an apostrophe in front of it.
    """
    made = io.StringIO()
    writer = csv.writer(made, lineterminator="\n")
    for row in (columns, *rows):
        plain = [";".join(map(str, value)) if isinstance(value, list) else value for value in row]
        writer.writerow([f"'{value}" if isinstance(value, str) and _computed(value) else value for value in plain])
    return made.getvalue()


def _computed(text: str) -> bool:
    """Whether a spreadsheet takes a text for a formula; `-3;-4` and `-1.5` are numbers, whoever wrote them."""
    if not text.startswith(("=", "+", "-", "@", "\t", "\r")):
        return False
    return re.fullmatch(r"[-+\d.;e]+", text) is None


def matrix_csv(matrix: dict[str, Any]) -> str:
    """The matrix of `eval`: a row per drafter and baseline, a column per domain, the macro average last; unrounded.

    Nothing measured is an empty cell.
    """
    names = [*matrix["drafters"], *matrix["baselines"]]
    rows = [[name, *line, macro] for name, line, macro in zip(names, matrix["values"], matrix["macro"], strict=True)]
    return to_csv(["drafter", *matrix["domains"], "macro"], rows)
