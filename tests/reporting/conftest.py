"""Small run directories with the files that commands write."""

import dataclasses
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from specctl.measuring.drafter_rows import Row
from specctl.measuring.records import SCHEMA
from specctl.training.outcome import TrainResult


def filled(kind, **given):
    """Return a library dataclass as a document, with None for fields not given, so that a renamed field fails."""
    return dataclasses.asdict(kind(**{field.name: given.get(field.name) for field in dataclasses.fields(kind)}))


def eval_row(drafter, domain="sql", mat=2.0, **more):
    return filled(Row, drafter=drafter, domain=domain, prompts=4, mat=mat, mat_interval=(mat - 0.5, mat + 0.5), **more)


def record(drafter, accepted, offered):
    empty = {field.name: None for field in SCHEMA}
    return {**empty, "drafter": drafter, "accepted_by_depth": accepted, "offered_by_depth": offered}


@pytest.fixture
def make_run(tmp_path):
    """Return `make(name, command, result, …)`, which writes a run. Without a result, result.json is omitted."""

    def make(name, command, result, *, started="2026-01-01T00:00:00+0000", recipe=None, info=None, **files):
        directory = tmp_path / name
        directory.mkdir(parents=True)
        about = {
            "command": command,
            "argv": ["/bin/specctl", command, "--domain", "a b"],
            "started": started,
            "seed": 7,
        }
        about |= {"versions": {"specctl": "0.1"}, "hardware": {"cpu": "Z80", "cuda": []}, "git": "abc123"}
        (directory / "run.json").write_text(json.dumps(about | (info or {})))
        lines = [f"command: {command}", *(f"{key}: {value}" for key, value in (recipe or {}).items())]
        (directory / "recipe.resolved.yaml").write_text("\n".join(lines) + "\n")
        if result is not None:
            common = {"schema_version": 1, "command": command, "run_dir": name, "target": "builtin", "seed": 7}
            (directory / "result.json").write_text(json.dumps(common | {"elapsed_s": 61.0} | result))
        for stem, rows in files.items():
            (directory / f"{stem}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return directory

    return make


@pytest.fixture
def eval_run(make_run):
    """Return `make(name, …)`, which writes an eval run of a drafter and plain decoding, with records."""

    def make(name="e", drafter="sql-head", mat=2.0, **more):
        rows = [eval_row(drafter, mat=mat, speedup=1.5, speedup_interval=(1.2, 1.9)), eval_row("vanilla", mat=1.0)]
        lossless = {"sequences": 4, "mismatches": 0, "ties": 1}
        directory = make_run(name, "eval", {"rows": rows, "lossless": lossless, "matrix": None}, **more)
        records = [record(drafter, [20, 3], [30, 20]), record(drafter, [10, 0, 5], [10, 0, 5])]
        pq.write_table(pa.Table.from_pylist(records, schema=SCHEMA), directory / "records.parquet")
        return directory

    return make


@pytest.fixture
def train_run(make_run):
    def make(name="t", finished=True, **more):
        result = filled(
            TrainResult, arch="eagle3", domain="sql", steps=40, final_loss=2.0, mat=2.5, drafter="drafters/sql-eagle3"
        )
        lines = [{"step": step, "loss": 3.0 - step / 40} for step in range(40)]
        lines += [{"step": step, "mat": 2 + step / 80, "acceptance_by_position": [0.8, 0.6]} for step in (20, 40)]
        return make_run(name, "train-drafter", result if finished else None, metrics=lines, **more)

    return make


@pytest.fixture
def select_run(make_run):
    def make(name="s", weights=True, **more):
        arms = ["sql-head", "lookup"]
        rounds = [
            {"domain": "sql" if n < 6 else "math", "round": n, "arm": arms[n % 2], "regret": 0.5}
            | {"weights": [0.75, 0.25] if weights else None}
            for n in range(10)
        ]
        result = {
            **{"algo": "hedge", "arms": arms, "queries": 2, "rounds": 10, "mat": 2.5, "oracle_mat": 3.0},
            **{"reset": "query", "seeds": 3, "intervals_over": "3 seeds × 2 queries", "table_sha256": "ab12"},
            "per_domain": {"sql": {"mat": 2.0}},
            "rewards": [{"arm": "lookup", "mean": 0.5, "std": 0.1, "n": 5}],
            "policies": [{"algo": "hedge", "mat": 2.5, "mat_interval": [2.0, 3.0]}, {"algo": "ucb", "mat": 2.0}],
            "pool_size": [{"arms": 4, "algo": "hedge", "mat": 2.5}, {"arms": 2, "algo": "hedge", "mat": 2.0}],
            "curves": {"hedge": {"loss_regret": [0.1, 0.2], "stopping_regret": [1, 1], "best_arm": [0.0, 0.5]}},
        }
        return make_run(name, "select", result, rounds=rounds, **more)

    return make
