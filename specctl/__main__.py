"""`python -m specctl` and the installed `specctl` command."""

import atexit
import gc
import io
import os
import sys
import warnings
from contextlib import suppress

from specctl.errors import ReaderGone, SpecctlError
from specctl.progress import RESTART, interrupts


class Stderr(io.TextIOWrapper):
    """Standard error that ignores write errors: a command does not stop because its messages cannot be shown.

    After an error the descriptor points to the null device, so that the flush at exit does not fail again.
    """

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError as error:
            self._failed(error)
            return len(text)

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            self._failed(error)

    def _failed(self, error: OSError) -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())


class Stdout(Stderr):
    """Standard output that raises its write errors as specctl errors, distinct from all other failures.

    The error is ReaderGone if the reader has closed the pipe (`specctl … | head`), else SpecctlError.
    """

    def _failed(self, error: OSError) -> None:
        super()._failed(error)
        if isinstance(error, BrokenPipeError):
            raise ReaderGone("the reader of stdout has closed the pipe") from error
        raise SpecctlError(f"cannot write to stdout: {error.strerror}") from error


def main() -> None:
    """Run the command line and exit with its code."""
    _read_words_as_utf8()
    gc.disable()  # imported modules stay in use; `cli.command.search_for_cycles` ends this
    codes: list[int] = []
    atexit.register(_end, codes)  # the first to be registered is the last to be called
    _open_standard_streams()
    warnings.formatwarning = lambda message, *_: f"warning: {message}\n"  # without a line of the program
    interrupts.exit_on_signal()
    try:
        from specctl.cli.main import run
    except BaseException as error:
        shown = interrupts.signal_error(error)
        if shown is error:
            raise
        print(f"error: {shown} (hint: {RESTART})", file=sys.stderr)
        sys.exit(getattr(shown, "exit_code", 130))
    codes.append(run(sys.argv[1:]))
    sys.exit(codes[0])


def _read_words_as_utf8() -> None:
    """Start again in Python's UTF-8 mode if the locale's encoding lacks characters of the command line. Python has then
    decoded them byte by byte, to surrogates, which no message could show."""
    if not sys.flags.utf8_mode and any("\udc80" <= char <= "\udcff" for char in "".join(sys.argv)):
        os.execv(sys.executable, [sys.orig_argv[0], "-X", "utf8", *sys.orig_argv[1:]])


def _end(codes: list[int]) -> None:
    """Exit at once, with the code of the command, if a command has ended. Python would free all objects first, which
    takes about a second; the operating system frees the memory at once."""
    if codes:
        with suppress(SpecctlError):  # stdout cannot be written, as `run` has reported
            sys.stdout.flush()
        sys.stderr.flush()
        os._exit(codes[0])


def _open_standard_streams() -> None:
    """Install `Stdout` and `Stderr`, which escape characters that the locale's encoding lacks.

    A standard stream that is closed (`specctl … >&-`) becomes the null device: otherwise the next file that is opened
    would get its descriptor.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free descriptor, which is `number`
            setattr(sys, name, os.fdopen(number, mode, closefd=False))
    for name, kind in (("stdout", Stdout), ("stderr", Stderr)):
        before = getattr(sys, name)
        buffering = {"line_buffering": before.line_buffering, "write_through": before.write_through}
        encoding = before.encoding
        setattr(sys, name, kind(before.detach(), encoding, "backslashreplace", **buffering))


if __name__ == "__main__":
    main()
