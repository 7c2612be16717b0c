"""Errors that reach the user: what was wrong, where, and what would be right.

Each class carries the exit code of the command-line contract. Programming errors stay ordinary exceptions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches


def brief(text: str, longest: int = 200) -> str:
    """A text for a message: one that is longer than so many characters loses its middle."""
    if len(text) <= longest:
        return text
    ends = (longest - 5) // 2
    return f"{text[:ends]} […] {text[-ends:]}"


def did_you_mean(name: str, known: Iterable[str] | Mapping[str, str], most: int = 1, cutoff: float = 0.6) -> str:
    """`did you mean X?`, with the nearest names (of a mapping what stands behind them); empty where none is near.

    `cutoff`: similarity of `difflib` from which on a name is near.
    """
    names = known if isinstance(known, Mapping) else {one: one for one in known}
    near = [names[one] for one in get_close_matches(name, names, n=most, cutoff=cutoff)]
    return f"did you mean {' or '.join(near)}?" if near else ""


class SpecctlError(Exception):
    """A failure with a message for people and, where there is one, the next thing to try (`hint`)."""

    exit_code = 1

    def __init__(self, message: str, hint: str | None = None):
        super().__init__(message)
        self.message = message
        self.hint = hint


def one_line(error: Exception) -> str:
    """Kind and first line of another library's exception."""
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
    """`specctl … | head` has all it wanted: a success."""

    exit_code = 0


class Interrupted(SpecctlError):
    """Stopped by SIGTERM or SIGUSR1 after saving; the same command with `--resume` continues."""

    exit_code = 75
