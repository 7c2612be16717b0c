"""Files of a distilled directory: their names, the records of a shard, and the manifests with checksums.

    meta.json                      domain, target, sampling: everything that all responses have in common
    shard-<i>of<n>-<k>.jsonl       one response per line; a writer may still append to its last shard
    manifest-<i>of<n>.json         the finished shards of writer i of n, with their SHA-256
    filtered-<i>of<n>.jsonl        responses that writer i of n dropped or cut, by id, with the reason
    card.json                      the data card of the directory
    writer-<i>of<n>.lock           a writer is active (see `specctl/lock.py`)

Every writer has a separate manifest, so the jobs of an array share a directory without sharing a file.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specctl import regular_files
from specctl.errors import DataError
from specctl.runs import sha256

Record = dict[str, Any]
Writer = tuple[int, int]  # i of n

FIELDS: dict[str, type | tuple[type, ...]] = {
    "id": str,
    "prompt_id": str,
    "domain": str,
    "messages": list,
    "prompt_ids": list,
    "response_ids": list,
    "text": str,
    "temperature": (int, float),
    "seed": int,
    "stop": str,
    "target": str,
}
REPAIR = "delete that file and run `specctl distill --resume`: only its responses are generated again"
_NAME = re.compile(r"(?:shard|manifest|writer|filtered)-(\d+)of(\d+)(?:-\d+)?\.(?:jsonl|json|lock)")


def writer_of(path: Path) -> Writer | None:
    """The writer i of n that a file of the directory belongs to, or None for any other file."""
    match = _NAME.fullmatch(path.name)
    return (int(match[1]), int(match[2])) if match else None


def files(directory: Path, kind: str) -> list[Path]:
    """Files of one kind (shard, manifest, filtered, writer), in name order."""
    return sorted(path for path in directory.glob(f"{kind}-*") if writer_of(path))


def manifest_path(directory: Path, writer: Writer) -> Path:
    return directory / f"manifest-{writer[0]}of{writer[1]}.json"


def load_manifest(path: Path) -> dict[str, Any]:
    """Load {"complete": bool, "shards": [{"file", "records", "tokens", "sha256"}]}; an empty manifest if there is no
    file."""
    if not os.path.lexists(path):
        return {"version": 1, "complete": False, "shards": []}
    manifest = load_json(path)
    entries = manifest.get("shards")
    if not (isinstance(entries, list) and all(map(_is_entry, entries)) and type(manifest.get("complete")) is bool):
        raise DataError(f"{path} is damaged", hint="delete it and run `specctl distill --resume`: the shards are kept")
    # A manifest may only name shards in its own directory: no path leads elsewhere.
    if not all(_NAME.fullmatch(entry["file"]) for entry in entries):
        raise DataError(f"{path} names a file that is not a shard in its directory", REPAIR)
    return manifest


def _is_entry(entry: Any) -> bool:
    kinds = {"file": str, "records": int, "tokens": int, "sha256": str}
    if not isinstance(entry, dict) or not all(type(entry.get(name)) is kind for name, kind in kinds.items()):
        return False
    return all(0 <= entry[name] < 2**63 for name in ("records", "tokens"))


def load_json(path: Path) -> dict[str, Any]:
    """Load the JSON object in a file. DataError if there is none."""
    try:
        document = regular_files.read_json(path)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise DataError(f"{path} cannot be read: {why}", hint="restore it or distil again with --overwrite") from error
    if not isinstance(document, dict):
        raise DataError(f"{path} is damaged: not a JSON object", hint="restore it or distil again with --overwrite")
    return document


def verify(directory: Path, entry: dict[str, Any]) -> Path:
    """Path of the finished shard of a manifest entry, after its checksum was verified. DataError if it is missing or
    corrupted."""
    path = directory / entry["file"]
    if not path.is_file():
        raise DataError(f"{path} is missing", hint="run `specctl distill --resume` to generate its responses again")
    if sha256(path) != entry["sha256"]:
        raise DataError(f"{path} is corrupted: its SHA-256 differs from the manifest's", hint=REPAIR)
    return path


def records(path: Path) -> Iterator[Record]:
    """Records of one shard. A torn last line is left out: a writer crashed, or is writing now."""
    with regular_files.open_regular(path) as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                yield _checked(regular_files.parse_json(line))
            except ValueError as error:
                raise DataError(f"{path}:{number}: {error}", hint=REPAIR) from error


def _checked(record: Any) -> Record:
    if not isinstance(record, dict):
        raise ValueError(f"expected a JSON object, got {type(record).__name__}")
    for name, kind in FIELDS.items():
        if not isinstance(record.get(name), kind):
            raise ValueError(f"`{name}` is missing or has the wrong type")
    for name in ("prompt_ids", "response_ids"):
        if not all(type(token) is int and 0 <= token < 2**31 for token in record[name]):
            raise ValueError(f"`{name}` contains values that are not token ids")
    if not record["prompt_ids"]:
        raise ValueError("`prompt_ids` is empty")
    return record
