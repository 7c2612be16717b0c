"""Lock files: they let one process at a time write a run directory, a drafter, a data set or a recorded table.

The holder flocks the file, and signs it again and again while it lives. The kernel releases a flock however its holder
ends, kill -9 included. So on one machine a lock file without a flock was left by a dead process, even if another
process has since got its pid.

Some network file systems keep flocks within one machine, or do not support them. There the signature decides: every
`BEAT` seconds the holder increments its counter. If a signature does not change for `PATIENCE` beats, its holder is
dead. The clocks of two machines are never compared.

Child processes do not inherit the flock: Python closes descriptors on exec, our workers are spawned, and the one forked
process (`decoding.models.chat`) closes them. So a child that outlives its parent does not keep the lock.
"""

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

from specctl import progress, regular_files
from specctl.errors import SpecctlError, UsageError

NAME = ".lock"  # of the lock file in a run directory
SIGNATURE = 512  # bytes of a signature
BEAT = 15.0  # seconds between two signatures
PATIENCE = 4  # beats without a change after which the holder counts as dead
Signature = dict[str, Any]
"""Holder of a lock: host, pid and time describe it; machine, id and beats show whether it still holds the lock."""

HINT = "wait for that process or stop it, and start again; or use another --output-dir now"


class Lock:
    """Lock file at `path`, in an existing directory, held from construction until `release`.

    Args:
        protected: path of the protected thing, for messages; default: the directory.
        hint: advice to a user who finds the lock taken.

    Raises:
        UsageError: another process holds the lock, or the file at `path` is not a lock file of specctl; then it is
            left unchanged.
        SpecctlError: the directory cannot be written.
    """

    def __init__(self, path: Path, protected: Path | None = None, hint: str = HINT):
        self.path, self.protected, self._hint = path, protected or path.parent, hint
        self._ended, self._signing = threading.Event(), threading.Lock()
        self._id, self._beats, self._since = secrets.token_hex(4), 0, time.strftime("%Y-%m-%dT%H:%M:%S%z")
        try:
            self._fd = self._acquire()
        except OSError as error:
            raise SpecctlError(f"cannot write {path}: {error.strerror}", hint="choose another --output-dir") from error
        threading.Thread(target=self._heartbeat, name="lock", daemon=True).start()

    def release(self) -> None:
        """Release the lock, and remove its file unless another process took it over. A second call does nothing."""
        with self._signing:
            if self._ended.is_set():
                return
            self._ended.set()
        if same_file(self._fd, self.path) and self._read_signature().get("id", self._id) == self._id:
            self.path.unlink(missing_ok=True)
        os.close(self._fd)

    def _acquire(self) -> int:
        while True:
            fd = self._create()
            if fd is None:
                fd = self._take_over()
            if fd is not None:
                return fd

    def _create(self) -> int | None:
        """Create a lock file that is flocked and signed before others see it. Returns None if a lock file exists."""
        if os.path.lexists(self.path):
            return None
        draft = self.path.with_name(f".{self.path.name}.{secrets.token_hex(4)}.{os.getpid()}.tmp")
        fd = _new(draft)
        try:
            _flock(fd)
            self._sign(fd)
            os.link(draft, self.path)  # fails if the file exists, also on network file systems
            return fd
        except OSError as error:
            os.close(fd)
            return None if isinstance(error, FileExistsError) else self._create_unlinked()
        finally:
            draft.unlink(missing_ok=True)

    def _create_unlinked(self) -> int | None:
        """Create the lock file on a file system without hard links.

        Another process may open it before it is signed: the flock keeps that process out, or `_await_silence` waits
        until the signature appears. Returns None if a lock file exists.
        """
        try:
            fd = _new(self.path)
        except FileExistsError:
            return None
        _flock(fd)
        self._sign(fd)
        return fd

    def _take_over(self) -> int | None:
        """Take over the existing lock file of a dead process. Returns None if the file has disappeared meanwhile.

        Raises UsageError if another process holds the lock.
        """
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
                raise self._foreign() from None
            raise
        try:
            holder = self._checked_signature(fd)
            locked = _flock(fd)
            if locked is None:
                raise self._busy(self._read_signature())
            if not same_file(fd, self.path):  # released between our open and our flock
                os.close(fd)
                return None
            in_sight = locked and holder.get("machine") == _machine(fd)
            if not in_sight:
                self._await_silence(holder)
            self._sign(fd)
            if not in_sight:
                self._confirm()
            progress.log(f"taking over {self.protected} from {describe_holder(holder)}, which has ended")
            return fd
        except BaseException:
            with suppress(OSError):
                os.close(fd)
            raise

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

    def _confirm(self) -> None:
        """Raise UsageError if another process, which does not see our flock, has signed after this one."""
        time.sleep(BEAT)
        if (seen := self._read_signature()).get("id") != self._id:
            raise self._busy(seen)

    def _read_signature(self) -> Signature:
        """Return the signature now in the file, opened anew: then a network file system asks its server."""
        with suppress(OSError), regular_files.open_regular(self.path) as file:
            return _parsed(file.read(SIGNATURE)) or {}
        return {}

    def _checked_signature(self, fd: int) -> Signature:
        """Return the signature in an open file, empty if it is unsigned.

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
        about = {"host": socket.gethostname(), "pid": os.getpid(), "time": self._since}
        signature = about | {"machine": _machine(fd), "id": self._id, "beats": self._beats}
        os.pwrite(fd, json.dumps(signature).ljust(SIGNATURE).encode(), 0)
        os.fsync(fd)

    def _heartbeat(self) -> None:
        """Sign every `BEAT` seconds, until the lock is released or another process has taken it over."""
        while not self._ended.wait(BEAT):
            holder = self._read_signature()
            if holder.get("id", self._id) != self._id and not self._ended.is_set():
                return progress.warn(
                    f"{self.protected} was taken over by {describe_holder(holder)}: stop one of the two processes"
                )
            with self._signing, suppress(OSError):
                if not self._ended.is_set():
                    self._sign(self._fd)

    def _busy(self, holder: Signature) -> UsageError:
        return UsageError(f"{self.protected} is being written by {describe_holder(holder)}", hint=self._hint)

    def _foreign(self) -> UsageError:
        return UsageError(f"{self.path} is not a lock of specctl", hint="move it away, or choose another --output-dir")


@contextmanager
def hold(path: Path, protected: Path) -> Iterator[None]:
    """Hold the lock file `path`, in an existing directory, during the block.

    Under torchrun only rank 0 holds it. Afterwards the file is removed, and its directory too if that is empty. Raises
    the errors of `Lock`.
    """
    if not progress.is_rank_zero():
        yield
        return
    lock = Lock(path, protected)
    try:
        yield
    finally:
        lock.release()
        with suppress(OSError):  # the directory is not empty
            path.parent.rmdir()


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


def _new(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)


def _flock(fd: int) -> bool | None:
    """Try to flock a file: True if we have it now, False without support of flocks, None if another process has it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return None
    except OSError:
        return False
    return True


def _machine(fd: int) -> str:
    """Return an id that is equal for processes that see each other's flocks: same kernel and mounted file system."""
    try:
        kernel = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        kernel = socket.gethostname()
    return f"{kernel}/{os.fstat(fd).st_dev}"


def _parsed(content: bytes) -> Signature | None:
    """Parse a signature: empty if the file is unsigned, None if it holds something else."""
    if not content.strip(b" \0"):
        return {}
    try:
        signature = json.loads(content)
    except (ValueError, RecursionError):
        return None
    return signature if isinstance(signature, dict) and {"host", "pid"} <= signature.keys() else None
