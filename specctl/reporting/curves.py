"""Line charts over a running quantity such as steps, rounds, depths or batch sizes. Arrays in, figure out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from specctl.reporting.contents import Picture, numbers
from specctl.reporting.style import Look, Looks, grouped_names, legend, short, style_axes
from specctl.reporting.tables import usable_value

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH, LEGEND = 6.6, 0.085  # inches; LEGEND is per character of the longest name
HEIGHT = 2.4, 0.7  # inches per panel, and around the panels
LEGEND_LINE = 0.19  # inches
MOST_MARKERS = 25
MOST_POINTS = 2000  # a screen cannot show more
SMOOTHED = 0.02  # share of the points that a running mean covers


@dataclass(frozen=True)
class Curve:
    """Curve of y over x; NaN is a gap. A `noisy` curve is drawn as its running mean, a single one over its data."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    look: Look
    noisy: bool = False


@dataclass(frozen=True)
class Panel:
    """Lines over one vertical axis.

    `reference` is a horizontal line and its label. A limit of None follows the data.
    """

    label: str
    lines: list[Curve]
    reference: tuple[float, str] | None = None
    limits: tuple[float | None, float | None] | None = None


def labeled(rows: Sequence[Mapping[str, Any]], x: str, y: str, looks: Looks) -> list[Curve]:
    """Build a curve of field `y` over field `x` for each `label` of the rows that has numbers."""
    made = []
    for label in dict.fromkeys(row["label"] for row in rows):
        mine = sorted((row for row in rows if row["label"] == label), key=itemgetter(x))
        values = numbers(usable_value(row, y) for row in mine)
        if any(value == value for value in values):
            made.append(Curve(label, numbers(row[x] for row in mine), values, looks[label]))
    return made


def picture(
    name: str, caption: str, panels: Sequence[Panel], x_label: str, *, powers_of_two: bool = False
) -> list[Picture]:
    """Draw the panels with lines over an axis of whole numbers. Returns an empty list if all panels are empty."""
    filled = [panel for panel in panels if panel.lines]
    return [Picture(name, caption, lines(filled, x_label, powers_of_two=powers_of_two, whole=True))] if filled else []


def lines(panels: Sequence[Panel], x_label: str, *, powers_of_two: bool = False, whole: bool = False) -> Figure:
    """Draw panels on top of each other with a common horizontal axis and one legend.

    `whole` restricts the axis ticks to whole numbers.
    """
    from matplotlib.ticker import MaxNLocator, ScalarFormatter

    names = grouped_names(line.name for panel in panels for line in panel.lines)
    figure, grid = _figure(len(panels), names)
    handles: dict[str, Any] = {}
    for axes, panel in zip(grid, panels, strict=True):
        style_axes(axes)
        axes.set_ylabel(panel.label)
        for line in panel.lines:
            drawn = _draw(axes, line, alone=len(names) == 1)
            handles.setdefault(line.name, drawn)
        if panel.reference is not None:
            _reference(axes, *panel.reference)
        if panel.limits is not None:
            axes.set_ylim(*panel.limits)
    last = grid[-1]
    last.set_xlabel(x_label)
    if powers_of_two:
        ticks = sorted({x for panel in panels for line in panel.lines for x in line.x})
        last.set_xscale("log", base=2)
        last.set_xticks(ticks)
        last.minorticks_off()
        last.xaxis.set_major_formatter(ScalarFormatter())
    elif whole:
        last.xaxis.set_major_locator(MaxNLocator(integer=True))
    legend(figure, {name: handles[name] for name in names})
    return figure


def stacked(
    x: Sequence[float], shares: Any, names: Sequence[str], looks: Sequence[Look], x_label: str, y_label: str
) -> Figure:
    """Draw stacked areas that fill the whole height; shares: [len(names), len(x)]."""
    figure, (axes,) = _figure(1, names)
    style_axes(axes)
    drawn = axes.stackplot(x, shares, colors=[look.color for look in looks], edgecolor="white", linewidth=0.4)
    for area, look in zip(drawn, looks, strict=True):
        area.set_hatch(look.hatch)
    axes.set(xlabel=x_label, ylabel=y_label, ylim=(0, 1))
    axes.margins(x=0)
    legend(figure, dict(reversed(list(zip(names, drawn, strict=True)))))  # same order as the areas, from the top
    return figure


def running_mean(values: Any, window: int) -> Any:
    """Means [n] of the values in a window around each point, without NaN; NaN for a window without values."""
    import numpy as np

    values = np.asarray(values, dtype=float)
    known = np.isfinite(values)
    before = np.concatenate([[0.0], np.cumsum(np.where(known, values, 0.0))])
    count = np.concatenate([[0], np.cumsum(known)])
    middle = np.arange(len(values))
    low, high = np.maximum(middle - window // 2, 0), np.minimum(middle + window // 2 + 1, len(values))
    with np.errstate(invalid="ignore"):
        return (before[high] - before[low]) / (count[high] - count[low])


def _figure(panels: int, names: Sequence[str]) -> tuple[Figure, list[Any]]:
    from matplotlib.figure import Figure

    beside = LEGEND * max(map(len, map(short, names))) + 0.5 if len(names) > 1 else 0.0
    height = max(HEIGHT[0] * panels + HEIGHT[1] + 0.4 * (panels == 1), LEGEND_LINE * len(names) + 0.3)
    figure = Figure(figsize=(WIDTH + beside, height), layout="constrained")
    return figure, list(figure.subplots(panels, 1, sharex=True, squeeze=False)[:, 0])


def _draw(axes: Any, line: Curve, alone: bool) -> Any:
    import numpy as np

    x, y = np.asarray(line.x, dtype=float), np.asarray(line.y, dtype=float)
    every = -(-len(x) // MOST_POINTS) or 1
    width = 1.6
    if line.noisy and len(x) > MOST_MARKERS:
        if alone:  # the noise of several lines would hide them all
            axes.plot(x[::every], y[::every], color=line.look.color, alpha=0.25, linewidth=0.6)
        y = running_mean(y, max(3, int(SMOOTHED * len(y))))
    marker = line.look.marker if len(x) <= MOST_MARKERS else ""
    (drawn,) = axes.plot(
        x[::every],
        y[::every],
        color=line.look.color,
        linestyle=line.look.dash,
        linewidth=width,
        marker=marker,
        markersize=4,
    )
    return drawn


def _reference(axes: Any, value: float, text: str) -> None:
    axes.axhline(value, color="#555555", linewidth=0.9, linestyle=(0, (2, 2)))
    axes.annotate(
        text, (1, value), xycoords=("axes fraction", "data"), xytext=(0, 2), textcoords="offset points",
        ha="right", va="bottom", fontsize=7.5, color="#555555", parse_math=False,
    )  # fmt: skip
