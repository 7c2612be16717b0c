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
with lock.held(place / lock.NAME, place):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    print(child.pid, flush=True)
    time.sleep(60)
"""


@pytest.fixture
def place(tmp_path):
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def take(place):
    return lock.held(place / lock.NAME, place)


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
        assert str(place) in caught.value.message and "wait until it has ended" in caught.value.hint
        holder.kill()
        holder.wait()
        os.kill(child, 0)
        with take(place):
            assert f"was left by process {holder.pid}" in capsys.readouterr().err
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
            (place / lock.NAME).write_text(json.dumps({"host": "elsewhere", "pid": 1, "time": "long ago"}))
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

    monkeypatch.setattr(lock.fcntl, "flock", slow)
    with take(place):
        assert len(opened) == 2 and (place / lock.NAME).stat().st_ino == opened[1] != opened[0]


def test_a_file_system_without_locks(place, monkeypatch, capsys):
    def none(fd, how):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(lock.fcntl, "flock", none)
    with take(place):
        assert capsys.readouterr().err.count("cannot be locked (No locks available)") == 1


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
