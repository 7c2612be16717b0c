"""`train-drafter` distills first if there is no data, the only place where commands are chained."""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import pytest
from rich.console import Console

from specctl.cli.train_drafter import report_norms, show
from specctl.recipe import RECIPES
from tests.conftest import write_tiny
from tests.toys import mtp


@dataclass
class Result:
    drafter: str = "drafters/sql-eagle3"
    output: str = "distilled/sql"


@pytest.fixture
def calls(library):
    """Record the (command, recipe) pairs that reach the library."""
    seen = []

    def note(command):
        def function(recipe, run):
            seen.append((command, recipe))
            return Result()

        return function

    for command in ("distill", "train-drafter"):
        library(command, note(command))
    return seen


@pytest.mark.parametrize(("mat", "says"), [(2.5, "2.50 (on held-out prompts"), (math.nan, "–")])
def test_mat_is_printed_with_its_prompts(capsys, mat, says):
    """If there are too few prompts, none is held out and there is no mat."""
    result = {"mat": mat, "choosing_mat": None, "final_loss": math.nan, "drafter": "drafters/sql-eagle3"}
    Console(width=200).print(show(result, RECIPES["train-drafter"]()))
    told = capsys.readouterr().out
    assert "choosing_mat" not in told and "final_loss" not in told
    assert says in told and ("held-out" in told) == (mat == 2.5)


def test_a_head_that_llama_cpp_cannot_run_is_announced(capsys):
    """The export refused it, after hours of training."""
    recipe, llama_cpp = RECIPES["train-drafter"](), {"norm_output": False, "fc_norm": False, "norm_before_fc": True}
    for target, options, told in (("m.gguf", {}, True), ("builtin", {}, False), ("m.gguf", llama_cpp, False)):
        drafter = recipe.drafter.model_copy(update=options)
        named = recipe.target.model_copy(update={"name": target})
        report_norms(recipe.model_copy(update={"target": named, "drafter": drafter}))
        assert ("--recipe train-drafter/llama-cpp" in capsys.readouterr().err) == told


def test_missing_data_is_distilled_first(specctl, calls):
    done = specctl.ok("train-drafter", "--domain", "math", "--seed", "5", "distill.responses=7")
    assert [command for command, _ in calls] == ["distill", "train-drafter"]
    first = calls[0][1]
    assert (first.data.domain, first.data.limit, first.data.seed) == (["math"], 7, 5)
    assert first.output == calls[1][1].data_dirs[0] == Path("distilled/math")
    assert "distilling from up to 7 prompts of the built-in generator first" in done.err


@pytest.mark.parametrize("dry", [(), ("--dry-run",)])
def test_a_target_without_an_mtp_layer_is_refused_first(specctl, calls, tmp_path, dry):
    """Before responses are distilled and before anything is written."""
    done = specctl("train-drafter", "--arch", "mtp", *dry)
    assert done.code == 4 and "target builtin has no MTP layer" in done.err and "model.mtp_layers.*" in done.err
    assert not calls and not list(tmp_path.iterdir())


@pytest.mark.parametrize("dry", [(), ("--dry-run",)])
@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["drafter.taps=[1,99]"], "the taps must be distinct hidden states from 0 to"),
        (["--arch", "dflash", "drafter.taps=[3,3]"], "must be distinct hidden states"),
        (["--arch", "dflash", "drafter.conv_kernel_size=9"], "exceeds the 8 slots of a block"),
        (["--arch", "lm", "drafter.preset=huge"], "unknown preset"),
    ],
)
def test_invalid_sizes_are_refused_first(specctl, calls, tmp_path, argv, says, dry):
    done = specctl("train-drafter", *argv, *dry)
    assert done.code == 2 and says in done.err
    assert not calls and not list(tmp_path.iterdir())


@pytest.mark.parametrize("dry", [(), ("--dry-run",)])
def test_a_target_with_narrow_embeddings_is_refused_first(specctl, calls, tmp_path, dry):
    """The training of a head ended in a RuntimeError about sizes of tensors, after responses were distilled."""
    sizes = {"hidden_size": 48, "ffn_dim": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    opt = write_tiny(tmp_path / "opt", "OPTConfig", sizes | {"word_embed_proj_dim": 32, "do_layer_norm_before": False})
    done = specctl("train-drafter", "--target", opt, *dry)
    assert done.code == 4 and "but the target has 48 and 32 (hint: use --arch lm" in done.err
    assert not calls and [file.name for file in tmp_path.iterdir()] == ["opt"]
    specctl.ok("train-drafter", "--target", opt, "--arch", "retrieval", *dry)


def test_an_mtp_layer_is_planned(specctl, calls, tmp_path):
    native = mtp.write(tmp_path / "native", "mimo")
    done = specctl.ok("train-drafter", "--arch", "mtp", "--target", native, "--dry-run", "--json")
    assert done.json["estimate"]["drafter_parameters"] > 800_000
    assert done.json["recipe"]["ttt_steps"] == 3


def test_data_of_a_mixture_is_named_before_one_of_its_domains_is_distilled(specctl, calls, distilled, tmp_path):
    """`distill --domain sql,math` writes one directory. The data of sql alone was then distilled from other prompts."""
    distilled(tmp_path / "distilled/sql+math")
    note = "distilled/sql+math has texts of sql, too, but only --domain sql,math reads them"
    assert note in specctl.ok("train-drafter", "--domain", "sql", "--dry-run").err
    assert "has texts of" not in specctl.ok("train-drafter", "--domain", "code", "--dry-run").err
    assert specctl.ok("train-drafter", "--domain", "sql,math", "--dry-run").err == ""


def test_the_result_ends_with_the_next_command(specctl, calls, distilled, tmp_path):
    done = specctl.ok("distill", "--domain", "sql", "--output-dir", "my data")
    assert done.out.splitlines()[-1] == "next: specctl train-drafter --domain sql 'distilled=my data'"
    assert "next:" not in specctl.ok("distill", "--domain", "sql", "--shard", "1/2").out
    done = specctl.ok("train-drafter", "--domain", "sql")
    assert done.out.splitlines()[-1] == (
        "next: specctl eval --domain sql --drafter drafters/sql-eagle3 --drafter lookup"
    )
    (tmp_path / "mine.jsonl").write_text('{"prompt": "Q"}\n')
    done = specctl.ok("train-drafter", "--prompts", "mine.jsonl")
    assert " --domain mine --prompts TEST.jsonl --drafter " in done.out.splitlines()[-1]
    distilled(tmp_path / "distilled/sql")
    (tmp_path / "distilled/sql/card.json").write_text('{"sources": ["mine.jsonl"], "excluded": "test.jsonl"}')
    done = specctl.ok("train-drafter", "--domain", "sql")
    assert " --domain sql --prompts test.jsonl --drafter " in done.out.splitlines()[-1]
    (tmp_path / "distilled/sql/card.json").write_text("[]")  # damaged: the drafter was made, and then came a traceback
    assert " --domain sql --drafter " in specctl.ok("train-drafter", "--domain", "sql").out.splitlines()[-1]


def test_existing_data_is_used(specctl, calls, distilled, tmp_path):
    distilled(tmp_path / "distilled/sql")
    assert specctl("train-drafter").code == 0
    assert [command for command, _ in calls] == ["train-drafter"]


def test_options_without_effect_on_existing_data_are_warned_about(specctl, calls, distilled, tmp_path):
    """--prompts used to be ignored silently, and so was another target that had written the data."""
    distilled(tmp_path / "distilled/sql")
    meta = tmp_path / "distilled/sql/meta.json"
    meta.write_text(json.dumps(json.loads(meta.read_text()) | {"target": {"name": "other"}}))
    (tmp_path / "mine.jsonl").write_text('{"prompt": "Q"}\n')
    done = specctl("train-drafter", "--domain", "sql", "--prompts", "mine.jsonl", "distill.responses=7")
    assert done.code == 0 and [command for command, _ in calls] == ["train-drafter"]
    assert "data.prompts, distill.responses" in done.err and "specctl distill" in done.err
    assert "was written by target other, not builtin" in done.err
    meta.write_text(json.dumps(json.loads(meta.read_text()) | {"target": {"name": "builtin"}}))
    assert specctl("train-drafter").err == ""


@pytest.mark.parametrize(("argv", "commands"), [([], ["train-drafter"]), (["--resume"], ["distill", "train-drafter"])])
def test_unfinished_data_is_finished_on_resume(specctl, calls, distilled, tmp_path, argv, commands):
    distilled(tmp_path / "distilled/sql", complete=False)
    done = specctl.ok("train-drafter", *argv)
    assert [command for command, _ in calls] == commands
    assert calls[0][1].resume == bool(argv)
    assert ("is incomplete" in done.err) != bool(argv)


@pytest.mark.parametrize("argv", [[], ["--resume"]])
def test_unfinished_data_that_is_named_is_reported_and_never_finished(specctl, calls, distilled, tmp_path, argv):
    """The Slurm scripts name their data. A training on a part of it said nothing."""
    distilled(tmp_path / "mine", complete=False)
    done = specctl.ok("train-drafter", "distilled=mine", *argv)
    assert "data in mine is incomplete: training on its 1 responses" in done.err
    assert [command for command, _ in calls] == ["train-drafter"]


def test_named_data_that_is_missing_is_refused_for_a_domain_of_any_name(specctl):
    """The domain was unknown instead, with the advice to give prompts."""
    done = specctl("train-drafter", "--domain", "tickets", "distilled=nowhere")
    assert done.code == 2 and "no distilled data in nowhere" in done.err


def test_unfinished_data_that_was_trained_on_stays_unfinished(specctl, calls, distilled, tmp_path):
    """A resumed training needs the same data, and would refuse finished data."""
    distilled(tmp_path / "distilled/sql", complete=False)
    (tmp_path / "drafters/sql-eagle3.checkpoints").mkdir(parents=True)
    done = specctl("train-drafter", "--resume")
    assert done.code == 0 and "is incomplete" in done.err
    assert [command for command, _ in calls] == ["train-drafter"]


def test_several_processes_do_not_distill(specctl, calls, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    done = specctl("train-drafter")
    assert done.code == 2
    assert "specctl distill --domain sql" in done.err
    assert calls == []


def test_each_trains_one_drafter_per_domain(specctl, calls):
    done = specctl.ok("train-drafter", "--domain", "sql,math", "--each", "--output-dir", "pool", "--json")
    assert [command for command, _ in calls] == ["distill", "distill", "train-drafter", "train-drafter"]
    assert [recipe.data.domain for _, recipe in calls] == [["sql"], ["math"], ["sql"], ["math"]]
    assert [str(recipe.output) for _, recipe in calls[2:]] == ["pool/sql-eagle3", "pool/math-eagle3"]
    assert done.json["pool"] == "pool" and len(done.json["drafters"]) == 2


def test_a_mixture_uses_existing_data_and_distills_the_rest(specctl, calls, distilled, tmp_path):
    distilled(tmp_path / "distilled/sql")
    assert specctl("train-drafter", "--domain", "sql,math").code == 0
    assert [command for command, _ in calls] == ["distill", "train-drafter"]
    assert calls[0][1].data.domain == ["math"]
    assert [str(path) for path in calls[1][1].data_dirs] == ["distilled/sql", "distilled/math"]
    assert str(calls[1][1].output) == "drafters/sql+math-eagle3"


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--lora"], "lora needs init"),
        (["--init", "nowhere"], "no drafter nowhere"),
        (["--init", "nowhere", "drafter.vocab_size=100"], "leave out drafter.vocab_size"),
        (["--each", "distilled=d"], "exclude each other"),
    ],
)
def test_contradictory_options_are_refused(specctl, calls, argv, says):
    done = specctl("train-drafter", *argv)
    assert done.code in (2, 4) and says in done.err
    assert calls == []


def test_pretraining_runs_once(specctl, calls, tmp_path):
    argv = ["train-drafter", "--arch", "lm", "--domain", "sql", "pretrain.responses=50"]
    assert specctl(*argv).code == 0
    assert [(command, recipe.data.domain) for command, recipe in calls] == [
        ("distill", ["unconditional"]),
        ("distill", ["sql"]),
        ("train-drafter", ["unconditional"]),
        ("train-drafter", ["sql"]),
    ]
    assert calls[0][1].temperatures == [1.0] and calls[0][1].data.limit == 50
    assert calls[2][1].output == calls[3][1].init == Path("drafters/general-lm")
    calls.clear()
    general = tmp_path / "drafters/general-lm"
    general.mkdir(parents=True)
    (general / "config.json").write_text("{}")
    assert specctl(*argv).code == 0
    assert [recipe.data.domain for command, recipe in calls if command == "train-drafter"] == [["sql"]]


def test_the_architecture_follows_the_initial_drafter(specctl, calls, distilled, tmp_path):
    distilled(tmp_path / "distilled/sql")
    (tmp_path / "d").mkdir()
    (tmp_path / "d/config.json").write_text('{"family": "hydra"}')
    assert specctl("train-drafter", "--init", "d").code == 0
    assert calls[0][1].arch == "hydra" and str(calls[0][1].output) == "drafters/sql-hydra"
    (tmp_path / "d/config.json").write_text("{}")
    done = specctl("train-drafter", "--init", "d")
    assert done.code == 4 and 'lacks "family"' in done.err


def drafter(place, domains, family="eagle3", target="builtin", tokens=1, **config):
    place.mkdir(parents=True)
    shape = {"family": family, "architecture": {}, "target": {"name": target}, **config}
    (place / "config.json").write_text(json.dumps(shape))
    (place / "drafter.json").write_text(json.dumps({"domain": domains, "train_tokens": tokens}))
    (place / "model.safetensors").write_bytes(b"")


def test_auto_starts_from_the_generalist_with_most_data(specctl, calls, distilled, tmp_path):
    """Not from a specialist, an adapter, another family's or target's head, or an invalid directory."""
    distilled(tmp_path / "distilled/sql")
    place = tmp_path / "drafters"
    drafter(place / "math", ["math"])
    drafter(place / "two", ["math", "sql"], tokens=5)
    drafter(place / "few", ["math", "code"], tokens=4)
    drafter(place / "adapter", ["a", "b", "c"], lora={})
    drafter(place / "other", ["a", "b", "c"], family="hydra")
    drafter(place / "strange", ["a", "b", "c"], target="other")
    (place / "broken").mkdir()
    (place / "broken/config.json").write_text("{")
    done = specctl.ok("train-drafter", "--init", "auto")
    assert str(calls[0][1].init) == "drafters/two" and "starts from drafters/two" in done.err
    assert specctl("train-drafter", "--init", "auto", "--arch", "hydra").code == 0
    assert str(calls[1][1].init) == "drafters/other"


def test_auto_without_a_generalist_trains_a_new_head(specctl, calls, distilled, tmp_path):
    """With a message. An adapter needs a base and is refused."""
    distilled(tmp_path / "distilled/sql")
    done = specctl("train-drafter", "--init", "auto")
    assert done.code == 0 and calls[0][1].init is None and "training a new head" in done.err
    done = specctl("train-drafter", "--init", "auto", "--lora")
    assert done.code == 2 and "an adapter needs one" in done.err and len(calls) == 1
