"""One process at a time holds a directory: the second gets an error naming the first, and dead holders do not block."""

import errno
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
from unittest.mock import Mock

import pytest

from specctl import lock
from specctl.errors import SpecctlError, UsageError

HOLDER = """
import subprocess, sys, time
from pathlib import Path
from specctl import lock
place = Path(sys.argv[1])
with lock.hold(place / lock.NAME, place):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    print(child.pid, flush=True)
    time.sleep(60)
"""


@pytest.fixture
def place(tmp_path):
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


@pytest.fixture(autouse=True)
def short_beats(monkeypatch):
    monkeypatch.setattr(lock, "BEAT", 0.02)


def take(place):
    return lock.hold(place / lock.NAME, place)


def sign(path):
    """Write a lock file signed by a process on another machine."""
    path.write_text(json.dumps({"host": "elsewhere", "pid": 7, "time": "2026-01-01"}))


def test_a_killed_holder_does_not_block(place, capsys):
    """Not even if a child process of the holder survives."""
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(place)], stdout=subprocess.PIPE, text=True)
    child = int(holder.stdout.readline())
    try:
        with (
            pytest.raises(UsageError, match=f"by process {holder.pid} on {socket.gethostname()}") as caught,
            take(place),
        ):
            pass
        assert str(place) in caught.value.message and "wait for that process or stop it" in caught.value.hint
        holder.kill()
        holder.wait()
        os.kill(child, 0)
        with take(place):
            assert f"from process {holder.pid}" in capsys.readouterr().err
    finally:
        holder.kill()
        os.kill(child, signal.SIGKILL)
        holder.stdout.close()


def test_a_lock_removes_itself_and_an_empty_directory(place):
    """An empty directory would disturb the next command; files written there stay."""
    with pytest.raises(ZeroDivisionError), take(place):
        assert (place / lock.NAME).exists()
        raise ZeroDivisionError
    assert not place.exists()
    place.mkdir()
    with take(place):
        (place / "kept").write_text("")
    assert [path.name for path in place.iterdir()] == ["kept"]


def compete(place, start, outcome):
    """Compete for the lock, and hold it until every competitor has tried."""
    start.wait()
    try:
        with take(place):
            start.wait()
            outcome.put(True)
    except UsageError:
        start.wait()
        outcome.put(False)


@pytest.mark.parametrize("stale", [False, True])
def test_a_race_has_one_winner(place, stale):
    context = multiprocessing.get_context("fork")
    (place / "kept").write_text("")
    for _ in range(5):
        if stale:
            sign(place / lock.NAME)
        start, outcome = context.Barrier(4), context.SimpleQueue()
        racers = [context.Process(target=compete, args=(place, start, outcome)) for _ in range(4)]
        for racer in racers:
            racer.start()
        for racer in racers:
            racer.join()
        assert sum(outcome.get() for _ in racers) == 1


def test_a_lock_replaced_while_opening_is_taken_again(place, monkeypatch):
    """Between our open and our flock the file is replaced, and our lock would be on a deleted file."""
    flock, opened = lock.fcntl.flock, []

    def slow(fd, how):
        opened.append(os.fstat(fd).st_ino)
        if len(opened) == 1:
            (place / lock.NAME).rename(place / "gone")
        flock(fd, how)

    sign(place / lock.NAME)
    monkeypatch.setattr(lock.fcntl, "flock", slow)
    with take(place):
        assert len(opened) == 2 and (place / lock.NAME).stat().st_ino == opened[1] != opened[0]


def unknown(fd, how):
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


def granted(fd, how):
    """flock on a file system that locks per machine only: always granted."""


@pytest.mark.parametrize("flock", [lock.fcntl.flock, unknown, granted])
def test_a_dead_holder_on_another_machine_does_not_block(place, monkeypatch, capsys, flock):
    """A requeued job on another node, or a restarted pod, continues without help."""
    monkeypatch.setattr(lock.fcntl, "flock", flock)
    sign(place / lock.NAME)
    with take(place):
        err = capsys.readouterr().err
        assert "cannot be seen from here" in err and "process 7 on elsewhere" in err and "which has ended" in err
    assert not place.exists()


@pytest.mark.parametrize("flock", [unknown, granted])
def test_a_live_holder_on_another_machine_blocks(place, monkeypatch, flock):
    """Its signature keeps changing, also on file systems without a shared flock. Both machines have one host name."""
    monkeypatch.setattr(lock.fcntl, "flock", flock)
    monkeypatch.setattr(lock, "PATIENCE", 3000)  # a busy machine may delay a beat, and the next one ends the wait
    with take(place):
        monkeypatch.setattr(lock, "_machine", lambda: "another")
        with pytest.raises(UsageError, match=f"by process {os.getpid()}"), take(place):
            pass
        assert (place / lock.NAME).exists()


def test_a_process_taken_for_dead_keeps_the_lock_of_its_successor(place, monkeypatch):
    """Paused for a minute on another machine, it wakes up and ends; the lock is no longer its own."""
    monkeypatch.setattr(lock, "BEAT", 60.0)
    sleeper = lock.Lock(place / lock.NAME)
    sign(place / lock.NAME)
    sleeper.release()
    assert "elsewhere" in (place / lock.NAME).read_text()


@pytest.mark.parametrize("kind", ["link", "dangling link", "directory", "pipe", "text", "list", "long"])
def test_a_file_that_is_not_a_lock_is_left_alone(place, tmp_path, kind):
    path, other = place / lock.NAME, tmp_path / "thesis"
    other.write_text("my thesis")
    texts = {"text": "my thesis", "list": "[1]", "long": json.dumps({"host": "a", "pid": 1, "more": "x" * 600})}
    match kind:
        case "link":
            path.symlink_to(other)
        case "dangling link":
            path.symlink_to(tmp_path / "nothing")
        case "directory":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
        case _:
            path.write_text(texts[kind])
    with pytest.raises(UsageError, match=f"{path} is not a lock") as caught, take(place):
        pass
    assert other.read_text() == "my thesis" and os.path.lexists(path) and "move it away" in caught.value.hint
    assert path.is_symlink() or not path.is_file() or path.read_text() == texts[kind]
    assert not (tmp_path / "nothing").exists()


def interrupted_at(count, call):
    """Run `call`, and raise KeyboardInterrupt at its operation number `count` in lock.py. Returns whether it came so
    far."""
    left = count

    def deleting(frame):  # an exception in `__del__` goes nowhere
        return frame is not None and (frame.f_code.co_name == "__del__" or deleting(frame.f_back))

    def trace(frame, event, argument):
        nonlocal left
        if frame.f_code.co_filename != lock.__file__ or deleting(frame):
            return None
        frame.f_trace_opcodes = True
        left -= event == "opcode"
        if left == 0 and event == "opcode":
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def test_ctrl_c_at_any_time_leaves_no_lock(place, monkeypatch):
    """An exception between the acquisition of a lock and the block that releases it left the directory locked until the
    process ended: in a notebook, every further training said that the process itself was writing there."""
    monkeypatch.setattr(lock, "BEAT", 60.0)

    def once():
        with take(place):
            pass

    count, interrupted = 0, True
    while interrupted:
        count += 1
        place.mkdir(exist_ok=True)
        interrupted = interrupted_at(count, once)
        place.mkdir(exist_ok=True)
        try:
            lock.Lock(place / lock.NAME).release()
        except UsageError as error:
            raise AssertionError(f"locked after operation {count}") from error
    assert count > 200, "the trace does not reach lock.py"


def test_rank_zero_locks_for_all_ranks(place, monkeypatch):
    with take(place):
        monkeypatch.setenv("RANK", "1")
        with take(place):
            pass
        assert (place / lock.NAME).exists()


def test_a_full_disk_leaves_no_lock_file(place, monkeypatch):
    """An unsigned lock file and its directory used to stay."""

    def full(fd, content, offset):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(lock.os, "pwrite", full)
    with pytest.raises(SpecctlError, match="No space left on device"), take(place):
        pass
    assert not place.exists()


def test_an_empty_directory_that_was_there_before_stays(place, monkeypatch):
    """It used to be removed if the lock could not be signed, and at the end of a command that wrote nothing."""
    with lock.hold(place / lock.NAME, place, new=False):
        pass
    monkeypatch.setattr(lock.os, "pwrite", Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    with pytest.raises(SpecctlError, match="No space left on device"), lock.hold(place / lock.NAME, place, new=False):
        pass
    assert list(place.iterdir()) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_directory_is_an_error(place):
    place.chmod(0o500)
    try:
        with pytest.raises(SpecctlError, match="cannot write"), take(place):
            pass
    finally:
        place.chmod(0o700)
