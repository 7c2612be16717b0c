"""Result documents as CSV."""

from __future__ import annotations

import csv
import io
from typing import Any


def matrix_csv(matrix: dict[str, Any]) -> str:
    """The matrix of `eval`: a row per drafter and baseline, a column per domain, the macro average last; unrounded.

    Nothing measured is an empty cell.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["drafter", *matrix["domains"], "macro"])
    for name, values, macro in zip(
        [*matrix["drafters"], *matrix["baselines"]], matrix["values"], matrix["macro"], strict=True
    ):
        writer.writerow([name, *values, macro])
    return text.getvalue()
