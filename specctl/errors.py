"""Exceptions for errors that the user can fix: the message names the problem, its place, and a remedy.

Each class carries its exit code of the command line. Programming errors stay ordinary exceptions.
"""

import os
from collections.abc import Iterable, Mapping
from difflib import get_close_matches


def brief(text: str, longest: int = 200) -> str:
    """Shorten a text for a message: a text of more than `longest` characters loses its middle."""
    if len(text) <= longest:
        return text
    ends = (longest - 5) // 2
    return f"{text[:ends]} […] {text[-ends:]}"


def did_you_mean(name: str, known: Iterable[str] | Mapping[str, str], most: int = 1, cutoff: float = 0.6) -> str:
    """Return `did you mean X?` with the known names nearest to `name`, or an empty string if no name is near.

    If `known` is a mapping, `name` is compared with the keys and the text shows their values.
    `cutoff`: least similarity of a near name, as in `difflib`.
    """
    names = known if isinstance(known, Mapping) else {one: one for one in known}
    near = [names[one] for one in get_close_matches(name, names, n=most, cutoff=cutoff)]
    return f"did you mean {' or '.join(near)}?" if near else ""


def near_path(path: str | os.PathLike[str], others: Iterable[str] = (), suffix: str = "") -> str:
    """Return `did you mean X? ` for a path that does not exist, or an empty string if no name is near.

    Compared with the last part of `path`: the names beside it that end with `suffix`, and `others`.
    """
    parent, name = os.path.split(os.fspath(path))
    try:
        beside = os.listdir(os.path.expanduser(parent) or ".")
    except (OSError, ValueError):  # ValueError: a null character
        beside = []
    known = {one: os.path.join(parent, one) for one in sorted(beside) if one.endswith(suffix) and one != name}
    near = did_you_mean(name, known | {one: one for one in others}, cutoff=0.75)
    return near and f"{near} "


class SpecctlError(Exception):
    """A failure with a message for people and an optional hint: the next thing to try."""

    exit_code = 1

    def __init__(self, message: str, hint: str | None = None):
        super().__init__(message)
        self.message = message
        self.hint = hint


def one_line(error: Exception) -> str:
    """Return the class name and the first line of another library's exception."""
    return f"{type(error).__name__} {str(error).strip().partition(chr(10))[0]:.200}".strip()


class UsageError(SpecctlError):
    """The command line asks for something that does not exist or contradicts itself."""

    exit_code = 2


class RecipeError(SpecctlError):
    """A recipe, override or environment value is invalid."""

    exit_code = 2


class DataError(SpecctlError):
    """Prompts or distilled data cannot be used."""

    exit_code = 3


class ChatTemplateError(DataError):
    """The chat template of a target refuses a conversation, or fails on it."""


class CheckpointError(SpecctlError):
    """A checkpoint is damaged, incomplete, or belongs to another target."""

    exit_code = 4


class ReaderGone(SpecctlError):
    """The reader of stdout has closed the pipe (`specctl … | head`). This counts as success."""

    exit_code = 0


class Interrupted(SpecctlError):
    """Stopped by SIGTERM, SIGUSR1 or SIGHUP after saving; the same command with `--resume` continues."""

    exit_code = 75
