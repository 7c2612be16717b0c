"""The `specctl` command: its subcommands, its global options, and the exit of every invocation."""

import functools
import importlib
import os
import sys
import traceback
from contextlib import suppress
from typing import Any

import typer

from specctl import __version__, progress
from specctl.cli.command import Json, Quiet, Verbose, app
from specctl.cli.failures import explain
from specctl.cli.output import output
from specctl.errors import ReaderGone, SpecctlError, UsageError, redacted
from specctl.subcommands import SUBCOMMANDS, TODAY

for row in SUBCOMMANDS.values():
    importlib.import_module(f"specctl.{row.cli}")
# One module imports another, which registers its command first.
app.registered_commands.sort(key=lambda one: [*SUBCOMMANDS].index(TODAY.get(str(one.name), str(one.name))))


@app.callback(invoke_without_command=True)
def globals_(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", help="Print the version and exit."),
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    output.configure(json, quiet, verbose)
    if version:
        document = {"version": __version__}
        output.result(document, lambda doc: f"specctl {doc['version']}", brief=__version__)
        raise typer.Exit()
    if context.invoked_subcommand is None:
        raise UsageError("the command is missing", hint="see specctl --help")


@functools.cache
def _command() -> Any:
    """All subcommands with their options. Typer needs 20 ms to build them, so a process does this only once."""
    return typer.main.get_command(app)


def _check_working_directory() -> None:
    """Raise UsageError if the working directory was deleted: libraries of torch would end the process."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise UsageError("the working directory does not exist any more", hint="cd to another one") from None


def _warn_of_repetitions(argv: list[str], name: str | None) -> None:
    """Warn of each option of a command that takes one value and is given several. The last one counts."""
    for parameter in getattr(_command().commands.get(name), "params", []):
        times = sum(word.partition("=")[0] in parameter.opts for word in argv)
        if times > 1 and not (parameter.multiple or parameter.is_flag):
            progress.warn(f"{parameter.opts[0]} is given {times} times: the last value counts")


def run(argv: list[str]) -> int:
    """Run one command line and return its exit code. Errors are reported on stderr."""
    output.reset(argv)
    name = next((word for word in argv if not word.startswith("-")), None)
    try:
        if sys.flags.optimize > 1:
            raise UsageError("transformers needs docstrings, which PYTHONOPTIMIZE=2 (python -OO) strips: unset it")
        _check_working_directory()
        _warn_of_repetitions(argv, name)
        code = _command()(argv, prog_name="specctl", standalone_mode=False)
        if code == 130:  # Typer has caught Ctrl-C without a message
            raise KeyboardInterrupt
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except ReaderGone as gone:
        return gone.exit_code
    except SystemExit as stop:
        return int(stop.code or 0)
    except (Exception, KeyboardInterrupt) as error:
        failure = explain(progress.interrupts.signal_error(error), name)
        if output.verbose:
            print(redacted("".join(traceback.format_exception(error))), end="", file=sys.stderr)
        with suppress(SpecctlError):  # the failure may be stdout itself
            output.failure(failure)
        return failure.code
