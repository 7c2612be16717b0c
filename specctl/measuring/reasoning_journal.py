"""The files of a run of lookahead reasoning, besides its states.

chunks.jsonl    a line per mode and chunk
traces.jsonl    a line per mode and prompt: the text, and how it came about
pairs/          a file per chunk: the steps that the judge found to differ, as preference pairs with their contexts;
                datasets.load_dataset("RUN/pairs") reads them
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from specctl.measuring.reasoning_rows import rows
from specctl.measuring.records import Stamp, part_name
from specctl.measuring.resumable import CHUNKS, States
from specctl.reasoning.lookahead import ReasoningTrace
from specctl.reasoning.modes import ChunkRecord
from specctl.reasoning.preferences import PreferenceLesson, table
from specctl.reasoning.writer import WritingWork
from specctl.recipe import ReasonRecipe
from specctl.recipe.lookahead import ReasoningMode
from specctl.runs import Run, atomic_write

TRACES, PAIRS = "traces.jsonl", "pairs"
SHOWN = ("mode", "seed", "chunk", "step_acceptance", "loss", "margin", "learning_s")
"""Fields of a chunk that go to metrics.jsonl."""


@dataclass(frozen=True)
class ReasoningChunk:
    """A line of `chunks.jsonl`: one mode in one chunk, with the draft LM from before learning.

    Rates are those of `ModeRow`, without their intervals. `pairs`, `steps`, `loss`, `margin`, `refused` are those of
    its `PreferenceLesson`; `judge` counts its `Tally`. A run that was resumed asks again about pairs from before.
    """

    mode: ReasoningMode
    seed: int
    chunk: int
    prompts: int
    tokens: int
    step_acceptance: float | None
    accepted_per_target_step: float | None
    avg_len: float | None
    mat: float | None
    agreement: float | None
    seconds: float
    draft_s: float
    judge_s: float
    learning_s: float
    pairs: int
    steps: int
    loss: float | None
    margin: float | None
    refused: bool
    judge: dict[str, int]


SHARED = ("mode", "prompts", "tokens", "seconds", "draft_s", "judge_s", "learning_s")
RATES = ("step_acceptance", "accepted_per_target_step", "avg_len", "mat", "agreement")


def chunk_rows(record: ChunkRecord, seed: int, judged: Mapping[str, dict[str, int]]) -> list[ReasoningChunk]:
    """A row per mode; `judged`: what became of the chunk's pairs, by mode."""
    found = []
    for row in rows([record]):
        facts = {name: getattr(row, name) for name in SHARED} | {name: getattr(row, name).value for name in RATES}
        lesson = record.lessons.get(row.mode, PreferenceLesson(0))
        facts |= asdict(lesson) | {"judge": judged.get(row.mode, {})}
        found.append(ReasoningChunk(seed=seed, chunk=record.chunk, **facts))
    return found


class ReasoningJournal(States):
    """States, chunks, traces and pairs."""

    def __init__(self, recipe: ReasonRecipe, run: Run, stamp: Stamp):
        super().__init__(recipe, run, stamp, PAIRS, SHOWN, (CHUNKS, TRACES))
        self._longest = recipe.reasoning.learning.max_length

    def keep(self, record: ChunkRecord, rows: Sequence[ReasoningChunk]) -> None:
        """Write down a chunk, before `advance`."""
        seed = rows[0].seed
        with self.writing():
            self._keep_pairs(record, seed)
            self.append(TRACES, (_line(mode, seed, one) for mode, traces in record.traces.items() for one in traces))
            self.write_chunk(rows)

    def _keep_pairs(self, record: ChunkRecord, seed: int) -> None:
        """Write the pairs of steps of every mode that is judged; no file where nothing differed."""
        tables = []
        for mode, traces in record.traces.items():
            found = [one for trace in traces for one in trace.mismatches]
            if found:
                columns = table(found, self._longest).to_dict()
                count = len(columns["chosen"])
                named = {"mode": [mode] * count, "seed": [seed] * count, "chunk": [record.chunk] * count}
                tables.append(pa.table(named | columns))
        if tables:
            sink = pa.BufferOutputStream()
            pq.write_table(pa.concat_tables(tables), sink)
            atomic_write(self.parts / part_name(self.number), sink.getvalue().to_pybytes())

    def rows(self) -> list[ReasoningChunk]:
        """All chunks, in order."""
        return [ReasoningChunk(**row) for row in self.read(CHUNKS)]

    def traces(self) -> dict[tuple[ReasoningMode, int], list[ReasoningTrace]]:
        """Traces by mode and seed, in the order of the prompts; without mismatches, which are in `pairs`."""
        names = {field.name for field in fields(ReasoningTrace)} - {"mismatches"}
        found: dict[tuple[ReasoningMode, int], list[ReasoningTrace]] = {}
        for row in self.read(TRACES):
            facts = {name: row[name] for name in names}
            works = {name: WritingWork(**row[name]) for name in ("target", "draft")}
            found.setdefault((row["mode"], row["seed"]), []).append(ReasoningTrace(**facts | works))
        return found


def _line(mode: str, seed: int, trace: ReasoningTrace) -> dict[str, Any]:
    facts = asdict(replace(trace, mismatches=[]))
    del facts["mismatches"]
    return {"mode": mode, "seed": seed, **facts}
