"""YAML parser for recipes: types of YAML 1.2, no duplicate keys, and the line of every key for error messages.

PyYAML follows YAML 1.1, in which `1e-4` is a string, `no` is false and `010` is eight. Each has ruined runs.
"""

import re
from typing import Any, ClassVar

import yaml

from specctl.errors import RecipeError

KeyPath = tuple[str | int, ...]
MOST_VALUES = 10_000  # in a document with its aliases expanded: 400 bytes can expand to 9⁹ values
DEEPEST = 50  # levels of nesting
SCALARS = str | int | float | None  # dates and bytes need explicit tags, and no recipe key takes them
TAG_ERRORS = (ValueError, LookupError, AttributeError)  # of PyYAML, for an explicit tag that does not fit: `!!int x`


class _Loader(yaml.SafeLoader):
    """PyYAML's loader with the plain scalars of YAML 1.2. It refuses documents with too many or too deep nodes."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}
    nodes = depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self.nodes += 1
        if self.nodes > 2 * MOST_VALUES:  # keys are nodes, too
            raise _too_many(self.peek_event().start_mark)
        if self.depth > DEEPEST:  # the time that PyYAML needs grows with the square of the depth
            raise _too_deep(self.peek_event().start_mark)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(0|[1-9][0-9]*)", list("-+0123456789")),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*)([eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+", list("-+.0123456789")),
    ("float", r"[-+]?\.inf|\.nan", list("-+.")),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), _first)


def load(text: str, source: str) -> tuple[dict[str, Any], dict[KeyPath, int]]:
    """Parse a recipe into (mapping, 1-based line of every key path). Raises RecipeError, which names `source:line`."""
    document = _Document(text, source)
    data = document.read()
    if data is None:
        return {}, {}
    if not isinstance(data, dict):
        raise RecipeError(f"{source}:{document.begins}: a recipe is a mapping of keys to values")
    if document.problems:
        raise RecipeError("\n".join(document.problems))
    return data, document.lines


def scalar(text: str, source: str) -> Any:
    """Parse the value of an override or environment variable (`1e-4`, `true`, `[0, 0.7]`). Other text is a string.

    Raises RecipeError, which names `source`, for YAML that has too many values, contains itself, or repeats a key.
    """
    document = _Document(text, source)
    try:
        value = document.read()
    except NotYaml:
        return text
    if document.problems:
        raise RecipeError("\n".join(document.problems))
    return value


class NotYaml(RecipeError):
    """The text breaks the rules of YAML, or has a tag that does not fit."""


class _Document:
    """The values of a document, with the line of every key and the problems found."""

    def __init__(self, text: str, source: str):
        self.text, self.source = text, source
        self.lines: dict[KeyPath, int] = {}
        self.problems: list[str] = []
        self.begins = 1  # first line
        self._values = 0

    def read(self) -> Any:
        """Return the value of the document. Raises NotYaml, RecipeError."""
        try:
            self._loader = _Loader(self.text)
            node = self._loader.get_single_node()
            if node is None:
                return None
            self.begins = node.start_mark.line + 1
            return self._build(node, (), frozenset())
        except _ForbiddenYaml as error:
            raise RecipeError(_describe(error, self.source, self.text)) from error
        except yaml.YAMLError as error:
            raise NotYaml(_describe(error, self.source, self.text)) from error

    def _build(self, node: yaml.Node, path: KeyPath, ancestors: frozenset[int]) -> Any:
        """Python values of a node; collects duplicate keys in `problems`. `ancestors`: ids of the nodes around it."""
        self._values += 1
        if self._values > MOST_VALUES:
            raise _too_many(node.start_mark)
        if id(node) in ancestors:
            raise _ForbiddenYaml(None, None, "a value that contains itself", node.start_mark)
        if len(ancestors) > DEEPEST:
            raise _too_deep(node.start_mark)
        ancestors |= {id(node)}
        if isinstance(node, yaml.SequenceNode):
            return [self._build(item, (*path, i), ancestors) for i, item in enumerate(node.value)]
        if not isinstance(node, yaml.MappingNode):
            return self._scalar(node)
        mapping: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key that is not text", key_node.start_mark)
            key, line = key_node.value, key_node.start_mark.line + 1
            key_path = (*path, key)
            if key in mapping:
                name = ".".join(map(str, key_path))
                first = self.lines[key_path]
                self.problems.append(f"{self.source}:{line}: {name}: duplicate key, first given in line {first}")
                continue
            self.lines[key_path] = line
            mapping[key] = self._build(value_node, key_path, ancestors)
        return mapping

    def _scalar(self, node: yaml.Node) -> Any:
        try:
            value = self._loader.construct_object(node, deep=True)
            if isinstance(value, SCALARS):
                return value
        except TAG_ERRORS:
            pass
        raise yaml.constructor.ConstructorError(None, None, f"not a value of {node.tag}", node.start_mark)


class _ForbiddenYaml(yaml.MarkedYAMLError):
    """Valid YAML that no recipe may contain."""


def _too_many(mark: yaml.Mark) -> _ForbiddenYaml:
    return _ForbiddenYaml(None, None, f"more than {MOST_VALUES} values (with all aliases expanded)", mark)


def _too_deep(mark: yaml.Mark) -> _ForbiddenYaml:
    return _ForbiddenYaml(None, None, f"nested too deeply, over {DEEPEST} levels", mark)


IN_WORDS = {
    "'<document start>'": "one mapping of keys to values",
    "found another": "found a second",
    "'<stream end>'": "the end of the file",
}
"""Words for PyYAML's terms in its messages."""


def _describe(error: yaml.YAMLError, source: str, text: str) -> str:
    if isinstance(error, yaml.reader.ReaderError):
        line = text.count("\n", 0, error.position) + 1
        return f"{source}:{line}: not YAML: {chr(error.character)!r} is no character of a text"
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or "cannot be read"
    for term, words in IN_WORDS.items():
        problem = problem.removeprefix("but ").replace(term, words)
    kind = "" if isinstance(error, _ForbiddenYaml | yaml.constructor.ConstructorError) else "not YAML: "
    return f"{source}:{mark.line + 1}: {kind}{problem}" if mark else f"{source}: {kind}{problem}"
