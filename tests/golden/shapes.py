"""Shapes of documents: every dotted key with the kinds of its values, and the differences of two shapes."""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

Shape = dict[str, str]
"""Dotted key → kinds of its values, as in `rows[].mat` → `float|null`."""

NAMES = (
    *("sql-eagle3", "math-eagle3", "sql-lm", "ens-eagle3", "hedgespec", "ucbspec", "online-lr", "lookup"),
    *("random", "ogd", "math", "sql"),
)
"""Domains, drafters and algorithms of the small runs: as keys they are data."""

MACHINE = ("cuda", "git", "others_busy", "unusable", "notes")
"""The values of these keys depend on the machine, or on how busy it is."""
BUSY = " not usable"
"""End of the headings that a report has on a busy machine only."""

_NAME = re.compile(rf"(?<![\w-])({'|'.join(NAMES)})(?![\w-])")
_NUMBER = re.compile(r"(?<!\w)\d+(?!\w)")
_KINDS = {type(None): "null", bool: "bool", int: "int", float: "float", str: "str"}


def numberless(text: str) -> str:
    """The text with a placeholder for every number, such as a step, a chunk or a rank."""
    return _NUMBER.sub("#", text)


def placed(key: str) -> str:
    """The key with placeholders for names and numbers, which are data."""
    return numberless(_NAME.sub("<name>", key))


def shape_of(value: Any) -> Shape:
    """The shape of a document; the elements of a list are merged."""
    return merged({path: kind} for path, kind in _walk(value, ""))


def merged(shapes: Iterable[Shape]) -> Shape:
    """One shape for several documents of a sort, such as the lines of a file."""
    kinds: dict[str, set[str]] = {}
    for shape in shapes:
        for path, kind in shape.items():
            kinds.setdefault(path, set()).update(kind.split("|"))
    return {path: "|".join(sorted(found)) for path, found in sorted(kinds.items())}


def same_kinds(reference: str, found: str) -> bool:
    """Whether `found` has no kind that `reference` lacks. Null alone tells no kind, and a float may be an int."""
    expected, there = set(reference.split("|")), set(found.split("|"))
    if expected == {"null"}:
        return True
    if "float" in expected:
        expected.add("int")
    return there <= expected | {"null"} and (there != {"null"} or "null" in expected)


def differences(name: str, reference: Shape, found: Shape, fits: Callable[[str, str], bool] = same_kinds) -> list[str]:
    """A line for every key of a document that is gone, new or changed; `fits(reference, found)` compares two kinds."""
    gone = [path for path in reference.keys() - found.keys() if not _under_nothing(path, found)]
    new = [path for path in found.keys() - reference.keys() if not _under_nothing(path, reference)]
    changed = [path for path in reference.keys() & found.keys() if not fits(reference[path], found[path])]
    return [
        *(f"{name}: {path} is gone (was {reference[path]})" for path in sorted(gone)),
        *(f"{name}: {path} is new ({found[path]})" for path in sorted(new)),
        *(f"{name}: {path} was {reference[path]}, is {found[path]}" for path in sorted(changed)),
    ]


def _walk(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if path.rpartition(".")[2] in MACHINE:
        yield path, "any"
    elif isinstance(value, dict):
        yield path or ".", "dict"
        for key, item in value.items():
            if str(key).endswith(BUSY):
                continue
            yield from _walk(item, f"{path}.{placed(str(key))}".lstrip("."))
    elif isinstance(value, list | tuple):
        yield path or ".", "list"
        for item in value:
            yield from _walk(item, f"{path}[]")
    else:
        yield path or ".", _KINDS.get(type(value), type(value).__name__)


def _under_nothing(path: str, shape: Shape) -> bool:
    """Whether a key above `path` is null in every document of `shape`: elsewhere this key may have keys of its own."""
    above = [path[: found.start()] for found in re.finditer(r"[.\[]", path)]
    return any(shape.get(key) == "null" for key in above)
