"""Render a report page: one part per command with numbers, pictures and tables, then how to repeat each run.

The template escapes all text, so no name, prompt or path can become markup. The page loads and runs nothing, which the
content security policy in its head also enforces.
"""

import base64
import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment

from specctl import regular_files
from specctl.reporting import plots
from specctl.reporting.collect import RunRecord, flat
from specctl.reporting.contents import Contents
from specctl.reporting.tables import text

TEMPLATE = Path(__file__).resolve().parent.parent / "assets" / "report.html"
FACTS = {"started": "started", "seed": "seed", "git": "git commit", "hardware": "hardware", "versions": "versions"}
SHOWN = 200
"""Maximal number of table rows on the page; the CSV file has all rows."""


def render(runs: Sequence[RunRecord], parts: Mapping[str, Contents], images: Mapping[str, Sequence[bytes]]) -> str:
    """Render the page. `images` holds the pictures of each part as PNG files, in their order."""
    shown = {}
    for name, contents in parts.items():
        pictures = [
            # the width on the page, for which the labels were designed
            (base64.b64encode(png).decode(), int.from_bytes(png[16:20]) * 96 // plots.DPI, picture.caption)
            for png, picture in zip(images[name], contents.pictures, strict=True)
        ]
        shown[name] = [run for run in runs if run.command == name], contents, pictures
    what = ", ".join(f"{len(own)} × {name}" if len(own) > 1 else name for name, (own, *_) in shown.items())
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["text"] = text
    functions = {"numeric_columns": _numeric, "where": _where, "about": _about, "command_line": _argv, "facts": _facts}
    environment.globals |= functions | {"shown": SHOWN}
    template = environment.from_string(regular_files.read_text(TEMPLATE))
    return template.render(title=f"specctl report: {what}", runs=runs, parts=shown)


def _numeric(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[bool]:
    """Whether each column has numbers alone, which are aligned; never in a table without headings."""
    return [
        any(columns) and all(isinstance(row[index], int | float | None) for row in rows)
        for index in range(len(columns))
    ]


def _about(runs: Sequence[RunRecord]) -> list[list[str]]:
    return [[f"#{run.number}", _where(run)] for run in runs]


def _where(run: RunRecord) -> str:
    loaded = run.info.get("target")
    target = run.result.get("target") or (loaded.get("name") if isinstance(loaded, dict) else loaded)
    known = [str(run.dir), run.info.get("started"), f"target {target}" if target else None, _took(run)]
    return " · ".join(str(part) for part in known if part)


def _took(run: RunRecord) -> str | None:
    seconds = run.result.get("elapsed_s")
    if not isinstance(seconds, int | float) or not math.isfinite(seconds):
        return None
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"


def _argv(run: RunRecord) -> str | None:
    argv = run.info.get("argv")
    if not isinstance(argv, list) or not argv:
        return None
    program = "specctl" if Path(str(argv[0])).name in ("specctl", "__main__.py") else str(argv[0])
    return shlex.join([program, *map(str, argv[1:])])


def _facts(run: RunRecord) -> list[list[str]]:
    known = [[name, _fact(run.info[key])] for key, name in FACTS.items() if run.info.get(key) is not None]
    return known + ([["target", _fact(run.info["target"])]] if run.info.get("target") else [])


def _fact(value: Any) -> str:
    if not isinstance(value, dict):
        return str(value)
    return ", ".join(f"{key} {text(item)}" for key, item in flat(value) if item is not None and item != [])
