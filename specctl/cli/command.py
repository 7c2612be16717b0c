"""Decorators that register subcommands with their options, and the run of a resolved recipe.

`command` adds the global options; `recipe_command` also adds --recipe, --dry-run, overrides and flags.
"""

from __future__ import annotations

import functools
import gc
import inspect
import os
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from specctl import progress
from specctl.cli import checks, options
from specctl.cli.output import output
from specctl.errors import UsageError
from specctl.subcommands import SUBCOMMANDS, TODAY

if TYPE_CHECKING:
    from specctl.recipe import CommandRecipe

app = typer.Typer(
    name="specctl",
    help="Train, adapt, select and measure draft heads for speculative decoding.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
PANEL = "Output"
EARLIER = "Old options, now commands of their own"
Json = Annotated[
    bool, typer.Option("--json", metavar=options.SWITCH, help="One JSON document on stdout.", rich_help_panel=PANEL)
]
Quiet = Annotated[
    bool,
    typer.Option(
        "-q",
        "--quiet",
        metavar=options.SWITCH,
        help="Hide progress; print only the path or name of the result.",
        rich_help_panel=PANEL,
    ),
]
Verbose = Annotated[
    bool,
    typer.Option(
        "-v",
        "--verbose",
        metavar=options.SWITCH,
        help="Library logs, tracebacks; all keys of --dry-run.",
        rich_help_panel=PANEL,
    ),
]
Recipe = Annotated[
    str | None, typer.Option("--recipe", metavar="FILE", help="YAML file, or a name from `specctl recipes ls`.")
]
DryRun = Annotated[
    bool,
    typer.Option("--dry-run", metavar=options.SWITCH, help="Check options and files, load no weights, print the plan."),
]

OVERRIDE = re.compile(r"[A-Za-z_][\w.]*=.*", re.DOTALL)
GLOBALS = {"json": Json, "quiet": Quiet, "verbose": Verbose}
RECIPE_COMMANDS: dict[str, Callable[[Any, bool], None]] = {}
"""Registered functions of (recipe, dry_run), by command."""


def command_group(name: str, about: str) -> typer.Typer:
    """Add a command with subcommands of its own."""
    group = typer.Typer(name=name, help=about, no_args_is_help=True)
    app.add_typer(group)
    return group


def command(
    name: str, example: str = "", group: typer.Typer = app
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a function as a subcommand that also takes --json, -q and -v after its name. `example` ends its help."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def wrapper(json: bool, quiet: bool, verbose: bool, **arguments: Any) -> None:
            output.configure(json, quiet, verbose)
            function(**arguments)

        _set_signature(wrapper, _parameters(function) + [_option(key, kind, False) for key, kind in GLOBALS.items()])
        row = SUBCOMMANDS.get(name)  # a command of a group, such as `recipes ls`, has no row
        panel = row.panel if row else None
        summary = " ".join((inspect.getdoc(function) or "").split("\n\n")[0].split())  # as one line: the list wraps it
        ending, hidden = f"Example: {example}" if example else None, TODAY.get(name, name) != name
        group.command(name, short_help=summary, epilog=ending, rich_help_panel=panel, hidden=hidden)(wrapper)
        return function

    return register


class Operand(NamedTuple):
    """A plain argument of a command: the recipe key that it sets, its help text, and its name there if not the key."""

    key: str
    meaning: str
    metavar: str | None = None


def recipe_command(
    name: str, flags: tuple[str, ...], example: str, operand: Operand | None = None, earlier: tuple[str, ...] = ()
) -> Callable[[Callable[[Any, bool], None]], Callable[[Any, bool], None]]:
    """Register `function(recipe, dry_run)` as the subcommand that runs a recipe.

    Args:
        flags: names in `options.FLAGS`.
        example: a whole command line, for the help.
        operand: the plain argument, as in `generate "prompt"`.
        earlier: further names in `options.FLAGS`, of commands that were modes of this one.
    """

    def register(function: Callable[[Any, bool], None]) -> Callable[[Any, bool], None]:
        def run(operands: list[str] | None, recipe: str | None, dry_run: bool, **given: Any) -> None:
            today, resolved = _resolve(name, recipe, operands or [], given, operand.key if operand else None)
            RECIPE_COMMANDS[today](resolved, dry_run)

        run.__doc__ = function.__doc__
        RECIPE_COMMANDS[name] = function
        keys = f"{operand.metavar or operand.key.upper()} KEY=VALUE" if operand else "KEY=VALUE"  # shown in [ ]...
        overrides = "Keys of the recipe, such as target.dtype=fp32: --dry-run -v lists them all."
        help = f"{operand.meaning} {overrides}" if operand else overrides
        operands = Annotated[list[str] | None, typer.Argument(metavar=keys, help=help, show_default=False)]
        _set_signature(
            run,
            [
                _option("operands", operands, None),
                *(_option(flag, options.FLAGS[flag].annotation(flag, name), None) for flag in flags),
                *(_option(flag, options.FLAGS[flag].annotation(flag, name, EARLIER), None) for flag in earlier),
                _option("recipe", Recipe, None),
                _option("dry_run", DryRun, False),
            ],
        )
        command(name, example)(run)
        return function

    return register


def run_or_plan(
    name: str, recipe: Any, dry_run: bool, steps: Callable[[], list[str]], show: Callable[[Any], Any], brief: str
) -> None:
    """Run a recipe and print its result document, or only show the plan for --dry-run.

    Args:
        steps: returns the plan in words.
        show: renders the result document for people.
        brief: field of the document that --quiet prints.
    """
    if dry_run:
        return checks.show(name, recipe, steps())
    with library_output():
        document = execute(name, recipe)
    output.result(document, show, brief=document[brief])


def execute(name: str, recipe: CommandRecipe) -> dict[str, Any]:
    """Run a resolved recipe and return its result document. Raises the errors of `api.execute`."""
    progress.interrupts.leave_on_signal()
    from specctl import api

    pkgutil.resolve_name(api.FUNCTIONS[name])
    search_for_cycles()
    return api.execute(name, recipe)[1]


def search_for_cycles() -> None:
    """Let Python search for reference cycles again, if the process has started without it (`specctl.__main__`), but not
    among the modules and other objects of the start."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


@contextmanager
def library_output() -> Iterator[None]:
    """Redirect stdout to stderr during the block, also for C code and child processes: stdout is for the result."""
    if not output.verbose:
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        if not sys.stderr.isatty() or output.quiet:
            os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _resolve(
    name: str, recipe: str | None, operands: list[str], given: dict[str, Any], operand: str | None
) -> tuple[str, CommandRecipe]:
    """Return the resolved recipe and its command, which is another one than `name` for an earlier spelling."""
    from specctl.recipe.resolve import Setting, command_for, resolve

    overrides = [text for text in operands if OVERRIDE.fullmatch(text)]
    plain = [text for text in operands if not OVERRIDE.fullmatch(text)]
    if len(plain) > (operand is not None):
        whole = f"give one {operand.upper()}, and quote it if it has spaces; " if operand else ""
        raise UsageError(f"unexpected argument {plain[-1]!r}", hint=f"{whole}write overrides as key.sub=value")
    flags = [Setting((operand,), text, operand.upper()) for text in plain if operand]
    resolved = resolve(name, recipe, overrides, flags + options.settings(given, name))
    return command_for(resolved), resolved


def _option(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _parameters(function: Callable[..., None]) -> list[inspect.Parameter]:
    signature = getattr(function, "__signature__", None) or inspect.signature(function, eval_str=True)
    return [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in signature.parameters.values()]


def _set_signature(function: Callable[..., Any], parameters: list[inspect.Parameter]) -> None:
    """Give a function the signature and the annotations from which Typer reads the options."""
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    function.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    function.__dict__.pop("__wrapped__", None)
