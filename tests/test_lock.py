"""One process at a time: whoever is second is told who is first, and nobody waits for the dead."""

import errno
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys

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


def sign(path, **about):
    """What a process on another machine has signed."""
    path.write_text(json.dumps({"host": "elsewhere", "pid": 7, "time": "2026-01-01", "machine": "other", **about}))


def test_a_killed_holder_keeps_nobody_out(place, capsys):
    """Not even by a program that it has started, and that lives on."""
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


def test_nothing_is_left_behind(place):
    """A directory with nothing in it would be in the way of the next command; what was written there stays."""
    with pytest.raises(ZeroDivisionError), take(place):
        assert (place / lock.NAME).exists()
        raise ZeroDivisionError
    assert not place.exists()
    place.mkdir()
    with take(place):
        (place / "kept").write_text("")
    assert [path.name for path in place.iterdir()] == ["kept"]


def compete(place, start, outcome):
    """Try once with all others, and hold what was won until all have tried."""
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


def test_who_lets_go_in_between_is_no_holder(place, monkeypatch):
    """Between our open and our flock the file is gone, and another one in its place: ours would be of nothing."""
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
    """A file system whose locks end at the machine: elsewhere, whoever asks gets one."""


@pytest.mark.parametrize("flock", [lock.fcntl.flock, unknown, granted])
@pytest.mark.parametrize("text", [None, ""])
def test_a_holder_out_of_sight_that_has_died(place, monkeypatch, capsys, flock, text):
    """A requeued job on another node, or a restarted pod, goes on by itself."""
    monkeypatch.setattr(lock.fcntl, "flock", flock)
    sign(place / lock.NAME) if text is None else (place / lock.NAME).write_text(text)
    with take(place):
        err = capsys.readouterr().err
        assert "cannot be seen from here" in err and "which has ended" in err
        assert ("process 7 on elsewhere" in err) == (text is None)
    assert not place.exists()


@pytest.mark.parametrize("flock", [unknown, granted])
def test_a_holder_out_of_sight_that_lives(place, monkeypatch, flock):
    """Its signature goes on, and so do we not, wherever no flock keeps us out."""
    monkeypatch.setattr(lock.fcntl, "flock", flock)
    with take(place):
        monkeypatch.setattr(lock, "_machine", lambda fd: "another")
        with pytest.raises(UsageError, match=f"by process {os.getpid()}"), take(place):
            pass
        assert (place / lock.NAME).exists()


def test_of_two_that_have_watched_the_last_to_sign_goes_on(place, monkeypatch):
    signed = lock.Lock._sign

    def beaten(self, fd):
        signed(self, fd)
        sign(place / lock.NAME, host="faster")

    monkeypatch.setattr(lock.fcntl, "flock", granted)
    monkeypatch.setattr(lock.Lock, "_sign", beaten)
    sign(place / lock.NAME)
    with pytest.raises(UsageError, match="by process 7 on faster"), take(place):
        pass


def test_who_is_thought_dead_removes_nobody_elses_lock(place, monkeypatch):
    """Stopped for a minute on another machine, it wakes up and ends: the lock is no longer its own."""
    monkeypatch.setattr(lock, "BEAT", 60.0)
    sleeper = lock.Lock(place / lock.NAME)
    sign(place / lock.NAME, id="another")
    sleeper.release()
    assert "elsewhere" in (place / lock.NAME).read_text()


@pytest.mark.parametrize("kind", ["link", "dangling link", "directory", "pipe", "text", "list", "long"])
def test_a_file_that_is_no_lock_is_left_alone(place, tmp_path, kind):
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


def test_a_file_system_without_hard_links(place, monkeypatch):
    def none(one, other):
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(lock.os, "link", none)
    with take(place):
        assert [path.name for path in place.iterdir()] == [lock.NAME]
        with pytest.raises(UsageError, match=f"by process {os.getpid()}"), take(place):
            pass


def test_the_first_of_several_processes_locks_for_all(place, monkeypatch):
    with take(place):
        monkeypatch.setenv("RANK", "1")
        with take(place):
            pass
        assert (place / lock.NAME).exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_that_cannot_be_written(place):
    place.chmod(0o500)
    try:
        with pytest.raises(SpecctlError, match="cannot write"), take(place):
            pass
    finally:
        place.chmod(0o700)
