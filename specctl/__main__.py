"""`python -m specctl` and the installed `specctl` command."""

import os
import sys


def main() -> None:
    """Run the command line and exit with its code."""
    _open_standard_streams()
    from specctl.cli.main import run

    sys.exit(run(sys.argv[1:]))


def _open_standard_streams() -> None:
    """The null device for those that are closed (`specctl … >&-`): the next file opened would take their place."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


if __name__ == "__main__":
    main()
