"""Prometheus' text format, as far as counters need it."""

from __future__ import annotations

import re

_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+\d+)?$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def samples(page: str, name: str) -> list[tuple[dict[str, str], float]]:
    """(labels, value) of every sample of a metric; with engines behind one port there are several."""
    found = []
    for line in page.splitlines():
        match = _SAMPLE.match(line)
        if match and match[1] == name:
            found.append((dict(_LABEL.findall(match[2] or "")), float(match[3])))
    return found


def total(page: str, name: str) -> float | None:
    """The sum of a metric's samples; None where there is none."""
    values = [value for _, value in samples(page, name)]
    return sum(values) if values else None
