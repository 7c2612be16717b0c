"""Log of requests and answers that only its owner can read."""

import errno
import logging
import os
import sys
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import cast

from specctl import progress, regular_files
from specctl.runs import PRIVATE


class PrivateLog(RotatingFileHandler):
    """Rotating log file that only its owner can read, including the files that rotation creates.

    Raises OSError if a link, a pipe or another user's file has its path. If the disk is full, lines are lost. A single
    warning says so without quoting them, because clients wrote them.
    """

    refused = False

    def _open(self) -> TextIOWrapper:
        file = regular_files.open_regular(self.baseFilename, "a", follow=False, permissions=PRIVATE, encoding="utf-8")
        try:
            if os.fstat(file.fileno()).st_uid != os.geteuid():
                raise PermissionError(errno.EPERM, "file of another user", self.baseFilename)
            os.fchmod(file.fileno(), PRIVATE)  # an existing file may have had other permissions
        except OSError:
            file.close()
            raise
        return cast(TextIOWrapper, file)

    def format(self, record: logging.LogRecord) -> str:
        """The line of a record. After a failed write it starts with a newline: half a line may have been written."""
        return "\n" * self.refused + super().format(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Warn that lines are lost. Logging's default would print the lines."""
        error = sys.exception()
        if not self.refused:
            why = getattr(error, "strerror", None) or type(error).__name__
            progress.warn(f"cannot write {self.baseFilename}: {why}; log lines are lost until this is fixed")
        self.refused = True


def opened(path: Path, max_bytes: int) -> logging.Logger:
    """Open the log. When it grows beyond `max_bytes`, it is renamed to PATH.1 and a new file begins."""
    handler = PrivateLog(path, maxBytes=max_bytes, backupCount=1)
    handler.setFormatter(logging.Formatter("%(message)s"))
    log = logging.Logger("traffic")
    log.addHandler(handler)
    return log


def delete(path: Path) -> None:
    """Delete the files of a log."""
    for file in (path, path.with_name(f"{path.name}.1")):
        file.unlink(missing_ok=True)


def close(log: logging.Logger) -> None:
    """Close the files of a log."""
    for handler in log.handlers:
        handler.close()
