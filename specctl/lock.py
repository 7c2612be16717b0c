"""One process at a time for what a command makes: a file that its holder has flocked.

The kernel gives the lock back however its holder ends, kill -9 included: there are no stale ones, and the file is only
there to say who it is. Programs that are started do not inherit it (Python's descriptors are closed on exec, and our
workers are spawned, not forked): one that outlives its parent keeps nobody out.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from specctl import progress
from specctl.errors import SpecctlError, UsageError

NAME = ".lock"  # in a run directory
SIGNATURE = 512  # bytes


@contextmanager
def held(path: Path, what: Path) -> Iterator[None]:
    """Nobody else gets the lock `path`, in a directory that exists, before the block or this process ends.

    Under torchrun it is the first process that holds it. Afterwards the file is gone, and so is its directory if the
    block has left nothing in it. Where the file system knows no locks there is a warning instead.

    Raises:
        UsageError: another process has it, and so writes `what`.
        SpecctlError: the directory cannot be written.
    """
    if os.environ.get("RANK", "0") != "0":
        yield
        return
    fd = _take(path, what)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(fd)
        with suppress(OSError):  # it has content
            path.parent.rmdir()


def _take(path: Path, what: Path) -> int:
    """The lock file's descriptor."""
    while True:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise SpecctlError(f"cannot write {path}: {error.strerror}", hint="choose another --output-dir") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = owner(fd)
            os.close(fd)
            raise UsageError(
                f"{what} is being written by {describe(holder)}",
                hint="wait until it has ended, or end it, and start again; another --output-dir can be used now",
            ) from None
        except OSError as error:
            reason = f"{path} cannot be locked ({error.strerror})"
            progress.warn(f"{reason}: see to it that no other process writes {what}")
            return fd
        if same_file(fd, path):
            if before := owner(fd):
                progress.log(f"{what} was left by {describe(before)}, which has ended")
            sign(fd)
            return fd
        os.close(fd)  # its holder has let go between our open and our flock


def sign(fd: int) -> None:
    """Name this process in one write of fixed size: one killed on the way never leaves a lock without an owner."""
    signature = {"host": socket.gethostname(), "pid": os.getpid(), "time": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
    os.pwrite(fd, json.dumps(signature).ljust(SIGNATURE).encode(), 0)


def owner(fd: int) -> dict[str, object]:
    """Who has signed; empty where nobody has, or nothing that can be read."""
    try:
        found = json.loads(os.pread(fd, SIGNATURE, 0))
        return found if isinstance(found, dict) else {}
    except ValueError:
        return {}


def describe(owner: dict[str, object]) -> str:
    """An owner in words."""
    if not owner:
        return "an unknown process"
    return f"process {owner.get('pid')} on {owner.get('host')} since {owner.get('time')}"


def same_file(fd: int, path: Path) -> bool:
    """Whether what was opened is still what is at `path`."""
    try:
        there = os.stat(path)
    except FileNotFoundError:
        return False
    here = os.fstat(fd)
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)
