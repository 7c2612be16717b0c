"""Files of a `specctl online` run that drafts tokens, in addition to the checkpoints of `ResumableRun`.

chunks.jsonl        one line per learner and chunk
records/            one file per chunk with every answer; at the end all answers are in records.parquet, too
"""

from collections.abc import Sequence
from dataclasses import fields

from specctl.errors import CheckpointError
from specctl.measuring.online_contenders import ChunkRow
from specctl.measuring.records import RECORDS, Record, Stamp, chunk_file_name, read_chunk_records, write_records
from specctl.measuring.resumable_run import CHUNKS, ResumableRun
from specctl.recipe import OnlineRecipe
from specctl.runs import Run

PARTS = "records"
SHOWN = ("algo", "seed", "chunk", "mat", "loss", "learn_s")
"""Fields of a chunk that are copied to metrics.jsonl."""


class Journal(ResumableRun):
    """States of an online run, with its chunks and answers."""

    def __init__(self, recipe: OnlineRecipe, run: Run, stamp: Stamp):
        super().__init__(recipe, run, stamp, PARTS, SHOWN)

    def _delete_files(self) -> None:
        super()._delete_files()
        (self.run.dir / RECORDS).unlink(missing_ok=True)

    def _check_whole(self) -> None:
        super()._check_whole()
        for number in range(1, self.mark.number + 1):
            if not (self.chunk_dir / chunk_file_name(number)).is_file():
                raise CheckpointError(f"{self.chunk_dir} lacks the answers of chunk {number}", "start with --overwrite")

    def keep(self, records: Sequence[Record], rows: Sequence[ChunkRow]) -> None:
        """Write the files of a chunk; call it before `advance`."""
        with self.writing():
            write_records(self.chunk_dir, records, self.stamp, chunk_file_name(self.number))
            self.write_chunk(rows)

    def rows(self) -> list[ChunkRow]:
        names = {field.name for field in fields(ChunkRow)}
        return [ChunkRow(**{name: value for name, value in row.items() if name in names}) for row in self.read(CHUNKS)]

    def records(self) -> list[Record]:
        """All answers, in order, without the ids of their prompts."""
        return read_chunk_records(self.chunk_dir)

    def finish(self, records: Sequence[Record]) -> None:
        """Write all answers to one file.

        The chunk files stay: if the last checkpoint is damaged, the run resumes from an earlier one and needs some of
        them again.
        """
        with self.writing():
            write_records(self.run.dir, records, self.stamp)
