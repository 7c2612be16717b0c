"""`python -m specctl` and the installed `specctl` command."""

import sys


def main() -> None:
    """Run the command line and exit with its code."""
    from specctl.cli.main import run

    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
