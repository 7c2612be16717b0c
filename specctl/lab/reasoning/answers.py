"""Extract the final answer of a text, and compare it with a reference or test a program."""

import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from fractions import Fraction

from specctl.errors import UsageError

SHORT = 64  # characters; a reference up to this length is itself an answer
LONGEST_NUMBER = 300  # characters; longer numbers, or exponents of five digits, are compared as text
CPU_S, MEMORY_BYTES, FILE_BYTES = 5, 512 << 20, 1 << 20  # limits of a tested program

_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|[-+]?\.\d+")
_BEYOND = re.compile(r"e[-+]?[\d_]{5,}", re.IGNORECASE)
_WORDS = re.compile(r"\\(?:text|textbf|textrm|mathrm|mbox)\{([^{}]*)\}")
_UNITS = re.compile(r"[$€£%°]|\^\\circ|\^\{\\circ\}|\\\$|\\%|\\[,;! ]")
_FRACTION = re.compile(r"\\[dt]?frac(?:\{([^{}]+)\}|(\d))(?:\{([^{}]+)\}|(\d))")
_MIXED = re.compile(r"([-+]?)(\d+) +(\d+/\d+)")  # one and a half: 1 1/2
_CHOICE = re.compile(r"\(?([A-J])\)?[.:]?|\(([a-j])\)[.:]?")
_ANSWER_PHRASE = re.compile(
    r"(?i:answer(?:\s+is\s*:?|\s*:)[\s*]*(?:option[\s*]+)?)(\([A-Ja-j]\)|[A-J]\b|[-+$]?\$?[\d.,/]*\d%?)"
)
_PROGRAM = re.compile(r"```(?:python)?\s*\n(.*?)```", re.DOTALL)

LIMITS = f"""
import resource
resource.setrlimit(resource.RLIMIT_CPU, ({CPU_S}, {CPU_S}))
resource.setrlimit(resource.RLIMIT_AS, ({MEMORY_BYTES}, {MEMORY_BYTES}))
resource.setrlimit(resource.RLIMIT_FSIZE, ({FILE_BYTES}, {FILE_BYTES}))
resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
"""
"""Code that the program's process runs first: resource limits per process, which only root can raise."""


def extract(text: str) -> str | None:
    r"""Extract the final answer of a text.

    This is the last `\boxed{…}`, else the line after the last `####`, else the answer named by "the answer is". Returns
    None if a text has none of them: the last number of an unfinished text is not an answer.
    """
    boxed = _boxed(text)
    if boxed is not None:
        return boxed
    if "####" in text:
        lines = text.rsplit("####", 1)[1].strip().splitlines()
        return lines[0].strip() or None if lines else None
    phrases = _ANSWER_PHRASE.findall(text)
    return phrases[-1] if phrases else None


def reference_answer(text: str) -> str | None:
    """Extract the answer of a reference: marked as in a response, or the whole text if it is short."""
    found = extract(text)
    if found is None and len(text.strip()) <= SHORT and "\n" not in text.strip():
        found = text.strip()
    return found or None


def normalise(answer: str) -> str | Fraction:
    """Normalize an answer for comparison.

    Numbers become their value ("1,200", "$1200.00" and "1200" are equal), choices their letter, and other text is
    case-folded.
    """
    plain = _plain(_WORDS.sub("", answer)) or _plain(_WORDS.sub(r"\1", answer))  # units, or an answer in words
    if choice := _CHOICE.fullmatch(plain):
        return (choice[1] or choice[2]).upper()
    if mixed := _MIXED.fullmatch(plain):
        whole, part = number(mixed[2]), number(mixed[3])
        if whole is not None and part is not None:
            return -(whole + part) if mixed[1] == "-" else whole + part
    value = number(plain.replace(" ", ""))
    numbers = _NUMBER.findall(plain) if value is None else []
    # "18 dollars a day", not "x2 apples", "3\\pi" or "x^2"
    if len(numbers) == 1 and not re.search(r"[A-Za-z]{2,}.*\d|[\\^_]", plain):
        value = number(numbers[0])
    return re.sub(r"\s+", " ", plain).casefold() if value is None else value


def _plain(answer: str) -> str:
    """An answer without units and emphasis, and with fractions as `1/2`."""
    apart = re.sub(r"(?<=\d)(?=\\[dt]?frac)", " ", answer)  # 1\frac{1}{2} is one and a half, not 11/2
    fractions = _FRACTION.sub(lambda part: f"{part[1] or part[2]}/{part[3] or part[4]}", apart)
    return _UNITS.sub("", fractions).strip().strip("*.").strip()


def number(text: str) -> Fraction | None:
    """Value of a decimal number or a fraction, or None for other texts and for excessively large numbers.

    A model in a loop may write `1e99999999`, which would take hours and gigabytes.
    """
    if len(text) > LONGEST_NUMBER or _BEYOND.search(text):
        return None
    try:
        return Fraction(text.replace(",", ""))
    except (ValueError, ZeroDivisionError):
        return None


def equal_answers(one: str | None, other: str | None) -> bool:
    """Whether two answers are equal; a missing answer equals nothing."""
    return one is not None and other is not None and normalise(one) == normalise(other)


def correct(response: str, reference: str | None, *, allow_code_execution: bool = False) -> bool | None:
    """Whether a response is right, or None if the reference cannot tell.

    A reference of assertions is a test of the program in the response. It is run only if `allow_code_execution` is set.
    """
    if reference is None:
        return None
    if reference.lstrip().startswith("assert "):
        return passes_tests(response, reference, allowed=True) if allow_code_execution else None
    wanted = reference_answer(reference)
    return None if wanted is None else equal_answers(extract(response), wanted)


def passes_tests(response: str, tests: str, *, allowed: bool) -> bool:
    """Whether the last program of a response passes `tests`, run in a separate process.

    The process is isolated from our environment, starts in an empty directory, and has limited time, memory and file
    size. A random word is printed after the tests, so a program that exits before them does not pass.

    This is not a sandbox: network access is not blocked. The program cannot start processes, unless it runs as root,
    which RLIMIT_NPROC does not restrict. Its child processes are killed too, except for processes in a new session.

    Raises UsageError unless running programs of a model is explicitly `allowed`.
    """
    if not allowed:
        raise UsageError(
            "checking these answers means running programs that a model wrote",
            "add --allow-code-execution if that is safe on this machine",
        )
    programs = _PROGRAM.findall(response)
    program = programs[-1] if programs else response
    passed = secrets.token_hex(8)
    with tempfile.TemporaryDirectory() as empty, tempfile.TemporaryFile() as printed:
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-c", f"{LIMITS}\n{program}\n{tests}\nprint({passed!r})"],
                cwd=empty,
                env={},
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except (OSError, ValueError):  # ValueError: a NUL in the program
            return False
        try:
            process.wait(2 * CPU_S)
        except subprocess.TimeoutExpired:
            return False
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # including the processes it has started
            process.wait()
        printed.seek(0)
        return process.returncode == 0 and printed.read().rstrip().endswith(passed.encode())


def _boxed(text: str) -> str | None:
    r"""Contents of the last `\boxed{…}`, which may contain nested braces, or None if it is not closed."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    begin = start + len("\\boxed{")
    depth = 1
    for at in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return text[begin:at].strip() or None
    return None
