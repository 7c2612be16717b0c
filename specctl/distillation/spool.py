"""Spool for rows that exceed memory: they are kept in a temporary file, with eight bytes of memory per row."""

import os
from array import array
from tempfile import TemporaryFile


class Spool:
    """Rows of bytes by their place; the temporary file disappears with this object."""

    def __init__(self) -> None:
        self._file = TemporaryFile()  # noqa: SIM115 (closed with this object)
        self._ends = array("Q", [0])
        self._flushed = 0  # bytes

    def append(self, row: bytes) -> int:
        """Add a row and return its place."""
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
