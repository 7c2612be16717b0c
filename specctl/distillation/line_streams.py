"""Lines of JSON from a file, a pipe or stdin: opened without waiting, read in bounded memory, parsed with a reason.

Rows of other formats (.txt, .csv, .tsv, .parquet) become such lines.
"""

import csv
import errno
import io
import json
import os
import select
import stat
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from specctl import progress, regular_files
from specctl.errors import DataError, near_path, one_line

MAX_LINE_BYTES = 8 << 20  # traces of agents have a few MiB
REMEDY = "give a file of prompts, or - for stdin"
POLL_S = 0.2  # seconds that a signal may wait while stdin is silent
COMPRESSED = {b"\x1f\x8b": "gunzip", b"\x28\xb5\x2f\xfd": "unzstd", b"BZh": "bunzip2", b"\xfd7zXZ": "unxz"}
"""First bytes of compressed files, and the commands that read them."""
ARRAY = "if the file is a JSON array, `jq -c '.[]'` puts each element on a separate line"


def json_lines(name: str) -> Iterator[tuple[str, bytes | None]]:
    """The rows of a file and their places, as lines of JSON. A line that was too long is None. Blank lines are left
    out.

    A line of a .txt file is a prompt, unless it begins like JSON. A row of a .csv, .tsv or .parquet file is an object
    of its cells, without the empty ones. DataError if the file cannot be read.
    """
    label = "<stdin>" if name == "-" else name
    with open_prompts(name) as file:
        for number, line in enumerate(READERS.get(Path(name).suffix.lower(), lines)(file), 1):
            if line is None or line.strip():
                yield f"{label}:{number}", line


def open_prompts(name: str) -> IO[bytes]:
    """Open a file, a pipe such as the shell's `<(…)`, or stdin for `-`. DataError if it cannot be read."""
    if name == "-":
        return _stdin()
    try:
        if stat.S_ISREG(os.stat(name).st_mode):
            return regular_files.open_regular(name)
        return _stream(name)
    except FileNotFoundError as error:
        raise DataError(f"no prompts file {name}", f"{near_path(name)}{REMEDY}") from error
    except OSError as error:
        hint = None if isinstance(error, PermissionError) else REMEDY
        raise DataError(f"cannot read prompts from {name}: {error.strerror}", hint) from error


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


def _texts(file: IO[bytes]) -> Iterator[bytes | None]:
    for line in lines(file):
        try:
            text = (line or b"").decode("utf-8-sig").strip()
        except UnicodeDecodeError:
            text = ""  # `json_object` names the fault of the line
        is_json = text == "[" or text.startswith(("{", "[{"))  # an array is refused, with advice
        yield _row({"prompt": text}) if text and not is_json else line


def _table(file: IO[bytes]) -> Iterator[bytes]:
    """Rows of a CSV file. Its header tells whether commas, semicolons, tabs or bars separate the cells."""
    csv.field_size_limit(MAX_LINE_BYTES)
    text = io.TextIOWrapper(file, "utf-8-sig", newline="")
    try:
        header = text.readline()
        separator = max(",;\t|", key=header.count)
        names = next(csv.reader([header], delimiter=separator), [])
        rows = csv.DictReader(text, names, delimiter=separator, strict=True)
        for row in rows:
            if any(row.get(None, ())):
                raise csv.Error(f"line {rows.line_num + 1} has more cells than the header")
            yield _row(row)
    except UnicodeDecodeError:
        hint = "convert it, such as `iconv -f WINDOWS-1252 -t UTF-8`"
        raise DataError(f"cannot read {file.name} as CSV: not UTF-8", hint=hint) from None
    except csv.Error as error:
        hint = f"put cells with {separator!r} or quotes in quotes, and double the quotes in them; or write JSONL"
        raise DataError(f"cannot read {file.name} as CSV: {error}", hint=hint) from None


def _parquet(file: IO[bytes]) -> Iterator[bytes]:
    import pyarrow.parquet

    try:
        for batch in pyarrow.parquet.ParquetFile(file).iter_batches(batch_size=256):
            yield from map(_row, batch.to_pylist())
    except (ValueError, OSError, pyarrow.ArrowException) as error:
        hint = "write the file again, or give the rows as JSONL"
        raise DataError(f"cannot read {file.name} as Parquet: {one_line(error)}", hint) from None


def _row(cells: Mapping[Any, Any]) -> bytes:
    return json.dumps(
        {name: cell for name, cell in cells.items() if name and cell not in (None, "")}, default=_text
    ).encode()


def _text(cell: Any) -> str:
    """Text of a cell that JSON has no type for, such as a time. Bytes are text of a column without an encoding."""
    return cell.decode(errors="replace") if isinstance(cell, bytes) else str(cell)


READERS: dict[str, Callable[[IO[bytes]], Iterator[bytes | None]]] = {
    ".txt": _texts,
    ".csv": _table,
    ".tsv": _table,
    ".parquet": _parquet,
}
"""Readers of other formats than JSONL, by the end of a file's name."""


def json_object(line: bytes | None) -> dict[str, Any]:
    """Parse a line's JSON object. ValueError says why there is none."""
    if line is None:
        raise ValueError(f"line longer than {MAX_LINE_BYTES >> 20} MiB; {ARRAY}")
    if command := next((command for begin, command in COMPRESSED.items() if line.startswith(begin)), None):
        raise ValueError(f"compressed: `{command}` the file, or pipe `{command} -c` of it into `-`")
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
