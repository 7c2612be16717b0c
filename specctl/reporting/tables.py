"""Tables of result documents as CSV, and values as people read them."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

MARK = " !"
SPEEDS = {"speedup", "speedup_transformers", "speedup_with_training"}
"""Fields whose figures a row's `unusable` is about."""


class Unusable(float):
    """A figure that is shown with a mark: it cannot be used."""


def marked(row: Mapping[str, Any], name: str) -> Any:
    """A field of a row for a table; None where it has none of that name."""
    value = row.get(name)
    return Unusable(value) if name in SPEEDS and value is not None and row.get("unusable") else value


def usable(row: Mapping[str, Any], name: str) -> Any:
    """A field of a row for a picture or a headline, which have no room for doubts: None where it cannot be used."""
    return None if name in SPEEDS and row.get("unusable") else row.get(name)


def doubts(document: Mapping[str, Any]) -> list[str]:
    """One line on the marked figures of a result document, if there are any."""
    rows = [row for value in document.values() if isinstance(value, list) for row in value]
    unusable = [row for row in rows if isinstance(row, Mapping) and row.get("unusable")]
    whose = dict.fromkeys(f"{_whose(row)}{row['unusable']}" for row in unusable or [document] if row.get("unusable"))
    if not whose:
        return []
    about = document.get("machine")
    busy = f" ({machine(about)})" if isinstance(about, Mapping) else ""
    return [
        f"{MARK.strip()} speeds that cannot be used: {'; '.join(whose)} (even a draft that costs nothing has "
        f"× plain = mat). The clock saw other work{busy}, or too few tokens: measure again on a quiet machine"
    ]


def machine(about: Mapping[str, Any]) -> str:
    """`machine` of a result document in words."""
    busy = about.get("others_busy")  # a report reads it from a file: it may be anything
    words = [f"{text(about.get(many))} {many[:-1] if about.get(many) == 1 else many}" for many in ("cores", "threads")]
    return ", ".join([*words, *([f"others kept {text(busy)} cores busy"] if busy is not None else [])])


def _whose(row: Mapping[str, Any]) -> str:
    """`sql-eagle3 in sql: `, by what the row calls itself."""
    name = row.get("drafter") or row.get("algo")
    where = [f"in {row['domain']}"] if row.get("domain") else [f"batch {row['batch']}"] if row.get("batch") else []
    return f"{' '.join([str(name), *where])}: " if name else ""


def text(value: Any) -> str:
    """A value in a few characters: floats rounded, thousands set apart, nothing (None, NaN) as a dash."""
    if value is None or value != value:
        return "–"
    if isinstance(value, Unusable):
        return text(float(value)) + MARK
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

    A text that a spreadsheet would compute has an apostrophe in front of it; a carriage return, which would end the row
    unquoted, is a line feed.
    """
    made = io.StringIO()
    writer = csv.writer(made, lineterminator="\n")
    for row in (columns, *rows):
        plain = [";".join(map(str, value)) if isinstance(value, list) else value for value in row]
        writer.writerow([_inert(value) if isinstance(value, str) else value for value in plain])
    return made.getvalue()


def _inert(text: str) -> str:
    """A text that no spreadsheet takes for a formula; `-3;-4` and `-1.5` are numbers, whoever wrote them."""
    text = text.replace("\r", "\n")
    formula = text.startswith(("=", "+", "-", "@", "\t", "\n")) and not re.fullmatch(r"[-+\d.;e]+", text)
    return f"'{text}" if formula else text


def matrix_csv(matrix: dict[str, Any]) -> str:
    """The matrix of `eval`: a row per drafter and baseline, a column per domain, the macro average last; unrounded.

    Nothing measured is an empty cell.
    """
    names = [*matrix["drafters"], *matrix["baselines"]]
    rows = [[name, *line, macro] for name, line, macro in zip(names, matrix["values"], matrix["macro"], strict=True)]
    return to_csv(["drafter", *matrix["domains"], "macro"], rows)
