"""Conversion of exceptions into message, hint and exit code."""

import errno
import os
import re
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

from specctl.errors import SpecctlError, brief, redacted
from specctl.progress import interrupts
from specctl.subcommands import SUBCOMMANDS

ENDPOINT = "HF_ENDPOINT"  # environment variable with the address for huggingface_hub
LINES = 10  # most lines of a message
LINE = 400  # most characters of a line
FULL = "free space on the disk of --output-dir, or choose another one"
WRITES = {errno.ENOSPC: FULL, errno.EDQUOT: FULL, errno.EFBIG: "a file may not become so large here: raise ulimit -f"}
"""Remedies for writes that the operating system refuses."""
GLOO = "/gloo/transport/"  # in PyTorch's messages about a collective on CPUs that another process has left
OF_ENGINES = {
    "--host": "--listen HOST:PORT",
    "--port": "--listen HOST:PORT",
    "--model": "--target MODEL",
    "--max-tokens": "--max-new-tokens N",
    "--speculative-model": "--drafter PATH",
    "--speculative-config": "--drafter PATH",
    "--tensor-parallel-size": "target.tensor_parallel=N",
}
"""Our options for options that engines call otherwise."""
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
MESSAGE = 1500  # most characters of all lines; the first line is always shown


@dataclass(frozen=True)
class Failure:
    """An error as reported to the user: type for programs, message and hint for people, and the exit code."""

    type: str
    message: str
    hint: str | None
    code: int


def explain(error: BaseException, command: str | None = None) -> Failure:
    """Return the failure for an exception of `command`, with a message that always fits a screen."""
    failure = _explain(error, command)
    hint = failure.hint and presentable(failure.hint, MESSAGE)  # it may be a command to copy
    return replace(failure, message=presentable(failure.message), hint=hint)


def presentable(message: str, longest: int = LINE) -> str:
    """Make a message safe and short for a terminal.

    It loses passwords, control characters, the middle of lines above `longest`, and the lines beyond the limits.
    """
    lines = [
        CONTROL.sub(lambda char: f"\\x{ord(char[0]):02x}", brief(line, longest))
        for line in redacted(message).split("\n")
    ]
    kept = lines[:1]
    for line in lines[1:LINES]:
        if sum(map(len, kept)) + len(line) > MESSAGE:
            break
        kept.append(line)
    more = len(lines) - len(kept)
    return "\n".join(kept + [f"and {more} more"] * bool(more))


def _explain(error: BaseException, command: str | None) -> Failure:
    """Return the full failure: specctl's errors carry all facts; other exceptions are put into words here."""
    if isinstance(error, SpecctlError):
        return Failure(type(error).__name__, error.message, error.hint, error.exit_code)
    if isinstance(error, KeyboardInterrupt):
        return Failure("Interrupted", "stopped by SIGINT", interrupts.advice, 130)
    if hasattr(error, "format_message") and hasattr(error, "exit_code"):  # Typer's error: the command line is wrong
        if own := _own_option(error):
            return Failure("UsageError", f"No such option: {getattr(error, 'option_name', '')}", f"use {own}", 2)
        message = error.format_message().rstrip(".") or "the command is missing"  # without a message, help was shown
        return Failure("UsageError", message, _usage_hint(error, command), error.exit_code)
    if isinstance(error, OSError) and error.strerror:
        where = f"{os.fsdecode(error.filename)}: " if isinstance(error.filename, str | bytes) else ""
        number = error.errno or 0
        hint = WRITES.get(number) if error.strerror == os.strerror(number) else None
        if error.errno == errno.ENAMETOOLONG:  # no file can have such a name, so the user has given it
            return Failure("UsageError", f"{where}{error.strerror}", "choose a shorter name", 2)
        return Failure(type(error).__name__, f"{where}{error.strerror}", hint, 1)
    first_line = str(error).strip().splitlines()[0] if str(error).strip() else ""
    if isinstance(error, RuntimeError) and first_line == "Could not determine home directory.":  # of pathlib
        return Failure("UsageError", "a path begins with ~, but there is no such home", "write the whole path", 2)
    if _out_of_memory(error):
        row = SUBCOMMANDS.get(command or "")
        hint = f"lower or set {', '.join(row.memory_keys)}" if row and row.memory_keys else None
        return Failure(
            "MemoryError", f"out of memory: {first_line.partition('err == 0. ')[2] or first_line}".rstrip(": "), hint, 1
        )
    if isinstance(error, RuntimeError) and GLOO in first_line:
        hint = "its message says why; if all are gone, start them again (train-drafter: with --resume)"
        return Failure("ProcessError", "another process of this job has ended or does not answer", hint, 1)
    if isinstance(error, ValueError) and not _is_address(endpoint := os.environ.get(ENDPOINT, "")):
        return Failure(
            "UsageError", f"{ENDPOINT} is not an address: {endpoint}", "unset it, or set it to https://HOST[:PORT]", 2
        )
    hint = "specctl -v … shows the traceback"
    return Failure(type(error).__name__, f"unexpected {type(error).__name__}: {first_line}".rstrip(": "), hint, 1)


def _is_address(url: str) -> bool:
    """Whether a URL can be parsed. The import of huggingface_hub parses it, with an error that explains nothing."""
    try:
        return urlsplit(url).port != 0
    except ValueError:
        return False


def _out_of_memory(error: BaseException) -> bool:
    """Whether an exception means that memory ran out, in Python or in PyTorch.

    PyTorch's exceptions are recognized by name and text: importing torch takes longer than most commands.
    """
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and "allocate memory" in str(error)


def _own_option(error: Any) -> str | None:
    """The command's option for an option that vLLM, SGLang or llama.cpp call otherwise, or None."""
    option, context = OF_ENGINES.get(getattr(error, "option_name", "")), getattr(error, "ctx", None)
    if option is None or context is None:
        return None
    known = {name for parameter in context.command.params for name in parameter.opts}
    needed = "--target" if option.startswith("target.") else option.split()[0]
    return option if needed in known else None


def _usage_hint(error: BaseException, command: str | None) -> str:
    context = getattr(error, "ctx", None)  # errors of the option parser have none
    path = context.command_path if context is not None else " ".join(filter(None, ("specctl", command)))
    return f"see {path} --help"
