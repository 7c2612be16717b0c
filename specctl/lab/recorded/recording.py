"""A table during its recording: pieces in a directory next to its file, joined at the end.

table.parquet                   written last, whole
table.parquet.pieces/           removed once the table is written
    0000000.parquet             the queries from that place in the stream on
    writer.lock                 held by the writer
"""

import shutil
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from specctl.decoding.target_text import with_weights_digest
from specctl.errors import UsageError
from specctl.lab.recorded.table_file import Header, Recorded, differences, read, table_of, write
from specctl.lab.recorded.trace import Table
from specctl.lock import Lock
from specctl.runs import make_dir, remove_leftovers

KEEP_EVERY_S = 60.0  # a recording that is killed without a signal loses no more than this


class Recording:
    """The rows of a table, kept in `path` if one is given. A context manager that keeps all rows, however it is left.

    Attributes:
        rows: of the whole stream, starting with the rows of earlier runs.
    """

    def __init__(self, path: Path | None, header: Header, *, resume: bool = False, overwrite: bool = False):
        self.path, self.header = path, header
        self.resume, self.overwrite = resume, overwrite
        self.rows: list[Recorded] = []
        self._unkept: list[Recorded] = []
        self._kept_at = time.monotonic()
        self._lock: Lock | None = None

    def __enter__(self) -> Self:
        """Raises UsageError if `path` has something that must be kept, that was recorded with other settings, or that
        another process is writing; CheckpointError if a piece cannot be read."""
        if self.path is not None:
            check_free(self.path, resume=self.resume, overwrite=self.overwrite)
            make_dir(pieces(self.path), hint="record to another file")
            where = pieces(self.path) / "writer.lock"
            self._lock = Lock(where, self.path, hint="wait for it, or record to another file")
            try:
                self._begin(pieces(self.path))
            except BaseException:
                self._lock.release()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._keep()
        finally:
            if self._lock is not None:
                self._lock.release()

    @property
    def next(self) -> int:
        """The first place in the stream that is not recorded."""
        return self.rows[-1].place + 1 if self.rows else 0

    def add(self, row: Recorded) -> None:
        self.rows.append(row)
        self._unkept.append(row)
        if time.monotonic() - self._kept_at > KEEP_EVERY_S:
            self._keep()

    def finish(self, costs: Mapping[str, list[Any]]) -> Table:
        """Make the table, and write it if there is a path."""
        header = replace(self.header, costs=dict(costs))
        if self.path is not None:
            write(self.path, header, self.rows)
            self._unkept.clear()
            shutil.rmtree(pieces(self.path))
        return table_of(header, self.rows)

    def _begin(self, directory: Path) -> None:
        """Load the pieces of earlier runs, or remove them."""
        remove_leftovers(directory)
        for piece in sorted(directory.glob("*.parquet")):
            if not self.resume:
                piece.unlink()
                continue
            header, rows = read(piece)
            kept = {**vars(header), "stamp": with_weights_digest(header.stamp, self.header.stamp)}
            found = differences(kept, vars(self.header))
            if found:
                raise UsageError(
                    f"{piece} was recorded with different settings: {'; '.join(found)}",
                    hint="resume with the recipe of that run, or start over with --overwrite",
                )
            self.rows += rows

    def _keep(self) -> None:
        if self.path is not None and self._unkept:
            write(pieces(self.path) / f"{self._unkept[0].place:07}.parquet", self.header, self._unkept)
            self._unkept = []
            self._kept_at = time.monotonic()


def pieces(path: Path) -> Path:
    """The directory of a table's pieces."""
    return path.with_name(f"{path.name}.pieces")


def check_free(path: Path, *, resume: bool, overwrite: bool) -> None:
    """Raise UsageError if a recording to `path` would destroy another one, or if `path` is a directory."""
    if path.is_dir():
        raise UsageError(f"{path} is a directory, not a file", hint="name a file in it")
    if resume or overwrite:
        return
    if path.exists():
        raise UsageError(f"{path} already exists", hint=f"specctl replay {path} plays on it, --overwrite replaces it")
    if any(pieces(path).glob("*.parquet")):
        raise UsageError(f"{path} is incomplete", hint="continue it with --resume, or start over with --overwrite")
