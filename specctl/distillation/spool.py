"""Rows that are more than memory should hold: in a temporary file, with eight bytes each in memory."""

from __future__ import annotations

from array import array
from tempfile import TemporaryFile

BUFFER = 1 << 20


class Spool:
    """Rows of bytes by their place; the file is gone with its owner."""

    def __init__(self) -> None:
        self._file = TemporaryFile(buffering=BUFFER)  # noqa: SIM115 (closed when nobody needs it any more)
        self._ends = array("Q", [0])
        self._writing = True

    def append(self, row: bytes) -> int:
        """Its place."""
        if not self._writing:
            self._file.seek(self._ends[-1])
            self._writing = True
        self._file.write(row)
        self._ends.append(self._ends[-1] + len(row))
        return len(self) - 1

    def __getitem__(self, place: int) -> bytes:
        start, end = self._ends[place : place + 2]
        self._writing = False
        self._file.seek(start)
        return self._file.read(end - start)

    def __len__(self) -> int:
        return len(self._ends) - 1
