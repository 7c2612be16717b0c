"""The files of a run of `specctl online` that drafts tokens, besides its states.

chunks.jsonl        a line per learner and chunk
records/            a file per chunk: every answer; at the end all are in records.parquet, too
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from specctl.errors import CheckpointError
from specctl.measuring.online_contenders import ChunkRow
from specctl.measuring.records import RECORDS, Record, Stamp, part_name, read_parts, write_records
from specctl.measuring.resumable import CHUNKS, States
from specctl.recipe import OnlineRecipe
from specctl.runs import Run

PARTS = "records"
SHOWN = ("algo", "seed", "chunk", "mat", "loss", "learn_s")
"""Fields of a chunk that go to metrics.jsonl."""


class Journal(States):
    """States, chunks and answers."""

    def __init__(self, recipe: OnlineRecipe, run: Run, stamp: Stamp):
        super().__init__(recipe, run, stamp, PARTS, SHOWN)

    def _clear(self) -> None:
        super()._clear()
        (self.run.dir / RECORDS).unlink(missing_ok=True)

    def _check_whole(self) -> None:
        super()._check_whole()
        for number in range(1, self.mark.number + 1):
            if not (self.parts / part_name(number)).is_file():
                raise CheckpointError(f"{self.parts} lacks the answers of chunk {number}", "start with --overwrite")

    def keep(self, records: Sequence[Record], rows: Sequence[ChunkRow]) -> None:
        """Write down a chunk, before `advance`."""
        with self.writing():
            write_records(self.parts, records, self.stamp, part_name(self.number))
            self.write_chunk(rows)

    def rows(self) -> list[ChunkRow]:
        """All chunks, in order."""
        names = {field.name for field in fields(ChunkRow)}
        return [ChunkRow(**{name: value for name, value in row.items() if name in names}) for row in self.read(CHUNKS)]

    def records(self) -> list[Record]:
        """All answers, in order; without the prompts' ids."""
        return read_parts(self.parts)

    def finish(self, records: Sequence[Record]) -> None:
        """All answers into one file, besides the parts: a run whose last state is damaged needs some of them."""
        with self.writing():
            write_records(self.run.dir, records, self.stamp)
