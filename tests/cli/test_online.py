"""`specctl online` as users call it: refusals, plans, results, and the warm-up."""

import json
import os
from pathlib import Path

import pytest

from specctl import lock
from specctl.drafters import checkpoint
from specctl.errors import Interrupted
from tests.measuring.streams import contents, write_copy, write_prompts


@pytest.fixture
def start(tmp_path, tiny):
    """Prompts, a drafter of family lm, and the options that name them."""
    write_prompts(tmp_path)
    write_copy(tmp_path / "lm", tiny, tiny.name, 0.03)
    return ["--target", tiny.name, "--dtype", "fp32", "--device", "cpu", "--prompts", "prompts.jsonl", "--init", "lm"]


ALONE = ["--beside", "none", "learner.budget=null"]  # the heads draft alone, and learning may take any time
SMALL = ["--max-new-tokens", "6", "--chunk", "2", *ALONE]


@pytest.mark.parametrize(
    ("argv", "code", "says"),
    [
        (["--algo", "opt-hidra"], 2, "did you mean opt-hydra?"),
        (["--algo", "ogdd"], 2, "did you mean ogd?"),
        (["--algo", "ogd,ogd"], 2, "names an algo twice"),
        (["--algo", "ogd,static"], 2, "baselines without static"),
        (["--algo", "ens-hydra", "learner.combine=probs"], 2, "combine"),
        (["--prompts", "-", "--seeds", "0,1"], 2, "stdin can be read only once"),
        (["--prompts", "-", "stream.shuffle=true"], 2, "stdin is answered in its order"),
        (["--prompts", "nowhere.jsonl"], 3, "no prompts file nowhere.jsonl"),
        (["--schedule", "sql"], 2, "is not NAME:PROMPTS"),
        (["--schedule", "sqll:4"], 2, "did you mean sql"),
        (["--resume"], 2, "resume needs output_dir"),
        (["--init", "lookup"], 2, "no drafter lookup"),
        (["learner.lr=-1"], 2, "greater than 0"),
        (["--learner-device", "cuda:1"], 2, "set asynchronous (--async)"),
        (["--async", "--learner-device", "gpu"], 2, "'gpu' is not a device"),
        (["--async", "--learner-device", "cuda:1,cuda:2"], 2, "several devices, but a learner has one"),
        (["learner.rate=1"], 2, "learner.rate"),
    ],
)
def test_wrong_options_are_refused(specctl, argv, code, says):
    done = specctl("online", *argv, "--dry-run")
    assert done.code == code, done.err
    assert says in done.err and done.out == ""


def test_a_missing_learner_device_stops_a_run_but_not_a_plan(specctl):
    """A plan may name a device that this machine lacks. A run refuses the device before it trains anything."""
    options = ["--async", "--learner-device", "cuda:98"]
    done = specctl("online", *options, "--dry-run", "--json")
    assert done.json["recipe"]["learner_device"] == ["cuda:98"]
    assert any("a separate process learns" in step for step in done.json["steps"])
    done = specctl("online", *options)
    assert done.code == 2 and "cuda:98 does not exist" in done.err


def test_a_start_that_cannot_learn_is_refused(specctl, start, tmp_path, tiny):
    """A datastore has no weights to train. A head of one family cannot start an algorithm for another family."""
    done = specctl("online", *start, "--algo", "opt-hydra", "--dry-run")
    assert done.code == 2 and "lm is of family lm, but the algo needs hydra" in done.err
    config = json.loads((tmp_path / "lm/config.json").read_text())
    checkpoint.save(tmp_path / "store", config=config | {"family": "retrieval"}, tensors={}, info={})
    done = specctl("online", "--init", "store", "--dry-run")
    assert done.code == 2 and "family retrieval, which has no weights to train" in done.err
    (tmp_path / "empty").mkdir()
    done = specctl("online", "--init", "empty", "--dry-run")
    assert done.code == 4 and "empty is not a drafter" in done.err


@pytest.mark.parametrize("name", ["online/opt-hydra", "online/ens-eagle3"])
def test_shipped_recipes_can_be_planned(specctl, name):
    done = specctl.ok("online", "--recipe", name, "--dry-run", "--json")
    steps = " ".join(done.json["steps"])
    assert "400 sql, 400 math, 400 code" in steps and "distill 1000 prompts of sql" in steps
    assert done.json["recipe"]["algo"][0] == name.split("/")[1]


def test_a_run_learns_and_is_reported(specctl, start, tmp_path):
    """Two learners on a small target. Then the test resumes the run, reports it, and measures a learned drafter."""
    run = ["--output-dir", "run"]
    document = specctl.ok("online", *start, *SMALL, *run, "--algo", "ensemble,ogd", "--json").json
    assert document["command"] == "online" and document["algo"] == "ensemble" and document["family"] == "lm"
    assert document["static"]["mat"] > 1 and document["lossless"]["mismatches"] == 0
    assert document == json.loads((tmp_path / "run/result.json").read_text())
    again = specctl("online", *start, *SMALL, *run)
    assert again.code == 2 and "--overwrite" in again.err
    before = contents(tmp_path / "run")
    other = specctl("online", *start, "--max-new-tokens", "7", "--chunk", "2", *run, "--resume")
    assert other.code == 2 and "algo was" in other.err and "sampling.max_new_tokens was 6, is 7" in other.err
    with lock.hold(tmp_path / "run" / lock.NAME, tmp_path / "run"):
        for how in ("--resume", "--overwrite"):
            second = specctl("online", *start, *SMALL, *run, how)
            assert second.code == 2 and f"run is being written by process {os.getpid()}" in second.err, second.err
    assert contents(tmp_path / "run") == before
    resumed = specctl.ok("online", *start, *SMALL, *run, "--algo", "ensemble,ogd", "--resume")
    assert "0 mismatches" in resumed.out and "learned by ensemble: run/drafters/ensemble" in resumed.out
    assert "× static" in resumed.out and "learning" in resumed.out
    shown = specctl.ok("report", "run", "--json")
    assert [name.rsplit("/")[-1] for name in shown.json["pictures"]] == [
        "online-chunks.png",
        "online-weights-ensemble.png",
    ]
    assert "mat, not learning" in Path(shown.json["report"]).read_text()
    # `eval` measures a learned drafter like any other drafter.
    measured = specctl.ok("eval", *start[:-2], "--drafter", "run/drafters/ogd", "--max-new-tokens", "6", "--json")
    assert measured.json["lossless"]["mismatches"] == 0


def test_a_report_of_one_learner_shows_no_weights(specctl, start):
    """Only an ensemble has weights to show."""
    done = specctl("online", *start, *SMALL, "--output-dir", "run", "--baselines", "vanilla", "-q")
    assert done.code == 0 and done.out.strip() == "run", done.err
    shown = specctl("report", "run", "--json")
    assert shown.code == 0 and len(shown.json["pictures"]) == 1, shown.err


def test_a_schedule_with_a_file_for_each_domain(specctl, start, tmp_path):
    """The schedule sets the domains of the stream, and data.domain does not. The learned drafter lists these domains
    too."""
    for domain in ("code", "math"):
        (tmp_path / f"{domain}.jsonl").write_text((tmp_path / "prompts.jsonl").read_text())
    options = ["--prompts", "{domain}.jsonl", "--schedule", "math:2,code:1", "--output-dir", "run"]
    done = specctl.ok("online", *start, *SMALL, *options, "--baselines", "static", "--json")
    assert [row["domains"] for row in done.json["per_chunk"]] == [{"math": 2}, {"code": 1}]
    assert {row["domain"]: row["prompts"] for row in done.json["per_domain"]} == {"math": 2, "code": 1}
    assert json.loads((tmp_path / "run/drafters/ogd/drafter.json").read_text())["domain"] == ["sql", "math", "code"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "no prompts in prompts.jsonl"),
        ("\n\n", "no prompts in prompts.jsonl"),
        (json.dumps({"prompt": "word " * 400}) + "\n", "1 of 1 prompts rejected"),
        ("{\n" * 3, "3 of 3 prompts rejected"),
    ],
)
def test_a_stream_without_a_usable_prompt_is_refused(specctl, start, tmp_path, content, says):
    """The file is empty, its prompt exceeds the target's context, or its lines are not JSON."""
    (tmp_path / "prompts.jsonl").write_text(content)
    done = specctl("online", *start, *SMALL, "--json")
    assert done.code == 3 and done.json["error"]["type"] == "DataError"
    assert says in done.json["error"]["message"], done.err


def test_a_learner_that_never_recovers_ends_the_run(specctl, start, tmp_path):
    """The learning rate is so large that every update is taken back. After eight chunks the run ends with a hint."""
    write_prompts(tmp_path, [f"Count to {n}." for n in range(10)])
    options = ["--max-new-tokens", "4", "--chunk", "1", "--lr", "1e30", "--baselines", "static", "--output-dir", "run"]
    done = specctl("online", *start, *ALONE, *options, "--json")
    assert done.code == 1, done.err
    assert "ogd has learned nothing for 8 chunks" in done.json["error"]["message"]
    assert "learner.lr" in done.json["error"]["hint"] and "Traceback" not in done.err
    assert done.err.count("was taken back") == 8


def test_a_learner_recovers_when_its_rate_shrinks(specctl, start, tmp_path):
    """The first rate is just as large, but shrinks fast enough: one update is taken back, and the run succeeds."""
    write_prompts(tmp_path, [f"Count to {n}." for n in range(4)])
    options = ["--max-new-tokens", "4", "--chunk", "1", "--lr", "1e30", "learner.backoff=1e-34", "--output-dir", "run"]
    done = specctl.ok("online", *start, *ALONE, *options, "--json")
    assert [row["ruling"] for row in done.json["per_chunk"]] == ["keep", "rollback", "keep", "keep"]
    assert done.json["learners"][0]["rollbacks"] == 1 and done.json["lossless"]["mismatches"] == 0


def test_a_signal_during_the_warm_up_hints_how_to_resume(specctl, library):
    """--resume needs a run directory, which does not exist yet during the warm-up."""

    def stopped(recipe, run):
        raise Interrupted("interrupted by SIGTERM", hint="continue with --resume")

    library("distill", stopped)
    done = specctl("online", "--algo", "opt-hydra", "--output-dir", "run", "--json")
    assert done.code == 75
    assert done.json["error"]["message"] == "interrupted by SIGTERM during the warm-up"
    assert done.json["error"]["hint"] == "continue with --resume --output-dir run"


@pytest.mark.slow
def test_a_run_without_a_drafter_warms_up_first(specctl, tmp_path):
    """The command line of the README in an empty directory. The next run uses the same drafter again."""
    options = ["--algo", "opt-hydra", "--limit", "2", "--max-new-tokens", "6", "--device", "cpu", "--dtype", "fp32"]
    options += ["warmup.responses=8", "warmup.minutes=0.02"]
    planned = specctl.ok("online", *options, "--dry-run", "--json")
    said = " ".join(planned.json["steps"])
    assert "distill 8 prompts of sql" in said and "train a drafter of family hydra" in said
    done = specctl.ok("online", *options, "--json")
    assert "no drafter in drafters/sql-hydra: training one on 8 responses first" in done.err
    assert done.json["family"] == "hydra" and done.json["prompts"] == 2
    assert done.json["lossless"] == {"sequences": 8, "mismatches": 0, "ties": 0}
    before = checkpoint.fingerprint(tmp_path / "drafters/sql-hydra")
    again = specctl("online", *options, "--json")
    assert again.code == 0 and "training one" not in again.err, again.err
    assert checkpoint.fingerprint(tmp_path / "drafters/sql-hydra") == before


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "retrieval"),
        (["--beside", "suffix"], "suffix"),
        (["--beside", "none"], None),
        (["--draft-length", "auto"], None),
        (["drafting.proposal=sampled"], None),
    ],
)
def test_the_companion_that_shares_a_tree_with_the_heads(specctl, start, options, said):
    """By default, retrieval from the stream's texts joins the heads. An option that sets the depth of drafts prevents
    this."""
    done = specctl.ok("online", *start, *options, "--dry-run", "--json")
    told = [step.partition("in one tree with ")[2] for step in done.json["steps"] if "in one tree with" in step]
    assert told == ([said] if said else [])


def test_old_recipes_without_a_companion_can_be_read(specctl, start, tmp_path):
    """Old recipes say null, which now means none."""
    (tmp_path / "old.yaml").write_text("command: online\nbeside: null\n")
    done = specctl("online", "--recipe", "old.yaml", *start, "--dry-run", "--json")
    assert done.code == 0 and done.json["recipe"]["beside"] == "none", done.err
