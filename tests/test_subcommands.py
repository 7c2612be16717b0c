"""No subcommand lacks a fact, and none is told of that is not there."""

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


def test_the_table_is_what_help_lists():
    commands = get_command(app).commands
    assert sorted(name for name, one in commands.items() if not one.hidden) == sorted(SUBCOMMANDS)
    former = {row.formerly for row in SUBCOMMANDS.values() if row.formerly}
    assert {name for name, one in commands.items() if one.hidden} == former


def test_what_has_a_recipe_has_a_function():
    assert list(api.FUNCTIONS) == list(api.RECIPES) == RUNS


@pytest.mark.parametrize("name", RUNS)
def test_the_facts_of_a_command(name):
    """Out of memory, `select` and `online` once gave no hint: a table of hints did not know them."""
    row = SUBCOMMANDS[name]
    assert issubclass(RECIPES[name], CommandRecipe)
    assert f"`specctl {name}`" in RECIPES[name].__doc__
    assert list(inspect.signature(pkgutil.resolve_name(api.FUNCTIONS[name])).parameters)[:2] == ["recipe", "run"]
    assert row.report is None or callable(pkgutil.resolve_name(f"specctl.reporting.commands.{row.report}:contents"))
    assert bool(row.memory_keys) == (name not in LOADS_NO_TARGET_FOR_LONG)
