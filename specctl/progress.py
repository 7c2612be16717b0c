"""Progress bars, log lines and warnings on stderr, and the signals that ask a command to stop.

Everything here goes to stderr; stdout belongs to the result. On a terminal, one rich display shows a bar per open
`Progress`. Elsewhere (Slurm logs, pipes) progress is one plain line, at most every `LINE_EVERY_S` seconds.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

from specctl import processes
from specctl.errors import Interrupted, redacted

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

LINE_EVERY_S = 30.0
SLOW = 0.1  # rate per second below which the seconds of each unit are shown
RESUME, RESTART = "continue with --resume", "start the command again"
STOPPING = signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP  # ask a command to save and end

_quiet = False
_last_line = time.monotonic()  # shared by all bars, so that many short stages do not flood a log


def set_quiet(quiet: bool) -> None:
    """Silence bars and `log`; warnings stay."""
    global _quiet
    _quiet = quiet


def log(message: str) -> None:
    """Print one line about the current work to stderr, unless `-q` is given or this is not rank 0."""
    if not _silent():
        _line(message)


def warn(message: str) -> None:
    """Print one warning that the user should act on to stderr, also with `-q`."""
    if is_rank_zero():
        _line(f"warning: {message}")


def is_rank_zero() -> bool:
    """Whether this process is rank 0 under torchrun, or the only one: it prints and writes for all."""
    return os.environ.get("RANK", "0") == "0"


class Progress:
    """One progress bar over `total` units (None = unknown), or one occasional line: rate, ETA and the fields given to
    `update`. A context manager."""

    def __init__(self, description: str, total: int | None = None, unit: str = "it", quiet: bool = False):
        self.description, self.total, self.unit = description, total, unit
        self.done: float = 0
        self.fields: dict[str, Any] = {}
        self._quiet = quiet or _silent()
        self._started = time.monotonic()
        self._before: float = 0
        self._task: Any = None

    def __enter__(self) -> Progress:
        self._started = time.monotonic()
        if not self._quiet and sys.stderr.isatty():
            self._task = _display.open(self)
        return self

    def __exit__(self, *_: object) -> None:
        if self._task is not None:
            _display.close(self._task)
            self._task = None

    def skip(self, done: float) -> None:
        """Count `done` units that the resumed run had finished before; they do not count for the rate."""
        self._before += done
        self.update(done)

    def update(self, advance: float = 1, **fields: Any) -> None:
        """Advance by `advance` units and show `fields` (e.g. loss=0.31, mat=4.1) until they change."""
        global _last_line
        self.done += advance
        self.fields |= fields
        if self._task is not None:
            _display.update(self._task, advance, self._status())
        elif not self._quiet and time.monotonic() - _last_line >= LINE_EVERY_S:
            _last_line = time.monotonic()
            _line(self.line())

    def line(self) -> str:
        """Return the progress as a plain line: `train 120/400 steps (30%), 2.4 steps/s, 1:56 left, loss=0.31`."""
        of = f"/{_short(self.total)} {self.unit} ({self.done / self.total:.0%})" if self.total else f" {self.unit}"
        parts = [f"{self.description} {_short(self.done)}{of}", *filter(None, [self._status(), self._eta()])]
        return ", ".join(parts)

    def _rate(self) -> float:
        return (self.done - self._before) / max(time.monotonic() - self._started, 1e-9)

    def _eta(self) -> str:
        rate = self._rate()
        if not self.total or not rate:
            return ""
        minutes, seconds = divmod(round(max(self.total - self.done, 0) / rate), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02d}:{seconds:02d} left" if hours else f"{minutes}:{seconds:02d} left"

    def _status(self) -> str:
        rate = self._rate()
        shown = [f"{1 / rate:.3g} s each" if 0 < rate < SLOW else f"{_short(rate, 3)} {self.unit}/s"]
        return ", ".join(shown + [f"{name}={_short(value)}" for name, value in self.fields.items()])


class _Display:
    """The one rich display of the process: nested bars (training, and its evaluation) share it."""

    def __init__(self) -> None:
        self.rich: RichProgress | None = None
        self._open = 0

    def open(self, bar: Progress) -> Any:
        if self.rich is None:
            self.rich = self._make()
            self.rich.start()
        self._open += 1
        return self.rich.add_task(bar.description, total=bar.total, status="")

    def update(self, task: Any, advance: float, status: str) -> None:
        assert self.rich is not None
        self.rich.update(task, advance=advance, status=status)

    def close(self, task: Any) -> None:
        assert self.rich is not None
        self._open -= 1
        if self._open:
            self.rich.remove_task(task)
        else:
            self.rich.stop()
            self.rich = None

    @staticmethod
    def _make() -> RichProgress:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress
        from rich.table import Column

        one_line = Column(no_wrap=True, overflow="ellipsis")
        return RichProgress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[status]}", style="cyan", markup=False, table_column=one_line),
            console=Console(stderr=True),
        )


class Interrupts:
    """The signals that ask a command to stop (`sbatch --signal=TERM@120 --requeue`, a terminal that is closed).

    A command that has no work to save yet ends at once. Later a signal sets a flag; long loops poll it, save and exit.
    """

    def __init__(self) -> None:
        self._signal: int | None = None
        self._ctrl_c = self._early = False
        self.advice = RESTART  # hint for a command that Ctrl-C has stopped

    def exit_on_signal(self) -> None:
        """Prepare for signals. Call once, first, in the main thread."""
        self.leave_on_signal()
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # `nohup … &` ignores it
            signal.signal(signal.SIGINT, self._stop)

    def leave_on_signal(self) -> None:
        """End the command at once on a signal, until `begin_work`. Call in the main thread, before every command.

        Raises Interrupted if a signal has come meanwhile, at the end of an earlier command of this process.
        """
        self._early = True
        self._install(self._leave)
        if self._signal is not None:
            raise self._interrupted(RESTART)

    def signal_error(self, error: BaseException) -> BaseException:
        """Return the exception of the signal that led to `error`, or `error` itself.

        A library that a signal interrupts in its imports may raise another exception instead.
        """
        if self._ctrl_c:
            return KeyboardInterrupt("stopped by SIGINT")
        if self._early and self._signal is not None:
            return self._interrupted(RESTART)
        return error

    def begin_work(self) -> None:
        """From now on only remember signals, for loops to poll. Does nothing in a program that has its own handlers."""
        if signal.getsignal(signal.SIGTERM) == self._leave:
            self.remember_signals()

    def remember_signals(self) -> None:
        """Remember signals, for loops to poll. Call in the main thread."""
        self._install(self.handle)
        self._early = False

    def handle(self, number: int, frame: FrameType | None = None) -> None:
        self._signal = number

    def requested(self) -> bool:
        """Whether a signal has arrived: finish the step, save, then call `check`.

        With tensor parallelism rank 0 decides: another rank would leave it in the middle of a forward.
        """
        return self._signal is not None and not processes.is_follower()

    def check(self) -> None:
        """Raise `Interrupted` (exit code 75) once a signal arrived."""
        if self.requested():
            raise self._interrupted(RESUME)

    def reset(self) -> None:
        """Forget the signal (for a process that goes on to other work)."""
        self._signal = None

    def _interrupted(self, hint: str) -> Interrupted:
        assert self._signal is not None
        return Interrupted(f"interrupted by {signal.Signals(self._signal).name}", hint)

    @staticmethod
    def _install(handler: Callable[[int, FrameType | None], None]) -> None:
        for number in STOPPING:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # `nohup` ignores it
                signal.signal(number, handler)

    def _leave(self, number: int, frame: FrameType | None) -> None:
        self._signal = number
        raise self._interrupted(RESTART)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self._ctrl_c = True
        raise KeyboardInterrupt


interrupts = Interrupts()
_display = _Display()


def _silent() -> bool:
    return _quiet or not is_rank_zero()


def _line(message: str) -> None:
    message = redacted(message)
    if _display.rich is not None:
        _display.rich.console.print(message, markup=False, highlight=False, soft_wrap=True)
    else:
        print(message, file=sys.stderr, flush=True)


def _short(value: Any, digits: int = 4) -> str:
    """Format a value in a few characters: `0.3071`, `12,345`."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{digits}g}"
