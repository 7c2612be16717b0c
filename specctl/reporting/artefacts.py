"""The files that a result document gets beside result.json, because people would rather look at it than read it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specctl.reporting import plots, tables
from specctl.runs import atomic_write


def write(document: dict[str, Any], directory: Path) -> None:
    """Write the pictures and tables of a document into its run directory: so far those of the matrix of `eval`."""
    matrix = document.get("matrix")
    if matrix:
        atomic_write(directory / "matrix.csv", tables.matrix_csv(matrix))
        plots.save(plots.heat_map(matrix, title=f"target {Path(document['target']).name}"), directory / "matrix.png")
