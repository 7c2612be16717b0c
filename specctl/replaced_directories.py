"""Directories that `--overwrite` replaces as a whole: drafters, converted drafters and routers.

The new directory is written next to the old one and takes its place, and all files of the old one are deleted. So no
other output may be inside such a directory, and a directory with another output inside is not replaced.
"""

import os
from pathlib import Path

from specctl.errors import UsageError

MARKS = {
    "drafter": ("manifest.json", "drafter.json"),
    "converted drafter": ("export.json",),
    "router": ("router.json",),
}
"""Kind of a directory → files that identify it; one of them is enough."""
OUTPUTS = MARKS | {"run": ("run.json",), "data directory": ("meta.json",)}


def check_free(place: Path, overwrite: bool, what: str = "drafter") -> None:
    """Raise UsageError if a directory of the kind `what` cannot be written at `place`.

    Only a directory of that kind may be overwritten, and only without another output inside.
    """
    if not os.path.lexists(place) or (place.is_dir() and not place.is_symlink() and not any(place.iterdir())):
        return
    if place.is_symlink():
        raise UsageError(f"{place} is a link, which would be replaced", hint="give --output-dir the directory itself")
    if not any((place / name).is_file() for name in MARKS[what]):
        raise UsageError(f"{place} exists and is not a {what} directory", hint="choose another --output-dir")
    if not overwrite:
        raise UsageError(f"{place} already contains a {what}", hint="--overwrite replaces it")
    for folder, _, files in os.walk(place):
        kind = next((kind for kind, marks in OUTPUTS.items() if not {*marks}.isdisjoint(files)), None)
        if kind is not None and Path(folder) != place:
            raise UsageError(
                f"{place} contains the {kind} {folder}, which --overwrite would delete",
                hint=f"move {folder} elsewhere first, or choose another --output-dir",
            )


def check_outside(path: Path, mark: str = "") -> None:
    """Raise UsageError if a new output at `path` would be inside a directory that `--overwrite` replaces.

    `mark`: for a directory that is not replaced itself, the file that identifies it. An output that is there already
    may be continued.
    """
    known = path / mark
    if os.path.isfile(known) or (os.path.isdir(known) and any(known.iterdir())):
        return
    for folder in Path(os.path.realpath(known)).parents:  # unlike `Path.resolve`, without an error for a loop of links
        kind = next((kind for kind, marks in MARKS.items() if os.path.isfile(folder / marks[-1])), None)
        if kind is not None:
            where = "is" if folder == Path(os.path.realpath(path)) else f"is inside {folder}, which is"
            raise UsageError(
                f"{path} {where} a {kind}, and --overwrite of that {kind} would delete an output there",
                hint=f"choose a place outside {folder}",
            )
