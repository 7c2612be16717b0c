"""One process at a time for what a command makes: a file that its holder has flocked, and signs anew while it lives.

The kernel gives the flock back however its holder ends, kill -9 included, so on one machine a lock that nobody holds is
left from a dead process, whatever process has got its number since. Some network file systems keep flocks within a
machine, or know none. There the signature tells: every `BEAT` seconds its holder counts it up, and one that stands
still for `PATIENCE` beats belongs to nobody any more. No two clocks are compared.

Programs that are started do not inherit the flock (Python's descriptors are closed on exec, our workers are spawned,
and the one that is forked, `decoding.models.chat`, closes them): one that outlives its parent keeps nobody out.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import socket
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from specctl import progress, regular
from specctl.errors import SpecctlError, UsageError

NAME = ".lock"  # in a run directory
SIGNATURE = 512  # bytes
BEAT = 15.0  # seconds
PATIENCE = 4  # beats
Signature = dict[str, Any]
"""Who holds a lock: host, pid, time; machine, id and beats tell whether it still does."""

HINT = "wait until it has ended, or end it, and start again; another --output-dir can be used now"


class Lock:
    """The lock `path`, in a directory that exists, held from construction to `release`. `what`: the thing it is for.

    Raises:
        UsageError: another process holds it, or `path` is no lock of ours, which is left as it is.
        SpecctlError: the directory cannot be written.
    """

    def __init__(self, path: Path, what: Path | None = None, hint: str = HINT):
        self.path, self.what, self._hint = path, what or path.parent, hint
        self._ended, self._signing = threading.Event(), threading.Lock()
        self._id, self._beats, self._since = secrets.token_hex(4), 0, time.strftime("%Y-%m-%dT%H:%M:%S%z")
        try:
            self._fd = self._taken()
        except OSError as error:
            raise SpecctlError(f"cannot write {path}: {error.strerror}", hint="choose another --output-dir") from error
        threading.Thread(target=self._live, name="lock", daemon=True).start()

    def release(self) -> None:
        """Give the lock back, and remove its file unless somebody has taken it over; harmless the second time."""
        with self._signing:
            if self._ended.is_set():
                return
            self._ended.set()
        if same_file(self._fd, self.path) and self._seen().get("id", self._id) == self._id:
            self.path.unlink(missing_ok=True)
        os.close(self._fd)

    def _taken(self) -> int:
        """The lock file's descriptor."""
        while True:
            fd = self._created()
            if fd is None:
                fd = self._left_over()
            if fd is not None:
                return fd

    def _created(self) -> int | None:
        """A new lock file, locked and signed before anyone can see it; None where there is one."""
        if os.path.lexists(self.path):
            return None
        draft = self.path.with_name(f".{self.path.name}.{secrets.token_hex(4)}.{os.getpid()}.tmp")
        fd = _new(draft)
        try:
            _flock(fd)
            self._sign(fd)
            os.link(draft, self.path)  # only where there is none: network file systems keep that, too
            return fd
        except OSError as error:
            os.close(fd)
            return None if isinstance(error, FileExistsError) else self._created_in_sight()
        finally:
            draft.unlink(missing_ok=True)

    def _created_in_sight(self) -> int | None:
        """`_created` on a file system without hard links: whoever looks before the signature is there waits for it."""
        try:
            fd = _new(self.path)
        except FileExistsError:
            return None
        _flock(fd)
        self._sign(fd)
        return fd

    def _left_over(self) -> int | None:
        """The existing lock file, if nobody holds it; None where it has gone meanwhile."""
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
                raise self._foreign() from None
            raise
        try:
            holder = self._owner(fd)
            locked = _flock(fd)
            if locked is None:
                raise self._busy(self._seen())
            if not same_file(fd, self.path):  # released between our open and our flock
                os.close(fd)
                return None
            in_sight = locked and holder.get("machine") == _machine(fd)
            if not in_sight:
                self._watch(holder)
            self._sign(fd)
            if not in_sight:
                self._confirm()
            progress.log(f"{self.what} was left by {describe(holder)}, which has ended")
            return fd
        except BaseException:
            with suppress(OSError):
                os.close(fd)
            raise

    def _watch(self, holder: Signature) -> None:
        """Return once the signature has stood still so long that its holder must be dead. UsageError where it lives."""
        patience = BEAT * PATIENCE
        progress.log(
            f"{self.what} was left by {describe(holder)}, out of our sight: "
            f"if it gives no sign of life within {patience:.0f} s, it has ended"
        )
        until = time.monotonic() + patience
        while time.monotonic() < until:
            progress.interrupts.check()
            time.sleep(min(1.0, BEAT))
            if (seen := self._seen()) != holder:
                raise self._busy(seen)

    def _confirm(self) -> None:
        """UsageError unless this process was the last to sign, of several that do not see each other's flocks."""
        time.sleep(BEAT)
        if (seen := self._seen()).get("id") != self._id:
            raise self._busy(seen)

    def _seen(self) -> Signature:
        """The signature in the file now, opened anew for every look: a network file system asks its server then."""
        with suppress(OSError), regular.opened(self.path) as file:
            return _parsed(file.read(SIGNATURE)) or {}
        return {}

    def _owner(self, fd: int) -> Signature:
        """The signature in the file; empty where there is none. UsageError for a file that is not ours: signing would
        destroy it."""
        there = os.fstat(fd)
        signature = None
        if stat.S_ISREG(there.st_mode) and there.st_size <= SIGNATURE:
            signature = _parsed(os.pread(fd, SIGNATURE, 0))
        if signature is None:
            raise self._foreign()
        return signature

    def _sign(self, fd: int) -> None:
        """Name this process in one write of fixed size: one killed on the way never leaves a lock without an owner."""
        self._beats += 1
        about = {"host": socket.gethostname(), "pid": os.getpid(), "time": self._since}
        signature = about | {"machine": _machine(fd), "id": self._id, "beats": self._beats}
        os.pwrite(fd, json.dumps(signature).ljust(SIGNATURE).encode(), 0)
        os.fsync(fd)

    def _live(self) -> None:
        """Sign until the end, or until somebody has thought us dead."""
        while not self._ended.wait(BEAT):
            holder = self._seen()
            if holder.get("id", self._id) != self._id and not self._ended.is_set():
                return progress.warn(f"{self.what} was taken over by {describe(holder)}: end one of the two")
            with self._signing, suppress(OSError):
                if not self._ended.is_set():
                    self._sign(self._fd)

    def _busy(self, holder: Signature) -> UsageError:
        return UsageError(f"{self.what} is being written by {describe(holder)}", hint=self._hint)

    def _foreign(self) -> UsageError:
        return UsageError(f"{self.path} is no lock of specctl's", hint="move it away, or choose another --output-dir")


@contextmanager
def held(path: Path, what: Path) -> Iterator[None]:
    """Nobody else gets the lock `path`, in a directory that exists, before the block or this process ends.

    Under torchrun it is the first process that holds it. Afterwards the file is gone, and so is its directory if the
    block has left nothing in it. Raises as `Lock`.
    """
    if not progress.leads():
        yield
        return
    lock = Lock(path, what)
    try:
        yield
    finally:
        lock.release()
        with suppress(OSError):  # it has content
            path.parent.rmdir()


def describe(holder: Signature) -> str:
    """A holder in words."""
    if not holder:
        return "an unknown process"
    return f"process {holder.get('pid')} on {holder.get('host')} since {holder.get('time')}"


def same_file(fd: int, path: Path) -> bool:
    """Whether what was opened is still what is at `path`."""
    try:
        there = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    here = os.fstat(fd)
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)


def _new(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)


def _flock(fd: int) -> bool | None:
    """Whether we have the flock now, where the file system knows such locks; None where another process has it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return None
    except OSError:
        return False
    return True


def _machine(fd: int) -> str:
    """Equal for processes that see each other's flocks on a file: one kernel, one mounted file system."""
    try:
        kernel = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        kernel = socket.gethostname()
    return f"{kernel}/{os.fstat(fd).st_dev}"


def _parsed(content: bytes) -> Signature | None:
    """A signature; empty where nobody has signed yet, None where it is something else."""
    if not content.strip(b" \0"):
        return {}
    try:
        signature = json.loads(content)
    except (ValueError, RecursionError):
        return None
    return signature if isinstance(signature, dict) and {"host", "pid"} <= signature.keys() else None
