"""`python -m specctl` and the installed `specctl` command."""

import io
import os
import sys

from specctl.errors import ReaderGone, SpecctlError
from specctl.progress import interrupts


class Stdout(io.TextIOWrapper):
    """A stream whose write errors are told apart from all other failures; nothing is left for the flush at exit."""

    def write(self, text: str) -> int:
        """Raises ReaderGone (`specctl … | head`), SpecctlError."""
        try:
            return super().write(text)
        except OSError as error:
            raise self._lost(error) from error

    def flush(self) -> None:
        """Raises what `write` raises."""
        try:
            super().flush()
        except OSError as error:
            raise self._lost(error) from error

    def _lost(self, error: OSError) -> SpecctlError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
        if isinstance(error, BrokenPipeError):
            return ReaderGone("the reader of stdout is gone")
        return SpecctlError(f"cannot write to stdout: {error.strerror}")


class Stderr(io.TextIOWrapper):
    """Says what can be said: work does not end because nobody can be told of it."""

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError:
            self._give_up()
            return len(text)

    def flush(self) -> None:
        try:
            super().flush()
        except OSError:
            self._give_up()

    def _give_up(self) -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())


def main() -> None:
    """Run the command line and exit with its code."""
    _open_standard_streams()
    interrupts.expect()
    try:
        from specctl.cli.main import run
    except BaseException as error:
        told = interrupts.source_of(error)
        if told is error:
            raise
        print(f"error: {told}", file=sys.stderr)
        sys.exit(getattr(told, "exit_code", 130))
    sys.exit(run(sys.argv[1:]))


def _open_standard_streams() -> None:
    """The null device for those that are closed (`specctl … >&-`): the next file opened would take their place. Texts
    that the locale cannot spell are written with escapes."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one
            setattr(sys, name, os.fdopen(number, mode, closefd=False))
    for name, kind in (("stdout", Stdout), ("stderr", Stderr)):
        before = getattr(sys, name)
        buffering = {"line_buffering": before.line_buffering, "write_through": before.write_through}
        encoding = before.encoding
        setattr(sys, name, kind(before.detach(), encoding, "backslashreplace", **buffering))


if __name__ == "__main__":
    main()
