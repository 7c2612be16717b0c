"""Report contents of each command; other commands' results are shown as tables."""

import importlib
from collections.abc import Callable, Sequence

from specctl.reporting.collect import RunRecord
from specctl.reporting.contents import Contents, fallback_contents
from specctl.reporting.style import Looks
from specctl.subcommands import SUBCOMMANDS

Maker = Callable[[Sequence[RunRecord], Looks], Contents]


def contents(command: str, runs: Sequence[RunRecord], looks: Looks) -> Contents:
    """Build one command's part of a report; all parts share `looks`, so a drafter keeps its color."""
    row = SUBCOMMANDS.get(command)  # a run may be of a command that no longer exists
    if row is None or row.report is None:
        return fallback_contents(runs)
    maker: Maker = importlib.import_module(f"specctl.reporting.commands.{row.report}").contents
    return maker(runs, looks)
