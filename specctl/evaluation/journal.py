"""What a run of `specctl online` has on disk while it goes on, chunk by chunk, and how it is taken up again.

chunks.jsonl        a line per learner and chunk
records/            a file per chunk: every answer; at the end all are in records.parquet, too
checkpoints/        the newest states of all learners, with the place in the stream
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from typing import Any

from torch import Tensor

from specctl.errors import CheckpointError, SpecctlError
from specctl.evaluation.online_stage import ChunkRow
from specctl.evaluation.records import RECORDS, Record, Stamp, check_same, read_parts, write_records
from specctl.recipe import OnlineRecipe
from specctl.runs import Run, atomic_write, to_json
from specctl.training import checkpoint

CHUNKS, PARTS, CHECKPOINTS = "chunks.jsonl", "records", "checkpoints"


@dataclass(frozen=True)
class Mark:
    """A place between two chunks, with all that a run needs to go on from there.

    Attributes:
        number: chunks so far, of all passes.
        passed: passes over the stream that are finished.
        stream, stage: of the pass that is under way: `PromptStream.position`, and the JSON-able part of `Stage.state`.
    """

    number: int = 0
    passed: int = 0
    stream: dict[str, Any] | None = None
    stage: dict[str, Any] | None = None


class Journal:
    """The files of one run. Every method that writes raises SpecctlError where the disk refuses: what was saved stays.

    Attributes:
        mark, tensors: the last place between two chunks, saved or not.
    """

    def __init__(self, recipe: OnlineRecipe, run: Run, stamp: Stamp):
        self.recipe, self.run, self.stamp = recipe, run, stamp
        self.parts, self.checkpoints = run.dir / PARTS, run.dir / CHECKPOINTS
        self.mark, self.tensors = Mark(), {}
        self._saved = self.mark

    mark: Mark
    tensors: dict[str, Tensor]

    def start(self) -> bool:
        """Take up the newest checkpoint if the recipe asks for it, else begin anew. Whether there was one.

        Raises CheckpointError (none is whole), UsageError (it was made under another recipe).
        """
        found = checkpoint.newest(self.checkpoints) if self.recipe.resume else None
        if found is None:
            checkpoint.discard(self.checkpoints)
            checkpoint.discard(self.parts)
            for name in (CHUNKS, RECORDS):
                (self.run.dir / name).unlink(missing_ok=True)
        else:
            path, state = found
            check_same(state["stamp"], self.stamp, str(path))
            self.mark = Mark(**state["mark"])
            self.tensors = checkpoint.load_tensors(path)
            self._saved = self.mark
            self._cut()
        self.parts.mkdir(exist_ok=True)
        return found is not None

    def _cut(self) -> None:
        """Forget what was written behind the checkpoint: it comes again."""
        for path in self.parts.glob("*.parquet"):
            if int(path.stem) > self.mark.number:
                path.unlink()
        there = {int(path.stem) for path in self.parts.glob("*.parquet")}
        missing = set(range(1, self.mark.number + 1)) - there
        if missing:
            raise CheckpointError(f"{self.parts} lacks the answers of chunk {min(missing)}", "start with --overwrite")
        wanted = self.mark.number * len(self.recipe.algo)
        kept = self.rows()[:wanted]
        if len(kept) < wanted:
            raise CheckpointError(f"{self.run.dir / CHUNKS} has lost chunks", "start with --overwrite")
        atomic_write(self.run.dir / CHUNKS, "".join(to_json(asdict(row)) + "\n" for row in kept))

    def keep(self, records: Sequence[Record], rows: Sequence[ChunkRow], mark: Mark, tensors: dict[str, Tensor]) -> None:
        """Write down a chunk, and every so often the state behind it."""
        with self.writing():
            write_records(self.parts, records, self.stamp, f"{mark.number:08d}.parquet")
            with open(self.run.dir / CHUNKS, "a", encoding="utf-8") as file:
                file.writelines(to_json(asdict(row)) + "\n" for row in rows)
        self.mark, self.tensors = mark, tensors
        if mark.number % self.recipe.checkpoint.every == 0:
            self.save()

    def passed(self) -> None:
        """A pass over the stream is finished: the next one begins anew."""
        self.mark, self.tensors = Mark(self.mark.number, self.mark.passed + 1), {}
        self.save()

    def save(self) -> None:
        """Save the state behind the last chunk, if it is not there yet."""
        if self.mark == self._saved:
            return
        state = {"stamp": self.stamp, "mark": asdict(self.mark)}
        # The end of a pass has a number of its own: the state behind its last chunk stays until that one is there.
        step = self.mark.number + self.mark.passed
        with self.writing():
            checkpoint.save_tensors(self.checkpoints, step, state, self.tensors, keep=self.recipe.checkpoint.keep)
        self._saved = self.mark

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Whatever is written within: SpecctlError says how to go on where the disk refuses it."""
        try:
            yield
        except OSError as error:
            raise SpecctlError(
                f"cannot save to {self.run.dir}: {error.strerror or error}",
                hint=f"make room and continue with --resume --output-dir {self.run.dir}: "
                f"what was learnt from {self._saved.number} chunks is whole",
            ) from error

    def rows(self) -> list[ChunkRow]:
        """All chunks, in order."""
        path = self.run.dir / CHUNKS
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        names = [field.name for field in fields(ChunkRow)]
        found = []
        for line in lines:
            try:
                row = json.loads(line)
            except ValueError:  # the last one, of a run that was killed while it wrote
                break
            found.append(ChunkRow(**{name: row[name] for name in names}))
        return found

    def records(self) -> list[Record]:
        """All answers, in order; without the prompts' ids."""
        return read_parts(self.parts)

    def finish(self, records: Sequence[Record]) -> None:
        """All answers into one file, besides the parts: a run whose last state is damaged needs some of them."""
        with self.writing():
            write_records(self.run.dir, records, self.stamp)
