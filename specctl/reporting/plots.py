"""Render matplotlib figures of result documents, without a display and without changes to global state."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specctl.reporting.tables import matrix_csv
from specctl.runs import atomic_write

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LABELS = {
    "mat": ("mat", "tokens per pass of the target"),
    "speedup": ("speed-up", "tokens/s over plain decoding"),
    "accept_rate": ("acceptance", "accepted share of the verified draft tokens"),
}
COLOURS = "YlGnBu"  # sequential, readable in grey and by color-blind readers
NOTHING = "#ededed"  # a cell without a measurement
GAP = 0.18  # fraction of a cell, separates averages and baselines from the rest
ROW, COLUMN, CHARACTER = 0.34, 0.72, 0.082  # inches
MARGIN_X, MARGIN_Y = 1.0, 1.1  # inches: color bar and padding; title and labels
SMALLEST = 5.0, 2.2  # inches
DPI = 160
LARGEST = 8000  # pixels per side; bars of a hundred runs make a tall picture


def write_matrix(document: dict[str, Any], directory: Path) -> None:
    """Write the matrix of a result of `eval`, if it has one, as a picture and as CSV into its run directory."""
    matrix = document.get("matrix")
    if matrix:
        atomic_write(directory / "matrix.csv", matrix_csv(matrix))
        save(heat_map(matrix, title=f"target {Path(document['target']).name}"), directory / "matrix.png")


def save(figure: Figure, path: Path) -> Path:
    """Write a figure as PNG, atomically."""
    atomic_write(path, png(figure))
    return path


def png(figure: Figure) -> bytes:
    image = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # for names in a script that matplotlib's font lacks
        figure.savefig(image, format="png", dpi=min(DPI, LARGEST / max(figure.get_size_inches())))
    return image.getvalue()


def heat_map(matrix: dict[str, Any], title: str = "") -> Figure:
    """Draw the matrix of `eval`: drafters above baselines, domains and their average, the best per column framed."""
    import numpy as np
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

    names, columns = [*matrix["drafters"], *matrix["baselines"]], [*matrix["domains"], "macro\naverage"]
    lines = [[*values, macro] for values, macro in zip(matrix["values"], matrix["macro"], strict=True)]
    measured = [value for line in lines for value in line if value is not None]
    scale = ScalarMappable(
        Normalize(min(measured, default=0), max(measured, default=1)), colormaps[COLOURS].with_extremes(bad=NOTHING)
    )
    across = _places(len(matrix["domains"]), 1)
    down = _places(len(matrix["drafters"]), len(matrix["baselines"]))

    column = max(COLUMN, CHARACTER * max(map(len, matrix["domains"])) + 0.1)
    width = column * (across[-1] + 1) + CHARACTER * max(map(len, names)) + MARGIN_X
    height = ROW * (down[-1] + 1) + MARGIN_Y
    figure = Figure(figsize=(max(width, SMALLEST[0]), max(height, SMALLEST[1])), layout="constrained")
    axes = figure.add_subplot()
    colours = scale.to_rgba(np.array(lines, dtype=float))  # [rows, columns, 4]
    for y, line, row in zip(down, lines, colours, strict=True):
        for x, value, colour in zip(across, line, row, strict=True):
            _cell(axes, x, y, value, colour)
    for x, best in zip(across, [*matrix["best"], matrix["best_macro"]], strict=True):
        if best is not None:
            _frame(axes, x, down[matrix["drafters"].index(best)])

    axes.set(xlim=(-0.05, across[-1] + 1.05), ylim=(down[-1] + 1.05, -0.05))
    _name(axes, across, columns, down, names)
    short, long = LABELS[matrix["metric"]]
    heading = f"{short}: {long}" + (f" ({title})" if title else "")
    figure.suptitle(heading, fontsize=10, x=0.01, ha="left", parse_math=False)
    bar = figure.colorbar(scale, ax=axes, pad=0.02, fraction=0.04, aspect=18)
    bar.set_label(short, fontsize=9)
    bar.ax.tick_params(labelsize=8)
    bar.outline.set_visible(False)
    return figure


def _name(axes: Axes, across: list[float], columns: list[str], down: list[float], names: list[str]) -> None:
    """Write the names above the columns and next to the rows, and the meaning of a frame below."""
    axes.set_xticks([x + 0.5 for x in across], columns, parse_math=False)
    axes.set_yticks([y + 0.5 for y in down], names, parse_math=False)  # a drafter may be called $a_b
    axes.xaxis.tick_top()
    axes.tick_params(length=0, labelsize=9)
    axes.spines[:].set_visible(False)
    axes.set_xlabel("framed: the best drafter of the column", fontsize=8, loc="left", color="#555555")


def _places(first: int, second: int) -> list[float]:
    """Start positions of `first` cells and, after a gap, of `second` cells."""
    return [float(i) for i in range(first)] + [first + GAP * (first > 0) + i for i in range(second)]


def _cell(axes: Axes, x: float, y: float, value: float | None, colour: Any) -> None:
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle((x, y), 1, 1, facecolor=colour, edgecolor="white", linewidth=1))
    light = colour[:3] @ (0.299, 0.587, 0.114) > 0.5
    text = "–" if value is None else f"{value:.2f}"
    axes.text(x + 0.5, y + 0.52, text, ha="center", va="center", fontsize=9, color="#111111" if light else "white")


def _frame(axes: Axes, x: float, y: float) -> None:
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle((x + 0.03, y + 0.05), 0.94, 0.9, fill=False, edgecolor="#d1495b", linewidth=2, zorder=3))
