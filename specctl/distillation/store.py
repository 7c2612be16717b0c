"""Distilled responses on disk: appended line by line, sealed shard by shard, resumable after any crash.

A response has a stable id, a batch of responses is one write of whole lines, and the writer's manifest seals a shard
with its SHA-256. So a killed run loses at most the batch under way, and a resumed run repeats nothing. `shards.py`
describes the files.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from specctl import progress, regular_files
from specctl.decoding.target_text import with_weights_digest
from specctl.distillation import shards
from specctl.distillation.shards import Record, Writer
from specctl.errors import DataError, SpecctlError, UsageError
from specctl.lock import Lock
from specctl.runs import PRIVATE, PRIVATE_DIRECTORY, atomic_write, make_dir, remove_leftovers, sha256

META = "meta.json"
BUSY = "wait for it, or give each job its own --shard i/n"


@dataclass(frozen=True)
class StoreSummary:
    """Summary of a distilled directory. It is `complete` if every writer of some `--shard i/n` split has finished."""

    responses: int
    response_tokens: int
    shards: int
    complete: bool
    meta: dict[str, Any]


def exists(directory: str | Path) -> bool:
    """Whether there is at least one shard to read."""
    return bool(shards.files(Path(directory), "shard"))


def summary(directory: str | Path) -> StoreSummary:
    """Counts from the manifests and the open shards. DataError if there is no distilled data."""
    directory = _readable(directory)
    manifests = {path: shards.load_manifest(path) for path in shards.files(directory, "manifest")}
    sealed = [entry for manifest in manifests.values() for entry in manifest["shards"]]
    open_lengths = [len(record["response_ids"]) for path in _unsealed(directory) for record in shards.records(path)]
    ended = {shards.writer_of(path) for path, manifest in manifests.items() if manifest["complete"]}
    return StoreSummary(
        responses=sum(entry["records"] for entry in sealed) + len(open_lengths),
        response_tokens=sum(entry["tokens"] for entry in sealed) + sum(open_lengths),
        shards=len(shards.files(directory, "shard")),
        complete=any(all((i, n) in ended for i in range(n)) for _, n in filter(None, ended)),
        meta=_meta(directory),
    )


def read(directory: str | Path) -> Iterator[Record]:
    """Read all records in file order, sealed shards first. A sealed shard is verified before its first record.

    DataError names the file (and line) that is missing or corrupted, and a remedy.
    """
    directory = _readable(directory)
    return (record for path in _verified(directory) for record in shards.records(path))


def check_free(
    directory: str | Path, writer: Writer, *, resume: bool, overwrite: bool, private: bool = False
) -> list[Path]:
    """Files that a writer would continue or replace; UsageError if they exist and it may do neither.

    The check is cheap, so callers can make it before they load a target. Shards of other writers of the same split
    belong to other jobs of an array and do not matter. `private` is explained in `ShardWriter`.
    """
    directory = Path(directory)
    make_dir(directory, PRIVATE_DIRECTORY if private else 0o777)
    present = [path for kind in ("shard", "manifest", "filtered") for path in shards.files(directory, kind)]
    there = [path for path in present if shards.writer_of(path) == writer] + _of_other_splits(present, writer)
    if there and not (resume or overwrite):
        raise UsageError(
            f"{directory} already contains distilled data",
            hint="continue with --resume, or replace it with --overwrite",
        )
    return there


@dataclass(frozen=True)
class ShardLayout:
    """Form of a writer's files.

    Attributes:
        writer: (i, n): this is writer i of n.
        size: responses per shard.
        private: only the owner can read the shards, and the directory if it is created: for logs of requests.
    """

    writer: Writer = (0, 1)
    size: int = 1000
    private: bool = False


ONE_WRITER = ShardLayout()


class ShardWriter:
    """The only writer of shard i of n in a directory; a context manager that holds its lock.

    `done` maps the ids on disk to their response tokens: ids of this writer, and ids of earlier runs with another
    split. The other writers of this split have other prompts. `meta` is common to all responses (domain, target,
    sampling); continuing with other values is an error.
    """

    def __init__(
        self,
        directory: str | Path,
        meta: dict[str, Any],
        layout: ShardLayout = ONE_WRITER,
        *,
        resume: bool = False,
        overwrite: bool = False,
    ):
        self._permissions = PRIVATE if layout.private else 0o666
        self.dir, self.writer, self.shard_size = Path(directory), layout.writer, layout.size
        writer = layout.writer
        make_dir(self.dir, PRIVATE_DIRECTORY if layout.private else 0o777)
        self._lock = Lock(self.dir / f"writer-{writer[0]}of{writer[1]}.lock", hint=BUSY)
        self._path: Path | None = None  # the open shard, if any
        self._rows: list[int] = []  # response tokens of each record in the open shard
        self._file: IO[bytes] | None = None
        try:
            remove_leftovers(self.dir, shards.manifest_path(self.dir, writer).name)
            wanted = json.loads(json.dumps({"version": 1, "format": "jsonl", **meta}, default=str))
            self._check_existing(wanted, resume, overwrite)
            self._write_meta(wanted)
            self._open()
        except BaseException:
            self.close()
            raise

    def append(self, rows: list[Record]) -> None:
        """Add responses as whole lines, which are on disk when this returns. SpecctlError if the disk refuses."""
        if rows and self._manifest["complete"]:
            self._manifest["complete"] = False
            self._write_manifest()
        while rows:
            room = self.shard_size - len(self._rows)
            part, rows = rows[:room], rows[room:]
            self._write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in part).encode())
            self._rows += [len(row["response_ids"]) for row in part]
            self.done |= {row["id"]: len(row["response_ids"]) for row in part}
            if len(self._rows) >= self.shard_size:
                self._seal()

    def complete(self) -> None:
        """Seal the open shard at any size, and mark the manifest as complete."""
        if self._rows:
            self._seal()
        if not self._manifest["complete"]:
            self._manifest["complete"] = True
            self._write_manifest()

    @property
    def shards(self) -> int:
        """Number of this writer's shards, including the open one."""
        return len(self._manifest["shards"]) + bool(self._rows)

    def close(self) -> None:
        """Release the directory; an open shard stays unsealed, for `resume`."""
        if self._file is not None:
            self._file.close()
            self._file = None
        self._lock.release()

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_existing(self, meta: dict[str, Any], resume: bool, overwrite: bool) -> None:
        """Check that existing files may be continued or replaced, and remove files that are replaced."""
        there = check_free(self.dir, self.writer, resume=resume, overwrite=overwrite)
        for lock in _of_other_splits(shards.files(self.dir, "writer"), self.writer):
            Lock(lock, hint=BUSY).release()
        if overwrite:
            others = {*shards.files(self.dir, "shard")} - {*there}
            if others and (self.dir / META).exists():
                self._check(meta)  # these stay: refuse to replace anything if the settings differ
            for path in there:
                path.unlink()
            if not others:
                (self.dir / META).unlink(missing_ok=True)

    def _write_meta(self, meta: dict[str, Any]) -> None:
        """Write meta.json, or check that the existing one is the same."""
        path = self.dir / META
        wanted = json.dumps(meta, indent=2, ensure_ascii=False, sort_keys=True) + "\n"
        if not path.exists():
            aside = path.with_name(f".meta-{self.writer[0]}of{self.writer[1]}.json")
            atomic_write(aside, wanted)
            try:
                os.link(aside, path)  # fails if another job of the array was first; a rename would replace its file
            except FileExistsError:
                pass
            finally:
                aside.unlink()
        self._check(meta)

    def _check(self, meta: dict[str, Any]) -> None:
        """Raise DataError if meta.json differs from `meta`."""
        there = with_weights_digest(_meta(self.dir), meta)
        if "model" in meta and meta.get("target", {}).get("adapter_weights"):  # the name of the same adapter may change
            there["model"] = meta["model"]
        if different := differences(there, meta):
            again = f"specctl distill --output-dir {self.dir} --overwrite"
            raise DataError(
                f"{self.dir} was distilled with other settings: {'; '.join(different)}",
                hint=f"use those settings again, or replace the data: {again}",
            )

    def _open(self) -> None:
        """Find the responses that are done, repair the damage of a crash, and continue the open shard."""
        self._manifest = self._verified_manifest()
        sealed = {entry["file"] for entry in self._manifest["shards"]}
        unsealed = [path for path in self._own_shards() if path.name not in sealed]
        for path in unsealed:
            self._take_over_shard(path, last=path == unsealed[-1])
        relevant = [*self._own_shards(), *_of_other_splits(shards.files(self.dir, "shard"), self.writer)]
        self.done: dict[str, int] = {
            record["id"]: len(record["response_ids"]) for path in relevant for record in shards.records(path)
        }

    def _own_shards(self) -> list[Path]:
        return [path for path in shards.files(self.dir, "shard") if shards.writer_of(path) == self.writer]

    def _verified_manifest(self) -> dict[str, Any]:
        """This writer's manifest, with every checksum verified, without shards that were deleted."""
        manifest = shards.load_manifest(shards.manifest_path(self.dir, self.writer))
        kept = [entry for entry in manifest["shards"] if (self.dir / entry["file"]).exists()]
        for entry in kept:
            shards.verify(self.dir, entry)
        for entry in manifest["shards"]:
            if entry not in kept:
                progress.log(f"{self.dir / entry['file']} is missing: its responses will be generated again")
        return manifest | {"shards": kept, "complete": manifest["complete"] and kept == manifest["shards"]}

    def _take_over_shard(self, path: Path, last: bool) -> None:
        """Continue or seal a shard that no manifest lists; a torn last line is dropped."""
        drop_torn_line(path)
        rows = [len(record["response_ids"]) for record in shards.records(path)]
        if not rows:
            path.unlink()
            return
        self._path, self._rows = path, rows
        if not last or len(rows) >= self.shard_size:
            self._seal()

    def _write(self, data: bytes) -> None:
        if self._path is None:
            self._path = self._next_shard()
        if self._file is None:
            how: dict[str, Any] = {"buffering": 0, "follow": False, "permissions": self._permissions}
            self._file = regular_files.open_regular(self._path, "ab", **how)
        try:
            view = memoryview(data)
            while view:
                view = view[self._file.write(view) :]
            os.fsync(self._file.fileno())
        except OSError as error:
            raise SpecctlError(
                f"cannot write {self._path}: {error.strerror}",
                hint="finished responses are kept; free space and continue with --resume",
            ) from error

    def _next_shard(self) -> Path:
        last = max((int(path.stem.rsplit("-", 1)[1]) for path in self._own_shards()), default=-1)
        return self.dir / f"shard-{self.writer[0]}of{self.writer[1]}-{last + 1:05d}.jsonl"

    def _seal(self) -> None:
        """Finish the open shard: list its checksum in the manifest."""
        if self._file is not None:
            self._file.close()
            self._file = None
        assert self._path is not None
        counts = {"records": len(self._rows), "tokens": sum(self._rows)}
        self._manifest["shards"].append({"file": self._path.name, **counts, "sha256": sha256(self._path)})
        self._write_manifest()
        self._path, self._rows = None, []

    def _write_manifest(self) -> None:
        atomic_write(shards.manifest_path(self.dir, self.writer), json.dumps(self._manifest, indent=2) + "\n")


def _of_other_splits(paths: list[Path], writer: Writer) -> list[Path]:
    """Files of writers in a different split than this writer's i of n: an earlier run, divided otherwise."""
    return [path for path in paths if (other := shards.writer_of(path)) is not None and other[1] != writer[1]]


def _meta(directory: Path) -> dict[str, Any]:
    """The settings that all responses share, from meta.json. DataError if they cannot be read."""
    meta = shards.load_json(directory / META)
    if not isinstance(meta.get("target", {}), dict):
        raise DataError(f"{directory / META} is damaged: target is not an object", "distil again with --overwrite")
    return meta


def _readable(directory: str | Path) -> Path:
    directory = Path(directory)
    if next(directory.glob("shard-*.parquet"), None):
        raise DataError(
            f"{directory} has shards in Parquet, which are no longer read", hint="distil again as JSON lines"
        )
    if not exists(directory):
        raise DataError(
            f"no distilled data in {directory}", hint=f"create it with `specctl distill --output-dir {directory}`"
        )
    return directory


def _verified(directory: Path) -> Iterator[Path]:
    for path in shards.files(directory, "manifest"):
        for entry in shards.load_manifest(path)["shards"]:
            yield shards.verify(directory, entry)
    yield from _unsealed(directory)


def _unsealed(directory: Path) -> list[Path]:
    """Shards that no manifest lists, since they are being written."""
    entries = [entry for path in shards.files(directory, "manifest") for entry in shards.load_manifest(path)["shards"]]
    sealed = {entry["file"] for entry in entries}
    return [path for path in shards.files(directory, "shard") if path.name not in sealed]


def drop_torn_line(path: Path) -> None:
    """Truncate an incomplete last line, left by a kill."""
    with regular_files.open_regular(path, "rb+", follow=False) as file:
        whole = sum(len(line) for line in file if line.endswith(b"\n"))
        if whole < os.fstat(file.fileno()).st_size:
            progress.log(f"{path}: dropping the half-written last line")
            file.truncate(whole)


def differences(there: dict[str, Any], now: dict[str, Any], prefix: str = "") -> list[str]:
    """Texts like "key is OLD there and NEW now" for every leaf that differs."""
    found: list[str] = []
    for key in sorted(there.keys() | now.keys()):
        old, new = there.get(key), now.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            found += differences(old, new, f"{prefix}{key}.")
        elif old != new:
            found.append(f"{prefix}{key} was {json.dumps(old)} and is {json.dumps(new)} now")
    return found
