"""Exceptions for errors that the user can fix: the message names the problem, its place, and a remedy.

Each class carries its exit code of the command line. Programming errors stay ordinary exceptions. The functions shorten
texts for messages, find the nearest known name, and remove passwords and API keys.
"""

import os
import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

STARS = "***"
SHORTEST_BEGINNING = 3  # characters from which the beginning of a name counts as the name
SIMILARITY = 0.7  # of a name that is suggested, as in `difflib`; `nope` and `nodes` have 0.67
NAMES = (
    r"(?:(?:api|access|auth|secret|private|hf)[_-]?(?:key|token)|(?<![A-Za-z0-9_-])(?:token|secret|password|passwd))"
)

_IN_ADDRESS = re.compile(r"(:/{1,2}(?:[^/\s'\"?#:@]*:)?)[^/\s'\"?#]*@")
# In an address or an override, in JSON, in YAML between braces; not in a sentence.
_NAMED = re.compile(rf"((?:{NAMES}(?:=|['\"]: ?)|[{{,] ?{NAMES}: ?)['\"]?)[^\s'\"&,}}]+", re.IGNORECASE)
_ADDRESS = re.compile(r"https?://\S+")
_KEY = re.compile(NAMES, re.IGNORECASE)


def brief(text: str, longest: int = 200) -> str:
    """Shorten a text for a message: a text of more than `longest` characters loses its middle."""
    if len(text) <= longest:
        return text
    ends = (longest - 5) // 2
    return f"{text[:ends]} […] {text[-ends:]}"


def did_you_mean(name: str, known: Iterable[str] | Mapping[str, str], most: int = 1) -> str:
    """Return `did you mean X?` with the known names nearest to `name`, or an empty string if no name is near.

    A name that begins with `name` is nearest. If `known` is a mapping, `name` is compared with the keys, and may be one
    of them; the text shows their values.
    """
    names = known if isinstance(known, Mapping) else {one: one for one in known}
    begins = [one for one in names if len(name) >= SHORTEST_BEGINNING and one.startswith(name)][:most]
    begins = [name] if name in names else begins
    near = [names[one] for one in begins or get_close_matches(name, names, n=most, cutoff=SIMILARITY)]
    return f"did you mean {' or '.join(near)}?" if near else ""


def near_path(path: str | os.PathLike[str], others: Iterable[str] = (), suffix: str = "") -> str:
    """Return `did you mean X? ` for a path that does not exist, or an empty string if it does, or if no name is near.

    Compared with the last part of `path`: the names beside it that end with `suffix`, and `others`.
    """
    if os.path.lexists(os.path.expanduser(path)):
        return ""  # it is something else than wanted, but not misspelled
    parent, name = os.path.split(os.fspath(path))
    try:
        beside = os.listdir(os.path.expanduser(parent) or ".")
    except (OSError, ValueError):  # ValueError: a null character
        beside = []
    known = {one: os.path.join(parent, one) for one in sorted(beside) if one.endswith(suffix) and one != name}
    near = did_you_mean(name, known | {one: one for one in others})
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


def redacted(value: Any) -> Any:
    """Replace secrets by `***`: `http://user:***@host`, `?api_key=***`, `{"token": "***"}`.

    Lists and mappings are redacted item by item.
    """
    if isinstance(value, str):
        if ":/" in value:  # an address that was read as a path has one slash left
            value = _IN_ADDRESS.sub(rf"\1{STARS}@", value)
        return _NAMED.sub(rf"\1{STARS}", value)
    if isinstance(value, dict):
        return {
            key: STARS if isinstance(item, str) and item and _secret(key) else redacted(item)
            for key, item in value.items()
        }
    return [redacted(item) for item in value] if isinstance(value, list) else value


def without_passwords(document: Any) -> Any:
    """Replace secrets by `***` in every string and key of a document that is an address: `http://user:***@host`.

    All other texts stay unchanged, even if they contain a secret.
    """
    if isinstance(document, str):
        return redacted(document) if _ADDRESS.fullmatch(document) else document
    if isinstance(document, dict):
        return {without_passwords(key): without_passwords(value) for key, value in document.items()}
    if isinstance(document, list | tuple):
        parts = [without_passwords(value) for value in document]
        return parts if isinstance(document, list) else tuple(parts)
    return document


def _secret(key: Any) -> bool:
    return isinstance(key, str) and _KEY.fullmatch(key) is not None
