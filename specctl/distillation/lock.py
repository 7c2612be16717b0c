"""One writer per shard of a directory, also across the machines of a cluster.

The lock is a file that names its owner and is created whole (written aside, then hard-linked: the atomic "create
only if absent" that also network file systems keep). Its owner holds an advisory `flock` on it as long as it lives, so
on one machine a lock whose `flock` is free is stale, whatever process has got its number since.
"""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path

from specctl import progress
from specctl.errors import DataError
from specctl.lock import describe, owner, same_file, sign


class WriterLock:
    """Held from construction to `release`; DataError explains who holds it otherwise."""

    def __init__(self, path: Path):
        self.path = path
        self._fd = self._create()
        if self._fd is None:
            self._fd = self._take_over()

    def release(self) -> None:
        """Give the lock back; harmless the second time."""
        if self._fd is not None:
            self.path.unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = None

    def _create(self) -> int | None:
        """A new lock file, locked and complete before anyone can see it; None where one exists."""
        own = self.path.with_name(f".{self.path.name}.{socket.gethostname()}.{os.getpid()}.tmp")
        fd = os.open(own, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            sign(fd)
            os.link(own, self.path)
            return fd
        except FileExistsError:
            os.close(fd)
            return None
        finally:
            own.unlink(missing_ok=True)

    def _take_over(self) -> int:
        """The existing lock, if its owner died on this machine."""
        try:
            fd = os.open(self.path, os.O_RDWR)
        except FileNotFoundError:  # released since we looked
            return self._create() or self._take_over()
        holder = owner(fd)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise DataError(
                f"{self.path.parent} is being written by {describe(holder)}",
                hint="wait for it, or give each job its own --shard i/n",
            ) from None
        if not same_file(fd, self.path):  # its owner released it between our open and our flock
            os.close(fd)
            return self._create() or self._take_over()
        if holder.get("host") != socket.gethostname():
            os.close(fd)
            raise DataError(
                f"{self.path.parent} is locked by {describe(holder)}, which cannot be checked from here",
                hint=f"if that job has ended, delete {self.path} and try again",
            )
        progress.log(f"taking over the lock of {describe(holder)}, which has died")
        sign(fd)
        return fd
