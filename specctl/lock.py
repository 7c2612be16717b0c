"""Lock files: they let one process at a time write a run directory, a drafter, a data set or a recorded table.

The holder flocks the file, and signs it again and again while it lives. The kernel releases a flock however its holder
ends, kill -9 included. So on one machine a lock file without a flock was left by a dead process, even if another
process has since got its pid.

Some network file systems keep flocks within one machine, or do not support them. There the signature decides: every
`BEAT` seconds the holder increments its counter. If the signature of another machine, or on a file system without
flocks, does not change for `PATIENCE` beats, its holder is dead. The clocks of two machines are never compared.

Child processes do not inherit the flock: Python closes descriptors on exec, our workers are spawned, and the one forked
process (`decoding.models.chat`) closes them. So a child that outlives its parent does not keep the lock.
"""

import errno
import fcntl
import io
import json
import os
import socket
import stat
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from specctl import progress, regular_files
from specctl.errors import SpecctlError, UsageError

NAME = ".lock"  # of the lock file in a run directory
SIGNATURE = 512  # bytes of a signature
BEAT = 15.0  # seconds between two signatures
PATIENCE = 4  # beats without a change after which the holder counts as dead
Signature = dict[str, Any]
"""Holder of a lock: its host, pid and start time, the kernel that it runs on (machine), and a count that grows while it
lives (beats). Empty if the file is unsigned."""

HINT = "wait for that process or stop it, and start again; or use another --output-dir now"


class Lock:
    """Lock file at `path`, in an existing directory, held from construction until `release`, or until nothing refers to
    the lock: Ctrl-C can come before the caller has its lock.

    Args:
        protected: path of the protected thing, for messages; default: the directory.
        hint: advice to a user who finds the lock taken.

    Raises:
        UsageError: another process holds the lock, or the file at `path` is not a lock file of specctl; then it is
            left unchanged.
        SpecctlError: the directory cannot be written.
    """

    _file: io.FileIO | None = None

    def __init__(self, path: Path, protected: Path | None = None, hint: str = HINT):
        self.path, self.protected, self._hint = path, protected or path.parent, hint
        self._ended, self._signing, self._beats = threading.Event(), threading.Lock(), 0
        began = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        self._own = {"host": socket.gethostname(), "pid": os.getpid(), "time": began, "machine": _machine()}
        try:
            self._file = self._acquire()
        except OSError as error:
            raise SpecctlError(f"cannot write {path}: {error.strerror}", hint="choose another --output-dir") from error
        threading.Thread(target=_heartbeat, args=(weakref.ref(self), self._ended), name="lock", daemon=True).start()

    def __del__(self) -> None:
        if self._file is not None and os.getpid() == self._own["pid"]:  # not in a forked process
            with suppress(Exception):
                self._let_go()

    def release(self) -> None:
        """Release the lock, and remove its file unless another process took it over. A second call does nothing."""
        with self._signing:
            self._let_go()

    def _let_go(self) -> None:
        self._ended.set()
        if self._file is None or self._file.closed:
            return
        try:
            if same_file(self._file.fileno(), self.path) and not self._successor():
                self.path.unlink(missing_ok=True)
        finally:
            self._file.close()

    def _acquire(self) -> io.FileIO:
        """Return the lock file, flocked and signed. The file closes itself if an exception comes before its use."""
        while True:
            file = io.FileIO(self.path, "r+", opener=lambda *_: self._open())
            fd = file.fileno()
            try:
                holder = self._checked_signature(fd)
                flocked = self._flock(fd)
                if same_file(fd, self.path):  # otherwise the file was released between our open and our flock
                    if holder:
                        if not flocked or holder.get("machine") != self._own["machine"]:
                            self._await_silence(holder)
                        log = f"taking over {self.protected} from {describe_holder(holder)}, which has ended"
                        progress.log(log)
                    try:
                        self._sign(fd)
                    except OSError:  # the disk is full
                        self.path.unlink(missing_ok=True)
                        raise
                    return file
            except BaseException:
                file.close()
                raise
            file.close()

    def _open(self) -> int:
        try:
            return os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
                raise self._foreign() from None
            raise

    def _flock(self, fd: int) -> bool:
        """Flock the file, or return False if the file system has no flocks. Raises UsageError if another process has
        it."""
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise self._busy(self._read_signature()) from None
        except OSError:
            return False
        return True

    def _await_silence(self, holder: Signature) -> None:
        """Return once the signature has not changed for `PATIENCE` beats. Raises UsageError if it changes."""
        patience = BEAT * PATIENCE
        progress.log(
            f"{self.protected} is locked by {describe_holder(holder)}, which cannot be seen from here: "
            f"taking over if it gives no sign of life within {patience:.0f} s"
        )
        until = time.monotonic() + patience
        while time.monotonic() < until:
            progress.interrupts.check()
            time.sleep(min(1.0, BEAT))
            if (seen := self._read_signature()) != holder:
                raise self._busy(seen)

    def _read_signature(self) -> Signature:
        """Return the signature now in the file, opened anew: then a network file system asks its server."""
        with suppress(OSError), regular_files.open_regular(self.path) as file:
            return _parsed(file.read(SIGNATURE)) or {}
        return {}

    def _checked_signature(self, fd: int) -> Signature:
        """Return the signature in an open file.

        Raises UsageError if the file is not a lock of specctl: signing would destroy it.
        """
        there = os.fstat(fd)
        signature = None
        if stat.S_ISREG(there.st_mode) and there.st_size <= SIGNATURE:
            signature = _parsed(os.pread(fd, SIGNATURE, 0))
        if signature is None:
            raise self._foreign()
        return signature

    def _sign(self, fd: int) -> None:
        """Sign in one write of fixed size: a process that is killed meanwhile leaves no lock without an owner."""
        self._beats += 1
        os.pwrite(fd, json.dumps(self._own | {"beats": self._beats}).ljust(SIGNATURE).encode(), 0)
        os.fsync(fd)

    def _successor(self) -> Signature | None:
        """Return the signature of another process in the file, or None."""
        holder = self._read_signature()
        return holder if holder and not self._own.items() <= holder.items() else None

    def beat(self) -> bool:
        """Sign again. Returns whether the lock is still held: neither released nor taken over by another process."""
        if (holder := self._successor()) and not self._ended.is_set():
            progress.warn(
                f"{self.protected} was taken over by {describe_holder(holder)}: stop one of the two processes"
            )
            return False
        with self._signing, suppress(OSError):
            if not self._ended.is_set() and self._file is not None:
                self._sign(self._file.fileno())
        return not self._ended.is_set()

    def _busy(self, holder: Signature) -> UsageError:
        return UsageError(f"{self.protected} is being written by {describe_holder(holder)}", hint=self._hint)

    def _foreign(self) -> UsageError:
        return UsageError(f"{self.path} is not a lock of specctl", hint="move it away, or choose another --output-dir")


@contextmanager
def hold(path: Path, protected: Path, new: bool = True) -> Iterator[None]:
    """Hold the lock file `path`, in an existing directory, during the block.

    Under torchrun only rank 0 holds it. Afterwards the file is removed, and a `new` directory too if it is empty.
    Raises the errors of `Lock`.
    """
    if not progress.is_rank_zero():
        yield
        return
    lock = None
    try:
        lock = Lock(path, protected)
        yield
    finally:
        if lock is not None:
            lock.release()
        if new:
            with suppress(OSError):  # the directory is not empty
                path.parent.rmdir()


def _heartbeat(held: weakref.ref[Lock], ended: threading.Event) -> None:
    """Sign a lock every `BEAT` seconds, as long as it is held."""
    while not ended.wait(BEAT):
        if (lock := held()) is None or not lock.beat():
            return
        del lock


def describe_holder(holder: Signature) -> str:
    if not holder:
        return "an unknown process"
    return f"process {holder.get('pid')} on {holder.get('host')} since {holder.get('time')}"


def same_file(fd: int, path: Path) -> bool:
    """Whether the open file is still the file at `path`."""
    try:
        there = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    here = os.fstat(fd)
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)


def _machine() -> str:
    """Return an id of the running kernel: processes of one kernel see each other's flocks. Machines made from one image
    can have the same host name."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def _parsed(content: bytes) -> Signature | None:
    """Parse a signature: empty if the file is unsigned, None if it holds something else."""
    if not content.strip(b" \0"):
        return {}
    try:
        signature = json.loads(content)
    except (ValueError, RecursionError):
        return None
    return signature if isinstance(signature, dict) and {"host", "pid"} <= signature.keys() else None
