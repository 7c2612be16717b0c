"""Lines of JSON from a file, a pipe or stdin: opened without waiting, read in bounded memory, parsed with a reason."""

import errno
import io
import json
import os
import select
import stat
import sys
from collections.abc import Iterator
from typing import IO, Any

from specctl import progress, regular_files
from specctl.distillation.rejections import EXPECTED
from specctl.errors import DataError

MAX_LINE_BYTES = 8 << 20  # traces of agents have a few MiB
POLL_S = 0.2  # seconds that a signal may wait while stdin is silent
ARRAY = "if the file is a JSON array, `jq -c '.[]'` puts each element on a separate line"


def open_prompts(name: str) -> IO[bytes]:
    """Open a file, a pipe such as the shell's `<(…)`, or stdin for `-`. DataError if it cannot be read."""
    if name == "-":
        return _stdin()
    try:
        if stat.S_ISREG(os.stat(name).st_mode):
            return regular_files.open_regular(name)
        return _stream(name)
    except OSError as error:
        raise DataError(f"cannot read prompts from {name}: {error.strerror}", hint=f"expected {EXPECTED}") from error


def _stdin() -> IO[bytes]:
    try:
        return io.BufferedReader(_Interruptible(sys.stdin.buffer.fileno()))
    except OSError:  # stdin was replaced by an object without a descriptor
        return sys.stdin.buffer


def _stream(name: str) -> IO[bytes]:
    """Open a pipe or a terminal. OSError for anything else: a device may have no end."""
    descriptor = os.open(name, os.O_RDONLY | os.O_NONBLOCK)  # NONBLOCK: a pipe may have no writer yet
    if stat.S_ISFIFO(os.fstat(descriptor).st_mode) or os.isatty(descriptor):
        return io.BufferedReader(_Interruptible(descriptor, owned=True))
    os.close(descriptor)
    regular_files.check(name)
    raise OSError(errno.EINVAL, "the file was replaced while it was opened", name)


class _Interruptible(io.RawIOBase):
    """Reader of a file descriptor that stops on SIGTERM. By itself Python resumes a read that a signal interrupts, and
    the next line of `tail -f` may never come. With `owned`, `close` closes the descriptor."""

    def __init__(self, descriptor: int, owned: bool = False):
        self.descriptor, self.owned = descriptor, owned

    def close(self) -> None:
        if self.owned and not self.closed:
            os.close(self.descriptor)
        super().close()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not select.select([self.descriptor], [], [], POLL_S)[0]:
            progress.interrupts.check()
        data = os.read(self.descriptor, len(buffer))
        buffer[: len(data)] = data
        return len(data)


def lines(file: IO[bytes]) -> Iterator[bytes | None]:
    """Lines of at most MAX_LINE_BYTES. A longer line is skipped piece by piece, to bound memory, and given as None."""
    while line := file.readline(MAX_LINE_BYTES + 1):
        if len(line) <= MAX_LINE_BYTES:
            yield line
            continue
        while line and not line.endswith(b"\n"):
            line = file.readline(MAX_LINE_BYTES)
        yield None


def json_object(line: bytes | None) -> dict[str, Any]:
    """Parse a line's JSON object. ValueError says why there is none."""
    if line is None:
        raise ValueError(f"line longer than {MAX_LINE_BYTES >> 20} MiB; {ARRAY}")
    if line.startswith(b"\x1f\x8b"):
        raise ValueError("compressed with gzip: `gunzip` the file, or pipe `gunzip -c` of it into `-`")
    if line.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise ValueError("UTF-16, not UTF-8: `iconv -f UTF-16 -t UTF-8` converts it")
    try:
        row = json.loads(line.decode("utf-8-sig"))  # skips the byte order mark that some editors write
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        if line.strip() == b"[":
            raise ValueError(f"the line alone is not JSON; {ARRAY}") from None
        raise ValueError(f"not JSON: {error.msg.removesuffix(' at')} at column {error.colno}") from None
    except RecursionError:
        raise ValueError("not JSON: nested too deeply") from None
    if not isinstance(row, dict):
        more = f"; {ARRAY}" if isinstance(row, list) else ""
        raise ValueError(f"expected a JSON object, got {type(row).__name__}{more}")
    return row
