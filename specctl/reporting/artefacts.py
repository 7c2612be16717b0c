"""Write the files that accompany result.json: pictures and tables for human readers."""

from pathlib import Path
from typing import Any

from specctl.reporting import plots, tables
from specctl.runs import atomic_write


def write(document: dict[str, Any], directory: Path) -> None:
    """Write a document's pictures and tables into its run directory; currently only the matrix of `eval`."""
    matrix = document.get("matrix")
    if matrix:
        atomic_write(directory / "matrix.csv", tables.matrix_csv(matrix))
        plots.save(plots.heat_map(matrix, title=f"target {Path(document['target']).name}"), directory / "matrix.png")
