"""State of a run along a stream, saved to disk chunk by chunk, so that the run can be resumed.

*.jsonl         lines, appended with every chunk
PARTS/          one file per chunk, named by its number
checkpoints/    newest states of all learners, with their place in the stream

A resumed run deletes everything that was written after the checkpoint it goes on from, and answers those chunks again.
"""

import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from torch import OutOfMemoryError, Tensor

from specctl import progress, regular_files
from specctl.adaptation.stream import PromptStream
from specctl.decoding.target import Target
from specctl.distillation.rejections import Rejections
from specctl.errors import CheckpointError, DataError, Interrupted, SpecctlError, one_line
from specctl.measuring.records import Stamp, check_same, chunk_file_name, chunk_files
from specctl.recipe import LearningRecipe
from specctl.runs import METRICS, Run, remove_leftovers, sha256, to_json
from specctl.threads import counted
from specctl.training import checkpoint
from specctl.training.checkpoint import Count

CHUNKS, CHECKPOINTS, REJECTED = "chunks.jsonl", "checkpoints", "rejected.jsonl"


class ChunkSource(Protocol):
    """A stream of chunks, reduced to the interface that saving its place needs.

    Attributes:
        total: number of prompts in all, or None if it is unknown.
        stdin: the stream comes once and cannot be rewound.
    """

    stdin: bool

    @property
    def total(self) -> int | None: ...

    def position(self) -> dict[str, Any]:
        """Place after the last chunk that was given out, including the number of its `prompts`; JSON-able."""
        ...


@dataclass(frozen=True)
class ResumePoint:
    """A place between two chunks, with everything that a run needs to go on from there.

    Attributes:
        number: finished chunks, over all passes.
        passed: finished passes over the stream.
        stream, stage: state of the current pass: `PromptStream.position`, and the JSON-able part of the learners'
            state.
        sizes: bytes of each .jsonl file.
        digests: sha256 of these bytes, and of every chunk file, by path in the run directory.
    """

    number: Count = 0
    passed: Count = 0
    stream: dict[str, Any] | None = None
    stage: dict[str, Any] | None = None
    sizes: dict[str, Count] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Saved:
    """Content of a checkpoint, except its tensors."""

    stamp: Stamp
    mark: ResumePoint


class ResumableRun:
    """The files of one run. If the disk refuses a write, methods raise SpecctlError; states saved earlier stay intact.

    Attributes:
        mark, tensors: the last place between two chunks, saved or not, and the learners' tensors there.
    """

    def __init__(
        self,
        recipe: LearningRecipe,
        run: Run,
        stamp: Stamp,
        chunk_dir: str,
        metric_fields: Sequence[str],
        line_files: Sequence[str] = (CHUNKS,),
    ):
        """
        Args:
            chunk_dir: name of the directory with a file per chunk.
            metric_fields: fields of a chunk's row that are copied to metrics.jsonl.
            line_files: names of the .jsonl files that grow with every chunk.
        """
        self.metric_fields, self.line_files = metric_fields, line_files
        self.recipe, self.run, self.stamp = recipe, run, stamp
        self.chunk_dir, self.checkpoints = run.dir / chunk_dir, run.dir / CHECKPOINTS
        self.mark, self.tensors = ResumePoint(), {}
        self._saved = self.mark
        self._sums = {name: hashlib.sha256() for name in line_files}
        self._begun = False

    mark: ResumePoint
    tensors: dict[str, Tensor]

    def start(self) -> None:
        """Read the newest checkpoint if the recipe asks for it; the files on disk do not change before `begin`.

        Raises CheckpointError (no checkpoint is whole, or files that belong to it are missing), UsageError (the
        checkpoint was made under another recipe).
        """
        newest = checkpoint.newest(self.checkpoints, Saved) if self.recipe.resume else None
        if newest is None:
            return
        path, state = newest
        check_same(state.stamp, self.stamp, str(path))
        self.mark = self._saved = state.mark
        self._check_whole()
        self.tensors = checkpoint.load_tensors(path)

    def remaining_passes(self, target: Target) -> Iterator[tuple[int, PromptStream]]:
        """Seeds of the passes still to be made, each with its stream at the place where it continues.

        Only the first pass writes unusable prompts to disk, because later passes see the same lines again. Raises
        DataError (unusable prompts, or a stream that does not begin with the prompts answered before), UsageError.
        """
        for place, seed in enumerate(self.recipe.seeds[self.mark.passed :], self.mark.passed):
            kept = None if place else self.run.dir / REJECTED
            rejections = Rejections(kept, self.recipe.data.max_rejected, hold=self.run.replaces_earlier)
            stream = PromptStream.of_pass(self.recipe, target, rejections, seed)
            if self.mark.stream is not None:
                with self.restoring():
                    stream.resume(self.mark.stream, rewind=not stream.stdin)
            yield seed, stream

    @contextmanager
    def restoring(self) -> Iterator[None]:
        """Raise CheckpointError for errors in the block: a damaged state, or one of another specctl version."""
        hint = "resume with the version of specctl that saved it, or start with --overwrite"
        try:
            yield
        except (CheckpointError, DataError) as error:
            raise type(error)(f"{self.checkpoints}: {error.message}", error.hint) from error
        except KeyError as error:
            problem = f"the state in {self.checkpoints} lacks {error}: another version of specctl saved it"
            raise CheckpointError(problem, hint) from error
        except (TypeError, ValueError, AttributeError, LookupError, RuntimeError) as error:
            if isinstance(error, OutOfMemoryError):
                raise
            problem = f"the state in {self.checkpoints} cannot be restored: {one_line(error)}"
            raise CheckpointError(problem, hint) from error

    def begin(self, target: Target, rejections: Rejections | None = None) -> None:
        """Go on after the mark, or delete the files of an earlier run; log which of the two happens.

        Nothing on disk changes before this call, so make it in every pass, as late as possible: when only the decoding
        itself can still fail. Calls after the first one do nothing. `rejections`: the stream's, released here.
        """
        if self._begun:
            return
        self._begun = True
        resumed = self.mark != ResumePoint()
        if resumed:
            self.run.resume_from(self.run.dir, self.mark.sizes.get(METRICS, 0))
        self.run.annotate(target=target.identity)
        if rejections is not None:
            rejections.release()
        if resumed:
            self._truncate_to_mark()
            progress.log(f"resumed after chunk {self.mark.number}")
        else:
            self._delete_files()
            if self.recipe.resume:
                progress.log(f"nothing to resume in {self.run.dir}: starting from the beginning")
        self.chunk_dir.mkdir(exist_ok=True)
        for place in (self.chunk_dir, self.run.dir / "drafters"):
            remove_leftovers(place)

    @contextmanager
    def tracking(self, seed: int, stream: ChunkSource) -> Iterator[progress.Progress]:
        """Context of one pass: show a progress bar of prompts, and save the state if a signal ends the block.

        Raises Interrupted, with a hint how to resume.
        """
        label = "online" if len(self.recipe.seeds) == 1 else f"online, seed {seed}"
        try:
            with progress.Progress(label, total=stream.total, unit="prompts") as bar:
                bar.skip(self.answered)
                yield bar
        except (Interrupted, KeyboardInterrupt) as stop:
            self.save()
            if isinstance(stop, KeyboardInterrupt):
                raise
            hint = f"continue with --resume --output-dir {self.run.dir}"
            if stream.stdin:
                hint += f", and send the prompts after the first {self.answered} again"
            raise Interrupted(f"{stop.message} after {counted(self.mark.number, 'chunk')}", hint=hint) from None

    @property
    def answered(self) -> int:
        """Number of prompts already answered in the current pass."""
        return (self.mark.stream or {}).get("prompts", 0)

    def drafter_dir(self, name: str, seed: int) -> Path:
        """Directory of the drafter that a contender learned in the pass of this seed."""
        return self.run.dir / "drafters" / (name if seed == self.recipe.seeds[0] else f"{name}-seed{seed}")

    @property
    def number(self) -> int:
        """Number of the current chunk, counted over all passes."""
        return self.mark.number + 1

    @property
    def rejected(self) -> int:
        path = self.run.dir / REJECTED
        return len(regular_files.read_text(path).splitlines()) if path.exists() else 0

    def _delete_files(self) -> None:
        for place in (self.checkpoints, self.chunk_dir):
            shutil.rmtree(place, ignore_errors=True)
        for name in self.line_files:
            (self.run.dir / name).unlink(missing_ok=True)

    def _check_whole(self) -> None:
        """Raise CheckpointError if anything written before the mark is missing or changed."""
        for name in self.line_files:
            path, size = self.run.dir / name, self.mark.sizes.get(name)
            if size is None or not path.is_file() or path.stat().st_size < size:
                raise CheckpointError(f"{path} lacks chunks that were saved", "start with --overwrite")
            with regular_files.open_regular(path) as file:
                while part := file.read(min(size - file.tell(), 2**20)):
                    self._sums[name].update(part)
        there = self._digests(path for path in chunk_files(self.chunk_dir) if path.is_file())
        for name, digest in self.mark.digests.items():
            if there.get(name) != digest:
                raise CheckpointError(f"{self.run.dir / name} was changed or deleted", "start with --overwrite")

    def _digests(self, parts: Iterable[Path]) -> dict[str, str]:
        """sha256 of the lines written up to now, and of the chunk files in `chunk_dir`."""
        lines = {name: digest.hexdigest() for name, digest in self._sums.items()}
        return lines | {f"{path.parent.name}/{path.name}": sha256(path) for path in parts}

    def _truncate_to_mark(self) -> None:
        for path in chunk_files(self.chunk_dir):
            if int(path.stem) > self.mark.number:
                path.unlink()
        for name in self.line_files:
            os.truncate(self.run.dir / name, self.mark.sizes[name])

    def append(self, name: str, rows: Iterable[Any]) -> None:
        """Append the lines of a chunk to a .jsonl file, one JSON object per row."""
        lines = "".join(to_json(row) + "\n" for row in rows).encode()
        with regular_files.open_regular(self.run.dir / name, "ab", follow=False) as file:
            file.write(lines)
        self._sums[name].update(lines)

    def read(self, name: str) -> Iterator[dict[str, Any]]:
        """Yield the parsed lines of a file. Raises CheckpointError for a damaged line."""
        path = self.run.dir / name
        if not path.exists():
            return
        with regular_files.open_regular(path, "r", encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                try:
                    yield regular_files.parse_json(line)
                except ValueError as error:
                    raise CheckpointError(f"{path}:{number} is damaged: {error}", "start with --overwrite") from error

    def write_chunk(self, rows: Sequence[Any]) -> None:
        """Append the rows of a chunk to chunks.jsonl, and their `metric_fields` fields to metrics.jsonl."""
        for row in rows:
            self.run.metrics(**{key: getattr(row, key) for key in self.metric_fields})
        self.append(CHUNKS, map(asdict, rows))

    def advance(self, stream: ChunkSource, stage: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """Move the mark past a chunk after its files are written. `stage` and `tensors` are the learners' state there.

        The state is saved every `checkpoint.every` chunks.
        """
        mark = replace(self.mark, number=self.number, stream=stream.position(), stage=stage)
        sizes = {name: (self.run.dir / name).stat().st_size for name in self.line_files}
        sizes[METRICS] = self.run.metrics_size
        new = self.chunk_dir / chunk_file_name(mark.number)
        digests = self.mark.digests | self._digests([new] if new.exists() else [])
        self.mark, self.tensors = replace(mark, sizes=sizes, digests=digests), tensors
        if mark.number % self.recipe.checkpoint.every == 0:
            self.save()

    def finish_pass(self) -> None:
        """Record that a pass over the stream is finished; the next pass starts from the beginning."""
        self.mark, self.tensors = replace(self.mark, passed=self.mark.passed + 1, stream=None, stage=None), {}
        self.save()

    def save(self) -> None:
        """Save the state after the last chunk, unless it is saved already."""
        if self.mark == self._saved:
            return
        state = {"stamp": self.stamp, "mark": asdict(self.mark)}
        # The end of a pass gets a separate step number: the state after its last chunk stays until the new one is
        # written.
        step = self.mark.number + self.mark.passed
        with self.writing():
            checkpoint.save_tensors(self.checkpoints, step, state, self.tensors, keep=self.recipe.checkpoint.keep)
        self._saved = self.mark

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Turn an OSError of a write in the block into a SpecctlError that says how to resume."""
        try:
            yield
        except OSError as error:
            raise SpecctlError(
                f"cannot save to {self.run.dir}: {error.strerror or error}",
                hint=f"free disk space and continue with --resume --output-dir {self.run.dir}: "
                f"the state after {counted(self._saved.number, 'chunk')} is saved",
            ) from error
