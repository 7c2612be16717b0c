"""`specctl reason` as users call it, also through `specctl online`: refusals, plans, results and files."""

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from specctl.drafters import checkpoint
from specctl.drafters.lm.drafter import FAMILY as lm
from specctl.drafters.lm.model import LM, architecture
from specctl.lab.reason.show import show
from specctl.recipe import DrafterRecipe
from tests.measuring.streams import write_head, write_prompts

SMALL = ["reasoning.budget=16", "reasoning.answer_tokens=6", "reasoning.step_tokens=8", "reasoning.depth=2"]
SMALL += ["--chunk", "2", "--temperature", "0"]


@pytest.fixture
def start(tmp_path, target):
    """Prompts with their answers, a small untrained LM, and the options that name them."""
    prompts = [{"prompt": f"What is {n} + {n}?", "response": f"#### {2 * n}"} for n in (1, 2, 3)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(one) + "\n" for one in prompts))
    torch.manual_seed(0)
    sizes = DrafterRecipe(preset="tiny", hidden_size=32, num_heads=2, intermediate_size=32, num_layers=1)
    model = LM(LlamaForCausalLM(architecture(sizes, target)))
    info = {"domain": ["math"], "mat": {"math": 2.0}}
    tensors = lm.stored_state(model.state_dict())
    checkpoint.save(tmp_path / "lm", config=lm.checkpoint_config(model, target.identity), tensors=tensors, info=info)
    return ["--dtype", "fp32", "--device", "cpu", "--prompts", "prompts.jsonl", "reasoning.draft=./lm"]


@pytest.mark.parametrize(
    ("argv", "code", "says"),
    [
        (["--algo", "onlin-lr"], 2, "did you mean online-lr?"),
        (["--algo", "online-lr,ogd"], 2, "specctl online drafts tokens"),
        (["--algo", "lr", "--batch", "2"], 2, "batch: a key of specctl online, not of specctl reason"),
        (["--algo", "lr", "--lr", "1e-4"], 2, "learner.lr: a key of specctl online"),
        (["--algo", "lr", "--init", "lm"], 2, "init: a key of specctl online"),
        (["--algo", "lr", "--baselines", "vanilla"], 2, "baselines: a key of specctl online"),
        (["--algo", "lr", "--async"], 2, "asynchronous: a key of specctl online"),
        (["--algo", "lr", "--max-new-tokens", "9"], 2, "reasoning.budget"),
        (["--algo", "lr", "drafting.depth=3"], 2, "reasoning.drafter, which is not set"),
        (["--algo", "lr", "--temperature", "0", "reasoning.temperature=1"], 2, "but differ (0.0 or 1.0)"),
        (["--algo", "ogd", "reasoning.depth=2"], 2, "a key of specctl reason, not of specctl online"),
        (["--algo", "lr", "reasoning.judge.kind=model"], 2, "set judge.name"),
        (["--algo", "lr", "reasoning.depht=2"], 2, "did you mean reasoning.depth"),
        (["--algo", "lr", "reasoning.draft=./nowhere"], 4, "./nowhere"),
        (["--algo", "lr", "reasoning.drafter=./nowhere"], 2, "no drafter ./nowhere"),
        (["--algo", "lr", "reasoning.judge.kind=embedding", "reasoning.judge.name=./nowhere"], 4, "./nowhere"),
    ],
)
def test_wrong_options_are_refused(specctl, argv, code, says):
    done = specctl("online", *argv, "--dry-run")
    assert done.code == code, done.err
    assert says in done.err and done.out == ""


def test_a_head_cannot_draft_reasoning_steps(specctl, tmp_path, target):
    write_head(tmp_path / "head", target, "medusa")
    done = specctl("reason", "reasoning.draft=./head", "--dry-run")
    assert done.code == 4 and "head is of family medusa" in done.err


def test_the_plan_of_a_run(specctl):
    """One temperature and one seed hold for both sections. A resolved recipe can be resolved again."""
    done = specctl.ok("reason", "--algo", "lr,online-lr", "--temperature", "0.3", "--seed", "5", "--dry-run", "--json")
    recipe, said = done.json["recipe"], " ".join(done.json["steps"])
    assert recipe["sampling"]["temperature"] == recipe["reasoning"]["temperature"] == 0.3
    assert recipe["sampling"]["seed"] == recipe["reasoning"]["seed"] == recipe["data"]["seed"] == 5
    assert recipe["reasoning"]["allow_code_execution"] is False
    assert recipe["data"]["domain"] == ["math"] and "of family lm, on responses to prompts of math" in said
    assert "in modes target, draft, lr, online-lr" in said and "after every 25 prompts online-lr learn" in said
    # Runs older than `reason` have resolved recipes of `online`, with keys of both commands.
    for command, more in (("reason", {}), ("online", {"baselines": ["vanilla"], "buffer": {"replay": 0.0}})):
        Path("again.yaml").write_text(json.dumps({"command": command, **recipe, **more}))
        for asked in ("online", "reason"):
            again = specctl(asked, "--recipe", "again.yaml", "--dry-run", "--json")
            assert again.code == 0 and again.json["recipe"] == recipe, again.err
            assert ("now a command of its own: specctl reason" in again.err) == (asked == "online")


def test_a_run_without_a_draft_lm_warms_up_first(specctl, library):
    """The warm-up starts with `distill`, as for every other drafter."""
    called = []
    for name in ("distill", "train-drafter", "reason"):
        library(name, lambda recipe, run, name=name: called.append((name, recipe)) or (_ for _ in ()).throw(Stop))

    class Stop(Exception):
        pass

    done = specctl("online", "--algo", "online-lr")
    assert done.code == 1 and [name for name, _ in called] == ["distill"]
    assert called[0][1].data.domain == ["math"]
    assert "no drafter in drafters/math-lm: training one on 1000 responses first" in done.err


@pytest.mark.slow
def test_a_run_learns_and_is_reported(specctl, start, tmp_path):
    """A run on the built-in target. Then the test resumes the run, reports it, and measures a learned drafter."""
    argv = ["reason", "--algo", "online-lr,osd-lr", *start, *SMALL, "--output-dir", "run"]
    document = specctl.ok(*argv, "--json").json
    assert document == json.loads((tmp_path / "run/result.json").read_text())
    assert [row["mode"] for row in document["modes"]] == ["target", "draft", "lr", "online-lr", "osd-lr"]
    texts = {}
    for line in (tmp_path / "run/traces.jsonl").read_text().splitlines():
        trace = json.loads(line)
        texts.setdefault(trace["mode"], []).append(trace["text"])
    assert texts["online-lr"] == texts["osd-lr"] == texts["lr"] == texts["target"], "greedy, and the exact judge"
    by_mode = {row["mode"]: row for row in document["modes"]}
    assert by_mode["lr"]["agreement"]["value"] == 1 and by_mode["lr"]["accuracy"]["value"] is not None
    refused = specctl(*argv, "reasoning.depth=1", "--resume")
    assert refused.code == 2 and "reasoning.depth was 2, is 1" in refused.err, refused.err
    resumed = specctl.ok(*argv, "--resume")
    told = 3 - by_mode["target"]["unanswered"]
    assert told and f"on the {told} of 3 prompts that the target alone answered" in resumed.out
    assert "answers of the target" in resumed.out and "100.0 % [100.0, 100.0]" in resumed.out
    assert (
        "steps accepted, online-lr minus lr" in resumed.out and "learned by osd-lr: run/drafters/osd-lr" in resumed.out
    )
    shown = specctl.ok("report", "run", "--csv", "--json")
    assert [name.rsplit("/")[-1] for name in shown.json["pictures"]] == ["reason-steps.png"]
    page = Path(shown.json["report"]).read_text()
    assert "answers of the target alone" in page and "Gain of learning" in page
    write_prompts(tmp_path, ["Say hi."])
    options = [*start[:-1], "--max-new-tokens", "6", "--json"]
    measured = specctl.ok("eval", *options, "--drafter", "run/drafters/online-lr")
    assert measured.json["lossless"]["mismatches"] == 0


def shown(modes, **fields) -> str:
    """The printed page of modes that have these fields; most other numbers are unknown."""
    from rich.console import Console

    none = {"value": None, "interval": None}
    numbers = dict.fromkeys(["step_acceptance", "accepted_per_target_step", "avg_len", "mat", "speedup"], none)
    row = {"prompts": 4, "unanswered": 4, "agreement": none, "accuracy": none, "tflops": 0.1, **numbers}
    row |= {"speedup_with_learning": None, "cut": 7, "rounds": 9, "depth": 2.0} | fields
    document = {"differences": [], "judges": {}, "drafters": {}, "run_dir": "run"}
    console = Console(width=500)
    with console.capture() as captured:
        console.print(show(document | {"modes": [{"mode": mode, **row} for mode in modes]}))
    return captured.get()


@pytest.mark.parametrize(("modes", "says"), [(["lr"], "was not measured"), (["target", "lr"], "0 of 4 prompts")])
def test_the_table_says_when_no_answers_were_compared(modes, says):
    """Without answers of the mode `target`, the other modes have no answers to be compared with."""
    text = shown(modes)
    assert says in text
    assert "right answers" not in text
    assert ("7 of 9 steps were cut: set reasoning.delimiter" in text) == ("target" in modes)


@pytest.mark.parametrize(("depth", "speedup", "hinted"), [(2.0, 0.6, True), (0.2, 0.6, False), (2.0, 1.3, False)])
def test_a_mode_that_drafts_at_a_loss_gets_a_hint(depth, speedup, hinted):
    text = shown(["lr"], depth=depth, speedup={"value": speedup, "interval": None})
    assert ("lr: slower than the target alone; reasoning.depth=auto" in text) == hinted
