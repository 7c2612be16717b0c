"""--dry-run and the shipped recipes: everything is resolved and checked, nothing is loaded or written."""

import json
import shlex

import pytest

from specctl.drafters import checkpoint
from specctl.recipe import RECIPES
from specctl.recipe.resolve import command_of, shipped
from tests.measuring.streams import write_head

JSON = [name for name, text in shipped().items() if text.lstrip().startswith("{")]
SCRIPTS = [name for name, text in shipped().items() if text.startswith("#!")]
GIVEN = {"export", "import", "record", "replay", "learn-from-server", "eval-server"}
"""Commands that need an argument."""
LEARN = ["learn-from-server", "--server", "http://a", "--init", "drafters/sql-eagle3"]
YAML = [name for name in shipped() if name not in JSON + SCRIPTS]


@pytest.fixture
def workplace(tmp_path, distilled):
    """The directories that recipes read: drafters and distilled data."""
    of_demo = ("demo-out/drafters/sql-eagle3", "demo-out/drafters/sql-retrieval")
    for path in ("drafters/sql-eagle3", "drafters/sql-medusa", *of_demo, "heads/sql-eagle3"):
        (tmp_path / path).mkdir(parents=True)
        (tmp_path / path / "config.json").write_text(json.dumps({"family": path.rpartition("-")[2]}))
        if "drafters" in path:
            (tmp_path / path / "drafter.json").write_text("{}")
    distilled(tmp_path / "demo-out/distilled/sql")
    return tmp_path


@pytest.mark.parametrize("name", [name for name in YAML if name != "replay"])  # its plan reads the table
def test_every_recipe_can_be_dry_run(specctl, workplace, name):
    before = sorted(workplace.rglob("*"))
    output = workplace / "elsewhere"
    done = specctl.ok(command_of(name), "--recipe", name, "--dry-run", "--json", "--output-dir", str(output))
    assert done.json["dry_run"] is True
    assert done.json["steps"]
    assert sorted(workplace.rglob("*")) == before


def test_a_plan_shows_only_the_keys_that_differ_from_their_defaults(specctl):
    """A plan used to print all keys of the recipe, up to 120 lines, below the few steps."""
    end = "--dry-run -v lists all keys; key=value sets one\n"
    plan = specctl.ok("eval", "--drafter", "lookup", "sampling.top_k=5", "--dry-run").out
    shown = "keys that differ from their defaults:\nsampling:\n  top_k: 5\ndrafters:\n- lookup\n"
    assert plan.endswith(f"\n\n{shown}{end}")
    assert specctl.ok("reason", "--dry-run").out.endswith(f"\n\nall keys have their defaults\n{end}")
    assert "max_rejected: 0.01" in specctl.ok("eval", "--dry-run", "-v").out


@pytest.mark.parametrize("command", ["eval", "bench"])
def test_a_plan_says_what_the_baseline_transformers_takes(specctl, command):
    """`eval` took 4.3 GB for a quantized file of 0.4 GB, and nothing said so. A plan for a GPU needs no GPU."""
    second = "load the target a second time, with transformers: "
    assert f"{second}0.04 GB in fp32" in specctl.ok(command, "--dtype", "fp32", "--dry-run").out
    assert f"{second}0.02 GB in fp16" in specctl.ok(command, "--dtype", "fp16", "--device", "cuda", "--dry-run").out
    alone = {"eval": ("--baselines", "vanilla"), "bench": ("--shape", "1b")}[command]
    assert second not in specctl.ok(command, *alone, "--dry-run").out


@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        (["replay", "no.parquet"], 4, "table no.parquet does not exist"),
        (["replay", "/dev/zero"], 4, "table /dev/zero cannot be read: a device"),
        (["distill", "--from-log", "file", "--domain", "sql"], 3, "file:1: not JSON"),
        (["distill", "--from-log", "empty", "--domain", "sql"], 3, "no responses in empty"),
        (["eval", "--target", "/dev/zero"], 4, "model directory /dev/zero is a device, not a directory"),
        (["eval", "--recipe", "/dev"], 2, "error: /dev cannot be read: Is a directory"),
        (["replay", "file"], 4, "file is not a table of specctl"),
        (["record", "file/t.parquet"], 2, "file is a file, not a directory"),
        (["record", "drafters", "--overwrite"], 2, "drafters is a directory, not a file"),
        (["train-router", "--router", "drafters"], 2, "drafters exists and is not a router directory"),
        (["train-router", "--router", "none", "train_router=false"], 4, "no router directory"),
        (["train-router", "router.labels=hindsight", "replay=no.parquet"], 4, "table no.parquet does not exist"),
        (["train-router", "router.prompts=no.jsonl"], 3, "no.jsonl"),
        (
            ["learn-from-server", "--server", "http://a", "--init", "drafters/sql-eagle3", "--from-log", "no"],
            2,
            "log file no does not exist",
        ),
        (["export", "drafters/sql-eagle3", "--tune", "no.json"], 3, "no.json"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_plan_refuses_files_as_the_run_does(specctl, workplace, argv, code, said):
    """The run refused them, in part after hours."""
    (workplace / "file").write_text("content")
    (workplace / "empty").write_text("")
    done = specctl(*argv, "--dry-run")
    assert done.code == code and said in done.err, done.err


@pytest.mark.parametrize("name", ["prompts.jsonl", "no.jsonl", "notes", "a/b/c", "drafters/sql-eagle3"])
def test_the_name_of_a_file_is_no_hub_id(specctl, workplace, name):
    """A file of prompts as the target was planned as a model of the hub, which nothing can check."""
    for file in ("prompts.jsonl", "notes"):
        (workplace / file).write_text('{"prompt": "Q"}')
    done = specctl("distill", "--target", name, "--dry-run")
    assert done.code == 4 and name in done.err
    assert "read from the Hugging Face hub" in specctl.ok("distill", "--target", "org/Model-1.5", "--dry-run").out


@pytest.mark.parametrize(
    "argv",
    [
        ("distill", "--prompts", "trian.jsonl"),
        ("distill", "--exclude", "trian.jsonl"),
        ("distill", "--from-log", "trian.jsonl"),
        ("distill", "--target", "./trian.gguf"),
        ("distill", "--target", "./trian.d"),
        ("distill", "--target-adapter", "trian.d"),
        ("eval", "--drafter", "trian.d"),
        ("export", "trian.d"),
        ("import", "trian.d"),
        ("replay", "trian.parquet"),
        ("select", "--pool", "trian.d"),
        ("learn-from-server", "--server", "http://a", "--init", "drafters/sql-eagle3", "--from-log", "trian.jsonl"),
    ],
    ids=" ".join,
)
def test_a_misspelled_path_names_its_neighbor(specctl, workplace, argv):
    """The hint listed the layouts of a file that was not there."""
    for ending in ("jsonl", "gguf", "parquet"):
        (workplace / f"train.{ending}").write_text("")
    (workplace / "train.d").mkdir()
    done = specctl(*argv, "--dry-run")
    misspelled = next(word for word in argv if "trian" in word)
    meant = misspelled.removeprefix("./").replace("trian", "train")
    assert f"did you mean {meant}?" in done.err.replace("./", "") and len(done.err) < 250, done.err


@pytest.mark.parametrize(
    "argv", [("distill", "--exclude", "no.jsonl"), ("online", "--domain", "sql", "warmup.prompts=no.jsonl")]
)
def test_a_file_of_prompts_that_does_not_exist_is_refused(specctl, argv):
    """The run refused it, in part after the target had been loaded."""
    done = specctl(*argv, "--dry-run")
    assert done.code == 3 and "no.jsonl" in done.err


def test_the_plan_lists_active_response_filters(specctl):
    """Filters that are off are not listed."""

    def said(*options):
        steps = specctl("distill", "--domain", "sql", "--dry-run", "--json", *options).json["steps"]
        return [step for step in steps if step.startswith("filter the responses: ")]

    assert said() == ["filter the responses: cut loops"] and said("filters.loops=keep") == []
    (every,) = said("filters.loops=drop", "filters.truncated=drop")
    assert every.endswith("drop loops, drop truncated responses")


def test_a_datastore_is_planned_without_training_steps(specctl):
    steps = specctl("train-drafter", "--arch", "retrieval", "--dry-run", "--json").json["steps"]
    assert any(step.startswith("index the responses") for step in steps)
    assert not any("ZeRO" in step for step in steps)


def test_a_plan_counts_the_prompts_of_a_file(specctl, tmp_path):
    """It assumed 2,000 prompts for a file of six, and promised to measure mat on 16 more than there were."""
    (tmp_path / "six.jsonl").write_text("".join(f'{{"prompt": "Question {number}"}}\n' for number in range(6)))

    def planned(*options):
        argv = ("--domain", "six", "--prompts", "six.jsonl", "--dry-run", "--json", *options)
        return specctl.ok("train-drafter", *argv).json

    none = planned()
    assert none["estimate"]["responses"] == 6
    assert [step for step in none["steps"] if "no prompt is held out" in step]
    assert not [step for step in none["steps"] if step.startswith("measure")]
    measured = [step.partition(" every")[0] for step in planned("eval.fraction=0.6")["steps"] if "measure" in step]
    assert measured == ["measure mat on 2 held-out prompts", "measure the best checkpoint again on 1 other prompt"]
    unknown = planned("data.limit=3")
    assert unknown["estimate"]["responses"] == 3 and "measure mat on up to 16 held-out prompts" in str(unknown["steps"])
    assert "no prompt is held out" in str(planned("--arch", "retrieval")["steps"])


@pytest.mark.parametrize("name", ["none", "lookup", "suffix"])
def test_drafters_without_weights_are_accepted_by_name(specctl, name):
    assert specctl("eval", "--drafter", name, "--dry-run").code == 0


def test_every_command_has_a_recipe():
    assert {command_of(name) for name in YAML} == set(RECIPES)


@pytest.mark.parametrize("name", [name for name in JSON if name.startswith("deepspeed/")])
def test_every_deepspeed_configuration_parses_and_merges(specctl, name):
    done = specctl.ok(
        "train-drafter", "--dry-run", "--json", f"deepspeed={name}", "deepspeed.wall_clock_breakdown=true"
    )
    merged = done.json["recipe"]["deepspeed"]
    assert merged == {**json.loads(shipped()[name]), "wall_clock_breakdown": True}
    assert merged["zero_optimization"]["stage"] == done.json["recipe"]["zero_stage"] == int(name[-1])


@pytest.mark.parametrize("command", sorted(RECIPES.keys() - GIVEN))
def test_commands_run_without_arguments(specctl, command):
    """On a fresh install, without drafters or data."""
    specctl.ok(command, "--dry-run")


@pytest.mark.parametrize("command", sorted(GIVEN))
def test_commands_that_need_an_argument_say_so(specctl, command):
    done = specctl(command, "--dry-run")
    assert done.code == 2
    assert f"specctl {command}" in done.err


@pytest.mark.parametrize(
    ("argv", "code", "says"),
    [
        (["export", "nowhere"], 2, "nowhere"),
        (["export", "full"], 4, "full"),
        (["import", "nowhere"], 2, "nowhere"),
        (["import", "full"], 4, "config.json"),
        (["distill", "--prompts", "missing.jsonl"], 3, "missing.jsonl"),
        (["distill", "--domain", "sqk"], 2, "sql"),
        (["distill", "--target", "./nowhere"], 4, "./nowhere"),
        (["train-drafter", "distilled=nowhere"], 2, "nowhere"),
        (["train-drafter", "init=nowhere"], 2, "nowhere"),
        (["eval", "--drafter", "full"], 4, "full"),
        (["distill", "--output-dir", "file"], 2, "file"),
        (["eval", "--output-dir", "file/below"], 2, "is a file"),
        (["eval", "--output-dir", "online", "--resume"], 2, "online holds a run of specctl online"),
        (["distill", "--output-dir", "/proc/x"], 1, "cannot write to /proc: no files can be made there"),
        (["train-router", "--router", "/proc/x"], 1, "cannot write to /proc: no files can be made there"),
        (["train-drafter", "--output-dir", "full"], 2, "full exists and is not a drafter directory"),
        (["eval", "--output-dir", "full"], 2, "--overwrite"),
        (["train-drafter", "--output-dir", "full", "--overwrite"], 2, "full exists and is not a drafter directory"),
        (["train-drafter", "--output-dir", "full", "--resume"], 2, "full exists and is not a drafter directory"),
        (["distill", "--output-dir", "full", "--overwrite"], 0, ""),
        (["distill", "--output-dir", "full", "--resume"], 0, ""),
        (["distill", "--output-dir", "full", "--shard", "1/4"], 0, ""),
    ],
)
def test_obstacles_are_reported_before_anything_is_loaded(specctl, tmp_path, argv, code, says):
    (tmp_path / "file").write_text("")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/notes.txt").write_text("")
    (tmp_path / "online").mkdir()
    (tmp_path / "online/run.json").write_text('{"command": "online"}')
    done = specctl(*argv, "--dry-run")
    assert done.code == code, done.err
    assert says in done.err


def test_flags_overrides_and_prompt_set_their_keys(specctl):
    done = specctl(
        *(
            *("generate", "Which = is it?", "--drafter", "lookup", "--top-p", "0.9", "sampling.top_k=5"),
            *("--dry-run", "--json"),
        ),
        *("--chat-template-kwargs", '{"enable_thinking": false}'),
    )
    recipe = done.json["recipe"]
    assert (recipe["prompt"], recipe["drafter"]) == ("Which = is it?", "lookup")
    assert (recipe["sampling"]["top_p"], recipe["sampling"]["top_k"]) == (0.9, 5)
    assert recipe["target"]["chat_template_kwargs"] == {"enable_thinking": False}


def test_flags_beat_overrides_beat_recipe_beat_environment(specctl, monkeypatch, tmp_path):
    recipe = tmp_path / "r.yaml"
    recipe.write_text("limit: 3\nsampling: {top_k: 3, top_p: 0.3}\n")
    for key in ("LIMIT", "SAMPLING__TOP_K", "SAMPLING__MAX_NEW_TOKENS"):
        monkeypatch.setenv(f"SPECCTL_{key}", "4")
    monkeypatch.setenv("SPECCTL_ARCH", "lm")  # a key of another command
    argv = ("--recipe", str(recipe), "limit=2", "sampling.top_k=2", "--limit", "1", "--dry-run", "--json")
    resolved = specctl("eval", *argv).json["recipe"]
    sampling = resolved["sampling"]
    assert resolved["limit"] == 1
    assert (sampling["top_k"], sampling["top_p"], sampling["max_new_tokens"]) == (2, 0.3, 4)


@pytest.mark.parametrize(
    ("options", "ids"),
    [(["features.mode=server"], [2, 5, 7, 10]), (["--arch", "medusa", "--features-from", "http://h:1"], [10])],
)
def test_the_plan_prints_the_command_of_a_feature_server(specctl, options, ids):
    steps = specctl("train-drafter", "--domain", "sql", *options, "--dry-run", "--json").json["steps"]
    assert any(f'"eagle_aux_hidden_state_layer_ids": {ids}' in step for step in steps)
    assert any("sglang.launch_server" in step for step in steps) == (len(ids) == 1)
    assert any("request the target's hidden states from http://h:1" in step for step in steps) == (len(ids) == 1)


def test_the_plan_tells_that_no_engine_will_read_the_head(specctl, tiny_directory):
    """The last tap of a target of three layers is its last state. Only the export refused that, after the training."""
    says = "no engine will read this head: the head taps hidden_states [1, 2, 3]"
    assert says in specctl.ok("train-drafter", "--target", tiny_directory("llama"), "--dry-run").out
    assert says[:20] not in specctl.ok("train-drafter", "--dry-run").out


def test_the_plan_tells_what_is_lost_without_target_layers(specctl, tmp_path):
    options = ["--domain", "sql", "features.mode=server", "--dry-run", "--json"]
    whole, ends = (
        specctl("train-drafter", *options, *more).json["steps"] for more in ([], ["features.whole_target=false"])
    )
    assert any(step.startswith("measure mat") for step in whole)
    assert not any(step.startswith("measure mat") for step in ends)
    assert any(step.startswith("estimate mat") and "eval-server" in step for step in ends)
    assert any("without its layers" in step for step in ends)


@pytest.mark.parametrize("dry", [(), ("--dry-run",)])
def test_a_family_that_needs_target_layers_is_refused_by_name(specctl, tmp_path, dry):
    before = sorted(tmp_path.rglob("*"))
    options = ["--arch", "lm", "--domain", "sql", "objective=kl", "features.mode=cached", "features.whole_target=false"]
    done = specctl("train-drafter", *options, *dry)
    assert done.code == 2 and "lm needs the target's layers" in done.err
    assert sorted(tmp_path.rglob("*")) == before


@pytest.fixture
def foreign(tmp_path, target):
    """A head of the built-in target, and the same head relabeled for another target."""
    write_head(tmp_path / "own", target, "eagle3", 0)
    write_head(tmp_path / "pool/other", target, "eagle3", 0)
    found = checkpoint.load(tmp_path / "pool/other")
    found.config["target"] |= {"name": "elsewhere", "vocab_hash": "0" * 16}
    checkpoint.save(found.path, config=found.config, tensors=found.tensors, info=found.info, overwrite=True)
    return "pool/other was made for elsewhere, but target builtin is another model"


@pytest.mark.parametrize(
    "argv",
    [
        ["eval", "--drafter", "pool/other+lookup"],
        ["eval", "--pool", "pool"],
        ["generate", "Hi.", "--drafter", "pool/other"],
        ["select", "--pool", "pool", "--strict"],
        ["select", "--drafter", "lookup", "--rival", "pool/other"],
        ["record", "table.parquet", "--pool", "pool", "--strict"],
        ["serve", "--drafter", "pool/other"],
        ["bench", "--drafter", "pool/other"],
        ["online", "--init", "pool/other"],
        ["train-drafter", "--init", "pool/other", "--lora"],
        ["learn-from-server", "--init", "pool/other", "--server", "http://127.0.0.1:9"],
    ],
    ids=lambda argv: " ".join(argv[:3]),
)
def test_a_drafter_of_another_target_is_refused(specctl, foreign, argv):
    done = specctl(*argv, "--dry-run")
    assert done.code == 4 and foreign in done.err
    places = {"pool/other": "own", "pool/other+lookup": "own+lookup", "pool": "own"}
    specctl.ok(*(places.get(part, part) for part in argv), "--dry-run")


def test_the_plan_tells_that_llama_cpp_needs_a_gguf_file(specctl, foreign):
    """The plan of the built-in target passed, and the export failed without naming the conversion."""
    done = specctl("export", "own", "--to", "llama.cpp", "--dry-run")
    assert done.code == 4 and "llama.cpp serves GGUF files, but the target is " in done.err
    assert "--target FILE.gguf; llama.cpp's convert_hf_to_gguf.py makes one" in done.err
    specctl.ok("export", "own", "--to", "vllm", "--dry-run")


def test_a_pool_skips_a_drafter_of_another_target(specctl, foreign):
    for command in ("select", "serve"):
        done = specctl.ok(command, "--pool", "pool", "--dry-run")
        assert f"pool/other is left out of the pool: drafter {foreign}" in done.err


@pytest.mark.parametrize("dry", [(), ("--dry-run",)])
@pytest.mark.parametrize(
    ("listed", "says"),
    [
        (None, "there is no such file"),
        ("# none yet\n", "it names no server"),
        ("http://a:8000\nb:8000\n", "'b:8000' is not an address"),
        ("http://a:8000\nhttp://a:8000/v1\n", "named twice"),
        (b"\xff\xfe", "codec"),
    ],
)
def test_an_invalid_list_of_servers_is_refused_by_name(specctl, distilled, tmp_path, listed, says, dry):
    distilled(tmp_path / "data")
    if listed is not None:
        (tmp_path / "servers").write_bytes(listed if isinstance(listed, bytes) else listed.encode())
    done = specctl("train-drafter", "distilled=data", "features.servers=servers", *dry)
    assert done.code == 2 and done.err.count("\n") == 1
    assert "features.servers=servers: " in done.err and says in done.err and "one address per line" in done.err


def test_the_plan_of_a_stream_tells_how_far_ahead_it_reads(specctl, tmp_path):
    options = ["--domain", "sql", "features.servers=servers", "features.ahead=9", "features.server.wait_s=5"]
    steps = specctl("train-drafter", *options, "--dry-run", "--json").json["steps"]
    assert any("states from servers, 64 texts at a time and 9 ahead of the training" in step for step in steps)
    assert any('"eagle_aux_hidden_state_layer_ids": [2, 5, 7, 10]' in step for step in steps)


@pytest.mark.parametrize("command", ["generate", "eval", "bench", "select", "serve"])
@pytest.mark.parametrize(
    ("hybrid", "option", "says"),
    [
        ("drafters/sql-eagle3+drafters/sql-medusa", "rescore=false", "sql-medusa is not a text drafter"),
        ("drafters/sql-eagle3+lookahead", "rescore=false", "lookahead is not a text drafter"),
        ("demo-out/drafters/sql-retrieval+lookup", "rescore=false", "sql-retrieval is not a trained drafter"),
        ("drafters/sql-medusa+lookup", "rescore=true", "needs a medusa head and a datastore"),
        ("drafters/sql-eagle3+demo-out/drafters/sql-retrieval", "rescore=true", "needs a medusa head and a datastore"),
        ("drafters/sql-eagle3+lookup", "proposal=sampled", "a hybrid cannot sample its proposals"),
    ],
)
def test_a_plan_refuses_the_hybrids_that_a_run_refuses(specctl, workplace, command, hybrid, option, says):
    """By the families in the config files, without reading weights."""
    done = specctl(command, "--drafter", hybrid, f"drafting.{option}", "--dry-run")
    assert done.code == 2 and says in done.err


@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
@pytest.mark.parametrize("command", ["generate", "eval", "bench", "select", "serve", "online"])
def test_rescoring_without_a_head_and_a_datastore_is_refused(specctl, workplace, command, dry):
    """It would have no effect."""
    given = [[]] if command == "online" else [[], ["--drafter", "drafters/sql-medusa"], ["--drafter", "lookup"]]
    for drafter in given:
        done = specctl(command, *drafter, "drafting.rescore=true", *dry)
        assert done.code == 2 and "rescore needs a" in done.err and not done.out


def test_a_plan_accepts_a_head_with_a_datastore(specctl, workplace):
    store = "demo-out/drafters/sql-retrieval"
    specctl.ok("eval", "--drafter", f"drafters/sql-medusa+{store}", "drafting.rescore=true", "--dry-run")
    specctl.ok(
        "eval", "--drafter", f"drafters/sql-eagle3+{store}", "--drafter", "drafters/sql-eagle3+suffix", "--dry-run"
    )


@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
@pytest.mark.parametrize(
    ("argv", "code", "says"),
    [
        ("export drafters/sql-medusa --to speculators", 2, "medusa drafters cannot be written for speculators"),
        ("export demo-out/drafters/sql-retrieval --to hf", 2, "retrieval drafters cannot be written for hf"),
        ("export demo-out/drafters/sql-retrieval --check", 2, "--check is for heads"),
        ("export drafters/sql-eagle3 --to sglang --server http://localhost:1", 2, "publishes only datastores"),
        ("import drafters/sql-eagle3", 2, "drafters/sql-eagle3 is a drafter of specctl already"),
        ("train-drafter --arch eagle3 init=drafters/sql-medusa", 4, "sql-medusa has family medusa, not eagle3"),
        ("select --drafter lookup --drafter suffix arms.names=[wrong]", 2, "the pool has no wrong"),
        ("record t.parquet --drafter lookup --drafter suffix arms.names=[wrong]", 2, "the pool has no wrong"),
        (
            "select --drafter lookup --rival lookup",
            2,
            "two contenders are called 'lookup'",
        ),
        ("select --drafter lookup --beside suffix --rival suffix", 2, "two contenders are called 'suffix'"),
        ("record t.parquet 'arms.shapes=[{depth: 2}]'", 2, "a table has each drafter in one shape"),
        ("replay t.parquet 'arms.shapes=[{depth: 2}]'", 2, "a table has each drafter in one shape"),
        ("serve --drafter lookup --drafter suffix arms.draft_nodes=[2]", 2, "set arms.names alone"),
    ],
)
def test_a_plan_refuses_what_a_run_refuses_before_loading(specctl, workplace, argv, code, says, dry):
    done = specctl(*shlex.split(argv), *dry)
    assert done.code == code and says in done.err and done.err.count("\n") == 1


def test_a_pool_drafter_that_is_not_an_arm_can_be_a_rival(specctl, workplace):
    specctl.ok(*shlex.split("select --drafter lookup --drafter suffix arms.names=[lookup] --rival suffix --dry-run"))


INSIDE = {
    "train-drafter": ["train-drafter"],
    "distill": ["distill"],
    "import": ["import", "heads/sql-eagle3"],
    "eval": ["eval"],
    "shard": ["distill", "--shard", "1/4"],
    "overwrite": ["train-drafter", "--overwrite"],
}


@pytest.mark.parametrize("case", INSIDE)
@pytest.mark.parametrize("planned", [["--dry-run"], []])
def test_an_output_inside_a_drafter_is_refused(specctl, workplace, library, case, planned):
    """`--output-dir drafters/a/b` was accepted. Overwriting drafters/a later deleted b."""
    library(INSIDE[case][0], lambda recipe, run: pytest.fail("began"))
    outer = workplace / "drafters/sql-eagle3"
    done = specctl(*INSIDE[case], "--output-dir", "drafters/sql-eagle3/new/run", *planned)
    said = f"error: drafters/sql-eagle3/new/run is inside {outer}, which is a drafter, and --overwrite of that drafter"
    assert done.code == 2 and done.err.startswith(said)
    assert done.err.endswith(f"(hint: choose a place outside {outer})\n") and done.err.count("\n") == 1
    assert not (outer / "new").exists()


def test_other_outputs_inside_a_drafter_are_refused(specctl, workplace):
    """Exports, routers, tables and runs: all of them would be deleted with the drafter. Runs would be among its files,
    too."""
    outer = workplace / "drafters/sql-eagle3"
    written = workplace / "exported/h"
    written.mkdir(parents=True)
    (written / "export.json").write_text("{}")
    for argv, place in [
        (["export", "drafters/sql-eagle3", "--output-dir", "drafters/sql-eagle3/x"], outer),
        (["record", "drafters/sql-eagle3/t.parquet"], outer),
        (["train-router", "--router", "drafters/sql-eagle3/router"], outer),
        (["eval", "--overwrite", "--output-dir", "drafters/sql-eagle3"], outer),
        (["eval", "--output-dir", "exported/h/run"], written),
    ]:
        done = specctl(*argv, "--dry-run")
        assert (done.code, done.err.count(str(place)) > 0) == (2, True), done.err
        assert "would delete an output there" in done.err
    specctl.ok("eval", "--output-dir", "drafters/run", "--dry-run")  # beside drafters


@pytest.mark.parametrize("line", ["distill --output-dir x", "eval --output-dir x", "report x", "serve --pool x"])
def test_a_loop_of_links_is_an_error_with_a_remedy(specctl, workplace, monkeypatch, line):
    """`Path.resolve` raises RuntimeError for it, which was reported as a fault of specctl."""
    monkeypatch.chdir(workplace)
    (workplace / "x").symlink_to("x")
    done = specctl(*line.split(), *([] if line.startswith("report") else ["--dry-run"]))
    assert done.code == 2 and "unexpected" not in done.err, done.err


def test_an_output_that_is_already_inside_a_drafter_goes_on(specctl, workplace):
    """Earlier versions accepted it, and its run can be resumed."""
    run = workplace / "drafters/sql-eagle3/run"
    run.mkdir()
    (run / "run.json").write_text('{"command": "eval"}')
    specctl.ok("eval", "--resume", "--output-dir", "drafters/sql-eagle3/run", "--dry-run")


@pytest.mark.parametrize("mark", ["drafter.json", "run.json", "meta.json", "export.json", "router.json"])
@pytest.mark.parametrize("planned", [["--dry-run"], []])
@pytest.mark.parametrize("how", ["--overwrite", "--resume"])
def test_a_drafter_with_another_output_inside_is_not_replaced(specctl, workplace, library, mark, planned, how):
    """`--overwrite` deleted a drafter, run or data directory inside the replaced one."""
    library("train-drafter", lambda recipe, run: pytest.fail("began"))
    inner = workplace / "drafters/sql-eagle3/old/inner"
    inner.mkdir(parents=True)
    (inner / mark).write_text("{}")
    done = specctl("train-drafter", how, "--output-dir", "drafters/sql-eagle3", *planned)
    assert done.code == 2 and "drafters/sql-eagle3 contains the " in done.err
    assert "drafters/sql-eagle3/old/inner, which --overwrite would delete" in done.err
    assert "move drafters/sql-eagle3/old/inner elsewhere first" in done.err and done.err.count("\n") == 1
    assert (inner / mark).exists()
