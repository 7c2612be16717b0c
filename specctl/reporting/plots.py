"""Render matplotlib figures of result documents, without a display and without changes to global state."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specctl.reporting.tables import matrix_csv
from specctl.runs import atomic_write

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LABELS = {
    "mat": ("mat", "tokens per pass of the target"),
    "speedup": ("speed-up", "tokens/s over plain decoding"),
    "accept_rate": ("acceptance", "accepted share of the verified draft tokens"),
}
COLORS = "YlGnBu"  # sequential, readable in grey and by color-blind readers
NOTHING = "#ededed"  # a cell without a measurement
GAP = 6  # points between the rest and averages or baselines
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
    atomic_write(path, png(figure))
    return path


def png(figure: Figure) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    image = io.BytesIO()
    figure.set_dpi(min(DPI, LARGEST / max(figure.get_size_inches())))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # for names in a script that matplotlib's font lacks
        FigureCanvasAgg(figure).print_png(image)  # `Figure.savefig` draws twice
    return image.getvalue()


def heat_map(matrix: dict[str, Any], title: str = "") -> Figure:
    """Draw the matrix of `eval`: drafters above baselines, domains and their average, the best per column framed."""
    import numpy as np
    from matplotlib import colormaps
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    names, columns = [*matrix["drafters"], *matrix["baselines"]], [*matrix["domains"], "macro\naverage"]
    lines = [[*values, macro] for values, macro in zip(matrix["values"], matrix["macro"], strict=True)]
    values = np.array(lines, dtype=float)  # [rows, columns], NaN without a measurement
    down, across = values.shape
    column = max(COLUMN, CHARACTER * max(map(len, matrix["domains"])) + 0.1)
    width, height = column * across + CHARACTER * max(map(len, names)) + MARGIN_X, ROW * down + MARGIN_Y
    figure = Figure(figsize=(max(width, SMALLEST[0]), max(height, SMALLEST[1])), layout="constrained")
    axes = figure.add_subplot()
    colors = colormaps[COLORS].with_extremes(bad=NOTHING)
    image = axes.imshow(values, cmap=colors, extent=(0, across, down, 0), aspect="auto")
    widths = [GAP if y == len(matrix["drafters"]) else 1 for y in range(1, down)]
    axes.hlines(range(1, down), 0, across, "white", linewidth=widths)
    axes.vlines(range(1, across), 0, down, "white", linewidth=[1] * (across - 2) + [GAP])
    shades: Any = image.norm(values)
    for (y, x), value in np.ndenumerate(values):
        ink = "white" if shades[y, x] > 0.5 else "#111111"
        shown = "–" if np.isnan(value) else f"{value:.2f}"
        axes.text(x + 0.5, y + 0.52, shown, ha="center", va="center", fontsize=9, color=ink)
    for x, best in enumerate([*matrix["best"], matrix["best_macro"]]):
        if best is not None:
            corner = x + 0.03, matrix["drafters"].index(best) + 0.05
            axes.add_patch(Rectangle(corner, 0.94, 0.9, fill=False, edgecolor="#d1495b", linewidth=2, zorder=3))
    axes.set_xticks([x + 0.5 for x in range(across)], columns, parse_math=False)
    axes.set_yticks([y + 0.5 for y in range(down)], names, parse_math=False)  # a drafter may be called $a_b
    axes.xaxis.tick_top()
    axes.tick_params(length=0, labelsize=9)
    axes.spines[:].set_visible(False)
    axes.set_xlabel("framed: the best drafter of the column", fontsize=8, loc="left", color="#555555")
    short, long = LABELS[matrix["metric"]]
    heading = f"{short}: {long}" + (f" ({title})" if title else "")
    figure.suptitle(heading, fontsize=10, x=0.01, ha="left", parse_math=False)
    bar = figure.colorbar(image, ax=axes, pad=0.02, fraction=0.04, aspect=18)
    bar.set_label(short, fontsize=9)
    bar.ax.tick_params(labelsize=8)
    bar.outline.set_visible(False)
    return figure
