"""Render a report page: one part per command with numbers, pictures and tables, then how to repeat each run."""

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from specctl.reporting import html
from specctl.reporting.collect import RunRecord, flat
from specctl.reporting.contents import Contents
from specctl.reporting.html import Child, Markup, tag

FACTS = {"started": "started", "seed": "seed", "git": "git commit", "hardware": "hardware", "versions": "versions"}


def render(runs: Sequence[RunRecord], parts: dict[str, Contents], images: dict[str, list[Markup]]) -> str:
    """Render the page. `images` holds the pictures of each part, in their order."""
    what = ", ".join(f"{len(_of(runs, name))} × {name}" if len(_of(runs, name)) > 1 else name for name in parts)
    title = f"specctl report: {what}"
    body: list[Child] = [tag("h1", title)]
    if len(runs) == 1:
        body.append(tag("p", _where(runs[0]), class_="soft"))
    for name, contents in parts.items():
        body += [tag("h2", name), *_part(_of(runs, name), contents, images[name])]
    body.append(tag("h2", "How to repeat"))
    for run in runs:
        body += _repeat(run)
    return html.page(title, *body)


def _of(runs: Sequence[RunRecord], command: str) -> list[RunRecord]:
    return [run for run in runs if run.command == command]


def _where(run: RunRecord) -> str:
    loaded = run.info.get("target")
    target = run.result.get("target") or (loaded.get("name") if isinstance(loaded, dict) else loaded)
    known = [str(run.dir), run.info.get("started"), f"target {target}" if target else None, _took(run)]
    return " · ".join(str(part) for part in known if part)


def _took(run: RunRecord) -> str | None:
    seconds = run.result.get("elapsed_s")
    if not isinstance(seconds, int | float):
        return None
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"


def _part(runs: Sequence[RunRecord], contents: Contents, images: Sequence[Markup]) -> Iterator[Child]:
    if len(runs) > 1:
        yield html.table(["", "run"], [[f"#{run.number}", _where(run)] for run in runs])
    yield html.headline(contents.headline)
    yield from images
    for table in contents.tables:
        yield tag("h3", table.title)
        yield html.table(table.columns, table.rows)


def _repeat(run: RunRecord) -> Iterator[Child]:
    yield tag("h3", run.named(run.command) + f": {run.dir}")
    for note in run.notes:
        yield tag("p", f"Note: {note}.", class_="soft")
    argv = run.info.get("argv")
    if isinstance(argv, list) and argv:
        program = "specctl" if Path(str(argv[0])).name in ("specctl", "__main__.py") else str(argv[0])
        yield tag("pre", shlex.join([program, *map(str, argv[1:])]))
    facts = [[name, _fact(run.info[key])] for key, name in FACTS.items() if run.info.get(key) is not None]
    target = run.info.get("target")
    if target:
        facts.append(["target", _fact(target)])
    yield html.table(["", ""], facts)
    if run.recipe:
        yield tag("p", "Recipe with all defaults:", class_="soft")
        yield tag("pre", run.recipe.rstrip(), class_="long")


def _fact(value: Any) -> str:
    if not isinstance(value, dict):
        return str(value)
    return ", ".join(f"{key} {html.text(item)}" for key, item in flat(value) if item is not None and item != [])
