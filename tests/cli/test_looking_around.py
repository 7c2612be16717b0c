"""The commands recipes, domains and doctor."""

import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest
import transformers
from typer.main import get_command

from specctl import data_prep, progress
from specctl.cli import doctor
from specctl.cli.main import app
from specctl.decoding.target_text import load_target_text
from specctl.threads import CpuFacts
from tests.conftest import SIZES, write_tiny


def test_a_recipe_can_be_copied_edited_and_validated(specctl, tmp_path):
    assert specctl("recipes", "cp", "train-drafter/eagle3", "mine.yaml").code == 0
    mine = tmp_path / "mine.yaml"
    assert specctl("recipes", "validate", "mine.yaml").code == 0
    assert specctl("recipes", "cp", "eval", "mine.yaml").code == 2, "nothing is overwritten"
    assert specctl("recipes", "cp", "eval", "none/mine.yaml").code == 2, "directories are not made"
    mine.write_text(mine.read_text().replace("ttt_steps", "ttt_step").replace("clip: 0.5", "clip: high"))
    done = specctl("recipes", "validate", "mine.yaml")
    assert done.code == 2
    lines = mine.read_text().splitlines()
    for key in ("ttt_step", "clip"):
        number = next(n for n, line in enumerate(lines, 1) if line.strip().startswith(key))
        assert f"mine.yaml:{number}: " in done.err
    assert "did you mean ttt_steps?" in done.err


def test_recipes_are_listed_and_shown(specctl):
    names = specctl("recipes", "ls", "-q").out.split()
    assert {"distill", "eval", "generate", "train-drafter/eagle3", "demo/train", "deepspeed/zero3"} <= set(names)
    assert all(row["about"] for row in specctl("recipes", "ls", "--json").json["recipes"])
    assert json.loads(specctl("recipes", "show", "deepspeed/zero1").out)["zero_optimization"]["stage"] == 1


@pytest.mark.parametrize(
    ("name", "said"), [("deepspeed/zero1", "deepspeed=deepspeed/zero1"), ("slurm/train-drafter", "recipes cp")]
)
def test_files_that_are_not_recipes_are_refused_as_recipes(specctl, name, said):
    """The error used to be about line 19 of a script, or DeepSpeed's keys."""
    for argv in (("train-drafter", "--recipe", name), ("recipes", "validate", name)):
        done = specctl(*argv)
        assert done.code == 2 and "not a recipe" in done.err and said in done.err


def test_domains_are_listed_and_shown(specctl):
    assert specctl("domains", "ls", "-q").out.split() == list(data_prep.DOMAINS)
    done = specctl("domains", "show", "sql", "--samples", "2", "--json")
    assert len(done.json["samples"]) == 2
    assert done.json["public"]["licence"]
    assert specctl("domains", "show", "sql", "--samples", "0").out.count("prompts from the generator") == 0
    shown = specctl("domains", "show", "sql").out
    assert "prompts from the generator" in shown and "split: train = train[:95%], test = train[95%:]" in shown


@pytest.mark.parametrize("argv", [("domains", "show", "nope"), ("guide", "nope"), ("recipes", "show", "nope")])
def test_a_name_that_is_far_from_all_names_gets_no_suggestion(specctl, argv):
    """Every command had a limit of its own: for `nope` one suggested `code`, another the guide of gateways."""
    assert "nope" in specctl(*argv).err and "did you mean" not in specctl(*argv).err


def test_doctor_finds_everything_here(specctl):
    done = specctl("doctor", "--json")
    assert done.code == 0, done.out
    found = {finding["what"]: finding for finding in done.json["findings"]}
    assert {"python", "torch", "transformers", "deepspeed", "memory", "disk", "target builtin"} <= set(found)
    assert found["target builtin"]["value"].startswith("lean step")


def test_doctor_names_missing_packages_and_the_fix(specctl, monkeypatch):
    monkeypatch.setattr("specctl.runs.version", lambda name: {"torch": "1.0"}.get(name))
    done = specctl("doctor", "--json")
    assert done.code == 1
    missing = {finding["what"]: finding["fix"] for finding in done.json["findings"] if finding["state"] == "missing"}
    assert missing["torch"].startswith("pip install 'torch>=")
    assert missing["transformers"].startswith("pip install 'transformers>=")


def test_doctor_reports_a_missing_target(specctl):
    done = specctl("doctor", "--target", "./nowhere")
    assert done.code == 4
    assert "./nowhere" in done.out


def test_every_missing_finding_has_a_fix():
    assert doctor.package("torch", ">=2", None).fix
    assert doctor.package("torch", ">=2", "1.9").fix
    assert doctor.package("torch", ">=2", "2.13.0+cpu").state == "ok"


def test_doctor_reports_busy_cores():
    quiet, busy = CpuFacts(8, 8, busy=0.1), CpuFacts(8, 8, busy=3.0)
    assert doctor.threads_finding(quiet, None) == doctor.Finding("threads", "ok", "8 threads on 8 cores")
    assert doctor.threads_finding(quiet, 2).state == "ok", "fewer than are free were asked for"
    assert doctor.threads_finding(busy, None).value.startswith(
        "5 threads on 8 cores: other processes keep 3.0 of 8 cores busy"
    )
    assert "unset OMP_NUM_THREADS" in doctor.threads_finding(busy, 8).fix
    too_many = doctor.threads_finding(quiet, 16)
    assert too_many.value == "16 threads on 8 cores", "nobody else is to blame"
    assert "unset OMP_NUM_THREADS" in too_many.fix


def test_doctor_describes_a_target_without_its_weights(specctl, tmp_path):
    """So that a target can be checked before its download."""
    directory = write_tiny(
        tmp_path / "gemma", "Gemma2Config", SIZES | {"head_dim": 16, "sliding_window": 16, "num_hidden_layers": 2}
    )
    (tmp_path / "gemma" / "model.safetensors").unlink()
    done = specctl("doctor", "--target", directory, "--json")
    assert done.code == 4, "but what it is can be told"
    about = done.json["target"]
    expected = {
        "architecture": "Gemma2ForCausalLM",
        "path": "transformers",
        "layers": 2,
        "hidden_size": 48,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 16,
        "vocab_size": 4096,
        "context_length": 256,
        "trained_context": None,
        "rope": ["default"],
        "sliding_window": 16,
        "tied_head": True,
        "features": 2,
        "eos_ids": [3],
        "chat_template": True,
    }
    assert {key: about[key] for key in expected} == expected
    layer = 48 * 16 * (4 + 2 + 2 + 4) + 3 * 48 * 64 + 4 * 48
    assert about["parameters"] == 4096 * 48 + 2 * layer + 48
    assert about["bytes"] == about["parameters"] * {"bf16": 2, "fp32": 4}[about["dtype"]]
    assert "'gemma2' is not one of" in about["why"]
    shown = specctl("doctor", "--target", directory).out
    for words in ("the forward of transformers", "4 of dimension 16, 2 KV heads", "head tied", "hidden states 0 to 2"):
        assert words in shown


def test_doctor_shows_the_limit_of_longrope(specctl, tmp_path):
    factors = {"short_factor": [1.0] * 6, "long_factor": [2.0] * 6}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64, **factors}
    sizes = SIZES | {"rope_parameters": rope, "original_max_position_embeddings": 64}
    directory = write_tiny(tmp_path / "phi", "Phi3Config", sizes)
    assert specctl("doctor", "--target", directory, "--json").json["target"]["context_length"] == 64
    assert "64 of 256: beyond that, longrope changes" in specctl("doctor", "--target", directory).out


def test_doctor_finds_a_target_in_the_hugging_face_cache(specctl, tmp_path, monkeypatch):
    """By id, without asking the hub."""
    snapshot = tmp_path / "models--some--model" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (tmp_path / "models--some--model" / "refs").mkdir()
    (tmp_path / "models--some--model" / "refs" / "main").write_text(snapshot.name)
    write_tiny(snapshot, "Qwen2Config", SIZES)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    about = specctl("doctor", "--target", "some/model", "--json").json["target"]
    assert (about["target"], about["path"], about["model_type"]) == ("some/model", "lean", "qwen2")
    done = specctl("doctor", "--target", "some/other", "--json")
    assert done.code == 4
    finding = done.json["findings"][-1]
    assert "not in the Hugging Face cache" in finding["value"] and "hf download some/other" in finding["fix"]


def test_doctor_refuses_unusable_targets(specctl, tmp_path):
    """Each with exit code 4 and its reason."""
    (tmp_path / "empty").mkdir()
    transformers.T5Config().save_pretrained(tmp_path / "t5")
    (tmp_path / "unknown").mkdir()
    (tmp_path / "unknown" / "config.json").write_text('{"model_type": "never-heard-of"}')
    (tmp_path / "seven").mkdir()
    (tmp_path / "seven" / "config.json").write_text('{"model_type": "llama", "num_attention_heads": 7}')
    transformers.LlamaConfig(**SIZES).save_pretrained(tmp_path / "mute")
    for name, words in {
        "./nowhere": "does not exist",
        "./empty": "not a model directory: it has no config.json",
        "./t5": "not a decoder-only causal LM",
        "./unknown": "never-heard-of",
        "./seven": "not a multiple of the number of attention heads",
        "./mute": "cannot load the tokenizer of ./mute: its directory has no file of a tokenizer",
    }.items():
        done = specctl("doctor", "--target", name, "--json")
        finding = done.json["findings"][-1]
        assert done.code == 4 and finding["state"] == "missing" and finding["fix"], name
        assert words in finding["value"], finding


def test_doctor_notes_a_target_without_chat_template(specctl, tmp_path):
    write_tiny(tmp_path / "base", "LlamaConfig", SIZES)
    (tmp_path / "base" / "chat_template.jinja").unlink()
    done = specctl("doctor", "--target", "./base", "--json")
    assert done.code == 0 and done.json["target"]["chat_template"] is False
    fix = done.json["findings"][-1]["fix"]
    assert "chat_template.jinja" in fix
    shown = specctl("doctor", "--target", "./base").out
    assert "commands: all work with this target once it has a chat template" in shown
    assert re.search(r"^baseline +0\.0\d GB in (fp32|bf16) more in eval and bench, for transformers$", shown, re.M)
    # The advice used to be a template that leaves out all messages but the first.
    (tmp_path / "base" / "chat_template.jinja").write_text(fix.partition("base model: '")[2].removesuffix("')"))
    target = load_target_text("./base")
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hello"}]
    assert target.tokenizer.decode(target.render(messages)).split() == ["Be", "short.", "Hello"]


@pytest.mark.parametrize(
    ("method", "reason"), [("awq", "requires a package"), ("modelopt", "quant_method is 'modelopt'")]
)
def test_quantized_weights_that_cannot_be_read_are_left_to_engines(specctl, tmp_path, monkeypatch, method, reason):
    """`doctor` and --dry-run used to promise that all commands work, and the run stopped for a missing package. Targets
    that only engines can read, such as ModelOpt's, were refused in every command."""
    from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

    def not_installed(*args, **options):
        raise ImportError("requires a package: pip install it")

    monkeypatch.setattr(AUTO_QUANTIZER_MAPPING["awq"], "validate_environment", not_installed)
    directory = Path(write_tiny(tmp_path / "small", "LlamaConfig", SIZES))
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": method}}))
    done = specctl("doctor", "--target", "./small", "--json")
    assert done.code == 0 and done.json["target"]["path"] == "engine"
    assert {use["command"]: use["works"] for use in done.json["commands"]}["generate"] is False
    for words in (["generate", "hi"], ["generate", "hi", "--dry-run"], ["eval", "--domain", "sql", "--dry-run"]):
        stopped = specctl(*words, "--target", "./small")
        assert stopped.code == 4 and reason in stopped.err and "distill --server" in stopped.err
    assert specctl("distill", "--target", "./small", "--server", "http://localhost:1", "--dry-run").code == 0


def test_a_directory_without_config_is_not_a_target(specctl, tmp_path):
    """The error used to be "Unrecognized model in .", from transformers."""
    done = specctl("generate", "hi", "--target", ".")
    assert done.code == 4 and ". is not a model directory: it has no config.json" in done.err
    assert "no config.json" in specctl("doctor", "--target", str(tmp_path)).out


def test_a_pool_may_be_nested(specctl, tmp_path):
    """`eval` and --dry-run used to look one level deep only, unlike `select`."""
    (tmp_path / "pool/math/eagle3").mkdir(parents=True)
    for name in ("config.json", "drafter.json"):
        (tmp_path / "pool/math/eagle3" / name).write_text("{}")
    done = specctl("eval", "--pool", "pool", "--domain", "math", "--dry-run", "--json")
    assert done.code == 0 and any("pool/math/eagle3" in step for step in done.json["steps"])


def test_generate_says_when_no_prompt_was_given(specctl):
    assert "no prompt given" in specctl("generate", "--dry-run").err
    assert specctl("generate", "hi", "--dry-run").err == ""
    done = specctl("generate", "\udcff\udcfe", "--dry-run")
    assert done.code == 3 and "not UTF-8" in done.err


def from_pipe(monkeypatch, content: bytes | None):
    """Make stdin a pipe with `content`, or one that stays silent."""
    read, write = os.pipe()
    if content is not None:
        os.write(write, content)
        os.close(write)
    monkeypatch.setattr(sys, "stdin", os.fdopen(read))


def test_a_prompt_on_stdin_is_utf8(specctl, monkeypatch):
    """Other bytes were an unexpected error, or characters of the locale's encoding."""
    from_pipe(monkeypatch, b"\xef\xbb\xbfna\xc3\xafve")
    assert specctl("generate", "-", "--dry-run", "--json").json["recipe"]["prompt"] == "naïve"
    from_pipe(monkeypatch, b"caf\xe9")
    done = specctl("generate", "-", "--dry-run")
    assert done.code == 3 and "not UTF-8" in done.err


def test_sigterm_ends_the_wait_for_a_prompt(specctl, monkeypatch):
    from_pipe(monkeypatch, None)
    progress.interrupts.handle(signal.SIGTERM)
    try:
        assert specctl("generate", "-", "--dry-run").code == 75
    finally:
        progress.interrupts.reset()


def test_doctor_checks_the_weights(tmp_path):
    """It used to accept a directory without weights, and one with half a file."""
    directory = Path(write_tiny(tmp_path / "llama", "LlamaConfig", SIZES))
    file, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    assert doctor.weights(directory).state == "ok"
    whole = file.read_bytes()
    for content in (whole[:-10], whole[:100], b"", whole + b"x"):
        file.write_bytes(content)
        found = doctor.weights(directory)
        assert (found.state == "missing" and "model.safetensors" in found.value + str(found.fix)) or not content
    file.unlink()
    assert doctor.weights(directory).state == "missing"
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}))
    (directory / "model-1.safetensors").write_bytes(whole)
    found = doctor.weights(directory)
    assert found.state == "missing" and "model-2.safetensors" in found.value


def test_a_damaged_model_directory_is_reported(specctl, tmp_path):
    """Damaged weights used to raise SafetensorError, and a missing tokenizer made every prompt too long."""
    directory = Path(write_tiny(tmp_path / "qwen", "Qwen3Config", SIZES | {"head_dim": 16}))
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    done = specctl("generate", "hi", "--target", str(directory))
    assert done.code == 4 and "its weights are damaged" in done.err
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).unlink()
    found = specctl("doctor", "--target", str(directory), "--json")
    assert found.code == 4 and found.json["findings"][-1]["value"] == f"the tokenizer of {directory} has no vocabulary"
    shown = specctl("doctor", "--target", str(directory)).out
    assert "commands: all work with this target once nothing is missing" in shown


@pytest.mark.parametrize(
    "name",
    [
        *("distill", "train-drafter", "eval", "export", "import", "generate", "select", "online", "bench"),
        *("doctor", "report"),
    ],
)
def test_help_ends_with_an_example_of_its_own_options(specctl, name):
    """An example with an option of another command would fail at the first try."""
    said = " ".join(specctl(name, "--help").out.replace("│", " ").split())
    about, _, example = said.partition("Example: ")
    assert example.startswith(f"specctl {name} ")
    for option in [word for word in example.split() if word.startswith("--")]:
        assert f" {option} " in about
    assert "<bool>" not in about.replace("--help -h <bool>", "")


def test_command_summaries_are_not_broken_early(specctl):
    """The summary of `import` used to break after "Hydra," at any width, and later its second sentence did."""
    listed = " ".join(specctl("--help").out.replace("│", " ").split())
    summaries = {name: command.short_help for name, command in get_command(app).commands.items() if command.short_help}
    assert {"import", "eval", "report"} <= summaries.keys()
    for name, summary in summaries.items():
        assert "\n" not in summary and summary in listed, name
    for name, command in get_command(app).commands.items():
        for paragraph in command.help.split("\n\n")[1:]:
            lines = paragraph.strip().splitlines()
            assert all(line.endswith((".", ":")) for line in lines[:-1]), (name, lines)


@pytest.mark.parametrize(("missing", "verdict"), [(1, "1 requirement is missing"), (2, "2 requirements are missing")])
def test_the_doctor_verdict_uses_singular_and_plural(missing, verdict):
    """It used to say "1 requirements are missing"."""
    assert doctor._report({"findings": [], "missing": missing}, None).renderables[-1] == verdict


@pytest.mark.parametrize("name", ["pytorch_model.bin.index.json", "model.safetensors.index.json"])
def test_doctor_reports_missing_files_of_an_index(tmp_path, name):
    """A download that was interrupted has the index alone."""
    directory = Path(write_tiny(tmp_path / "llama", "LlamaConfig", SIZES))
    (directory / "model.safetensors").unlink()
    (directory / name).write_text(json.dumps({"weight_map": {"a": "part-1.bin"}}))
    found = doctor.weights(directory)
    assert found.state == "missing" and "part-1.bin" in found.value


@pytest.mark.parametrize("make_other", [lambda file: None, os.mkfifo, os.mkdir], ids=["nothing", "pipe", "directory"])
def test_doctor_reports_missing_weights(tmp_path, make_other):
    """It used to say ok for a target that cannot be loaded, and to block on a pipe."""
    directory = Path(write_tiny(tmp_path / "llama", "LlamaConfig", SIZES))
    (directory / "model.safetensors").unlink()
    make_other(directory / "model.safetensors")
    found = doctor.weights(directory)
    assert found.state == "missing" and str(directory) in found.value + str(found.fix)
    if make_other is os.mkfifo:
        assert "a named pipe, not a regular file" in found.value


def test_an_error_in_a_chat_template_is_one_line(specctl, tmp_path):
    write_tiny(tmp_path / "llama", "LlamaConfig", SIZES)
    (tmp_path / "llama/chat_template.jinja").write_text("{{ raise_exception('no users here') }}")
    done = specctl("generate", "hi", "--target", "./llama")
    assert done.code == 3 and len(done.err.strip().splitlines()) <= 2
    assert "llama/chat_template.jinja: the chat template rejects a conversation: no users here" in done.err
