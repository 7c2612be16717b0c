"""The table of subcommands is complete, and lists only commands that exist."""

import inspect
import pkgutil

import pytest
from typer.main import get_command

from specctl import api
from specctl.cli.main import app
from specctl.recipe import RECIPES, CommandRecipe
from specctl.subcommands import SUBCOMMANDS

LOADS_NO_TARGET_FOR_LONG = ("export", "import", "replay", "eval-server")
RUNS = [name for name, row in SUBCOMMANDS.items() if row.recipe is not None]


def test_help_lists_the_table_of_subcommands():
    commands = get_command(app).commands
    assert sorted(name for name, one in commands.items() if not one.hidden) == sorted(SUBCOMMANDS)
    former = {row.formerly for row in SUBCOMMANDS.values() if row.formerly}
    assert {name for name, one in commands.items() if one.hidden} == former


def test_every_recipe_has_a_function():
    assert list(api.FUNCTIONS) == list(api.RECIPES) == RUNS


@pytest.mark.parametrize("name", RUNS)
def test_the_row_of_a_command_is_complete(name):
    """`select` and `online` used to give no hint when out of memory, because a table of hints lacked them."""
    row = SUBCOMMANDS[name]
    assert issubclass(RECIPES[name], CommandRecipe)
    assert f"`specctl {name}`" in RECIPES[name].__doc__
    assert list(inspect.signature(pkgutil.resolve_name(api.FUNCTIONS[name])).parameters)[:2] == ["recipe", "run"]
    assert row.report is None or callable(pkgutil.resolve_name(f"specctl.reporting.commands.{row.report}:contents"))
    assert bool(row.memory_keys) == (name not in LOADS_NO_TARGET_FOR_LONG)
