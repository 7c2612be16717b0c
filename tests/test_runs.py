"""Run directories and whole files."""

import json

import pytest

from specctl import runs
from specctl.errors import SpecctlError
from specctl.recipe import EvalRecipe


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "f"
    runs.atomic_write(path, "old")
    monkeypatch.setattr(runs.os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        runs.atomic_write(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path], "no temporary file stays"


def test_a_run_is_recorded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = runs.Run.create("eval", EvalRecipe())
    assert run.dir.parent.name == "runs"
    run.annotate(target={"name": "builtin"})
    run.metrics(step=1, loss=float("inf"))
    run.metrics(step=2)
    document = run.result({"rows": []})
    about = json.loads((run.dir / "run.json").read_text())
    assert {"argv", "versions", "git", "hardware", "seed", "target"} <= set(about)
    lines = [json.loads(line) for line in (run.dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert lines[0]["loss"] is None
    assert json.loads((run.dir / "result.json").read_text()) == document
    assert runs.Run.create("eval", EvalRecipe()).dir != run.dir, "runs of one second differ"


def test_a_directory_that_is_used_again_forgets_the_old_metrics(tmp_path):
    run = runs.Run.create("eval", EvalRecipe(), tmp_path / "out")
    run.metrics(step=1)
    runs.Run.create("eval", EvalRecipe(), tmp_path / "out")
    assert not (tmp_path / "out/metrics.jsonl").exists()


def test_a_directory_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SpecctlError, match="cannot create"):
        runs.Run.create("eval", EvalRecipe(), tmp_path / "file/out")
