"""`specctl select` as users call it: what is refused before anything is loaded, and what is shown."""

import json

import pytest


def test_the_line_of_the_readme_without_a_pool(specctl):
    done = specctl("select", "--algo", "hedgespec", "--pool", "./drafters", "--dry-run", "--json")
    assert done.code == 0, done.err
    assert any("lookup, suffix by hedgespec" in step for step in done.json["steps"])


@pytest.mark.parametrize(
    ("argv", "code", "says"),
    [
        (["--algo", "hedgespek"], 2, "did you mean hedgespec?"),
        (["--algo", "ucbspec,ucbspec"], 2, "named twice"),
        (["--pool", "nowhere"], 2, "no pool directory"),
        (["--algo", "router"], 2, "there is no router"),
        (["--record", "a", "--replay", "b"], 2, "one after the other"),
        (["--resume"], 2, "name `record`"),
        (["--batch", "4", "--reset", "stream"], 2, "one text at a time"),
        (["--rival", "nothing-here"], 2, "no drafter nothing-here"),
        (["drafting.proposal=sampled", "batch=2"], 2, "different rules"),
    ],
)
def test_what_is_refused(specctl, argv, code, says):
    done = specctl("select", *argv, "--dry-run")
    assert done.code == code, done.err
    assert says in done.err and done.out == ""


def test_it_selects(specctl, tmp_path):
    """The installed command on the built-in target, with drafters that need no training; then its report."""
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("Count to three.", "Say hi.")))
    options = ("--prompts", str(prompts), "--max-new-tokens", "12", "--output-dir", str(tmp_path / "run"))
    done = specctl("select", *options, "--baselines", "vanilla,fixed", "--json")
    assert done.code == 0, done.err
    assert done.json["command"] == "select" and done.json["arms"] == ["lookup", "suffix"]
    assert done.json["lossless"]["mismatches"] == 0
    assert {row["algo"] for row in done.json["policies"]} == {"hedgespec", "vanilla", "lookup", "suffix"}
    again = specctl("select", *options)
    assert again.code == 2 and "--overwrite" in again.err
    shown = specctl("report", str(tmp_path / "run"), "--json")
    assert shown.code == 0, shown.err
    assert any("weights" in picture for picture in shown.json["pictures"])


def test_a_table_that_is_none(specctl, tmp_path):
    (tmp_path / "t.parquet").write_text("nothing")
    done = specctl("select", "--replay", "t.parquet", "--json")
    assert done.code == 4 and done.json["error"]["type"] == "CheckpointError"


def test_a_table_is_recorded_and_replayed(specctl, tmp_path):
    """Speeds of a replay are those of a cost model without scoring: to show them as measured would be a lie."""
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("Count to three.", "Say hi.")))
    for option in ("--record", "--replay"):
        planned = specctl("select", "--prompts", str(prompts), option, "t.parquet", "--dry-run", "--json")
        assert planned.code == 0 and "t.parquet" in " ".join(planned.json["steps"]), planned.err
    done = specctl("select", "--prompts", str(prompts), "--max-new-tokens", "12", "--record", "t.parquet")
    assert done.code == 0 and "table: t.parquet" in done.out, done.err
    done = specctl("select", "--replay", "t.parquet", "--algo", "hedgespec,random")
    assert done.code == 0 and "modelled" in done.out and "every query by its best arm" in done.out
    run = tmp_path / "run"
    again = ("select", "--prompts", str(prompts), "--max-new-tokens", "12", "--record", "u.parquet")
    (tmp_path / "u.parquet.pieces").mkdir()
    (tmp_path / "u.parquet.pieces" / "0000000.parquet").write_text("begun")
    run.mkdir()
    (run / "run.json").write_text('{"command": "select"}')
    refused = specctl(*again, "--output-dir", str(run))
    assert refused.code == 2 and "u.parquet was begun" in refused.err and "--resume goes on with it" in refused.err
    (tmp_path / "u.parquet.pieces" / "0000000.parquet").unlink()
    resumed = specctl(*again, "--output-dir", str(run), "--resume")
    assert resumed.code == 0 and "table: u.parquet" in resumed.out, resumed.err
    assert "join it" not in done.err and "against plain decoding" not in done.out
