"""`specctl report`: write pictures and one HTML page from run directories."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from specctl.cli import options
from specctl.cli.command import command, search_for_cycles
from specctl.cli.output import cell, fields, output

Runs = Annotated[
    list[Path] | None,
    typer.Argument(metavar="[RUN]...", help="Run directories; default: the newest in ./runs.", show_default=False),
]
OutputDir = Annotated[
    str | None,
    typer.Option(
        "--output-dir", metavar="DIR", help="Default: RUN/report, or ./runs/report-<time>-<id> for several runs."
    ),
]
Csv = Annotated[bool, typer.Option("--csv", metavar=options.SWITCH, help="Also write every table as a CSV file.")]


@command("report", "specctl report runs/eval-A runs/eval-B --csv")
def report(runs: Runs = None, output_dir: OutputDir = None, csv: Csv = False) -> None:
    """Write one HTML page and PNG pictures about runs. Several runs of one command are compared."""
    from specctl import api

    search_for_cycles()  # figures are reference cycles
    document = asdict(api.report(runs or (), output_dir, csv=csv))
    output.result(document, _show, brief=document["report"])


def _show(document: dict[str, Any]) -> Any:
    """Render the runs that were read, the files that were written, and the notes on missing parts."""
    from rich.console import Group

    listed = {
        "report": document["report"],
        "of": document["runs"],
        "pictures": [Path(path).name for path in document["pictures"]],
        "tables": [Path(path).name for path in document["tables"]],
    }
    shown = {name: value for name, value in listed.items() if value}
    return Group(fields(shown), *(cell(f"note: {note}") for note in document["notes"]))
