"""Shapes of the files that runs keep: one reader for each kind of file."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import yaml
from safetensors import safe_open

from tests.golden.shapes import MACHINE, Shape, merged, placed, shape_of


def shape_of_file(path: Path) -> Shape | None:
    """The shape of a file's content. A picture, a page and a tokenizer have none: the keys of a tokenizer are
    tokens."""
    read = None if path.name == "tokenizer.json" else READERS.get(path.suffix)
    return None if read is None else read(path)


def _json(path: Path) -> Shape:
    return shape_of(json.loads(path.read_text()))


def _lines(path: Path) -> Shape:
    return merged(shape_of(json.loads(line)) for line in path.read_text().splitlines())


def _yaml(path: Path) -> Shape:
    return shape_of(yaml.safe_load(path.read_text()))


def _columns(path: Path) -> Shape:
    """The columns, without the columns that a busy machine adds."""
    with open(path, newline="") as file:
        names = next(csv.reader(file), [])
    return shape_of({name: "" for name in names if name not in MACHINE}) if names else {}


def _table(path: Path) -> Shape:
    schema = pq.read_schema(path)
    columns = {f"column {field.name}": str(field.type) for field in schema}
    return columns | shape_of({"metadata": _decoded(schema.metadata)})


def _tensors(path: Path) -> Shape:
    with safe_open(path, "pt") as file:
        names = file.keys()
        kinds = merged({placed(name): file.get_slice(name).get_dtype()} for name in names)
        return kinds | shape_of({"metadata": file.metadata()})


def _decoded(metadata: dict[bytes, bytes] | None) -> dict[str, Any]:
    """Metadata of a table, with JSON values parsed."""
    found: dict[str, Any] = {}
    for key, value in (metadata or {}).items():
        try:
            found[key.decode()] = json.loads(value)
        except ValueError:
            found[key.decode()] = value.decode(errors="replace")
    return found


READERS: dict[str, Callable[[Path], Shape]] = {
    ".json": _json,
    ".jsonl": _lines,
    ".yaml": _yaml,
    ".csv": _columns,
    ".parquet": _table,
    ".safetensors": _tensors,
}
