"""Earlier spellings: commands that were modes of another command, or that are a part of another command today.

`specctl select --replay TABLE` is `specctl replay TABLE` today, and `specctl route` is `specctl serve --server`. The
earlier command lines, recipe files and calls of `api` still work: `mode_of` finds the command that is meant, keys that
this command does not have are left out, and `renamed` gives keys the names of today.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from specctl.errors import RecipeError
from specctl.recipe import RECIPES
from specctl.recipe.learner import STEP_ALGOS
from specctl.recipe.sections import CommandRecipe, Section
from specctl.recipe.select import ROUTER
from specctl.recipe.yaml_file import KeyPath, scalar
from specctl.subcommands import SUBCOMMANDS, TODAY

Values = dict[KeyPath, Any]


@dataclass(frozen=True)
class Mode:
    """A command that was a mode of another one.

    Attributes:
        spelling: the earlier spelling.
        meant: whether settings of the earlier command ask for this mode.
        ignores: whether the mode ignored keys without an effect on it; other modes refused them.
        defaults: values by key that the earlier spelling had as defaults, unlike the command.
    """

    spelling: str
    meant: Callable[[Values], bool]
    ignores: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)


def _any(*keys: str) -> Callable[[Values], bool]:
    """Whether one of the keys has a value other than none, false and empty."""
    return lambda values: any(values.get(tuple(key.split("."))) for key in keys)


def _algo(*names: str) -> Callable[[Values], bool]:
    """Whether one of the names is among the algorithms."""

    def meant(values: Values) -> bool:
        algo = values.get(("algo",)) or []
        given = algo.replace(" ", "").split(",") if isinstance(algo, str) else algo
        return isinstance(given, list) and any(name in given for name in names)

    return meant


def _router(values: Values) -> bool:
    return _any("train_router", "router_dir")(values) or _algo(ROUTER)(values)


ROUTE = "route"
"""A former command, and before that a mode of `select`: a part of `serve` today."""
ROUTE_NAMES = {"algo": "choose", "seeds": "seed"}
"""Keys of `route`, and their names in `serve`. They were lists of one item."""
ROUTE_KEYS = {"policy", "server", "listen", "overwrite", *ROUTE_NAMES, *CommandRecipe.model_fields}

REMOVED: dict[str, tuple[Any, str]] = {
    "filters.near_prompts": (0.95, "prompts are compared with `exclude` alone: leave it out"),
    "filters.near_responses": (None, "responses are not compared: leave it out"),
    "warm_start": (False, "a router plays in the policy `router` alone: leave it out"),
    "format": ("jsonl", "shards are JSON lines, which `datasets` and engines read: leave it out"),
    "vocabularies": ([32_000, 128_000], "bench times no kernels: leave it out"),
    "drafted": (8, "bench times no kernels: leave it out"),
    "gpus": (["a100-80g", "h100-80g", "h200"], "bench computes no floors from data sheets: leave it out"),
    "router.weight": (8, "no policy starts from a router's opinion: leave it out"),
}
"""Keys of earlier recipes: the default, which recipe files may still name, and what to do instead of another value."""

MODES = {
    "record": Mode("select --record", _any("record"), ignores=True),
    "train-router": Mode("select --train-router", _router, ignores=True, defaults={"train_router": False}),
    "replay": Mode("select --replay", _any("replay"), ignores=True),
    ROUTE: Mode("select --server", _any("server.urls", "listen")),
    "reason": Mode(f"online --algo {' | '.join(STEP_ALGOS)}", _algo(*STEP_ALGOS)),
    "learn-from-server": Mode(
        "online --server", _any("server.urls", "baseline_server.urls", "traffic.listen", "traffic.log"), ignores=True
    ),
    "eval-server": Mode("eval --server", _any("server.urls", "baseline_server.urls"), ignores=True),
}


def modes_of(command: str) -> list[str]:
    return [name for name in MODES if earlier_of(name) == command]


def earlier_of(command: str) -> str | None:
    """Return the command that had `command` as a mode, or None."""
    return "select" if command == ROUTE else SUBCOMMANDS[command].earlier


def accepted_files(command: str) -> set[str]:
    """Return the commands of recipe files that `command` accepts."""
    former = SUBCOMMANDS[TODAY.get(command, command)].formerly
    return {command, TODAY.get(command, command), former or command, earlier_of(command) or command, *modes_of(command)}


def spelling_of_route(asked: str) -> str:
    """Return the earlier spelling of `serve --server` that a call of the command `asked` was."""
    return "specctl " + (MODES[ROUTE].spelling if asked == "select" else ROUTE)


def renamed(path: KeyPath, value: Any) -> tuple[KeyPath, Any]:
    """Return a key of `route` and its value as `serve` has them. Other keys are returned unchanged.

    Raises RecipeError for a list of several values.
    """
    if path[0] not in ROUTE_NAMES:
        return path, value
    parsed = _parsed(value)
    values = parsed.split(",") if isinstance(parsed, str) else parsed if isinstance(parsed, list) else [parsed]
    if len(values) != 1:
        raise RecipeError(f"{path[0]}: name one value: it is {ROUTE_NAMES[path[0]]} of specctl {TODAY[ROUTE]} now")
    return (ROUTE_NAMES[path[0]], *path[1:]), values[0]


def fields_of(command: str) -> set[str]:
    """Return the top-level keys that `command` takes, with the keys of its former modes."""
    known = {key for name in [command, *modes_of(command)] for key in RECIPES[TODAY.get(name, name)].model_fields}
    return known | (set(ROUTE_NAMES) if command == ROUTE else set())


def has_key(command: str, path: KeyPath) -> bool:
    """Whether a key, or a key of which it is a part, belongs to the recipe of `command`."""
    section: Any = RECIPES[command]
    for key in path:
        if key not in section.model_fields:
            return False
        section = section.model_fields[key].annotation
        if not (isinstance(section, type) and issubclass(section, Section)):
            return True
    return True


def owner(asked: str, command: str, path: KeyPath) -> str | None:
    """Return the command that has a key: `command`, or else a command that was one command with it in earlier versions.
    Returns None for an unknown key.

    `asked`: the command that was typed, which differs from `command` for an earlier spelling.
    """
    earlier = earlier_of(asked) or asked
    related = (TODAY.get(name, name) for name in (command, asked, earlier, *modes_of(earlier)))
    return next((name for name in related if has_key(name, path)), None)


def mode_of(command: str, file_command: str, settings: Iterable[Any]) -> str:
    """Return the command that settings of `command` mean: the command, or one of its former modes, by its former name.

    Args:
        file_command: command that the recipe file names.
        settings: `specctl.recipe.resolve.Setting`s, later ones over earlier ones.

    Raises RecipeError if the settings ask for a recording and a replay.
    """
    values = {setting.path: _parsed(setting.value) for setting in settings}
    meant = [name for name in modes_of(command) if MODES[name].meant(values) or name == file_command]
    if {"record", "replay"} <= {*meant}:
        raise RecipeError("record writes the table that replay reads: run one after the other")
    return meant[0] if meant else command


def _parsed(value: Any) -> Any:
    """Parse a value from the command line, which is a text."""
    try:
        return scalar(value, "") if isinstance(value, str) else value
    except RecipeError:
        return value
