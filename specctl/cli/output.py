"""Output of results on stdout: a table for people, one JSON document with --json, a path or name with -q."""

from __future__ import annotations

import logging
import shlex
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from specctl import progress
from specctl.cli.failures import Failure
from specctl.reporting.tables import blank, machine, text, with_mark

if TYPE_CHECKING:
    from rich.console import RenderableType

PIPE_WIDTH = 10_000  # columns without a terminal, so that nothing is wrapped or cut
WHOLE = 24  # most characters of a cell that is never broken


class Output:
    """Printer of results and errors, configured once per invocation by the global options."""

    def __init__(self) -> None:
        self.json = self.quiet = self.verbose = False

    def reset(self, argv: list[str]) -> None:
        """Begin an invocation. `--json` is looked up in argv, so that a usage error is reported as JSON, too."""
        self.json, self.quiet, self.verbose = "--json" in argv, False, False
        progress.set_quiet(False)

    def configure(self, json: bool, quiet: bool, verbose: bool) -> None:
        """Apply the global options. Options before and after the subcommand add up."""
        self.json |= json
        self.quiet |= quiet
        self.verbose |= verbose
        progress.set_quiet(self.quiet)
        # It tells where its fonts are cached if it cannot write to the home directory.
        logging.getLogger("matplotlib").setLevel(logging.NOTSET if self.verbose else logging.ERROR)

    def result(
        self, document: dict[str, Any], show: Callable[[dict[str, Any]], RenderableType], brief: str = ""
    ) -> None:
        """Print one result: the document (--json), `brief` (-q), or the rendering of the document by `show`."""
        if not progress.is_rank_zero():
            return
        if self.json:
            self._print_json(document)
        elif self.quiet:
            if brief:
                self._print(brief)
        else:
            self._print_rich(show(document))

    def failure(self, failure: Failure) -> None:
        """Print message and hint to stderr, on one line if possible; with --json also a document to stdout."""
        hint = f"(hint: {failure.hint})" if failure.hint else ""
        if hint:
            hint = ("\n" if "\n" in failure.message else " ") + hint
        print(f"error: {failure.message}{hint}", file=sys.stderr, flush=True)
        if self.json and progress.is_rank_zero():
            self._print_json({"error": {"type": failure.type, "message": failure.message, "hint": failure.hint}})

    @staticmethod
    def _print(text: str) -> None:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()

    def _print_json(self, document: dict[str, Any]) -> None:
        from specctl.runs import to_json

        utf8 = (sys.stdout.encoding or "").lower().startswith("utf")
        self._print(to_json(document, indent=2, ascii=not utf8))

    def _print_rich(self, shown: RenderableType) -> None:
        """Print with colors and at the terminal's width; without a terminal, plain lines, never wrapped or padded."""
        from rich.console import Console

        if sys.stdout.isatty():
            console = Console(highlight=False)
            least = console.measure(shown, options=console.options.update(max_width=PIPE_WIDTH)).minimum
            console.width = max(console.width, least)  # with less rich breaks names and drops columns
            console.print(shown, soft_wrap=isinstance(shown, str), crop=False)
            return
        console = Console(highlight=False, width=PIPE_WIDTH)
        with console.capture() as captured:
            console.print(shown, soft_wrap=isinstance(shown, str))
        self._print("\n".join(line.rstrip() for line in captured.get().splitlines()))


output = Output()


def table(*columns: str, rows: list[list[Any]]) -> RenderableType:
    """Return a plain table. Columns after the first are right-aligned if every cell is a number, and left out if no
    row has a value.

    On a narrow terminal headings break between words, and long texts anywhere; names and numbers stay whole. Many
    columns stand closer there. Columns that do not fit follow in further tables, after the columns that name the rows.
    If two columns of texts do not fit, each text stands below its name.
    """
    filled = [place for place in range(len(columns)) if not (rows and place and all(blank(row[place]) for row in rows))]
    columns, rows = tuple(columns[place] for place in filled), [[row[place] for place in filled] for row in rows]
    made = _table(columns, rows)
    names = next((n for n in range(1, len(columns)) if len({str(row[:n]) for row in rows}) == len(rows)), 1)
    if not sys.stdout.isatty() or _fits(made):
        return made
    from rich.console import Group
    from rich.padding import Padding

    if len(columns) == 2 and all(isinstance(value, str) for _, value in rows):
        return Group(*(part for name, value in rows for part in (cell(name), Padding(cell(value), (0, 0, 0, 4)))))
    if len(columns) < names + 2:
        return made
    for count in range(len(columns) - 1, names, -1):
        made = _table(columns[:count], [row[:count] for row in rows])
        if _fits(made):
            break
    rest = [[*row[:names], *row[count:]] for row in rows]
    return Group(made, table(*columns[:names], *columns[count:], rows=rest))


def _fits(shown: RenderableType) -> bool:
    """Whether a table fits the terminal with every name and number whole."""
    from rich.console import Console

    console = Console()
    return console.measure(shown, options=console.options.update(max_width=PIPE_WIDTH)).minimum <= console.width


def _table(columns: Sequence[str], rows: list[list[Any]]) -> RenderableType:
    from rich import box
    from rich.table import Table

    widths = [max((len(text(row[index])) for row in rows), default=0) for index in range(len(columns))]
    needed = sum(map(max, widths, map(len, columns))) + 3 * len(columns)
    narrow = sys.stdout.isatty() and needed > shutil.get_terminal_size().columns
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 0) if narrow and len(columns) > 4 else (0, 1))
    for index, (name, width) in enumerate(zip(columns, widths, strict=True)):
        numeric = index > 0 and all(isinstance(row[index], int | float | None) for row in rows)
        whole = narrow and width <= WHOLE
        least = max(width, *map(len, name.split())) if whole else None
        made.add_column(
            textwrap.fill(name, least) if least else name,
            justify="right" if numeric else "left",
            overflow="fold",
            no_wrap=whole,
            min_width=least,
        )
    for row in rows:
        made.add_row(*(cell(value) for value in row))
    return made


def records(rows: list[dict[str, Any]], columns: dict[str, str]) -> RenderableType:
    """Return a table of the fields in `columns`, with their headings; numbers that cannot be used are marked."""
    return table(*columns.values(), rows=[[with_mark(row, name) for name in columns] for row in rows])


def by_domain(title: str, value: str, rows: list[dict[str, Any]], name: str) -> list[RenderableType]:
    """Return a table of one value: a line per contender (field `name`) and a column per domain. [] for one domain."""
    domains = list(dict.fromkeys(row["domain"] for row in rows))
    if len(domains) < 2:
        return []
    values = {(row[name], row["domain"]): with_mark(row, value) for row in rows}
    names = dict.fromkeys(row[name] for row in rows)
    return [table(title, *domains, rows=[[one, *(values.get((one, domain)) for domain in domains)] for one in names])]


def fields(document: dict[str, Any]) -> RenderableType:
    """Return a document as a table of two columns: name and value."""
    from rich.table import Table

    made = Table.grid(padding=(0, 2))
    for name, value in document.items():
        made.add_row(name, cell(machine(value) if name == "machine" else value))
    return made


def shell_line(line: str) -> RenderableType:
    """Return a command for a shell as one line. The terminal breaks it, so that a copy has no line break."""
    from rich.text import Text

    return Text(line, no_wrap=True, overflow="ignore")


def with_next(shown: RenderableType, command: list[str]) -> RenderableType:
    """Return a rendered result, and below it the command that a user needs next."""
    from rich.console import Group

    return Group(shown, "", shell_line(f"next: {shlex.join(command)}"))


def cell(value: Any) -> str:
    """Format a value for a table, with its markup characters escaped."""
    from rich.markup import escape

    return escape(text(value))
