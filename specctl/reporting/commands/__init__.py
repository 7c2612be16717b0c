"""What a report shows of each command; of others it shows their results as tables."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence

from specctl.reporting.collect import RunRecord
from specctl.reporting.contents import Contents, generic
from specctl.reporting.style import Looks
from specctl.subcommands import SUBCOMMANDS

Maker = Callable[[Sequence[RunRecord], Looks], Contents]


def contents(command: str, runs: Sequence[RunRecord], looks: Looks) -> Contents:
    """One command's part of a report; `looks` are shared by all parts, so that a drafter keeps its colour."""
    row = SUBCOMMANDS.get(command)  # a run may be of a command that is no more
    if row is None or row.report is None:
        return generic(runs)
    maker: Maker = importlib.import_module(f"specctl.reporting.commands.{row.report}").contents
    return maker(runs, looks)
