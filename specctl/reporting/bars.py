"""Bar charts that compare named items: bars with intervals, and shares of a whole. Arrays in, figure out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specctl.reporting.style import Look, grouped_names, legend, short, style_axes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROW, CHARACTER = 0.24, 0.075  # inches
PANEL, ACROSS = 2.7, 3  # inches per panel; number of panels per row
ALONE = 4.6  # inches of a single panel


@dataclass(frozen=True)
class Bar:
    """One value with its interval (both ends, or None)."""

    name: str
    value: float
    interval: tuple[float, float] | None
    look: Look


def bars(panels: Mapping[str, Sequence[Bar]], label: str, reference: float | None = None) -> Figure:
    """Draw horizontal bars from 0, with names in the same order in all panels, and a vertical line at `reference`.

    `panels` maps titles, which may be empty, to bars.
    """
    from matplotlib.figure import Figure

    names = grouped_names(bar.name for shown in panels.values() for bar in shown)
    across = min(ACROSS, len(panels))
    down = -(-len(panels) // across)
    width = (ALONE if across == 1 else PANEL * across) + CHARACTER * max(map(len, map(short, names))) + 0.4
    figure = Figure(figsize=(width, down * (ROW * len(names) + 0.45) + 0.45), layout="constrained")
    grid = figure.subplots(down, across, sharex=True, sharey=True, squeeze=False).ravel()
    for axes, (title, shown) in zip(grid, panels.items(), strict=False):
        style_axes(axes)
        axes.grid(False, axis="y")
        if title:
            axes.set_title(short(title), fontsize=9, loc="left", parse_math=False)
        for bar in shown:
            _draw(axes, names.index(bar.name), bar)
        if reference is not None:
            axes.axvline(reference, color="#555555", linewidth=0.9, linestyle=(0, (2, 2)))
        axes.tick_params(axis="y", length=0)
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    for axes in grid[max(0, len(panels) - across) : len(panels)]:
        axes.tick_params(labelbottom=True)
    grid[0].set_yticks(range(len(names)), [short(name) for name in names], parse_math=False)
    grid[0].set_ylim(len(names) - 0.4, -0.6)
    figure.supxlabel(label, fontsize=9)
    return figure


def shares(rows: Mapping[str, Sequence[float]], names: Sequence[str], looks: Sequence[Look], label: str) -> Figure:
    """Draw one bar per row, divided into the shares of `names`."""
    from matplotlib.figure import Figure

    beside = CHARACTER * (max(map(len, map(short, names))) + max(map(len, map(short, rows)))) + 0.9
    height = max(0.34 * len(rows) + 0.8, 0.19 * len(names) + 0.3)
    figure = Figure(figsize=(ALONE + beside, height), layout="constrained")
    axes = figure.add_subplot()
    style_axes(axes)
    axes.grid(False, axis="y")
    handles: dict[str, Any] = {}
    for y, values in enumerate(rows.values()):
        left, whole = 0.0, sum(values) or 1.0
        for name, value, look in zip(names, values, looks, strict=True):
            drawn = axes.barh(
                y,
                value / whole,
                left=left,
                height=0.7,
                color=look.color,
                hatch=look.hatch,
                edgecolor="white",
                linewidth=0.5,
            )
            handles.setdefault(name, drawn[0])
            left += value / whole
    axes.set_yticks(range(len(rows)), [short(row) for row in rows], parse_math=False)
    axes.set(xlim=(0, 1), ylim=(len(rows) - 0.5, -0.5), xlabel=label)
    axes.tick_params(axis="y", length=0)
    legend(figure, handles)
    return figure


def _draw(axes: Any, y: int, bar: Bar) -> None:
    axes.barh(y, bar.value, height=0.72, color=bar.look.color, hatch=bar.look.hatch, edgecolor="white", linewidth=0)
    if bar.interval is not None:
        axes.hlines(y, *bar.interval, color="#111111", linewidth=1.1)
        axes.plot(bar.interval, [y, y], "|", color="#111111", markersize=4)
