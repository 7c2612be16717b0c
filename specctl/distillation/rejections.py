"""Lines without a prompt or a text: collected, written to a file, and counted against the allowed share."""

import json
import shutil
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import IO

from specctl import progress, regular_files
from specctl.errors import DataError
from specctl.runs import PRIVATE

SHOWN_REASONS = 5
HELD_BYTES = 1 << 20  # rejected lines up to this size are held in memory, more in a temporary file
EXPECTED = (
    'one JSON object per line: {"prompt": "…"}, {"messages": [{"role": "user", "content": "…"}]} or '
    '{"turns": ["…", "…"]}; or .csv or .parquet with such columns; or .txt with one prompt per line'
)


class Rejections:
    """Rejected lines: counted, written to `path` as they occur, and judged by `check`. Only the owner can read the
    file, since it quotes the lines.

    With `hold`, the file of an earlier run stays at `path` until `release`, because this run may still be refused.
    """

    def __init__(
        self, path: Path | None, allowed: float, *, hold: bool = False, expected: str = EXPECTED, what: str = "prompts"
    ):
        self.path, self.allowed, self.expected, self.what = path, allowed, expected, what
        self.seen = 0  # lines read, good and bad
        self.count = 0
        self.too_long = 0  # later turns of traces that do not fit the context
        self.reasons: list[str] = []
        self._reported = self._reported_long = 0
        self._held: IO[str] | None = None
        if hold:
            self._held = SpooledTemporaryFile(HELD_BYTES, "w+", encoding="utf-8")  # noqa: SIM115 (`release` closes it)
        elif path is not None:
            path.unlink(missing_ok=True)

    def add(self, where: str, reason: str, text: str = "") -> None:
        """Record one rejected line; `where` is file:line, `text` the beginning of the line."""
        self.count += 1
        if len(self.reasons) < SHOWN_REASONS:
            self.reasons.append(f"{where}: {reason}")
        self._write(where, reason, text)

    def leave_out(self, where: str, reason: str, text: str = "") -> None:
        """Record a later turn of a trace that does not fit the context. It does not count as rejected, because the
        last turns of long traces are expected not to fit."""
        self.too_long += 1
        self._write(where, reason, text)

    def _write(self, where: str, reason: str, text: str) -> None:
        line = json.dumps({"where": where, "reason": reason, "text": text[:200]}) + "\n"
        if self._held is not None:
            self._held.write(line)
        elif self.path is not None:
            with regular_files.open_regular(
                self.path, "a", encoding="utf-8", follow=False, permissions=PRIVATE
            ) as file:
                file.write(line)

    def release(self) -> None:
        """Replace the earlier run's file by the held lines. Does nothing without `hold`."""
        held, self._held = self._held, None
        if held is None:
            return
        with held:
            held.seek(0)
            if self.path is not None:
                self.path.unlink(missing_ok=True)
                if self.count or self.too_long:
                    with regular_files.create_file(self.path, "x", encoding="utf-8", permissions=PRIVATE) as file:
                        shutil.copyfileobj(held, file)

    @property
    def too_many(self) -> bool:
        """Whether more than the allowed share of the lines was rejected."""
        return self.count > self.allowed * self.seen

    def check(self) -> None:
        """Raise DataError if more than the allowed share of the lines was rejected; otherwise report the rejections in
        one line."""
        kept = f"all of them are in {self.path}" if self.path and self._held is None else ""
        if self.too_many:
            share = f"{self.count} of {self.seen} {self.what} "
            share += f"rejected, more than data.max_rejected={self.allowed:g} allows"
            hint = f"expected {self.expected}" + (f"; {kept}" if kept else "")
            raise DataError("\n  ".join([share, *self.reasons]), hint=hint)
        self.report()

    def report(self) -> None:
        """Report in one line all rejections, if there are new ones since the last report."""
        kept = f"all of them are in {self.path}" if self.path else ""
        if self.count > self._reported:
            self._reported = self.count
            progress.log(f"{self.count} of {self.seen} {self.what} rejected ({self.reasons[0]}){kept and '; ' + kept}")
        if self.too_long > self._reported_long:
            self._reported_long = self.too_long
            progress.log(f"{self.too_long} later turns of traces do not fit the target's context: left out")
