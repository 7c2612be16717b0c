"""Reading run directories: accepted and refused content, with messages."""

import json

import pytest

from specctl.errors import SpecctlError, UsageError
from specctl.reporting import collect


def test_runs_of_one_command_are_numbered(eval_run, train_run):
    found = collect.read([eval_run("a"), train_run("t"), eval_run("b")])
    assert [run.named("x") for run in found] == ["x #1", "x", "x #2"]


def test_a_run_named_twice_is_read_once(eval_run):
    run = eval_run("a")
    assert len(collect.read([run, run.parent / "." / "a"])) == 1


def test_the_newest_run_is_the_last_started(eval_run, tmp_path):
    """Names start with the command, and copies have new file times, so neither decides."""
    eval_run("runs/z", started="2026-01-01T10:00:00+0000")
    newest = eval_run("runs/a", started="2026-01-01T09:30:00-0100")
    (tmp_path / "runs" / "report-of-something").mkdir()
    assert collect.newest(tmp_path / "runs") == newest


def test_no_runs_are_an_error(tmp_path):
    with pytest.raises(UsageError, match="no run directory"):
        collect.newest(tmp_path / "runs")


@pytest.mark.parametrize("name", ["run.json", "result.json"])
@pytest.mark.parametrize("text", [b'{"rows": [', b"[1]", b"\xff\xfe", b'{"a": ' * 100_000])
def test_a_broken_document_is_named(eval_run, name, text):
    run = eval_run()
    (run / name).write_bytes(text)
    with pytest.raises(SpecctlError, match=name) as caught:
        collect.read([run])
    assert caught.value.exit_code == 1


def test_a_lone_surrogate_is_replaced(make_run):
    (run,) = collect.read([make_run("x", "eval", {"name": "a\ud800"})])
    assert run.result["name"].encode() == b"a?"


@pytest.mark.parametrize("name", ["nowhere", "file", "empty"])
def test_paths_that_are_not_run_directories_are_refused(tmp_path, name):
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=name):
        collect.read([tmp_path / name])


def test_a_directory_of_runs_gets_a_hint(eval_run, tmp_path):
    eval_run("runs/a")
    with pytest.raises(UsageError, match=r"specctl report .*runs/\*"):
        collect.read([tmp_path / "runs"])


def test_missing_files_are_noted(train_run):
    directory = train_run(finished=False)
    (directory / "recipe.resolved.yaml").unlink()
    (run,) = collect.read([directory])
    assert run.command == "train-drafter"
    assert [note.split(":")[0] for note in run.notes] == ["there is no recipe.resolved.yaml", "there is no result.json"]


def test_unreadable_lines_are_skipped_and_counted(train_run):
    directory = train_run()
    path = directory / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n\xff\xfe\n[1]\n{"step": 2}\n{"st')
    (run,) = collect.read([directory])
    assert list(run.lines("metrics.jsonl")) == [{"step": 1}, {"step": 2}]
    assert run.notes == ["metrics.jsonl: 3 lines cannot be read and are left out"]


@pytest.mark.parametrize("recipe", ["a: [", "- 1", "", "just text"])
def test_an_invalid_recipe_has_no_keys(eval_run, recipe):
    directory = eval_run()
    (directory / "recipe.resolved.yaml").write_text(recipe)
    (run,) = collect.read([directory])
    assert run.keys() == {}


def test_flat_joins_nested_keys():
    assert dict(collect.flat({"a": {"b": 1, "c": {}}, "d": [2]})) == {"a.b": 1, "a.c": {}, "d": [2]}
    assert json.loads(json.dumps(dict(collect.flat({})))) == {}
