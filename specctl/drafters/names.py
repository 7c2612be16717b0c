"""Parse drafter names from the command line: a directory, a drafter without weights, or a hybrid `a+b`.

This module imports nothing heavy, because commands look at names before they load anything.
"""

import os
from collections.abc import Iterable
from pathlib import Path

from specctl.families import WEIGHTLESS_DRAFTERS

HYBRIDS = (
    "a hybrid combines a trained drafter with a text drafter: drafters/sql-eagle3+lookup, …+suffix, "
    "…+drafters/sql-retrieval"
)
RESCORED = (
    "drafting.rescore needs a medusa head and a datastore",
    "name them with a plus: drafters/sql-medusa+drafters/sql-retrieval",
)
SAMPLED = "a hybrid cannot sample its proposals", "set drafting.proposal to another value"


def parts_of(path_or_name: str) -> list[str]:
    """Split a name into its drafters: two for a hybrid `a+b`, otherwise one.

    A name stays whole if a directory has exactly this name, or if neither part exists: an error then names the whole.
    """
    if _is_there(path_or_name) or "+" not in path_or_name:
        return [path_or_name]
    first, _, second = path_or_name.rpartition("+")
    # A path may itself contain a plus, as in drafters/sql-eagle3+stores/sql+math.
    while not _is_there(second) and _is_there(f"{first.rpartition('+')[2]}+{second}"):
        first, _, last = first.rpartition("+")
        second = f"{last}+{second}"
    whole = not first or not second or not (_is_there(first) or _is_there(second))
    return [path_or_name] if whole else [first, second]


def _is_there(path_or_name: str) -> bool:
    return path_or_name in WEIGHTLESS_DRAFTERS or os.path.lexists(Path(path_or_name).expanduser())


def name_of(path_or_name: str) -> str:
    """Short name of a drafter: the last component of its path, for a hybrid of both paths (`sql-eagle3+lookup`)."""
    return "+".join(Path(part).name for part in parts_of(path_or_name))


def labels(paths: Iterable[str]) -> dict[str, str]:
    """Map each path to its short name, or to the full path if two drafters share the short name."""
    names = {path: name_of(path) for path in paths}
    return {path: name if [*names.values()].count(name) == 1 else path for path, name in names.items()}


def place_of(name: str) -> Path:
    """Relative path of the directory that a drafter of a pool is saved in. The name may be a path (`labels`), also an
    absolute one, which must not lead out of the pool."""
    return Path(*(part for part in Path(name).parts if part not in (os.sep, os.pardir)))
