"""Tables as parquet files: one query per row, its arrays flattened; names, costs and origin in the file's metadata.

Everything a reader uses is under one digest. It detects a file that was cut short, altered or made by another program.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError

from specctl import regular_files
from specctl.decoding.prompt_features import PromptClusters
from specctl.decoding.target_text import with_weights_digest
from specctl.distillation import store
from specctl.errors import CheckpointError, near_path
from specctl.lab.recorded.trace import Overheads, Table, Trace
from specctl.runs import atomic_write, sha256

VERSION = 5
AGAIN = "record it again with --overwrite"
RECORD = "record one: specctl record"
MAGIC = b"PAR1"  # first bytes of every Parquet file
MOST_S = 1e9  # largest plausible cost in seconds
HEADER, DIGEST = b"specctl.table", b"specctl.sha256"
ARRAYS: dict[str, tuple[type[np.generic], int]] = {
    "accepted": (np.int16, 2),
    "drafted": (np.int16, 2),
    "gamma": (np.float32, 3),
    "overlap": (np.float32, 3),
    "hit": (np.uint8, 3),
    "seconds": (np.float64, 1),
    "nodes": (np.int64, 1),
}
"""Type and number of axes of each array; the axes are arms, tokens and depths."""
SCHEMA = pa.schema(
    [
        ("place", pa.int64()),
        ("query", pa.string()),
        ("domain", pa.string()),
        ("session", pa.int64()),
        ("prompt", pa.int64()),
        ("tokens", pa.int64()),
        ("ended", pa.bool_()),
        *((name, pa.list_(pa.from_numpy_dtype(kind))) for name, (kind, _) in ARRAYS.items()),
        ("context", pa.list_(pa.float64())),
    ]
)


@dataclass(frozen=True)
class Header:
    """Facts about all rows of a file.

    Attributes:
        arms, depth: as in `Table`.
        stamp: origin of the table: target, drafters, sampling, stream, …
        costs: of a whole table: `draft_s`, `step_s`, `reach` and, if they were timed, the `read` and `score` of
            `Overheads`. A piece has none.
        version: of the file.
        trained_on: `PromptClusters.pairs` of each arm.
    """

    arms: list[str]
    depth: int
    stamp: dict[str, Any]
    costs: dict[str, list[Any]] = field(default_factory=dict)
    version: int = VERSION
    trained_on: list[list[tuple[list[float], float]]] = field(default_factory=list)


_HEADER = TypeAdapter(Header)


@dataclass(frozen=True)
class Recorded:
    """A trace at its place in the stream, and the cost of each arm's drafts for it, all positions together.

    Attributes:
        seconds: [N] of proposing.
        nodes: [N] draft tokens.
    """

    place: int
    trace: Trace
    seconds: NDArray[np.float64]
    nodes: NDArray[np.int64]

    def array(self, name: str) -> NDArray[Any]:
        return getattr(self if name in ("seconds", "nodes") else self.trace, name)


def write(path: Path, header: Header, rows: list[Recorded]) -> None:
    """Write a table, or a piece of a table, whole or not at all."""
    facts = [name for name in SCHEMA.names if name != "place" and name not in ARRAYS]
    plain = {"place": [row.place for row in rows]} | {
        name: [getattr(row.trace, name) for row in rows] for name in facts
    }
    flat = {name: [row.array(name).ravel() for row in rows] for name in ARRAYS}
    text = json.dumps(asdict(header), sort_keys=True)
    metadata = {HEADER: text, DIGEST: _digest(text, rows)}
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({**plain, **flat}, schema=SCHEMA.with_metadata(metadata)), sink, compression="zstd")
    atomic_write(path, sink.getvalue().to_pybytes())


def read(path: Path) -> tuple[Header, list[Recorded]]:
    """Read a file that `write` has written. Raises CheckpointError if it is another kind of file, or damaged."""
    if not path.is_file():
        raise CheckpointError(f"table {path} {regular_files.fault(path)}", near_path(path) + RECORD)
    try:
        regular_files.check(path)
        with regular_files.open_regular(path) as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise CheckpointError(f"{path} is not a table of specctl", hint=RECORD)
        with pq.ParquetFile(path) as parquet:
            content = parquet.read()
        metadata = content.schema.metadata or {}
        text = metadata[HEADER].decode()
        header = regular_files.parse_json(text)
        version = header["version"]
    except KeyError as error:
        raise CheckpointError(f"{path} is not a table of specctl", hint=RECORD) from error
    except (OSError, ValueError, TypeError, AttributeError, MemoryError, pa.ArrowException) as error:
        raise _damaged(path, str(error).splitlines()[0]) from error
    if version != VERSION:
        raise CheckpointError(
            f"{path} has table version {version}, but this specctl uses version {VERSION}", hint=AGAIN
        )
    try:
        _HEADER.validate_json(text, strict=True)
        found = Header(**header)
        rows = [_row(found, row) for row in _unpacked(content)]
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise _damaged(path, f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    except (KeyError, TypeError, ValueError, AttributeError, pa.ArrowException) as error:
        raise _damaged(path, str(error)) from error
    if _digest(text, rows).encode() != metadata.get(DIGEST):
        raise _damaged(path, "its contents have changed since it was written")
    return found, rows


def _damaged(path: Path, why: str) -> CheckpointError:
    return CheckpointError(f"{path} is damaged: {why}", hint=AGAIN)


def _unpacked(content: pa.Table) -> Iterable[dict[str, Any]]:
    """Rows as plain values and flat numpy arrays."""
    plain = {name: content[name].to_pylist() for name in SCHEMA.names if name not in ARRAYS}
    flat = {name: [one.values.to_numpy(zero_copy_only=False) for one in content[name]] for name in ARRAYS}
    columns = plain | flat
    return ({name: column[i] for name, column in columns.items()} for i in range(content.num_rows))


def _row(header: Header, row: dict[str, Any]) -> Recorded:
    whole = (len(header.arms), row["tokens"], header.depth)
    arrays: dict[str, Any] = {
        name: np.asarray(row[name], dtype=kind).reshape(whole[:axes]) for name, (kind, axes) in ARRAYS.items()
    }
    if arrays["accepted"].min(initial=0) < 0:
        raise ValueError("a negative number of accepted tokens")
    seconds, nodes = arrays.pop("seconds"), arrays.pop("nodes")
    fields = {name: row[name] for name in ("query", "domain", "ended", "session", "prompt")}
    context = None if row["context"] is None else np.asarray(row["context"])
    trace = Trace(**fields, **arrays, context=context)
    return Recorded(row["place"], trace, seconds, nodes)


def _digest(text: str, rows: list[Recorded]) -> str:
    found = hashlib.sha256(text.encode())
    for row in rows:
        trace = row.trace
        facts = (row.place, trace.query, trace.domain, trace.tokens, trace.ended, trace.session, trace.prompt)
        found.update(repr(facts).encode())
        if trace.context is not None:
            found.update(trace.context.tobytes())
        for name, (kind, _) in ARRAYS.items():
            found.update(np.ascontiguousarray(row.array(name), dtype=kind).tobytes())
    return found.hexdigest()


def table_of(header: Header, rows: list[Recorded]) -> Table:
    """The table of these rows. Raises CheckpointError if the header's costs do not fit its arms."""
    costs = _costs(header)
    overheads = Overheads(costs["read"], costs["score"], costs["reach"]) if "read" in costs else None
    sampling = header.stamp.get("sampling")
    try:
        trained_on = [PromptClusters.of(pairs) for pairs in header.trained_on]
    except ValueError as error:
        raise CheckpointError("the table has kinds of prompts of different sizes (trained_on)", hint=AGAIN) from error
    return Table(
        arms=header.arms,
        depth=header.depth,
        traces=[row.trace for row in rows],
        draft_s=costs["draft_s"],
        step_s=costs["step_s"],
        reach=costs["reach"],
        overheads=overheads,
        trained_on=trained_on,
        greedy=isinstance(sampling, dict) and sampling.get("temperature") == 0,
    )


def _costs(header: Header) -> dict[str, NDArray[Any]]:
    """The header's costs as arrays. Raises CheckpointError for a cost that is missing, or is no duration of every
    arm."""
    count = len(header.arms)
    shapes: dict[str, tuple[int, ...]] = {"draft_s": (count,), "step_s": (count + 1,), "reach": (count,)}
    if "read" in header.costs:
        shapes |= {"read": (count, 2), "score": (count, 2, 2)}
    costs: dict[str, NDArray[Any]] = {}
    for name, shape in shapes.items():
        if name not in header.costs:
            raise CheckpointError(f"the table has no costs {name}", hint=AGAIN)
        try:
            values = np.array(header.costs[name], np.float64)
        except (ValueError, TypeError, OverflowError):
            raise CheckpointError(f"the table's costs {name} are not numbers", hint=AGAIN) from None
        if values.shape != shape:
            raise CheckpointError(f"the table's costs {name} do not fit its {count} arms", hint=AGAIN)
        most = header.depth if name == "reach" else MOST_S
        if not ((values >= 0) & (values <= most)).all() or (name == "step_s" and not values.all()):
            raise CheckpointError(f"the table's costs {name} are not in 0 … {most:g}", hint=AGAIN)
        costs[name] = values.astype(np.int64) if name == "reach" else values
    return costs


def read_table(path: Path, stamp: Mapping[str, Any] | None = None) -> Table:
    """Read the table in a file. `stamp`: its required origin, such as a pool's `drafters`, its `arms`, or both.

    Raises CheckpointError if it cannot be read or has another origin.
    """
    header, rows = read(path)
    if not header.costs:
        raise CheckpointError(f"{path} is a piece of an unfinished table", hint="finish the recording with --resume")
    kept = with_weights_digest({**header.stamp, "arms": header.arms, "depth": header.depth}, stamp or {})
    differing = differences(kept, stamp or {})
    if differing:
        raise CheckpointError(
            f"{path} was recorded with different settings: {'; '.join(differing)}", hint="record another table"
        )
    return replace(table_of(header, rows), digest=sha256(path))


def differences(kept: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Differences of `kept` from `now`, in the parts that `now` has."""
    return store.differences({key: kept.get(key) for key in now}, json.loads(json.dumps(now)))
