"""What `eval` keeps of every sequence: records.parquet always, outputs.jsonl when asked for.

Every number and interval of the result can be recomputed from the records.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from specctl.decoding.loop import Decoded
from specctl.evaluation.lossless import Agreement
from specctl.runs import atomic_write

RECORDS, OUTPUTS = "records.parquet", "outputs.jsonl"

SCHEMA = pa.schema(
    [
        ("id", pa.string()),  # of the prompt
        ("domain", pa.string()),
        ("drafter", pa.string()),  # or the name of a baseline
        ("seed", pa.int64()),
        ("temperature", pa.float64()),
        ("prompt_tokens", pa.int64()),
        ("tokens", pa.int64()),  # of the decode phase
        ("target_passes", pa.int64()),
        ("accepted", pa.int64()),
        ("rejections", pa.int64()),
        ("drafted", pa.int64()),
        ("accepted_by_depth", pa.list_(pa.int64())),
        ("offered_by_depth", pa.list_(pa.int64())),
        ("prefill_s", pa.float64()),
        ("decode_s", pa.float64()),
        ("stop", pa.string()),
        ("agreement", pa.string()),  # with plain decoding; null where texts may differ
    ]
)


@dataclass(frozen=True)
class Record:
    """One prompt answered by one drafter or baseline."""

    id: str
    domain: str
    drafter: str
    seed: int
    temperature: float
    decoded: Decoded
    agreement: Agreement | None = None

    @property
    def question(self) -> tuple[str, str, int]:
        """What answers to the same question have in common: they may be compared and paired."""
        return self.domain, self.id, self.seed

    def row(self) -> dict[str, Any]:
        known = {name: getattr(self, name) for name in SCHEMA.names if hasattr(self, name)}
        counted = {name: getattr(self.decoded, name) for name in SCHEMA.names if hasattr(self.decoded, name)}
        lengths = {"prompt_tokens": len(self.decoded.prompt_ids), "tokens": self.decoded.decoded_tokens}
        return known | counted | lengths


def agreeing(record: Record, agreement: Agreement) -> Record:
    return dataclasses.replace(record, agreement=agreement)


def write_records(directory: Path, records: Sequence[Record]) -> Path:
    """Write records.parquet whole or not at all."""
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist([record.row() for record in records], schema=SCHEMA), sink)
    atomic_write(directory / RECORDS, sink.getvalue().to_pybytes())
    return directory / RECORDS


def write_outputs(directory: Path, records: Sequence[Record], tokenizer: Any) -> Path:
    """Write outputs.jsonl: one answer a line, in order; `text` is without special tokens."""
    lines = (json.dumps(_output(record, tokenizer), ensure_ascii=False) for record in records)
    atomic_write(directory / OUTPUTS, "".join(line + "\n" for line in lines))
    return directory / OUTPUTS


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
