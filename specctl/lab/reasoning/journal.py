"""Files of a lookahead-reasoning run, in addition to the checkpoints of `ResumableRun`.

chunks.jsonl    one line per mode and chunk
traces.jsonl    one line per mode and prompt: the text, and counts of its steps and passes
pairs/          one file per chunk: the steps that the judge ruled to differ, as preference pairs with their contexts;
                datasets.load_dataset("RUN/pairs") reads them
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from specctl.lab.reason.recipe import ReasonRecipe
from specctl.lab.reasoning.lookahead import ReasoningTrace
from specctl.lab.reasoning.modes import ChunkRecord
from specctl.lab.reasoning.options import ReasoningMode
from specctl.lab.reasoning.preferences import PreferenceLesson, pairs_dataset
from specctl.lab.reasoning.rows import row
from specctl.lab.reasoning.writer import WritingWork
from specctl.measuring.records import Stamp, chunk_file_name
from specctl.measuring.resumable_run import CHUNKS, ResumableRun
from specctl.runs import Run, atomic_write

TRACES, PAIRS = "traces.jsonl", "pairs"
SHOWN = ("mode", "seed", "chunk", "step_acceptance", "loss", "margin", "learning_s")
"""Fields of a chunk that are copied to metrics.jsonl."""


@dataclass(frozen=True)
class ReasoningChunk:
    """A line of `chunks.jsonl`: one mode in one chunk, with the draft LM in the state before learning from that chunk.

    Rates are defined as in `ModeRow`, without intervals. `pairs`, `steps`, `loss`, `margin` and `refused` come from its
    `PreferenceLesson`, `judge` holds the counts of `JudgeTally`. The judge's cache is not saved: a resumed run asks
    again about earlier pairs, so its counts can be higher.
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
    """Rows of a chunk, one per mode. `judged`: counts of the judge for the chunk, by mode."""
    found = []
    for mode, traces in record.traces.items():
        rated = row(mode, traces, record.traces.get("target"), record.learning_s.get(mode, 0.0))
        facts = {name: getattr(rated, name) for name in SHARED} | {name: getattr(rated, name).value for name in RATES}
        lesson = record.lessons.get(mode, PreferenceLesson(0))
        facts |= asdict(lesson) | {"judge": judged.get(mode, {})}
        found.append(ReasoningChunk(seed=seed, chunk=record.chunk, **facts))
    return found


class ReasoningJournal(ResumableRun):
    """States of a lookahead-reasoning run, with its chunks, traces and pairs."""

    recipe: ReasonRecipe

    def __init__(self, recipe: ReasonRecipe, run: Run, stamp: Stamp):
        super().__init__(recipe, run, stamp, PAIRS, SHOWN, (CHUNKS, TRACES))
        self._longest = recipe.reasoning.learning.max_length

    def keep(self, record: ChunkRecord, rows: Sequence[ReasoningChunk]) -> None:
        """Write the files of a chunk; call it before `advance`."""
        seed = rows[0].seed
        with self.writing():
            self._keep_pairs(record, seed)
            self.append(TRACES, (_line(mode, seed, one) for mode, traces in record.traces.items() for one in traces))
            self.write_chunk(rows)

    def _keep_pairs(self, record: ChunkRecord, seed: int) -> None:
        """Write the differing step pairs of every judged mode; without differences there is no file."""
        tables = []
        for mode, traces in record.traces.items():
            found = [one for trace in traces for one in trace.mismatches]
            if found:
                columns = pairs_dataset(found, self._longest).to_dict()
                count = len(columns["chosen"])
                named = {"mode": [mode] * count, "seed": [seed] * count, "chunk": [record.chunk] * count}
                tables.append(pa.table(named | columns))
        if tables:
            sink = pa.BufferOutputStream()
            pq.write_table(pa.concat_tables(tables), sink)
            atomic_write(self.chunk_dir / chunk_file_name(self.number), sink.getvalue().to_pybytes())

    def rows(self) -> list[ReasoningChunk]:
        return [ReasoningChunk(**row) for row in self.read(CHUNKS)]

    def traces(self) -> dict[tuple[ReasoningMode, int], list[ReasoningTrace]]:
        """Traces by mode and seed, in the order of the prompts. Mismatches are not included, they are in `pairs`."""
        names = {field.name for field in fields(ReasoningTrace)} - {"mismatches"}
        found: dict[tuple[ReasoningMode, int], list[ReasoningTrace]] = {}
        for line in self.read(TRACES):
            facts = {name: line[name] for name in names}
            works = {name: WritingWork(**line[name]) for name in ("target", "draft")}
            found.setdefault((line["mode"], line["seed"]), []).append(ReasoningTrace(**facts | works))
        return found


def _line(mode: str, seed: int, trace: ReasoningTrace) -> dict[str, Any]:
    facts = asdict(replace(trace, mismatches=[]))
    del facts["mismatches"]
    return {"mode": mode, "seed": seed, **facts}
