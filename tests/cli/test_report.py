"""`specctl report` on the command line: streams, defaults, exit codes."""

import json
from pathlib import Path

import pytest


@pytest.fixture
def run(tmp_path):
    """Return `make(name)`, which writes ./runs/name, a finished distillation."""

    def make(name, started="2026-01-01T00:00:00+0000"):
        directory = tmp_path / "runs" / name
        directory.mkdir(parents=True)
        (directory / "run.json").write_text(json.dumps({"command": "distill", "started": started, "argv": ["specctl"]}))
        (directory / "result.json").write_text(json.dumps({"command": "distill", "responses": 3}))
        return f"runs/{name}"

    return make


def test_without_arguments_the_newest_run_is_reported(specctl, run):
    run("b", "2026-01-01T00:00:00+0000")
    run("a", "2026-01-02T00:00:00+0000")
    done = specctl.ok("report")
    assert ["of", "runs/a"] in [line.split() for line in done.out.splitlines()]
    assert Path("runs/a/report/report.html").is_file()


def test_json_prints_one_document(specctl, run):
    done = specctl("report", run("a"), "--csv", "--json")
    assert done.json == {
        "report": "runs/a/report/report.html",
        "runs": ["runs/a"],
        "pictures": [],
        "tables": ["runs/a/report/distill-result.csv"],
        "notes": ["runs/a: there is no recipe.resolved.yaml"],
        "command": "report",
        "schema_version": 1,
    }
    assert all(Path(path).is_file() for path in (done.json["report"], *done.json["tables"]))


def test_quiet_prints_only_the_path(specctl, run):
    assert specctl("report", run("a"), "-q").out == "runs/a/report/report.html\n"


def test_several_runs_share_a_new_directory(specctl, run):
    document = specctl("report", run("a"), run("b"), "--json").json
    assert document["report"].startswith("runs/report-")
    assert document["runs"] == ["runs/a", "runs/b"]
    assert specctl("report", "--json").json["runs"] == ["runs/b"], "a report is no run"


def test_a_report_at_home(specctl, run, monkeypatch, tmp_path):
    """No shell expands `--output-dir=~/x`."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert specctl("report", run("a"), "--output-dir=~/x", "-q").out == f"{tmp_path}/x/report.html\n"


def test_a_report_can_be_repeated(specctl, run):
    first, second = (specctl("report", run_dir, "--json") for run_dir in (run("a"), "runs/a"))
    assert first.json == second.json


@pytest.mark.parametrize(
    ("argv", "code", "says"),
    [
        (["nowhere"], 2, "nowhere is not a directory"),
        (["runs/empty"], 2, "is not a run directory"),
        (["runs"], 2, "specctl report runs/*"),
        (["runs/broken"], 1, "runs/broken/result.json is not JSON"),
        (["runs/a", "--output-dir", "file"], 2, "--output-dir"),
        (["runs/a", "--output-dir", "file/below"], 2, "--output-dir"),
        (["runs/a", "--output-dir="], 2, "--output-dir: is empty"),
    ],
)
def test_invalid_arguments_give_one_error_line(specctl, run, argv, code, says):
    run("a"), run("broken")
    Path("runs/empty").mkdir()
    Path("runs/broken/result.json").write_text('{"rows": ')
    Path("file").write_text("x")
    done = specctl("report", *argv, "--json")
    assert done.code == code, done.err
    assert says in done.json["error"]["message"] + str(done.json["error"]["hint"])
    assert "Traceback" not in done.err


@pytest.mark.parametrize("seconds", ["NaN", "1e999"])
def test_a_duration_without_a_value_is_left_out(specctl, run, seconds):
    Path(run("a"), "result.json").write_text(f'{{"command": "distill", "elapsed_s": {seconds}}}')
    specctl.ok("report", "runs/a")


def test_without_runs_it_is_an_error(specctl):
    done = specctl("report")
    assert (done.code, done.out) == (2, "")
    assert "no run directory below ./runs" in done.err
