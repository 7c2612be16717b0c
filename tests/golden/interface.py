"""The words that users type: recipe keys, options, names of shipped recipes, environment variables."""

import json
from collections.abc import Iterator
from typing import Any

from typer.main import get_command

from specctl import api
from specctl.cli.main import app
from tests.golden.commands import Documents, specctl


def recipe_keys() -> Documents:
    """Command → dotted key → type, default and limits, as JSON."""
    return {name: dict(_keys(model.model_json_schema())) for name, model in api.RECIPES.items()}


def options() -> Documents:
    """Subcommand → spellings of an option → its traits, and its environment variable."""
    return {name: dict(map(_option, command.params)) for name, command in _commands(get_command(app), "specctl")}


def shipped() -> Documents:
    """Name of a file in the package → the command of the recipe, or the error that the file gives as a recipe."""
    found = {}
    for row in specctl("recipes", "ls")["recipes"]:
        document = specctl("recipes", "validate", row["name"], code=None)
        found[row["name"]] = document.get("command") or document["error"]["type"]
    return {"recipes": found}


def environment(setenv: Any) -> Documents:
    """Variable → the message for a value that is refused; `setenv(name, value)` sets a variable."""
    switches = (
        *("SPECCTL_KERNELS", "SPECCTL_GRAPHS", "SPECCTL_ATTENTION", "SPECCTL_LAYERS", "SPECCTL_KV"),
        *("SPECCTL_STEP", "SPECCTL_KV_GIB"),
    )
    names = (*switches, "SPECCTL_TARGET__DTYPE", "SPECCTL_DATA__LIMIT")
    for name in names:
        setenv(name, "golden")
    document = specctl("distill", "--dry-run", code=2)
    return {"refused": dict(line.split(": ", 1) for line in document["error"]["message"].splitlines())}


def _keys(schema: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield from _keys_of(schema, schema["$defs"], {}, "")


def _keys_of(node: Any, sections: Any, defaults: Any, prefix: str) -> Iterator[tuple[str, str]]:
    """A section's keys; `defaults` are the defaults that the section above replaces."""
    for name, field in node["properties"].items():
        default = defaults.get(name, field.get("default"))
        if "$ref" in field:
            yield from _keys_of(_section(field, sections), sections, default or {}, f"{prefix}{name}.")
        else:
            yield prefix + name, json.dumps(_nameless(field, sections) | {"default": default}, sort_keys=True)


def _section(field: Any, sections: Any) -> Any:
    return sections[field["$ref"].rpartition("/")[2]]


def _nameless(node: Any, sections: Any) -> Any:
    """A part of a schema without the names and the descriptions of classes."""
    if isinstance(node, list):
        return [_nameless(item, sections) for item in node]
    if not isinstance(node, dict):
        return node
    node = _section(node, sections) if "$ref" in node else node
    return {key: _nameless(item, sections) for key, item in node.items() if key not in ("title", "description")}


def _commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    yield name, command
    for key, sub in getattr(command, "commands", {}).items():
        yield from _commands(sub, f"{name} {key}")


def _option(parameter: Any) -> tuple[str, str]:
    traits = [trait for trait in ("is_flag", "multiple", "required", "hidden") if getattr(parameter, trait, False)]
    variable = [f"envvar={parameter.envvar}"] if parameter.envvar else []
    spelt = [*parameter.opts, *parameter.secondary_opts]
    return ", ".join(spelt), "|".join([*(traits or ["value"]), *variable])
