"""Prometheus' text format, as far as counters need it."""

from __future__ import annotations

import math
import re

_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+\d+)?$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def samples(page: str, name: str) -> list[tuple[dict[str, str], float]]:
    """(labels, value) of every sample of a metric; with engines behind one port there are several. Values that are no
    finite number, such as the NaN of a metric without observations, are left out."""
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
    """The sum of a metric's samples; None where there is none."""
    values = [value for _, value in samples(page, name)]
    return sum(values) if values else None
