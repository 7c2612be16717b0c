"""Report of acceptance by draft depth, as measured by `train-drafter` and `eval`."""

from collections.abc import Mapping, Sequence
from typing import Any

from specctl.reporting import curves
from specctl.reporting.contents import Picture, ReportTable, numbers
from specctl.reporting.curves import Curve, Panel
from specctl.reporting.style import Looks


def picture(positions: Mapping[str, Sequence[Any]], looks: Looks, of: str) -> Picture:
    """Plot the accepted share over draft depth for several drafters; `of` names the texts for the caption."""
    lines = [
        Curve(name, list(range(1, len(values) + 1)), numbers(values), looks[name]) for name, values in positions.items()
    ]
    panel = Panel("accepted share", lines, limits=(0, 1.03))
    caption = f"Share of draft tokens accepted at each depth, among drafts with all earlier tokens accepted: {of}."
    return Picture("acceptance", caption, curves.lines([panel], "draft depth (tokens)", whole=True))


def by_position(positions: Mapping[str, Sequence[Any]]) -> ReportTable:
    depth = max(map(len, positions.values()))
    rows = [[name, *values, *[None] * (depth - len(values))] for name, values in positions.items()]
    return ReportTable("acceptance", "Acceptance by draft depth", ["drafter", *map(str, range(1, depth + 1))], rows)
