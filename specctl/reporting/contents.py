"""Parts of a report before it is rendered as a page: headline numbers, pictures, tables."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from specctl.reporting.collect import RunRecord, flat
from specctl.reporting.tables import blank, usable_value, with_mark

if TYPE_CHECKING:
    from matplotlib.figure import Figure


COMMON = ("schema_version", "command", "run_dir")
"""Fields of every result that the report shows elsewhere."""


@dataclass(frozen=True)
class ReportTable:
    """Table of a report. `name` names its CSV file, after the command's name."""

    name: str
    title: str
    columns: list[str]
    rows: list[list[Any]]


@dataclass(frozen=True)
class Picture:
    """Picture of a report. `name` names its PNG file, after the command's name; the caption explains how to read it."""

    name: str
    caption: str
    figure: Figure


@dataclass
class Contents:
    """Part of a report for one command."""

    headline: dict[str, Any] = field(default_factory=dict)
    pictures: list[Picture] = field(default_factory=list)
    tables: list[ReportTable] = field(default_factory=list)

    @property
    def filled(self) -> list[ReportTable]:
        return [table for table in self.tables if table.rows]


def numbers(values: Iterable[Any]) -> list[float]:
    """Convert values to floats for a picture; other values become NaN, which leaves a gap."""
    return [float(value) if isinstance(value, int | float) else math.nan for value in values]


def add(first: Sequence[Any], second: Sequence[Any]) -> list[Any]:
    """Add two lists of numbers item by item. The shorter one is continued with zeros."""
    return [a + b for a, b in zip_longest(first, second, fillvalue=0)]


def headline(results: Sequence[Mapping[str, Any]], titles: Mapping[str, str]) -> dict[str, Any]:
    """Return the numbers of a single result by title; several results have no headline.

    `titles` maps fields to titles. Fields without a usable value are left out.
    """
    if len(results) > 1:
        return {}
    values = {title: usable_value(results[0], key) for key, title in titles.items()}
    return {title: value for title, value in values.items() if value is not None}


def labeled_rows(runs: Sequence[RunRecord], key: str, name: str) -> list[dict[str, Any]]:
    """Collect the rows in field `key` of all results. `label` is the field `name` of a row, distinguished by run."""
    return [{**row, "label": run.named(str(row.get(name)))} for run in runs for row in run.result.get(key) or []]


def records(name: str, title: str, rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> ReportTable:
    """Build a table from objects. `columns` maps fields to headings; a field without a value in any row is left out."""
    there = {key: heading for key, heading in columns.items() if any(not blank(row.get(key)) for row in rows)}
    return ReportTable(name, title, list(there.values()), [[with_mark(row, key) for key in there] for row in rows])


def fallback_contents(runs: Sequence[RunRecord]) -> Contents:
    """Fallback contents for results without special pictures.

    The scalars form a table with one column per run; each list of objects forms a table.
    """
    scalars = [
        {key: value for key, value in flat(run.result) if not _objects(value) and key not in COMMON} for run in runs
    ]
    keys = dict.fromkeys(key for fields in scalars for key in fields)
    heads = [run.named("value") for run in runs]
    tables = [
        ReportTable("result", "Result", ["", *heads], [[key, *(fields.get(key) for fields in scalars)] for key in keys])
    ]
    for run in runs:
        for key, rows in flat(run.result):
            if _objects(rows):
                flattened = [dict(flat(row)) for row in rows]
                columns = {name: name for row in flattened for name in row}
                tables.append(records(run.stem(key), run.named(key), flattened, columns))
    return Contents(tables=tables)


def differing(runs: Sequence[RunRecord]) -> ReportTable | None:
    """Table of the recipe keys in which runs of one command differ, or None if their recipes are equal."""
    recipes = [run.keys() for run in runs]
    keys = dict.fromkeys(key for recipe in recipes for key in recipe)
    unequal = [key for key in keys if any(recipe.get(key) != recipes[0].get(key) for recipe in recipes)]
    if not unequal:
        return None
    heads = [f"#{run.number}" for run in runs]
    return ReportTable(
        "recipes", "Where the recipes differ", ["", *heads], [[k, *(r.get(k) for r in recipes)] for k in unequal]
    )


def _objects(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)
