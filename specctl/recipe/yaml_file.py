"""YAML as recipes read it: typed like YAML 1.2, no duplicate keys, and the line of every key kept for error messages.

PyYAML follows YAML 1.1, where `1e-4` is a string, `no` is false and `010` is eight: each has ruined a run somewhere.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar

import yaml

from specctl.errors import RecipeError

KeyPath = tuple[str | int, ...]
MISFITS = (
    ValueError,
    LookupError,
    AttributeError,
)  # what PyYAML raises for an explicit tag that does not fit: `!!int x`


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}


for _tag, _pattern, _first in (
    ("null", r"~|null|", ["~", "n", ""]),
    ("bool", r"true|false", list("tf")),
    ("int", r"[-+]?(0|[1-9][0-9]*)", list("-+0123456789")),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*)([eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+", list("-+.0123456789")),
    ("float", r"[-+]?\.inf|\.nan", list("-+.")),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), _first)


def load(text: str, source: str) -> tuple[dict[str, Any], dict[KeyPath, int]]:
    """Parse a recipe: (its mapping, the 1-based line of every key path). RecipeError names `source:line`."""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return {}, {}
        if not isinstance(node, yaml.MappingNode):
            raise RecipeError(f"{source}:{node.start_mark.line + 1}: a recipe is a mapping of keys to values")
        lines: dict[KeyPath, int] = {}
        problems: list[str] = []
        data = _build(loader, node, (), lines, problems, source, set())
    except yaml.YAMLError as error:
        raise RecipeError(_describe(error, source)) from error
    except RecursionError:
        raise RecipeError(f"{source}: nested too deeply") from None
    if problems:
        raise RecipeError("\n".join(problems))
    return data, lines


def scalar(text: str) -> Any:
    """The value of one override or environment variable (`1e-4`, `true`, `[0, 0.7]`); what is not YAML is a string."""
    try:
        return _Loader(text).get_single_data()
    except (yaml.YAMLError, *MISFITS, RecursionError):
        return text


def _build(
    loader: _Loader,
    node: yaml.Node,
    path: KeyPath,
    lines: dict[KeyPath, int],
    problems: list[str],
    source: str,
    parents: set[int],
) -> Any:
    if id(node) in parents:
        raise yaml.constructor.ConstructorError(None, None, "a value that contains itself", node.start_mark)
    below = parents | {id(node)}
    if isinstance(node, yaml.SequenceNode):
        items = enumerate(node.value)
        return [_build(loader, item, (*path, i), lines, problems, source, below) for i, item in items]
    if not isinstance(node, yaml.MappingNode):
        try:
            return loader.construct_object(node, deep=True)
        except MISFITS:
            raise yaml.constructor.ConstructorError(None, None, f"not a value of {node.tag}", node.start_mark) from None
    mapping: dict[str, Any] = {}
    for key_node, value_node in node.value:
        key, line = str(getattr(key_node, "value", "")), key_node.start_mark.line + 1
        here = (*path, key)
        if key in mapping:
            name = ".".join(map(str, here))
            problems.append(f"{source}:{line}: {name}: duplicate key, first given in line {lines[here]}")
            continue
        lines[here] = line
        mapping[key] = _build(loader, value_node, here, lines, problems, source, below)
    return mapping


def _describe(error: yaml.YAMLError, source: str) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "not valid YAML"
    return f"{source}:{mark.line + 1}: {problem}" if mark else f"{source}: {problem}"
