"""`--target-adapter`: a LoRA adapter of the target, from data to results, and refusals."""

import json
import shutil

import pytest

from specctl.decoding.target import load_target
from specctl.decoding.target_text import load_target_text
from specctl.drafters import checkpoint
from specctl.drafters.checkpoint import CONFIG
from tests.decoding.test_target_adapter import write_adapter
from tests.measuring.streams import write_head
from tests.toys.engine import FakeEngine

pytestmark = pytest.mark.usefixtures("four_layers")


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    """An adapter of the built-in target."""
    return write_adapter("builtin", tmp_path_factory.mktemp("adapter") / "lora")


@pytest.fixture
def lora(adapter, tmp_path):
    """A copy of the adapter in the working directory."""
    shutil.copytree(adapter, tmp_path / "lora")
    return "lora"


def test_a_plan_refuses_the_adapters_that_a_run_refuses(specctl, lora, tiny_directory, tmp_path):
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "Name a colour."}) + "\n")
    tiny = tiny_directory("llama")
    for command in (["generate", "Hi."], ["distill", "--prompts", "prompts.jsonl"]):
        for target, adapter in (("builtin", "nowhere"), (tiny, lora)):
            line = [*command, "--target", target, "--target-adapter", adapter]
            plan, run = specctl(*line, "--dry-run"), specctl(*line)
            assert plan.code == run.code == 4
            assert plan.err.splitlines()[-1] == run.err.splitlines()[-1]
            assert "adapter" in plan.err
    specctl.ok("distill", "--prompts", "prompts.jsonl", "--target-adapter", lora, "--dry-run")


def test_doctor_checks_an_adapter_without_weights(specctl, lora, tiny_directory):
    found = specctl("doctor", "--target-adapter", lora, "--json").json["findings"]
    assert next(one for one in found if one["what"] == "adapter lora")["state"] == "ok"
    done = specctl("doctor", "--target", tiny_directory("llama"), "--target-adapter", lora, "--json")
    wrong = next(one for one in done.json["findings"] if one["what"] == "adapter lora")
    assert done.code == 4 and wrong["state"] == "missing" and "has a matrix of shape [4, 256]" in wrong["value"]


def test_an_adapter_given_as_target_gets_a_hint(specctl, lora):
    assert "--target BASE --target-adapter" in specctl("generate", "Hi.", "--target", f"./{lora}", "--dry-run").err


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["distill", "--server", "http://127.0.0.1:9"], "server.model=NAME"),
        (["train-drafter", "--features-from", "http://127.0.0.1:9"], "features.server.model=NAME"),
        (["train-drafter", "features.servers=servers.txt"], "features.server.model=NAME"),
        (["online", "target_schedule=builtin:3,other:3"], "exclude each other"),
        (["generate", "Hi.", "target.tensor_parallel=2"], "exclude each other"),
    ],
)
def test_contradictory_options_are_refused(specctl, lora, argv, says):
    done = specctl(*argv, "--target-adapter", lora, "--dry-run")
    assert done.code == 2 and says in done.err


def test_texts_with_an_adapter_are_lossless(specctl, lora, tmp_path):
    """With a head trained without the adapter; equal to the text of transformers and peft."""
    write_head(tmp_path / "head", load_target("builtin", device="cpu", dtype="fp32"), "eagle3", 0)
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "Name a colour."}) + "\n")
    line = ["--target-adapter", lora, "--dtype", "fp32", "--max-new-tokens", "12"]
    done = specctl.ok("generate", "Name a colour.", *line, "--drafter", "head+lookup", "--json")
    assert done.json["identical"]
    assert done.json["text"] != specctl.ok("generate", "Name a colour.", *line[2:], "--json").json["text"]
    assert "head was made for a target with no adapter, not with adapter lora" in done.err
    table = specctl.ok("eval", "--prompts", "prompts.jsonl", *line, "--drafter", "head", "--json").json
    for name in ("lossless", "lossless_transformers"):
        assert table[name]["sequences"] and not table[name]["mismatches"]


def test_data_and_drafters_name_the_adapter(specctl, lora, tmp_path):
    (tmp_path / "sql.jsonl").write_text("".join(json.dumps({"prompt": f"Count to {n}."}) + "\n" for n in range(4)))
    line = ["--prompts", "sql.jsonl", "--target-adapter", lora, "--dtype", "fp32"]
    specctl.ok("distill", *line, "--max-new-tokens", "8")
    specctl.ok("train-drafter", "--arch", "retrieval", "--domain", "sql", "eval.max_new_tokens=4", *line[2:])
    named = checkpoint.read_json(tmp_path / "drafters/sql-retrieval" / CONFIG)["target"]
    assert named["adapter"] == lora and named["adapter_weights"]
    assert "with `builtin` and its adapter `lora`." in (tmp_path / "drafters/sql-retrieval/README.md").read_text()
    plan = ["train-drafter", "--domain", "sql", "--dry-run"]
    done = specctl.ok(*plan, "--json")
    assert "made for the adapter that wrote the data (distilled/sql with lora)" in done.err
    assert done.json["recipe"]["target"]["adapter"] == "lora"
    shutil.copytree(tmp_path / "lora", tmp_path / "moved")
    assert "was written with" not in specctl.ok(*plan, "--target-adapter", "moved").err
    write_adapter("builtin", tmp_path / "other", r=2)
    said = specctl.ok(*plan, "--target-adapter", "other").err
    assert "was written with adapter lora, not with adapter other" in said


@pytest.mark.slow
def test_one_drafter_serves_several_adapters(specctl, lora, tmp_path):
    """From data to export: it fits each of its adapters, and warns about another one."""
    write_adapter("builtin", tmp_path / "other", r=2, target_modules="all-linear")
    write_adapter("builtin", tmp_path / "third", r=3)
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"Count to {n}."}) + "\n" for n in range(9)))
    line = ["--prompts", "prompts.jsonl", "--dtype", "fp32", "--max-new-tokens", "8"]
    for name in (lora, "other"):
        specctl.ok("distill", *line, "--domain", name, "--target-adapter", name)
    train = ["train-drafter", "--dtype", "fp32", "--domain", "lora,other", "max_steps=2"]
    train += ["eval.fraction=0.4", "eval.max_new_tokens=4"]
    plan = specctl.ok(*train, "--dry-run", "--json").json["steps"]
    assert "read distilled data from distilled/lora (adapter lora), distilled/other (adapter other)" in plan
    from_engine = ["--features-from", "http://127.0.0.1:9"]
    names = ["features.adapters.law=lora", "features.adapters.bank=other"]
    with FakeEngine(load_target_text("builtin").tokenizer) as engine:
        engine.adapters = ["law"]
        for refused, says in (
            (["features.mode=online"], "cannot switch the target's adapter"),
            (from_engine, "needs the names of the engine's models that have the adapters"),
            (["--features-from", engine.url, *names], f"{engine.url} does not serve model 'bank'"),
        ):
            planned, run = specctl(*train, *refused, "--dry-run"), specctl(*train, *refused)
            assert planned.code == run.code == 2 and planned.err.splitlines()[-1] == run.err.splitlines()[-1]
            assert says in run.err
        assert "start one: vllm serve " in run.err and "--lora-modules law=lora bank=other" in run.err
        engine.adapters.append("bank")
        plan = specctl.ok(*train, "--features-from", engine.url, *names, "--dry-run").out
        assert "it lists law, bank, and nothing else is checked" in plan
    plan = specctl.ok(*train, *from_engine, *names, "--dry-run", "--json").json["steps"]
    assert any("http://127.0.0.1:9 does not respond, so whether it lists law, bank is not checked" in s for s in plan)
    assert any("--enable-lora --lora-modules law=lora bank=other" in step for step in plan)
    writers = "distilled/lora (adapter lora as model law of the engine), distilled/other (adapter other as model bank"
    assert any(writers in step for step in plan)
    plan = specctl.ok(*train, "features.mode=server", *names, "--dry-run").out
    assert "the server in features.server.urls, 64 texts at a time; it is not checked" in plan
    done = specctl.ok(*train)
    assert "mat with lora" in done.err and "mat with other" in done.err
    specctl.ok(*train, "--arch", "retrieval", "max_steps=null")
    head, store = (f"drafters/lora+other-{arch}" for arch in ("eagle3", "retrieval"))
    asked = ["eval", *line, "--drafter", head, "--drafter", store, "baselines=[vanilla]", "limit=3"]
    asked += ["--json", "--target-adapter"]
    for name in (lora, "other", "third"):
        done = specctl.ok(*asked, name)
        assert done.json["lossless"]["sequences"] and not done.json["lossless"]["mismatches"]
        said = [f"{path} was made for a target with adapter lora or adapter other, not" for path in (head, store)]
        assert [line in done.err for line in said] == [name == "third"] * 2
    done = specctl.ok("export", head, "--to", "vllm")
    assert (
        "made for the target with adapter lora or adapter other: serve the target with the same adapters (--enable-lora"
        in done.out
    )
    shutil.rmtree(tmp_path / "other")
    planned, run = specctl(*train, "--overwrite", "--dry-run"), specctl(*train, "--overwrite")
    assert planned.code == run.code == 4 and planned.err.splitlines()[-1] == run.err.splitlines()[-1]
    assert "data in distilled/other was written with adapter other: adapter directory other does not exist" in run.err
