"""`specctl report`: one HTML page with its pictures and tables, made from run directories alone."""

import os
import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specctl.errors import SpecctlError, UsageError
from specctl.replaced_directories import check_outside
from specctl.reporting import collect, commands, page, plots
from specctl.reporting.collect import RUNS, RunRecord
from specctl.reporting.contents import Contents, differing
from specctl.reporting.style import Looks
from specctl.reporting.tables import to_csv
from specctl.runs import SCHEMA_VERSION, atomic_write, make_dir

PAGE = "report.html"


@dataclass(frozen=True)
class ReportResult:
    """The result document of `report`: the runs that were read, the files written, and `notes` on gaps in the runs.

    `tables` is filled only with the option `csv`.
    """

    report: str
    runs: list[str]
    pictures: list[str]
    tables: list[str]
    notes: list[str]
    command: str = "report"
    schema_version: int = SCHEMA_VERSION


def report(runs: Sequence[str | Path] = (), output_dir: str | Path | None = None, *, csv: bool = False) -> ReportResult:
    """Write report.html and its PNG files, and with `csv` a CSV file per table.

    Without `runs` the report is on the newest run in ./runs. `output_dir` defaults to `report` inside the run
    directory, for several runs to `./runs/report-<time>-<id>`.

    Raises UsageError (no run directory, or an output inside a drafter), SpecctlError (a broken result, or output that
    cannot be written).
    """
    if output_dir == "":
        raise UsageError("--output-dir: is empty")
    records = collect.read([Path(os.path.expanduser(run)) for run in runs] or [collect.newest()])
    looks = Looks()
    names = dict.fromkeys(run.command for run in records)
    parts: dict[str, Contents] = {}
    images: dict[str, list[bytes]] = {}
    for name in names:
        parts[name], images[name] = _contents(name, [run for run in records if run.command == name], looks)

    directory = Path(os.path.expanduser(output_dir)) if output_dir else _directory(records)
    check_outside(directory, PAGE)
    make_dir(directory)
    pictures: list[str] = []
    tables: list[str] = []
    for name, contents in parts.items():
        for picture, png in zip(contents.pictures, images[name], strict=True):
            pictures.append(_write(directory / _file_name(name, picture.name, ".png"), png))
        for table in contents.tables if csv else ():
            tables.append(_write(directory / _file_name(name, table.name, ".csv"), to_csv(table.columns, table.rows)))
    written = _write(directory / PAGE, page.render(records, parts, images))
    notes = [f"{run.dir}: {note}" for run in records for note in run.notes]
    return ReportResult(written, [str(run.dir) for run in records], pictures, tables, notes)


def _contents(command: str, runs: list[RunRecord], looks: Looks) -> tuple[Contents, list[bytes]]:
    """Return the contents of one command's part of the page, and its pictures as PNG files."""
    try:
        made = commands.contents(command, runs, looks)
        images = [plots.png(picture.figure) for picture in made.pictures]
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        where = ", ".join(str(run.dir) for run in runs)
        hint = "the run may be of another version: repeat it, or leave it out"
        raise SpecctlError(f"{where}: unexpected content in the files of {command} ({error!r})", hint) from error
    unequal = differing(runs) if len(runs) > 1 else None
    return Contents(made.headline, made.pictures, made.filled + ([unequal] if unequal else [])), images


def _directory(runs: Sequence[RunRecord]) -> Path:
    name = f"report-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    return runs[0].dir / "report" if len(runs) == 1 else RUNS / name


def _file_name(command: str, name: str, suffix: str) -> str:
    """Safe file name. Commands and fields of a result are data, so they must not lead out of the directory."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", f"{command}-{name}").strip("-")[:80] + suffix


def _write(path: Path, content: str | bytes) -> str:
    atomic_write(path, content)
    return str(path)
