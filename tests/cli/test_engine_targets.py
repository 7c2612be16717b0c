"""Targets that only engines can run, from the first prompt to the exported head.

Commands that would run such a target in specctl refuse it and name the commands that work.
"""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from specctl.decoding.target_text import vocab_hash
from specctl.distillation.store import ShardWriter
from tests.toys.engine_targets import TARGETS, TargetEngine, write

OFTEN = ["qwen3.5"]
"""A hybrid in the configuration of a vision-language model, with tied ends and a norm that stores its factor minus
one."""
UNSERVED = {("kimi-linear", "vllm"), ("kimi-linear", "sglang"), ("qwen2.5-vl", "sglang"), ("llava", "sglang")}
"""Targets and engines that do not draft for them with these heads: the export says so, and prints no command."""
SLOW = ["qwen3-next", "qwen3.5-moe", "kimi-linear", "nemotron-h", "qwen2.5-vl", "qwen3-vl", "llava"]
SIZES = ["drafter.intermediate_size=64", "batch_tokens=64", "max_steps=2", "optimizer.type=adamw", "precision=fp32"]
HELD_OUT = ["eval.prompts=2", "eval.max_new_tokens=2", "eval.fraction=0.3"]
ARCHS = {
    "eagle3": ["vllm", "drafter.vocab_size=64", "ttt_steps=2"],
    "dflash": ["sglang", "drafter.markov_rank=0", "drafter.block_size=4"],
}
ON_CPU = ["--device", "cpu", "--dtype", "fp32"]


@pytest.fixture
def served(tmp_path, monkeypatch):
    """Return `serve(name)`: the target's directory, its model, and a vLLM server that also returns states."""
    monkeypatch.setattr("specctl.engines.client.FIRST_PAUSE_S", 0.01)
    engines = []

    def serve(name):
        directory = tmp_path / name
        model = write(name, directory)
        files = tmp_path / "states"
        files.mkdir()
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
        engine = TargetEngine(name, model, tokenizer, files).__enter__()
        engines.append(engine)
        return str(directory), model, engine

    yield serve
    for engine in engines:
        engine.__exit__()


def train_and_export(specctl, tmp_path, served, name, arch):
    """Return the config of the exported head, the drafter's config, and the model."""
    target, model, engine = served(name)
    questions = tmp_path / "questions.jsonl"
    lines = [json.dumps({"prompt": f"Question {n}: what is {n} + {n * 7 % 13}?"}) for n in range(12)]
    questions.write_text("\n".join(lines))
    asked = ["--target", target, "--server", engine.url, "--prompts", str(questions), "--domain", "sums"]
    done = specctl.ok("distill", *asked, "--max-new-tokens", "6", "--output-dir", "data", "--json")
    assert done.json["responses"] == 12

    taps, (to, *sizes) = [1, 2, 3], ARCHS[arch]
    engine.states = lambda ids: engine.layered(ids, [*taps, 4])
    options = ["--target", target, *ON_CPU, "--arch", arch, "distilled=data", "drafter.taps=[1,2,3]"]
    options += [*sizes, *SIZES, *HELD_OUT, "--features-from", engine.url, "--output-dir", "head"]
    done = specctl.ok("train-drafter", *options, "--json")
    assert done.json["mat"] is None and done.json["expected_mat"] >= 1
    assert done.json["steps"] == 2

    done = specctl.ok("export", "head", "--to", to, "--check", "--output-dir", "exported", "--json")
    assert done.json["max_difference"] < 1e-4
    unserved = (name, to) in UNSERVED
    assert any(target in line for line in done.json["commands"]) is not unserved, done.json["notes"]
    assert any("does not serve" in note for note in done.json["notes"]) is unserved
    exported = json.loads((tmp_path / "exported" / "config.json").read_text())
    return exported, json.loads((tmp_path / "head" / "config.json").read_text()), model


@pytest.mark.parametrize(
    ("name", "arch"),
    [
        pytest.param(name, arch, marks=() if (name, arch) == ("qwen3.5", "eagle3") else pytest.mark.slow)
        for name in OFTEN + SLOW
        for arch in ARCHS
    ],
)
def test_a_head_is_trained_on_engine_states_and_exported(specctl, tmp_path, served, name, arch):
    """The head starts from the target's embedding and head; the exported config has the sizes of the text model."""
    exported, made, model = train_and_export(specctl, tmp_path, served, name, arch)
    text = model.config.get_text_config()
    for key in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"):
        assert exported[key] == getattr(text, key), key
    assert exported["max_position_embeddings"] >= text.max_position_embeddings
    rope = getattr(text, "rope_parameters", None) or {}
    assert made["architecture"]["rope_theta"] == rope.get("rope_theta", 10_000.0)
    assert made["target"]["hidden_size"] == 64 and made["target"]["vocab_size"] == 4224
    assert load_file(tmp_path / "head" / "model.safetensors")["norm.weight"].shape == (64,)


def test_a_head_is_imported_and_a_datastore_made_without_running_the_target(specctl, tmp_path):
    """The import notes that the head was not tried; a datastore needs only texts."""
    target = tmp_path / "target"
    model = write("qwen3.5", target)
    row = {"id": "0" * 32, "prompt_id": "1" * 16, "domain": "sums", "temperature": 0.0, "seed": 0, "stop": "eos"}
    row |= {"messages": [{"role": "user", "content": "Q"}], "prompt_ids": [5, 6], "text": "A"}
    row |= {"target": vocab_hash(transformers.AutoTokenizer.from_pretrained(target))}
    with ShardWriter(tmp_path / "data", {"domain": "sums"}) as store:
        store.append([row | {"response_ids": [7, 8, 9, 10, 11]}])
        store.complete()
    line = ["--target", str(target), *ON_CPU, "distilled=data", "--domain", "sums", "--output-dir", "store", "--json"]
    done = specctl("train-drafter", "--arch", "retrieval", *line)
    assert done.code == 0 and done.json["mat"] is None and done.json["train_tokens"] == 5, done.err
    done = specctl.ok("export", "store", "--to", "vllm", "--json")

    published = tmp_path / "published"
    published.mkdir()
    size, inner, heads = 64, 96, 64
    shapes = {"fc": (size, 3 * size), "lm_head": (4224, size), "norm": (size,)}
    layer = {"hidden_norm": (size,), "input_layernorm": (size,), "post_attention_layernorm": (size,)}
    layer |= {f"self_attn.{one}_proj": (heads, 2 * size) for one in "qkv"} | {"self_attn.o_proj": (size, heads)}
    layer |= {"mlp.gate_proj": (inner, size), "mlp.up_proj": (inner, size), "mlp.down_proj": (size, inner)}
    shapes |= {f"midlayer.{name}": shape for name, shape in layer.items()}
    tensors = {f"{name}.weight": torch.randn(shape) / 8 for name, shape in shapes.items()}
    tensors["embed_tokens.weight"] = model.get_input_embeddings().weight.detach().clone()
    save_file(tensors, published / "model.safetensors", metadata={"format": "pt"})
    config = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": size}
    config |= {"intermediate_size": inner, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 4224}
    config |= {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    (published / "config.json").write_text(json.dumps(config))
    line = ["import", "published", "--target", str(target), *ON_CPU, "--output-dir", "imported"]
    assert "do not test it: only an engine can run the target" in specctl(*line, "--dry-run").out
    done = specctl(*line, "--json")
    assert done.code == 0 and done.json["probe"] is None, done.err
    assert any("the head was not tried" in note for note in done.json["notes"])


REFUSED = {
    "generate": ["generate", "hi", "--drafter", "lookup"],
    "distill": ["distill", "--domain", "sql", "--output-dir", "data"],
    "eval": ["eval", "--drafter", "lookup", "--domain", "sql"],
    "serve": ["serve", "--drafter", "lookup"],
    "bench": ["bench", "parts=['steps']"],
    "train-drafter": ["train-drafter", "--domain", "sql", "distilled=data"],
    "whole target": [
        *("train-drafter", "--domain", "sql", "distilled=data", "--features-from", "http://h:1"),
        "features.whole_target=true",
    ],
}


@pytest.mark.parametrize("name", ["qwen3-vl", pytest.param("nemotron-h", marks=pytest.mark.slow)])
def test_commands_that_would_run_the_target_are_refused(specctl, tmp_path, distilled, name):
    """In one line that names what works, with and without --dry-run. The plan used to be printed."""
    write(name, tmp_path / "target")
    distilled(tmp_path / "data")
    for case, words in REFUSED.items():
        line = [*words, "--target", "./target"] + (["--overwrite"] if case == "distill" else [])
        plan, run = specctl(*line, "--dry-run"), specctl(*line)
        assert plan.code == run.code == 4, (case, plan.err, run.err)
        for said in (plan.err, run.err):
            assert said.splitlines()[-1].startswith("error: target ./target cannot verify drafts"), (case, said)
            assert "train-drafter --features-from" in said and "distill --server" in said


ACCEPTED = {
    "distill --server": ["distill", "--server", "http://h:1", "--domain", "sql", "--output-dir", "new"],
    "distill --from-log": ["distill", "--from-log", "log.jsonl", "--domain", "sql", "--output-dir", "new"],
    "eval-server": ["eval-server", "--server", "http://h:1", "--domain", "sql"],
    "train-drafter": ["train-drafter", "--domain", "sql", "distilled=data", "--features-from", "http://h:1"],
    "retrieval": ["train-drafter", "--domain", "sql", "distilled=data", "--arch", "retrieval"],
    "serve --server": ["serve", "--server", "http://h:1"],
    "route": ["route", "--server", "http://h:1,http://i:1", "--listen", "127.0.0.1:0"],
}


def test_commands_that_use_an_engine_are_planned(specctl, tmp_path, distilled):
    """`distill --server` used to plan without looking at the target."""
    write("qwen3-next", tmp_path / "target")
    (tmp_path / "log.jsonl").write_text('{"prompt": "Q", "response": "A"}\n')
    distilled(tmp_path / "data")
    for case, words in ACCEPTED.items():
        done = specctl(*words, "--target", "./target", "--dry-run")
        assert done.code == 0, (case, done.err)
        assert specctl(*words, "--target", "./nowhere", "--dry-run").code == 4, case


def test_missing_data_must_be_distilled_by_an_engine(specctl, tmp_path):
    """`train-drafter` used to distill first and refuse afterwards."""
    write("qwen3-next", tmp_path / "target")
    line = ["train-drafter", "--domain", "sql", "--target", "./target", "--features-from", "http://h:1", "--dry-run"]
    done = specctl(*line)
    assert done.code == 4 and "no complete data in" in done.err and "specctl distill --server" in done.err


def test_doctor_lists_the_commands_that_work(specctl, tmp_path):
    write("nemotron-h", tmp_path / "target")
    done = specctl("doctor", "--target", "./target", "--json")
    assert done.code == 0 and done.json["target"]["path"] == "engine"
    works = {use["command"]: use["works"] for use in done.json["commands"]}
    assert works["distill --server"] and works["export"] and not works["distill"] and not works["eval"]
    assert "recurrent state" in done.json["findings"][-1]["value"]
    shown = specctl("doctor", "--target", "./target").out
    assert "the head is not tried" in shown and "generate, distill, eval" in shown
    assert all(use["works"] for use in specctl("doctor", "--target", "builtin", "--json").json["commands"])


def test_the_table_of_target_commands_is_complete():
    """A new command that reads a target must state whether it runs it."""
    from specctl.cli.doctor import OWN_FORWARD, WITH_ENGINES
    from specctl.subcommands import SUBCOMMANDS

    named = {name.split()[0] for name in (*WITH_ENGINES, *OWN_FORWARD)}
    assert named == {name for name, row in SUBCOMMANDS.items() if row.recipe is not None} - {"replay"}
    assert {"qwen3.5", *SLOW} <= set(TARGETS)
