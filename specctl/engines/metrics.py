"""Parse counters in the Prometheus text format."""

from __future__ import annotations

import math
import re

_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+\d+)?$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def samples(page: str, name: str) -> list[tuple[dict[str, str], float]]:
    """(labels, value) of every sample of a metric. A port that serves several engines has several samples.

    Values that are not finite are skipped, such as the NaN of a metric without observations.
    """
    found = []
    for line in page.splitlines():
        match = _SAMPLE.match(line)
        if match and match[1] == name and math.isfinite(value := _number(match[3])):
            found.append((dict(_LABEL.findall(match[2] or "")), value))
    return found


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def total(page: str, name: str) -> float | None:
    """The sum of a metric's samples, or None if it has no samples."""
    values = [value for _, value in samples(page, name)]
    return sum(values) if values else None
