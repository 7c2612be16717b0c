"""The one table from exception to message, hint and exit code."""

from __future__ import annotations

import os
from dataclasses import dataclass

from specctl.errors import SpecctlError


@dataclass(frozen=True)
class Failure:
    """What a user is told: type for programs, message and hint for people, the exit code."""

    type: str
    message: str
    hint: str | None
    code: int


def explain(error: BaseException) -> Failure:
    """The failure an exception stands for. Errors of our own carry everything; the rest is put into words here."""
    if isinstance(error, SpecctlError):
        return Failure(type(error).__name__, error.message, error.hint, error.exit_code)
    if isinstance(error, KeyboardInterrupt):
        return Failure("Interrupted", "stopped by SIGINT", "commands with --resume can go on", 130)
    if hasattr(error, "format_message") and hasattr(error, "exit_code"):  # Typer's own: the command line is wrong
        return Failure("UsageError", error.format_message().rstrip("."), _usage_hint(error), error.exit_code)
    if isinstance(error, OSError) and error.strerror:
        where = f"{os.fsdecode(error.filename)}: " if isinstance(error.filename, str | bytes) else ""
        return Failure(type(error).__name__, f"{where}{error.strerror}", None, 1)
    if isinstance(error, MemoryError):
        return Failure("MemoryError", "out of memory", "a smaller batch_size or batch_tokens needs less", 1)
    first_line = str(error).strip().splitlines()[0] if str(error).strip() else ""
    hint = "specctl -v … shows the traceback"
    return Failure(type(error).__name__, f"unexpected {type(error).__name__}: {first_line}".rstrip(": "), hint, 1)


def _usage_hint(error: BaseException) -> str | None:
    context = getattr(error, "ctx", None)
    return f"see {context.command_path} --help" if context is not None else "see specctl --help"
