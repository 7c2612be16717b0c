"""Rows that are more than memory should hold: in a temporary file, with eight bytes each in memory."""

from __future__ import annotations

import os
from array import array
from tempfile import TemporaryFile


class Spool:
    """Rows of bytes by their place; the file is gone with its owner."""

    def __init__(self) -> None:
        self._file = TemporaryFile()  # noqa: SIM115 (closed when nobody needs it any more)
        self._ends = array("Q", [0])
        self._flushed = 0  # bytes

    def append(self, row: bytes) -> int:
        """Add a row. Returns its place."""
        self._file.write(row)
        self._ends.append(self._ends[-1] + len(row))
        return len(self) - 1

    def __getitem__(self, place: int) -> bytes:
        start, end = self._ends[place : place + 2]
        if end > self._flushed:
            self._file.flush()
            self._flushed = self._ends[-1]
        return os.pread(self._file.fileno(), end - start, start)

    def __len__(self) -> int:
        return len(self._ends) - 1
