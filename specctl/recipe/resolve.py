"""Resolve recipe file, overrides, environment and flags into one validated recipe, or report all problems at once.

Precedence: flag > override (`optimizer.lr=1e-4`) > recipe file > environment > default. An environment variable is
`SPECCTL_` plus the key in capitals with `__` for the dot: SPECCTL_TARGET__DTYPE=fp32. A section with a `name` may be
given by the name alone: SPECCTL_TARGET=./model, `target=./model`.
"""

import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple, get_args

from pydantic import ValidationError

from specctl import progress, regular_files
from specctl.environment import ENV_SECRETS, ENV_SIZES, ENV_SWITCHES
from specctl.errors import RecipeError, brief, did_you_mean
from specctl.recipe import RECIPES, CommandRecipe, Section, aliases, yaml_file
from specctl.recipe.yaml_file import KeyPath
from specctl.subcommands import TODAY

ENVIRONMENT = "SPECCTL_"
SUFFIXES = (".yaml", ".json", ".sbatch", ".py")  # recipes, DeepSpeed configurations, Slurm and Python scripts
MAX_CHARACTERS = 1 << 20  # most characters of a recipe file
MAX_SUGGESTIONS = 10  # further problems get no suggestion, because each search compares all names


class Setting(NamedTuple):
    """One value for one key, with its origin: `file:line`, a flag, or an environment variable."""

    path: KeyPath
    value: Any
    origin: str


class _Text(str):
    """A value from the command line or the environment; its type depends on the recipe field."""


def resolve(
    command: str,
    recipe: str | Path | None = None,
    overrides: Iterable[str] = (),
    flags: Iterable[Setting] = (),
    environ: Mapping[str, str] | None = None,
) -> CommandRecipe:
    """Return the recipe of `command` with every layer applied.

    It is the recipe of another command if the settings are an earlier spelling of that command (see `aliases`).

    Raises RecipeError, which lists every problem as `origin: key: problem`.
    """
    problems: list[str] = []
    environment = list(_from_environment(command, os.environ if environ is None else environ, problems))
    from_file, file_command = ([], command) if recipe is None else _from_file(command, recipe, problems)
    typed = [*_from_overrides(overrides, problems), *flags]
    asked, command = command, aliases.mode_of(command, file_command, [*environment, *from_file, *typed])
    routes = command == aliases.ROUTE or (command == TODAY[aliases.ROUTE] and file_command == aliases.ROUTE)
    if routes:
        progress.log(f"{aliases.spelling_of_route(asked)} is now specctl {TODAY[aliases.ROUTE]} --server")
        from_file = _of_route(from_file, stored=True)
        if command == aliases.ROUTE:  # otherwise only the file is old
            environment, typed = _of_route(environment, stored=True), _of_route(typed)
        command = TODAY.get(command, command)
    elif asked != command:
        mode = aliases.MODES[command]
        progress.log(f"specctl {mode.spelling} is now a command of its own: specctl {command}")
        if file_command != command:
            environment = [*(Setting((key,), value, key) for key, value in mode.defaults.items()), *environment]
    stored = [*environment, *from_file]
    settings = [*_stored_for(asked, command, stored), *_typed_for(asked, command, typed, problems)]
    model = RECIPES[command]

    values: dict[KeyPath, Any] = {}
    origins: dict[KeyPath, str] = {}
    for setting in settings:
        for path, value, origin in _to_fields(model, setting, problems):
            values[path] = _merged(values.get(path), value)
            origins[path] = origin
    if routes and not values.get(("server", "urls")):
        problems.append("there is no server: name the engines with --server")
    fallback = str(recipe) if recipe else command
    try:
        resolved = model.model_validate(_tree(values))
    except ValidationError as error:
        problems += [_explain(item, origins, fallback) for item in error.errors()]
    if problems:
        raise RecipeError("\n".join(problems))
    return resolved


def command_for(recipe: CommandRecipe) -> str:
    """Return the command that a resolved recipe is for."""
    return next(name for name, model in RECIPES.items() if type(recipe) is model)


def _of_route(settings: list[Setting], *, stored: bool = False) -> list[Setting]:
    """Return settings of the former command `route` under the names of `serve`. Of stored settings, which may be for
    several commands, only keys that `route` had remain."""
    foreign = set(RECIPES["select"].model_fields) - aliases.ROUTE_KEYS if stored else set()
    return [
        Setting(*aliases.renamed(setting.path, setting.value), setting.origin)
        for setting in settings
        if setting.path[0] not in foreign
    ]


def _stored_for(asked: str, command: str, settings: list[Setting]) -> list[Setting]:
    """Return the settings of files and the environment, without keys that only related commands have.

    Related are the command that was asked for, and the commands with the same earlier spelling: a recipe may be written
    for several of them.
    """
    return [setting for setting in settings if aliases.owner(asked, command, setting.path) in (command, None)]


def _typed_for(asked: str, command: str, settings: list[Setting], problems: list[str]) -> list[Setting]:
    """Return the settings of the command line, and add a problem for each key that only a related command has.

    A mode that ignored such keys still ignores them in its earlier spelling.
    """
    ignores = asked != command and command in aliases.MODES and aliases.MODES[command].ignores
    kept, ignored = [], []
    for setting in settings:
        owner = aliases.owner(asked, command, setting.path)
        if owner in (command, None):
            kept.append(setting)
        elif ignores:
            ignored.append(setting.origin)
        else:
            at = _location(setting.origin, setting.path)
            problems.append(f"{at}: a key of specctl {owner}, not of specctl {command}: leave it out")
    unused = dict.fromkeys(origin for origin in ignored if origin not in {setting.origin for setting in kept})
    if unused:
        progress.log(f"specctl {command} does not use {', '.join(unused)}")
    return kept


def shipped() -> dict[str, str]:
    """Return the recipes in the package: name (`eval`, `deepspeed/zero2`, `slurm/train-drafter`) → text."""
    root = Path(str(resources.files("specctl.recipes")))
    files = [path for path in sorted(root.rglob("*")) if path.suffix in SUFFIXES and path.name != "__init__.py"]
    return {path.relative_to(root).with_suffix("").as_posix(): path.read_text(encoding="utf-8") for path in files}


def read(name: str | Path) -> tuple[str, str]:
    """Return (text, label for messages) of a file, given by its path or by the name of a shipped recipe."""
    if Path(name).is_file():
        try:
            with regular_files.open_regular(name, "r", encoding="utf-8") as file:
                text = file.read(MAX_CHARACTERS + 1)
        except UnicodeDecodeError as error:
            raise RecipeError(f"{name}: not UTF-8 at byte {error.start}: name a file of YAML") from error
        except OSError as error:
            raise RecipeError(f"{name}: cannot be read: {error.strerror}") from error
        if len(text) > MAX_CHARACTERS:
            raise RecipeError(f"{name}: too long for a recipe, over {MAX_CHARACTERS >> 20} MiB")
        return text, str(name)
    known = shipped()
    key = str(name)
    for suffix in SUFFIXES:
        key = key.removesuffix(suffix)
    if key not in known:
        if os.path.exists(name):
            raise RecipeError(f"{name} {regular_files.fault(name)}", hint="name a file of YAML")
        near = _nearest(key, known)
        raise RecipeError(f"no recipe {str(name)!r}{near}", hint="name a file, or a recipe from `specctl recipes ls`")
    return known[key], str(name)


def _recipe(name: str | Path) -> tuple[str, str]:
    """Read a recipe as `read` does. Raises RecipeError for shipped files that are not recipes."""
    text, label = read(name)
    if not Path(name).is_file() and text.startswith("{"):
        raise RecipeError(f"{label} is a DeepSpeed configuration, not a recipe", hint=f"deepspeed={label}")
    if text.startswith("#!"):
        raise RecipeError(f"{label} is a script, not a recipe", hint="copy it with specctl recipes cp and edit that")
    return text, label


def command_of(name: str | Path) -> str:
    """Return the command of a recipe, from its `command:` key. Raises RecipeError if that names no command."""
    text, label = _recipe(name)
    named = yaml_file.load(text, label)[0].get("command")
    command = TODAY.get(named, named) if isinstance(named, str) else named
    if not isinstance(command, str) or command not in RECIPES:
        raise RecipeError(f"{label}: command: must be one of {', '.join(RECIPES)} (got {command!r})")
    return command


def dotted(path: KeyPath) -> str:
    """Join a key path with dots: `("target", "name")` → `target.name`."""
    return ".".join(map(str, path))


def _is_size(value: str) -> bool:
    try:
        return 0 < float(value) < math.inf
    except ValueError:
        return False


def _from_environment(command: str, environ: Mapping[str, str], problems: list[str]) -> Iterator[Setting]:
    """Yield the settings from environment variables. A variable that fits only another command is ignored."""
    others = {field for other in RECIPES.values() for field in other.model_fields} - aliases.fields_of(command)
    for name, value in sorted(environ.items()):
        path = tuple(name.removeprefix(ENVIRONMENT).lower().split("__"))
        if name in ENV_SECRETS:
            continue
        if name in ENV_SIZES:
            if value and not _is_size(value):
                problems.append(f"{name}: must be a number of GiB above 0 (got {brief(repr(value))})")
            continue
        if name in ENV_SWITCHES:
            if value and value not in ENV_SWITCHES[name]:
                problems.append(f"{name}: must be one of {', '.join(ENV_SWITCHES[name])} (got {brief(repr(value))})")
        elif name.startswith(ENVIRONMENT) and path[0] not in others:
            yield Setting(path, _Text(value), name)


def _from_file(command: str, recipe: str | Path, problems: list[str]) -> tuple[list[Setting], str]:
    """Return the settings of a recipe file, and the command that it names."""
    text, label = _recipe(recipe)
    data, lines = yaml_file.load(text, label)
    meant_for = data.pop("command", command)
    if not isinstance(meant_for, str) or meant_for not in aliases.accepted_files(command):
        problems.append(f"{label}:{lines[('command',)]}: command: this recipe is for {meant_for!r}, not {command!r}")
        meant_for = command
    return list(_flatten(data, (), label, lines)), meant_for


def _flatten(data: dict[str, Any], path: KeyPath, label: str, lines: dict[KeyPath, int]) -> Iterator[Setting]:
    """Yield one setting per innermost key, so that each keeps its line number."""
    for key, value in data.items():
        here = (*path, key)
        if isinstance(value, dict) and value:
            yield from _flatten(value, here, label, lines)
        else:
            yield Setting(here, value, f"{label}:{lines[here]}")


def _from_overrides(overrides: Iterable[str], problems: list[str]) -> Iterator[Setting]:
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals or not key:
            problems.append(f"{override}: an override has the form key.sub=value")
        else:
            yield Setting(tuple(key.split(".")), _Text(value), brief(override))


def _to_fields(model: type[Section], setting: Setting, problems: list[str]) -> Iterator[Setting]:
    """Yield the setting at the path of a field. If there is no such field, add a problem and yield nothing."""
    section: Any = model
    for depth, key in enumerate(setting.path):
        field = section.model_fields.get(key)
        if field is None:
            if (key := dotted(setting.path)) in aliases.REMOVED:
                default, advice = aliases.REMOVED[key]
                if setting.value != default:
                    problems.append(f"{_location(setting.origin, setting.path)}: no longer a key: {advice}")
                return
            near = _nearest(key, _keys(model)) if len(problems) < MAX_SUGGESTIONS else ""
            problems.append(f"{_location(setting.origin, setting.path)}: unknown key{near}")
            return
        here, rest = setting.path[: depth + 1], setting.path[depth + 1 :]
        if _is_section(field.annotation):
            section = field.annotation
            continue
        try:
            value = _value(setting, field.annotation, here, rest)
        except RecipeError as error:
            problems.append(error.message)
        else:
            yield Setting(here, value, setting.origin)
        return
    if setting.value == {} or setting.value is None:  # an empty section: `target:`
        return
    if isinstance(setting.value, str) and "name" in section.model_fields:
        yield Setting((*setting.path, "name"), str(setting.value), setting.origin)
        return
    problems.append(
        f"{_location(setting.origin, setting.path)}: set one of its keys: {', '.join(section.model_fields)}"
    )


def _value(setting: Setting, annotation: Any, here: KeyPath, rest: KeyPath) -> Any:
    """Return the value of the field `here`, from a setting for the field or for the keys `rest` within the field.

    Raises RecipeError if the field cannot have the value.
    """
    at = _location(setting.origin, here)
    if rest and not _accepts(annotation, dict):
        raise RecipeError(f"{at}: has no sub-keys (got {brief(repr(dotted(rest)))})")
    value = _typed(setting.value, dict[str, Any] if rest else annotation, at)
    if not rest and isinstance(value, str) and _accepts(annotation, dict):
        value = _mapping(value, at)
    reason = "nested too deeply" if len(rest) > yaml_file.DEEPEST else _rejection_reason(value)
    if reason and here != ("prompt",):  # `generate` raises a DataError for a prompt
        raise RecipeError(f"{at}: {reason}")
    for part in reversed(rest):
        value = {part: value}
    return value


def _typed(value: Any, annotation: Any, at: str) -> Any:
    """Parse a text from the command line as YAML, unless the field wants text (revision 1234 stays a string)."""
    if not isinstance(value, _Text):
        return value
    parsed = yaml_file.scalar(value, at)
    wants_text = _accepts(annotation, str, Path) and not _accepts(annotation, list, dict, int, float)
    if wants_text and not value:  # `drafter=$UNSET` does not mean null
        return ""
    return str(value) if wants_text and not isinstance(parsed, str | None) else parsed


def _mapping(text: str, at: str) -> Any:
    """Read a mapping from a JSON file, given by its path or by the name of a shipped file (`deepspeed/zero2`)."""
    try:
        return json.loads(read(text)[0])
    except (RecipeError, ValueError, RecursionError) as error:
        raise RecipeError(f"{at}: neither a mapping nor a JSON file: {error}") from error


def _rejection_reason(value: Any, depth: int = 0) -> str | None:
    """Return the reason why no key of any type may have this value, or None if there is no such reason.

    Tensors, files or reports could not hold such a value.
    """
    if depth > yaml_file.DEEPEST:
        return "nested too deeply"
    if isinstance(value, dict | list):
        parts = [*value, *value.values()] if isinstance(value, dict) else value
        return next(filter(None, (_rejection_reason(part, depth + 1) for part in parts)), None)
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return "an integer beyond 64 bits"
    if isinstance(value, str | Path) and any("\ud800" <= char <= "\udfff" for char in str(value)):
        return "not UTF-8"
    return None


def _merged(old: Any, new: Any) -> Any:
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return new
    return old | {key: _merged(old.get(key), value) for key, value in new.items()}


def _tree(values: dict[KeyPath, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in values.items():
        node: dict[Any, Any] = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = value
    return tree


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Section)


def _accepts(annotation: Any, *types: type) -> bool:
    """Whether an annotation admits one of `types`. Looks into Optional and Annotated, not at elements of containers."""
    origin = getattr(annotation, "__origin__", None)
    if annotation in types or origin in types:
        return True
    if origin in (list, dict):
        return False
    return any(_accepts(arg, *types) for arg in get_args(annotation))


def _keys(model: type[Section], prefix: str = "") -> list[str]:
    keys: list[str] = []
    for name, field in model.model_fields.items():
        keys.append(prefix + name)
        if _is_section(field.annotation):
            keys += _keys(field.annotation, f"{prefix}{name}.")  # type: ignore[arg-type]
    return keys


def _nearest(name: str, known: Iterable[str]) -> str:
    """Return ` (did you mean X?)`, by the whole key, else by its last part (`lr` → `optimizer.lr`), else nothing."""
    known = list(known)
    if name in known:  # a file has sections, and the dots of the command line in one key
        section, _, key = name.rpartition(".")
        return f" (write {key} below the section {section})"
    last = {key.rsplit(".", 1)[-1]: key for key in reversed(known)}
    meant = did_you_mean(name, known) or did_you_mean(name.rsplit(".", 1)[-1], last)
    return f" ({meant})" if meant else ""


FORMS = {
    r"^(auto|cpu|cuda(:\d+)?)$": "auto, cpu, cuda or cuda:N",
    r"^\d+([KMG]i?)?B$": "a size such as 60GiB",
    r"^\w+$": "the name of an environment variable",
    r"^\d+/[1-9]\d*$": "I/N, such as 0/4",
}
"""Words for the patterns of fields."""
KINDS = {
    "bool_type": "should be true or false",
    "int_type": "should be a whole number",
    "int_from_float": "should be a whole number",
    "float_type": "should be a number",
    "string_type": "should be a text",
    "list_type": "should be a list, such as [1, 2]",
    "dict_type": "should be a mapping of keys to values",
}
"""Words for wrong types, by pydantic's name of the error."""


def _explain(error: Any, origins: dict[KeyPath, str], fallback: str) -> str:
    """Format a pydantic error as `origin: key: problem`."""
    location: KeyPath = error["loc"]
    origin = next((origins[location[:n]] for n in range(len(location), 0, -1) if location[:n] in origins), fallback)
    problem = KINDS.get(error["type"]) or error["msg"].removeprefix("Value error, ").removeprefix("Input ").strip()
    if error["type"] == "string_pattern_mismatch":
        problem = f"should be {FORMS[error['ctx']['pattern']]}"
    if error["type"] == "too_short":
        least = error["ctx"]["min_length"]
        problem = f"needs at least {least} {'item' if least == 1 else 'items'}"
    given = error["input"]
    named = isinstance(given, str) and repr(given) in problem
    words = "null" if given is None else brief(repr(given))
    got = "" if isinstance(given, dict | Section) or named else f" (got {words})"
    near = ""
    if error["type"] == "literal_error" and isinstance(given, str):
        near = _nearest(given, re.findall("'([^']+)'", error["ctx"]["expected"]))
    return f"{_location(origin, location)}: {problem}{got}{near}"


def _location(origin: str, path: KeyPath) -> str:
    """Return `origin: key`, or the origin alone if it contains the key: `--arch`, `optimizer.lr=abc`."""
    key = brief(dotted(path))
    named = key in ("", origin.removeprefix("--").replace("-", "_")) or origin.startswith(f"{key}=")
    return origin if named else f"{origin}: {key}"
