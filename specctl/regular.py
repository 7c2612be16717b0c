"""Files that users and other processes name: a regular file is opened, anything else is refused by its name.

Opening a named pipe waits until somebody writes into it, reading a device may never end, and a symbolic link that
another user has put where a file is to be written leads the content elsewhere. The standard library alone is imported:
vLLM's workers read drafters with this, too.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Any

KINDS: dict[str, Callable[[int], bool]] = {
    "a named pipe": stat.S_ISFIFO,
    "a socket": stat.S_ISSOCK,
    "a device": lambda mode: stat.S_ISCHR(mode) or stat.S_ISBLK(mode),
    "a symbolic link": stat.S_ISLNK,
}


def check(path: str | os.PathLike[str], *, follow: bool = True) -> None:
    """Raise OSError, naming `path`, unless a regular file is there; for libraries that open a file by its name.

    `follow`: a symbolic link counts as what it leads to. Without, it is refused.
    """
    _check_mode(os.stat(path, follow_symlinks=follow).st_mode, path)


def _check_mode(mode: int, path: str | os.PathLike[str]) -> None:
    if stat.S_ISREG(mode):
        return
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    kind = next((name for name, is_one in KINDS.items() if is_one(mode)), "something else")
    raise OSError(errno.EINVAL, f"{kind}, not a regular file", os.fspath(path))


def opened(
    path: str | os.PathLike[str], mode: str = "rb", *, follow: bool = True, permissions: int = 0o666, **options: Any
) -> IO[Any]:
    """`open(path, mode, **options)` of a regular file, which never waits.

    Args:
        follow: as in `check`.
        permissions: of a file that is created; the umask takes some away.

    Raises OSError, naming `path`: as `open`, or what is there is no regular file.
    """

    def opener(name: str, flags: int) -> int:
        with suppress(FileNotFoundError):  # looked at before it is opened, which a device might act on
            check(path, follow=follow)
        # Not waiting is for a pipe that has taken the file's place since then.
        descriptor = os.open(name, flags | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW), permissions)
        try:
            _check_mode(os.fstat(descriptor).st_mode, path)
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    return open(path, mode, opener=opener, **options)


def created(path: str | os.PathLike[str], mode: str = "xb", *, permissions: int = 0o666, **options: Any) -> IO[Any]:
    """A new file, open for writing. What was at `path` is removed before; it is not written into, and no link followed.

    Args:
        mode: "xb", or "x" for text.

    Raises OSError where the file cannot be created, or somebody else has created it meanwhile.
    """
    with suppress(FileNotFoundError):
        os.unlink(path)
    return open(path, mode, opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, permissions), **options)


def content(path: str | os.PathLike[str], most: int | None = None) -> bytes:
    """The bytes of a regular file. Raises OSError: as `opened`, or it has more than `most` bytes."""
    with opened(path) as file:
        if most is None:
            return bytes(file.read())
        data = bytes(file.read(most + 1))
    if len(data) > most:
        raise OSError(errno.EFBIG, f"more than the {most:,} bytes that such a file may have", os.fspath(path))
    return data


def text(path: str | os.PathLike[str], errors: str = "strict") -> str:
    """The UTF-8 text of a regular file. Raises OSError, UnicodeDecodeError (a ValueError)."""
    return content(path).decode(errors=errors)


def document(path: str | os.PathLike[str]) -> Any:
    """The JSON value in a regular file. Raises OSError; ValueError where there is none, or one nested too deeply."""
    return parsed(content(path))


def parsed(text: str | bytes) -> Any:
    """`json.loads` whose only error is ValueError."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
