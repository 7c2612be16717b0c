"""`specctl select` on the command line: refusals before loading, and output."""

import io
import json

import pytest
from rich.console import Console

from specctl.cli.select import BOUNDS, COLUMNS, show
from specctl.decoding.controllers import PLAIN
from specctl.decoding.device.rounds import DeviceRounds
from specctl.decoding.target import load_target
from specctl.selection.arms import PLAIN as PLAIN_ARM
from tests.measuring.streams import write_head, write_prompts

pytestmark = pytest.mark.usefixtures("four_layers")

ROUTER = ("--train-router",)


def test_the_readme_command_works_without_a_pool(specctl):
    done = specctl.ok("select", "--algo", "hedgespec", "--pool", "./drafters", "--dry-run", "--json")
    assert any(
        "lookup, suffix, retrieval (and plain decoding, for policies that count seconds) with hedgespec" in step
        for step in done.json["steps"]
    )


@pytest.mark.parametrize(
    ("argv", "code", "says"),
    [
        (["--algo", "hedgespek"], 2, "did you mean hedgespec?"),
        (["--algo", "ucbspec,ucbspec"], 2, "named twice"),
        (["--pool", "nowhere"], 2, "no pool directory"),
        (["--algo", "router"], 2, "there is no router"),
        (["--record", "a", "--replay", "b"], 2, "run one after the other"),
        (["--resume"], 2, "a key of specctl record"),
        (["--batch", "4", "--reset", "stream"], 2, "one text at a time"),
        (["--rival", "nothing-here"], 2, "no drafter nothing-here"),
        (["drafting.proposal=sampled", "batch=2"], 2, "different rules"),
        (["choice=batch", "--algo", "ucbspec"], 2, "set reset=stream"),
        (["choice=batch", "--reset", "stream"], 2, "use one of fixed, random, ucbspec"),
        (["choice=batch", "--reset", "stream", "--algo", "metasd-ucb"], 2, "game.reward=throughput"),
        (["choice=batch", "--reset", "stream", "--algo", "ucbspec", *ROUTER], 2, "leave out choice=batch"),
    ],
)
def test_invalid_options_are_refused(specctl, argv, code, says):
    done = specctl("select", *argv, "--dry-run")
    assert done.code == code, done.err
    assert says in done.err and done.out == ""


def test_the_plan_tells_what_a_policy_sets(specctl):
    """Some policies bring their own reward or game, which the user did not set."""
    done = specctl.ok(
        "select", "--algo", "normalhedge,metasd-ucb,ucbspec,hedgespec,router", *ROUTER, "--dry-run", "--json"
    )
    brought = [step for step in done.json["steps"] if "sets" in step.split()]
    assert [step.split()[0] for step in brought] == ["normalhedge", "metasd-ucb", "ucbspec"]
    assert "game.batch_rounds=1" in brought[0] and 'game.reward="bd"' in brought[1] and "game.drift=null" in brought[0]
    done = specctl("select", "--algo", "metasd-ucb", "game.reward=be", "--dry-run", "--json")
    assert not any("sets" in step.split() for step in done.json["steps"])


@pytest.mark.parametrize(
    ("mode", "yardstick", "there", "absent"),
    [
        ("live", "mat", ["in games of 256 tokens", "× plain "], ["after 256", "modeled"]),
        ("replay", "mat", ["after 256 tokens", "modeled", "of best arm"], ["in games of"]),
        ("replay", "throughput", ["fastest arm played", "the fastest arm of every"], ["of best arm"]),
    ],
)
def test_headings_match_the_kind_of_result(mode, yardstick, there, absent):
    only = {"share_after_256": None if mode == "live" else 0.9}
    row = dict.fromkeys(COLUMNS, 0.9) | {"algo": "hedgespec", "kind": "policy"} | only
    row |= {"share_of_best_interval": [0.85, 0.95]}
    document = {"policies": [row], "mode": mode, "yardstick": yardstick, "oracle_mat": 2.0, "reset": "query"}
    document |= {
        "intervals_over": "2 seeds × 3 queries",
        "speeds": "measured" if mode == "live" else "modeled",
        "pulls": {},
        "per_domain": [
            {"drafter": "hedgespec", "domain": name, "mat": 2.0, "speedup": 1.25} for name in ("sql", "chat")
        ],
        "at_least": "holds at every moment",
    }
    reward = {"arm": "lookup", "reward": "be", "n": 7, "mean": 0.25, "std": 0.5, "zeros": 0.75}
    document["rewards"] = [reward | {"reward": "tokens"}] if mode == "live" else [reward, reward | {"reward": "bd"}]
    document |= {"algo": "hedgespec", "run_dir": "run", "machine": {"cores": 2, "threads": 1, "others_busy": 0.5}}
    document |= {"lossless": {"sequences": 0, "mismatches": 0, "ties": 0, "unverified": 0}}
    console = Console(width=400, file=io.StringIO())
    console.print(show(document))
    shown = console.file.getvalue()
    assert all(text in shown for text in there) and not any(text in shown for text in absent)
    assert "2 seeds × 3 queries" in shown and "holds at every moment" in shown and "90.0 % (85.0 … 95.0)" in shown
    lines = [line.split() for line in shown.splitlines()]
    assert ["×", "plain", "in", "sql", "chat"] in lines and ["hedgespec", "1.25", "1.25"] in lines
    assert [line[1] for line in lines if line[:1] == ["lookup"]] == ([] if mode == "live" else ["be", "bd"])
    row |= dict.fromkeys(BOUNDS)  # a run too short to have a bound used to explain it
    console.print(show(document))
    assert console.file.getvalue().count("holds at every moment") == 1


def test_select_and_report_run_end_to_end(specctl, tmp_path):
    """On the built-in target with drafters that need no training."""
    prompts = write_prompts(tmp_path, ("Count to three.", "Say hi."))
    options = ("--prompts", str(prompts), "--max-new-tokens", "12", "--output-dir", str(tmp_path / "run"))
    done = specctl.ok("select", *options, "--baselines", "vanilla,fixed", "--json")
    assert done.json["command"] == "select" and done.json["arms"] == [PLAIN_ARM, "lookup", "suffix", "retrieval"]
    assert done.json["lossless"]["mismatches"] == 0
    assert {row["algo"] for row in done.json["policies"]} == {"cgp-ucb", "vanilla", *done.json["arms"]}
    again = specctl("select", *options)
    assert again.code == 2 and "--overwrite" in again.err
    shown = specctl.ok("report", str(tmp_path / "run"), "--json")
    assert any("weights" in picture for picture in shown.json["pictures"])


def test_an_invalid_table_is_refused(specctl, tmp_path):
    (tmp_path / "t.parquet").write_text("nothing")
    done = specctl("select", "--replay", "t.parquet", "--json")
    assert done.code == 4 and done.json["error"]["type"] == "CheckpointError"


def test_a_table_is_recorded_and_replayed(specctl, tmp_path):
    """Speeds of a replay come from a cost model and must not be shown as measured."""
    prompts = write_prompts(tmp_path, ("Count to three.", "Say hi."))
    asked = ("select", "--prompts", str(prompts), "--max-new-tokens", "12", "--record", "t.parquet")
    planned = specctl.ok(*asked, "--dry-run", "--json")
    assert "t.parquet" in " ".join(planned.json["steps"])
    done = specctl(*asked)
    assert done.code == 0 and "table: t.parquet" in done.out, done.err
    planned = specctl.ok("replay", "--recipe", "replay", "replay=t.parquet", "--dry-run", "--json")
    assert "t.parquet" in " ".join(planned.json["steps"])
    done = specctl("select", "--replay", "t.parquet", "--algo", "hedgespec,random")
    assert done.code == 0 and "modeled" in done.out and "the fastest arm of every query" in done.out
    assert "1 seed × 2 queries" in done.out and "catching up and scoring" in done.out
    run = tmp_path / "run"
    again = ("select", "--prompts", str(prompts), "--max-new-tokens", "12", "--record", "u.parquet")
    (tmp_path / "u.parquet.pieces").mkdir()
    (tmp_path / "u.parquet.pieces" / "0000000.parquet").write_text("begun")
    run.mkdir()
    (run / "run.json").write_text('{"command": "select"}')
    refused = specctl(*again, "--output-dir", str(run))
    assert refused.code == 2 and "u.parquet is incomplete" in refused.err and "continue it with --resume" in refused.err
    (tmp_path / "u.parquet.pieces" / "0000000.parquet").unlink()
    resumed = specctl(*again, "--output-dir", str(run), "--resume")
    assert resumed.code == 0 and "table: u.parquet" in resumed.out, resumed.err
    assert "join it" not in done.err and "against plain decoding" not in done.out


@pytest.mark.parametrize(
    "options",
    [[], pytest.param(["choice=batch", "batch=2", "reset=stream", "algo=[ucbspec,random]"], marks=pytest.mark.slow)],
)
def test_rounds_run_on_the_device_if_all_contenders_support_it(specctl, tmp_path, tiny_directory, monkeypatch, options):
    """Two heads, chosen by counts or scores: plain decoding, arms and policies all run on the device, also in hybrids.

    A policy that looks at drafts runs all but plain decoding on the host.
    """
    target = load_target(tiny_directory("qwen3"), device="cpu", dtype="fp32")
    for seed, family in enumerate(("eagle3", "medusa")):
        write_head(tmp_path / "pool" / family, target, family, seed)
    ran, run = [], DeviceRounds.round
    monkeypatch.setattr(DeviceRounds, "round", lambda *args: (ran.append(args[0].active_drafter), run(*args)))

    def selected(place, *more, mode="eager"):
        monkeypatch.setenv("SPECCTL_GRAPHS", mode)
        ran.clear()
        argv = [f"target.name={target.name}", "target.dtype=fp32", "target.device=cpu", "data.domain=[sql]"]
        argv += [f"data.prompts={write_prompts(tmp_path)}", f"pool={tmp_path / 'pool'}", "beside=none", "limit=2"]
        argv += ["algo=[cgp-ucb,hedgespec]", "baselines=[vanilla,fixed]"]
        argv += ["drafting.stop_below=0", "drafting.keep_above=0"]
        argv += ["game.reward=throughput", "sampling.max_new_tokens=10", f"output_dir={tmp_path / place}"]
        done = specctl.ok("select", *argv, *options, *more, "--json")
        return done.json

    device = selected("device")
    arms = {getattr(drafter, "name", "plain") for drafter in ran}
    assert arms == {"plain", PLAIN_ARM, "eagle3", "medusa"} and device["rounds_on"] == "device"
    assert device["lossless"]["mismatches"] == 0 and device["lossless"]["sequences"] > 0
    lines = [json.loads(line) for line in (tmp_path / "device" / "rounds.jsonl").read_text().splitlines()]
    for row in device["policies"]:
        if row["kind"] == "policy":
            mine = [line for line in lines if line["algo"] == row["algo"]]
            assert len(mine) == sum(row["pulls"].values()) and row["switches"] > 0
            assert len({*row["pulls"]} - {PLAIN_ARM}) == 2, "every head has been tried"
            if not options:
                assert len(mine) == row["rounds"]
    host = selected("host", mode="0")
    assert host["rounds_on"] == "host" and not ran
    mats = [
        {row["algo"]: row["mat"] for row in found["policies"] if row["kind"] != "policy"} for found in (device, host)
    ]
    assert mats[0] == mats[1]
    joined = selected("joined", "beside=lookup")
    assert joined["rounds_on"] == "device" and joined["lossless"]["mismatches"] == 0
    kinds = {type(getattr(drafter, "drafter", drafter)).__name__ for drafter in ran}
    assert {"Hybrid", "WeighedText"} <= kinds
    others = [] if options else [["algo=[metasd-ucb]", "game.reward=bd"], ["batch=2"]]
    for place, more in enumerate(others):
        found = selected(f"other {place}", *more, "limit=1")
        assert found["rounds_on"] == "host" and {*ran} == {PLAIN}, more
