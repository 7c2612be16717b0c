"""Records of every decoded sequence of `eval`, `select` and `online`: records.parquet, and outputs.jsonl if requested.

All numbers and intervals of a result can be recomputed from the records. A run that was cut short resumes from them:
the file also holds the recipe, target and drafters under which they were made (its `stamp`).
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from specctl import regular_files
from specctl.decoding.records import Decoded
from specctl.decoding.target_text import with_weights_digest
from specctl.drafters import checkpoint
from specctl.drafters.names import parts_of
from specctl.errors import CheckpointError, SpecctlError, UsageError, one_line
from specctl.families import WEIGHTLESS_DRAFTERS
from specctl.measuring.lossless import Agreement
from specctl.recipe import EvalRecipe, LearningRecipe
from specctl.runs import atomic_write, to_json

RECORDS, OUTPUTS = "records.parquet", "outputs.jsonl"
STAMP = b"specctl.stamp"
UNSTAMPED_KEYS = {"resume", "overwrite", "output_dir", "save_outputs", "matrix", "metric", "log"}
UNSTAMPED_KEYS |= {"server", "publication", "traffic", "baseline_server", "concurrency", "mats"}  # servers: no records
"""Recipe keys that change what is shown of the records, or where they are written, but not what is measured."""

Question = tuple[str, str, int]
"""Domain, prompt id and seed. Answers to the same question can be compared and paired."""
Stamp = dict[str, dict[str, Any]]
"""Origin of records: recipe, target and drafters, each a dict by key."""

SCHEMA = pa.schema(
    [
        ("id", pa.string()),  # prompt id
        ("domain", pa.string()),
        ("drafter", pa.string()),  # or the name of a baseline
        ("seed", pa.int64()),
        ("temperature", pa.float64()),
        ("prompt_tokens", pa.int64()),
        ("output_ids", pa.list_(pa.int32())),
        ("tokens", pa.int64()),  # tokens of the decode phase
        ("target_passes", pa.int64()),
        ("accepted", pa.int64()),
        ("rejections", pa.int64()),
        ("drafted", pa.int64()),
        ("accepted_by_depth", pa.list_(pa.int64())),
        ("offered_by_depth", pa.list_(pa.int64())),
        ("prefill_s", pa.float64()),
        ("decode_s", pa.float64()),
        ("stop", pa.string()),
        ("replays", pa.int64()),  # CUDA-graph replays up to the end of this sequence, over the whole turn
        ("agreement", pa.string()),  # with plain decoding; null if the texts may differ
        ("session", pa.int64()),  # select: number of the session; online: number of the chunk; else null
    ]
)


@dataclass(frozen=True)
class Record:
    """Answer of one drafter or baseline to one prompt."""

    id: str
    domain: str
    drafter: str
    seed: int
    temperature: float
    decoded: Decoded
    agreement: Agreement | None = None
    session: int | None = None

    @property
    def question(self) -> Question:
        return self.domain, self.id, self.seed

    def row(self) -> dict[str, Any]:
        known = {name: getattr(self, name) for name in SCHEMA.names if hasattr(self, name)}
        counted = {name: getattr(self.decoded, name) for name in SCHEMA.names if hasattr(self.decoded, name)}
        lengths = {"prompt_tokens": len(self.decoded.prompt_ids), "tokens": self.decoded.decoded_tokens}
        return known | counted | lengths


def write_records(directory: Path, records: Sequence[Record], stamp: Stamp, name: str = RECORDS) -> Path:
    """Write records.parquet, or a part of it under another name, whole or not at all."""
    sink = pa.BufferOutputStream()
    schema = SCHEMA.with_metadata({STAMP: to_json(stamp)})
    rows = pa.Table.from_pylist([record.row() for record in records], schema=schema)
    pq.write_table(rows, sink, write_page_checksum=True)
    atomic_write(directory / name, sink.getvalue().to_pybytes())
    return directory / name


def _read_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of a file that `write_records` has written. A changed byte is an OSError."""
    regular_files.check(path)
    return pq.read_table(path, page_checksum_verification=True).to_pylist()


def chunk_file_name(number: int) -> str:
    return f"{number:08d}.parquet"


def chunk_files(directory: Path) -> list[Path]:
    return sorted(directory.glob("[0-9]" * 8 + ".parquet"))


def read_chunk_records(directory: Path) -> list[Record]:
    """Records from the chunk files in `directory`, in order, without prompt ids.

    Raises CheckpointError if a file cannot be read.
    """
    records = []
    for path in chunk_files(directory):
        try:
            rows = _read_rows(path)
            records += [replace(_record(row, []), agreement=row["agreement"], session=row["session"]) for row in rows]
        except (pa.ArrowException, OSError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path} is damaged: {one_line(error)}", "start with --overwrite") from error
    return records


def read_records(directory: Path, stamp: Stamp, prompts: Mapping[str, list[int]]) -> list[Record]:
    """Records that an earlier run in `directory` made of `prompts` (id → token ids); empty if there was no such run.

    Raises UsageError if the run was made under another `stamp`, SpecctlError if the file cannot be read.
    """
    check_stamp(directory, stamp)
    path = directory / RECORDS
    if not path.exists():
        return []
    try:
        rows = _read_rows(path)
        return [_record(row, prompts[row["id"]]) for row in rows if row["id"] in prompts]
    except (OSError, ValueError, LookupError, TypeError, pa.ArrowException) as error:
        raise _unusable(path, error) from error


def fingerprints(paths: Mapping[str, str]) -> dict[str, str]:
    """Fingerprint of each drafter with weights, to detect that its directory now holds another drafter."""
    weighty = {
        name: [part for part in parts_of(path) if part not in WEIGHTLESS_DRAFTERS] for name, path in paths.items()
    }
    return {name: "+".join(map(checkpoint.fingerprint, parts)) for name, parts in weighty.items() if parts}


def recipe_stamp(recipe: EvalRecipe | LearningRecipe) -> Stamp:
    """The part of a stamp that the recipe determines."""
    measured = {key: value for key, value in recipe.model_dump(mode="json").items() if key not in UNSTAMPED_KEYS}
    return {"recipe": dict(_flat(measured))}


def check_stamp(directory: Path, stamp: Stamp) -> None:
    """Compare the stamp of the records in `directory`, if there are any, with the parts of a stamp known by now.

    Raises UsageError if they differ, SpecctlError if the file cannot be read.
    """
    path = directory / RECORDS
    if not path.exists():
        return
    try:
        regular_files.check(path)
        kept = regular_files.parse_json((pq.read_schema(path).metadata or {})[STAMP])
        if not isinstance(kept, dict) or not all(isinstance(kept.get(part), dict) for part in stamp):
            raise ValueError("its origin is not readable")
    except (OSError, pa.ArrowException, KeyError, ValueError) as error:
        raise _unusable(path, error) from error
    check_same(kept, stamp, str(path))


def _unusable(path: Path, error: Exception) -> SpecctlError:
    why = getattr(error, "strerror", None) or one_line(error)
    return SpecctlError(f"cannot continue from {path}: {why}", hint="--overwrite starts over")


def check_same(kept: Stamp, stamp: Stamp, what: str) -> None:
    """Raise UsageError if a kept stamp differs from `stamp`. Only the parts in `stamp` are compared.

    Sections of the recipe that `stamp` lacks have no effect on the run: the stamp is of the command that had this one
    as a mode. `what`: name of the kept file, for the message.
    """
    kept = with_weights_digest(kept, stamp)
    sections = {key.split(".")[0] for key in stamp.get("recipe", {})}
    kept = kept | {"recipe": {key: value for key, value in kept["recipe"].items() if key.split(".")[0] in sections}}
    differing = [
        f"{key} was {kept[part].get(key)}, is {now.get(key)}"
        for part, now in stamp.items()
        for key in {**kept[part], **now}
        if kept[part].get(key) != now.get(key)
    ]
    if differing:
        hint = "resume with the recipe of that run; --overwrite or another --output-dir starts a new one"
        raise UsageError(f"{what} was measured with other settings: {'; '.join(differing)}", hint=hint)


def write_outputs(directory: Path, records: Sequence[Record], tokenizer: Any) -> Path:
    """Write outputs.jsonl: one answer per line, in order. `text` has no special tokens."""
    lines = (json.dumps(_output(record, tokenizer), ensure_ascii=False) for record in records)
    atomic_write(directory / OUTPUTS, "".join(line + "\n" for line in lines))
    return directory / OUTPUTS


def _record(row: dict[str, Any], prompt_ids: list[int]) -> Record:
    """Inverse of `Record.row`, given the prompt ids. The agreement is not restored, it can be computed again."""
    named = {field.name: row[field.name] for field in fields(Decoded) if field.name in row}
    decoded = Decoded(prompt_ids=prompt_ids, **named)
    return Record(row["id"], row["domain"], row["drafter"], row["seed"], row["temperature"], decoded)


def _flat(document: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in document.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _output(record: Record, tokenizer: Any) -> dict[str, Any]:
    decoded = record.decoded
    return {
        "id": record.id,
        "prompt_ids": decoded.prompt_ids,
        "output_ids": decoded.output_ids,
        "text": tokenizer.decode(decoded.output_ids, skip_special_tokens=True),
        "target_passes": decoded.target_passes,
        "accepted": decoded.accepted,
        "drafted": decoded.drafted,
        "drafter": record.drafter,
        "seed": record.seed,
    }
