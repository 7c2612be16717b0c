"""Opening of regular files only: a pipe, a socket, a device and, on request, a symbolic link are refused.

The paths come from users and other processes. Opening a named pipe waits for a writer, and reading a device may never
end. A symbolic link that another user has put at the path of an output file redirects the content. Only the standard
library is imported, because vLLM's workers read drafters with this module, too.
"""

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
    """Raise OSError, naming `path`, unless it is a regular file. For libraries that open a file by its name.

    `follow`: whether a symbolic link counts as the file to which it points; otherwise it is refused.
    """
    _check_mode(os.stat(path, follow_symlinks=follow).st_mode, path)


def _check_mode(mode: int, path: str | os.PathLike[str]) -> None:
    if stat.S_ISREG(mode):
        return
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    raise OSError(errno.EINVAL, f"{_kind(mode)}, not a regular file", os.fspath(path))


def _kind(mode: int) -> str:
    return next((name for name, is_one in KINDS.items() if is_one(mode)), "something else")


def fault(path: str | os.PathLike[str]) -> str:
    """Say why a path is no regular file, such as `does not exist`."""
    try:
        check(path)
    except FileNotFoundError:
        return "does not exist"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return "is a regular file"


def directory_fault(path: str | os.PathLike[str]) -> str:
    """Say why a path is no directory, such as `does not exist`."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return "does not exist"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return f"is {'a file' if stat.S_ISREG(mode) else _kind(mode)}, not a directory"


def no_directory(what: str, path: str | os.PathLike[str]) -> str:
    """Say that a path is no directory: `no drafter D`, or `drafter D is a file, not a directory`."""
    return f"{what} {path} {directory_fault(path)}" if os.path.lexists(path) else f"no {what} {path}"


def open_regular(
    path: str | os.PathLike[str], mode: str = "rb", *, follow: bool = True, permissions: int = 0o666, **options: Any
) -> IO[Any]:
    """Open a regular file as `open(path, mode, **options)` does, without ever waiting.

    Args:
        follow: as in `check`.
        permissions: mode bits of a file that is created, before the umask.

    Raises OSError, naming `path`, if `open` fails or the path is not a regular file.
    """

    def opener(name: str, flags: int) -> int:
        with suppress(FileNotFoundError):  # checked before it is opened: a device may act on being opened
            check(path, follow=follow)
        # O_NONBLOCK: a pipe may have replaced the file since the check.
        descriptor = os.open(name, flags | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW), permissions)
        try:
            _check_mode(os.fstat(descriptor).st_mode, path)
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    return open(path, mode, opener=opener, **options)


def create_file(path: str | os.PathLike[str], mode: str = "xb", *, permissions: int = 0o666, **options: Any) -> IO[Any]:
    """Create a file and open it for writing. An existing file or link at `path` is unlinked first, never followed.

    Args:
        mode: "xb", or "x" for text.
        permissions: mode bits of the file, before the umask.

    Raises OSError if the file cannot be created, or if another process has created it meanwhile.
    """
    with suppress(FileNotFoundError):
        os.unlink(path)
    return open(path, mode, opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, permissions), **options)


def read_bytes(path: str | os.PathLike[str], most: int | None = None) -> bytes:
    """Return the bytes of a regular file. Raises OSError as `open_regular` does, or if it has more than `most`
    bytes."""
    with open_regular(path) as file:
        if most is None:
            return bytes(file.read())
        data = bytes(file.read(most + 1))
    if len(data) > most:
        raise OSError(errno.EFBIG, f"larger than the limit of {most:,} bytes", os.fspath(path))
    return data


def read_text(path: str | os.PathLike[str], errors: str = "strict") -> str:
    """Return the UTF-8 text of a regular file. Raises OSError, UnicodeDecodeError (a ValueError)."""
    return read_bytes(path).decode(errors=errors)


def read_json(path: str | os.PathLike[str]) -> Any:
    """Return the JSON value in a regular file. Raises OSError; ValueError if it is not JSON or nested too deeply."""
    return parse_json(read_bytes(path))


def parse_json(text: str | bytes) -> Any:
    """Parse JSON like `json.loads`, with ValueError as the only error."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
