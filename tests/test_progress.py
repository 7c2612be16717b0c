"""Progress messages during work, and interruption by signals."""

import os
import signal

import pytest

from specctl import progress
from specctl.errors import Interrupted


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test can advance."""
    now = [1000.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(progress, "_last_line", now[0])
    return now


def test_without_a_terminal_a_line_is_printed_every_half_minute(clock, capsys):
    with progress.Progress("train", total=100, unit="steps") as bar:
        for _ in range(100):
            clock[0] += 1
            bar.update(loss=0.25)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert lines[0] == "train 30/100 steps (30%), 1 steps/s, loss=0.25, 1:10 left"


def test_slow_items_show_their_seconds(clock, capsys):
    """It said "0.00288 prompts/s", and 1,500 minutes were a time left."""
    with progress.Progress("eval", total=100, unit="prompts") as bar:
        clock[0] += 400
        bar.update()
    assert capsys.readouterr().err == "eval 1/100 prompts (1%), 400 s each, 11:00:00 left\n"


def test_skipped_items_do_not_count_for_the_speed(clock, capsys):
    """A resumed run used to report hundreds of thousands per second and to be nearly done."""
    with progress.Progress("online", total=100, unit="prompts") as bar:
        clock[0] += 30
        bar.skip(40)
        clock[0] += 30
        bar.update(6)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "online 40/100 prompts (40%), 0 prompts/s"
    assert lines[1] == "online 46/100 prompts (46%), 0.1 prompts/s, 9:00 left"


def test_short_stages_share_the_half_minute(clock, capsys):
    for _ in range(10):
        with progress.Progress("eval") as bar:
            clock[0] += 4
            bar.update()
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize("silence", ["quiet", "rank"])
def test_quiet_mode_and_other_ranks_print_nothing(clock, capsys, monkeypatch, silence):
    if silence == "rank":
        monkeypatch.setenv("RANK", "1")
    progress.set_quiet(silence == "quiet")
    with progress.Progress("train") as bar:
        clock[0] += 60
        bar.update()
    progress.log("hello")
    progress.set_quiet(False)
    assert capsys.readouterr().err == ""


def test_nested_bars_on_a_terminal(monkeypatch, capsys):
    """rich allows one live display, so an evaluation inside a training must not open a second."""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with progress.Progress("train", total=2) as outer:
        outer.update()
        with progress.Progress("eval", total=1) as inner:
            inner.update(mat=4.0)
        progress.log("[not markup]")
        outer.update()
    assert progress._display.rich is None
    assert "[not markup]" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_sets_the_flag(number):
    interrupts = progress.Interrupts()
    before = {n: signal.getsignal(n) for n in progress.STOPPING}
    try:
        interrupts.remember_signals()
        interrupts.check()
        os.kill(os.getpid(), number)
        assert interrupts.requested()
        with pytest.raises(Interrupted, match=number.name):
            interrupts.check()
    finally:
        for n, handler in before.items():
            signal.signal(n, handler)


def test_large_numbers_are_plain(clock, capsys):
    """It said "3.28e+03 prompts/s" and "2e+06 tokens"."""
    with progress.Progress("compare", unit="prompts") as bar:
        clock[0] += 60
        bar.update(2_000_000, tokens_per_s=1_126_664.0, loss=0.30712)
    shown = capsys.readouterr().err.strip()
    assert shown == "compare 2,000,000 prompts, 33,333 prompts/s, tokens_per_s=1,126,664, loss=0.3071"
