"""Recipes: typed YAML, all errors at once with their lines, suggestions, precedence, and earlier spellings."""

import contextlib
import json
import re
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from specctl import kernels
from specctl.decoding import attention
from specctl.environment import ENV_SIZES, ENV_SWITCHES
from specctl.errors import RecipeError, UsageError
from specctl.kernels import native
from specctl.measuring.records import check_same, recipe_stamp
from specctl.recipe import (
    RECIPES,
    EvalRecipe,
    OnlineRecipe,
    SelectRecipe,
    ServerRecipe,
    TrainRecipe,
    aliases,
    yaml_file,
)
from specctl.recipe import resolve as resolve_module
from specctl.recipe.resolve import Setting, command_for, command_of, resolve
from specctl.subcommands import SUBCOMMANDS


def problems(*args, **kwargs) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        resolve(*args, environ=kwargs.pop("environ", {}), **kwargs)
    return caught.value.message.splitlines()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1E3", 1e3),
        ("-.5", -0.5),
        ("3", 3),
        ("010", "010"),
        ("no", "no"),
        ("on", "on"),
        ("true", True),
        ("True", True),
        ("FALSE", False),
        ("null", None),
        ("Null", None),
        ("~", None),
        ("12:30:00", "12:30:00"),
        ("2024-01-01", "2024-01-01"),
        ("1_000", "1_000"),
        ("[0, 0.7]", [0, 0.7]),
        ("a: b: c", "a: b: c"),
    ],
)
def test_scalars_follow_yaml_1_2(text, value):
    """YAML 1.1 reads 1e-4 as a string, no as false, 010 as eight, and 12:30:00 as seconds."""
    read = yaml_file.scalar(text, "o")
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize("value", ["no", "Off", "yes"])
def test_a_template_argument_is_no_word_for_a_boolean(value):
    """A template took the text "no" for true: `enable_thinking=no` switched the thinking on."""
    (said,) = problems("distill", overrides=[f"target.chat_template_kwargs.enable_thinking={value}"])
    assert said.endswith(f"enable_thinking: {value!r} is a text that templates take for true: write true or false")
    (said,) = problems("distill", overrides=[f"resume={value}"])
    assert said == f"resume={value}: should be true or false (got {value!r})"


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_float_survives_a_resolved_recipe(number):
    data, _ = yaml_file.load(yaml.safe_dump({"x": number}), "f")
    assert data == {"x": number}
    assert yaml_file.scalar(repr(number), "o") == number


def test_all_errors_are_reported_at_once_with_their_lines(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text(
        "arch: egle3\noptimizer:\n  weight_decy: 0\n  lr: '1e-4'\nttt_steps: 2.5\nepochs:\n  x: 3\noptimizer.lr: 3\n"
    )
    found = problems("train-drafter", path, ["lr=3", "novalue"], environ={"SPECCTL_TAGET": "x"})
    for start, rest in [
        (f"{path}:1: arch: ", "did you mean eagle3?"),
        (f"{path}:3: optimizer.weight_decy: unknown key", "did you mean optimizer.weight_decay?"),
        (f"{path}:4: optimizer.lr: ", "'1e-4'"),
        (f"{path}:5: ttt_steps: ", "2.5"),
        (f"{path}:7: epochs: ", "'x'"),
        (f"{path}:8: optimizer.lr: unknown key", "write lr below the section optimizer"),
        ("lr=3: unknown key", "did you mean optimizer.lr?"),
        ("novalue: ", "key.sub=value"),
        ("SPECCTL_TAGET: taget: unknown key", "did you mean target?"),
    ]:
        assert [line for line in found if line.startswith(start) and rest in line], (start, found)
    assert len(found) == 9


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: 1\nb: 2\na: 3\n", ":3: a: duplicate key, first given in line 1"),
        ("target:\n  name: x\n  name: y\n", ":3: target.name: duplicate key"),
        ("- 1\n- 2\n", ":1: a recipe is a mapping"),
        ("target: [1\n", ":2: "),
        ("a: &x [*x]\n", "contains itself"),
        ("a: !!python/object/apply:os.system [ls]\n", ":1: "),
        ("a: 1\nb: \x00\n", r":2: not YAML: '\x00' is no character"),
        ('{"prompt": "a"}\n{"prompt": "b"}\n', ":2: not YAML: expected one mapping of keys to values, but found '{'"),
        ("a: 1\n---\na: 2\n", ":2: not YAML: found a second document"),
        ("a: [1\n", ":2: not YAML: expected ',' or ']', but got the end of the file"),
        ("a: 1\nb: !!int x\n", ":2: not a value of"),
        ("a: !!bool x\n", ":1: not a value of"),
        ("command: [eval]\n", ":1: command: this recipe is for ['eval'], not 'train-drafter'"),
        ("command: {a: 1}\n", ":1: command: this recipe is for {'a': 1}, not 'train-drafter'"),
        ("a: " + "[" * 5000, ":1: nested too deeply, over 50 levels"),
    ],
)
def test_broken_yaml_names_its_line(tmp_path, text, says):
    path = tmp_path / "r.yaml"
    path.write_text(text)
    assert says in "\n".join(problems("train-drafter", path))


LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 9)
)
"""413 bytes that stand for 9⁹ values."""


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (LAUGHS, "more than 1000 values"),
        (LAUGHS + "? *a8\n: 1\n", "more than 1000 values"),
        ("target:\n  ? {a: 1}\n  : 1\n", ":2: a key that is not text"),
        ("x: [" + "a," * 2_000 + "]", "more than 1000 values"),
        ("x: " + "{a: " * 60 + "1" + "}" * 60, "nested too deeply"),
        ("x: !!timestamp 2020-01-01\n", ":1: not a value of"),
        ("#" * (1 << 20) + "\n", "too long for a recipe"),
        ("sampling:\n  seed: 9223372036854775808\n", ":2: sampling.seed: an integer beyond 64 bits"),
        ('target:\n  name: "\\ud800"\n', ":2: target.name: not UTF-8"),
        ("sampling:\n  temperature: .inf\n", ":2: sampling.temperature: should be a finite number"),
    ],
    ids=lambda text: text[:40],
)
def test_the_size_of_a_recipe_is_limited_with_its_aliases(tmp_path, monkeypatch, text, says):
    """A few hundred bytes used to take forever or to give an error of megabytes."""
    monkeypatch.setattr(yaml_file, "MOST_VALUES", 1000)
    path = tmp_path / "r.yaml"
    path.write_text(text)
    (line,) = problems("generate", path)
    assert says in line and len(line) < 300


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("target.chat_template_kwargs={" + LAUGHS.replace("\n", ", ") + "}", "more than 10000 values"),
        ("target.chat_template_kwargs=&a {x: *a}", "contains itself"),
        ("target.chat_template_kwargs={a: 1, a: 2}", "duplicate key"),
        ("target.chat_template_kwargs" + ".x" * 3000 + "=1", "nested too deeply"),
        ("target.chat_template_kwargs.x=" + "9" * 4000, "an integer beyond 64 bits"),
        ("target.name" + ".x" * 3000 + "=1", "has no sub-keys"),
        ("." * 3000 + "=1", "unknown key"),
        ("target.device=" + "x" * 100_000, "should be auto, cpu, cuda or cuda:N"),
        ("target.dtype=" + "x" * 100_000, "should be 'auto'"),
    ],
    ids=lambda text: text[:40],
)
def test_an_override_is_limited_and_shortened_in_errors(override, says):
    (line,) = problems("generate", overrides=[override])
    assert says in line and len(line) < 900


def test_every_pattern_has_a_description():
    """`--device gpu` used to be answered with a regular expression."""
    sources = Path(resolve_module.__file__).parent.glob("*.py")
    found = {match for source in sources for match in re.findall(r'Field\(pattern=r"(.*?)"\)', source.read_text())}
    assert found == set(resolve_module.FORMS)


@pytest.mark.parametrize("content", ["9" * 5000, '{"a":' * 100_000], ids=["digits", "deep"])
def test_a_huge_json_file_is_refused(tmp_path, content):
    path = tmp_path / "ds.json"
    path.write_text(content)
    (line,) = problems("train-drafter", overrides=[f"deepspeed={path}"])
    assert "neither a mapping nor a JSON file" in line


def test_a_binary_file_is_refused(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    assert "not UTF-8 at byte" in problems("eval", path)[0]


@given(st.text())
def test_any_text_is_a_recipe_or_a_recipe_error(text):
    with contextlib.suppress(RecipeError):
        yaml_file.load(text, "f")


def test_an_empty_recipe_has_all_defaults(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text("# nothing\n\ntarget:\n")
    assert resolve("train-drafter", path, environ={}) == TrainRecipe()


def test_flags_beat_overrides_beat_environment_beat_defaults():
    """Key by key; recipe files are tested through the command."""
    resolved = resolve(
        "eval",
        overrides=["sampling.top_p=0.5", "sampling.top_k=5"],
        flags=[Setting(("sampling", "top_p"), 0.9, "--top-p")],
        environ={"SPECCTL_SAMPLING__TOP_P": "0.1", "SPECCTL_SAMPLING__TOP_K": "1", "SPECCTL_SAMPLING__SEED": "9"},
    )
    assert isinstance(resolved, EvalRecipe)
    assert (resolved.sampling.top_p, resolved.sampling.top_k, resolved.sampling.seed) == (0.9, 5, 9)
    assert resolved.sampling.max_new_tokens == EvalRecipe().sampling.max_new_tokens


def test_shorthand_and_text_fields():
    resolved = resolve(
        "train-drafter",
        overrides=["target.revision=1234", "data.prompts=-", "data.domain=sql, math", "optimizer.lr=1e-3"],
        environ={"SPECCTL_TARGET": "./model"},
    )
    assert (resolved.target.name, resolved.target.revision) == ("./model", "1234")
    assert (resolved.data.prompts, resolved.data.domain, resolved.optimizer.lr) == ("-", ["sql", "math"], 1e-3)


def test_environment_switches_are_not_recipe_keys():
    read = {"SPECCTL_KERNELS": "reference", "SPECCTL_GRAPHS": "0", "SPECCTL_KV": "paged", "SPECCTL_KV_GIB": "0.5"}
    assert resolve("eval", environ=read) == EvalRecipe()


def test_environment_switches_are_validated():
    assert problems("eval", environ={"SPECCTL_KERNELS": "nope", "SPECCTL_GRAPHS": "2", "SPECCTL_ATTENTION": "no"}) == [
        "SPECCTL_ATTENTION: must be one of kernel, sdpa (got 'no')",
        "SPECCTL_GRAPHS: must be one of 0, 1, eager (got '2')",
        "SPECCTL_KERNELS: must be one of reference, cpu, triton (got 'nope')",
    ]
    assert ENV_SWITCHES["SPECCTL_KERNELS"] == tuple(kernels.BACKENDS)
    assert ENV_SWITCHES["SPECCTL_STEP"] == ("native", "torch", *native.INSTRUCTIONS)


@pytest.mark.parametrize("size", ["much", "0", "-1", "nan", "inf"])
def test_a_size_must_be_a_number_above_zero(size):
    assert problems("eval", environ={"SPECCTL_KV_GIB": size}) == [
        f"SPECCTL_KV_GIB: must be a number of GiB above 0 (got {size!r})"
    ]


def test_every_environment_variable_in_the_package_is_known():
    """A variable that is read but not listed would end every command."""
    sources = (path.read_text() for path in Path(attention.__file__).parent.parent.rglob("*.py"))
    read = {name for text in sources for name in re.findall(r'(?:os\.environ\.get|switch)\("(SPECCTL_\w+)"', text)}
    assert read and read <= {*ENV_SWITCHES, *ENV_SIZES}


@pytest.mark.parametrize("command", sorted(RECIPES))
def test_the_resolved_recipe_can_be_read_again(command, tmp_path):
    """`recipe.resolved.yaml` of a run must reproduce the run."""
    recipe = RECIPES[command]()
    path = tmp_path / "recipe.resolved.yaml"
    path.write_text(yaml.safe_dump({"command": command, **recipe.model_dump(mode="json")}))
    assert resolve(command, path, environ={}) == recipe


def test_a_recipe_of_another_command_is_refused(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text("# mine\ncommand: eval\n")
    assert problems("distill", path) == [f"{path}:2: command: this recipe is for 'eval', not 'distill'"]


def test_a_json_file_can_give_a_mapping(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 1}}))
    assert (
        resolve("train-drafter", overrides=[f"deepspeed={path}"], environ={}).deepspeed["zero_optimization"]["stage"]
        == 1
    )
    assert "neither a mapping nor a JSON file" in problems("train-drafter", overrides=["deepspeed=nowhere"])[0]


@pytest.mark.parametrize(
    ("given", "label"),
    [
        (["data.prompts=data/My file.jsonl"], ["My-file"]),
        (["data.prompts=math.jsonl"], ["math"]),
        (["data.prompts=-"], ["stdin"]),
        (["data.prompts=../.jsonl"], ["prompts"]),
        (["data.prompts=a.jsonl", "data.domain=sql"], ["sql"]),
        (["data.prompts={domain}.jsonl"], ["sql"]),
        ([], ["sql"]),
    ],
)
def test_prompts_are_named_after_their_file(given, label):
    """Data, drafter and rows used to be named sql for any file."""
    recipe = resolve("train-drafter", overrides=given, environ={})
    assert recipe.data.domain == label
    assert str(recipe.output) == f"drafters/{label[0]}-eagle3"
    assert resolve("online", overrides=[*given, "algo=ogd"], environ={}).first_domain == label[0]


@pytest.mark.parametrize(
    ("command", "override"),
    [
        *(("eval", "drafters=['']"), ("generate", "drafter=''"), ("eval", "pool=''"), ("eval", "output_dir=''")),
        *(("eval", "target="), ("generate", "drafter="), ("eval", "data.prompts=''"), ("reason", "reasoning.draft=''")),
    ],
)
def test_an_empty_name_is_refused(command, override):
    """`--drafter=` used to decode without drafts, and `--output-dir=` to write into the working directory."""
    (line,) = problems(command, overrides=[override])
    assert "is empty" in line


def test_a_leading_tilde_is_the_home_directory(monkeypatch):
    """No shell expands `--output-dir=~/x`, which used to make a directory named ~ in the working directory."""
    monkeypatch.setenv("HOME", "/home/me")
    asked = resolve("eval", overrides=["output_dir=~/x", "pool=~nobody-here/y", "data.prompts=~/{domain}.jsonl"])
    assert (asked.output_dir, asked.pool) == (Path("/home/me/x"), Path("~nobody-here/y"))
    assert asked.data.prompts_of("sql") == "/home/me/sql.jsonl"


def test_a_recipe_is_shown_without_passwords():
    recipe = resolve(
        "reason",
        overrides=[
            *("reasoning.judge.kind=model", "reasoning.judge.name=m"),
            "reasoning.judge.endpoint=http://me:HUSH@host/v1?api_key=HUSH",
            "target.chat_template_kwargs={api_key: HUSH, bos_token: <s>}",
        ],
        environ={},
    )
    assert "HUSH" in recipe.reasoning.judge.endpoint
    shown = recipe.model_dump(mode="json")
    assert "HUSH" not in json.dumps(shown)
    assert shown["reasoning"]["judge"]["endpoint"] == "http://me:***@host/v1?api_key=***"
    assert shown["target"]["chat_template_kwargs"] == {"api_key": "***", "bos_token": "<s>"}
    other = recipe.model_copy(deep=True)
    other.reasoning.judge.endpoint = other.reasoning.judge.endpoint.replace("HUSH", "NEW")
    assert recipe_stamp(other) == recipe_stamp(recipe)


def test_the_block_rule_requires_sampled_proposals():
    """With deterministic proposals the match rule would apply instead."""
    with pytest.raises(RecipeError, match="set proposal=sampled"):
        resolve("eval", None, ["drafting.rule=block"], [])
    assert resolve("eval", None, ["drafting.rule=block", "drafting.proposal=sampled"], []).drafting.rule == "block"


EARLIER = {
    "replay": ("select", ["replay=t.parquet"]),
    "record": ("select", ["record=t.parquet"]),
    "train-router": ("select", ["train_router=true"]),
    "reason": ("online", ["algo=osd-lr"]),
    "learn-from-server": ("online", ["server.urls=http://a"]),
    "eval-server": ("eval", ["server.urls=http://a"]),
}
"""Command → the command that had it as a mode, and overrides that ask for the mode."""


def test_every_former_mode_has_an_earlier_spelling():
    assert (
        set(EARLIER)
        == set(aliases.MODES) - {aliases.ROUTE}
        == {name for name, row in SUBCOMMANDS.items() if row.earlier}
    )
    assert all(SUBCOMMANDS[name].earlier == earlier for name, (earlier, _) in EARLIER.items())


@pytest.mark.parametrize("command", EARLIER)
def test_an_earlier_spelling_resolves_to_the_current_command(tmp_path, capsys, command):
    """Resolve overrides, a recipe file, and environment variables, with one message each."""
    earlier, overrides = EARLIER[command]
    today = [part for part in overrides if part != "train_router=true"]
    expected = resolve(command, overrides=today, environ={})
    assert capsys.readouterr().err == "" and command_for(expected) == command
    said = f"specctl {aliases.MODES[command].spelling} is now a command of its own: specctl {command}\n"
    assert resolve(earlier, overrides=overrides, environ={}) == expected
    assert capsys.readouterr().err == said
    document: dict = {"command": earlier, "drafting": {"depth": None}}
    for override in overrides:
        key, _, value = override.partition("=")
        document |= {"server": {"urls": value}} if key == "server.urls" else {key: yaml.safe_load(value)}
    (tmp_path / "old.yaml").write_text(yaml.safe_dump(document))
    assert resolve(earlier, tmp_path / "old.yaml", environ={}) == expected
    assert capsys.readouterr().err == said
    assert resolve(command, tmp_path / "old.yaml", environ={}) == expected
    assert capsys.readouterr().err == ""
    variables = {
        f"SPECCTL_{part.partition('=')[0].upper().replace('.', '__')}": part.partition("=")[2] for part in overrides
    }
    assert resolve(earlier, environ=variables) == expected


ROUTED = ["server.urls=http://a,http://b", "listen=h:1"]


@pytest.mark.parametrize("earlier", ["route", "select"])
def test_route_resolves_to_serve(tmp_path, capsys, earlier):
    """On the command line, in recipe files, in the resolved recipe of an old run, and from the environment."""
    expected = resolve("serve", None, [*ROUTED, "choose=metasd-ucb", "seed=3", "policy.delta=0.2"], environ={})
    assert capsys.readouterr().err == "" and command_for(expected) == "serve"
    spelling = "specctl route" if earlier == "route" else "specctl select --server"
    said = f"{spelling} is now specctl serve --server\n"
    names = ["algo=metasd-ucb", "seeds=3", "policy.delta=0.2"]
    assert resolve(earlier, None, [*ROUTED, *names], environ={}) == expected
    assert capsys.readouterr().err == said
    flags = [Setting(("algo",), "metasd-ucb", "--algo"), Setting(("seeds",), [3], "--seeds")]
    assert resolve(earlier, None, [*ROUTED, names[-1]], flags, environ={}) == expected
    assert capsys.readouterr().err == said
    stored = {"command": earlier, "algo": ["metasd-ucb"], "seeds": [3], "policy": {"delta": 0.2}, "overwrite": False}
    stored |= {"server": {"urls": ["http://a", "http://b"]}, "listen": "h:1", "pool": "of another command"}
    (tmp_path / "old.yaml").write_text(yaml.safe_dump(stored))
    assert resolve(earlier, tmp_path / "old.yaml", environ={}) == expected
    assert capsys.readouterr().err == said
    variables = {"SPECCTL_SERVER__URLS": "http://a,http://b", "SPECCTL_LISTEN": "h:1", "SPECCTL_ALGO": "metasd-ucb"}
    variables |= {"SPECCTL_SEEDS": "[3]", "SPECCTL_POLICY__DELTA": "0.2"}
    assert resolve(earlier, environ=variables) == expected


def test_a_route_recipe_is_read_as_a_serve_recipe(tmp_path, capsys):
    """Overrides must use current names: accepting `serve algo=…` would hide a misspelled `choose`."""
    (tmp_path / "old.yaml").write_text("command: route\nalgo: [random]\nserver: {urls: 'http://a,http://b'}\n")
    assert command_of(tmp_path / "old.yaml") == "serve"
    assert resolve("serve", tmp_path / "old.yaml", environ={}).choose == "random"
    assert capsys.readouterr().err == "specctl route is now specctl serve --server\n"
    assert resolve("serve", tmp_path / "old.yaml", ["choose=cgp-ucb"], environ={}).choose == "cgp-ucb"
    (line,) = problems("serve", tmp_path / "old.yaml", ["algo=cgp-ucb"])
    assert line.startswith("algo=cgp-ucb: unknown key")
    (tmp_path / "new.yaml").write_text("command: serve\nserver: {urls: 'http://a,http://b'}\n")
    assert resolve("route", tmp_path / "new.yaml", ["algo=random"], environ={}).choose == "random"
    (line,) = problems("select", tmp_path / "new.yaml")
    assert "this recipe is for 'serve', not 'select'" in line


def test_a_recipe_of_the_earlier_command_serves_several_commands(tmp_path, capsys):
    """One file may hold policies for live decoding and for replays; each command takes its own keys."""
    (tmp_path / "a.yaml").write_text("command: select\nalgo: [ftl]\nbeside: none\npool_sizes: [2]\nresume: true\n")
    live = resolve("select", tmp_path / "a.yaml", environ={})
    table = resolve("replay", tmp_path / "a.yaml", ["replay=t"], environ={})
    assert (live.algo, live.beside, table.algo, table.pool_sizes) == (["ftl"], "none", ["ftl"], [2])
    assert resolve("record", tmp_path / "a.yaml", ["record=t", "output_dir=o"], environ={}).resume
    assert capsys.readouterr().err == ""
    (line,) = problems("replay", tmp_path / "a.yaml", ["replay=t", "beside=none"])
    assert line == "beside=none: a key of specctl select, not of specctl replay: leave it out"
    (line,) = problems("select", overrides=["pool_sizes=[2]"])
    assert line == "pool_sizes=[2]: a key of specctl replay, not of specctl select: leave it out"


def test_stamps_of_the_earlier_command_compare_current_keys_only():
    """Runs of `online --algo lr` stored all keys of `online`; `--resume` compares the keys of `reason`."""
    stamp = recipe_stamp(resolve("reason", environ={}))
    kept = {"recipe": stamp["recipe"] | {"buffer.max_mb": 512.0, "baselines": ["vanilla"]}}
    check_same(kept, stamp, "a run")
    with pytest.raises(UsageError, match=r"reasoning\.depth was 2, is 4"):
        check_same({"recipe": kept["recipe"] | {"reasoning.depth": 2}}, stamp, "a run")
    with pytest.raises(UsageError, match=r"target\.chat_template_kwargs\.think was True, is None"):
        check_same({"recipe": kept["recipe"] | {"target.chat_template_kwargs.think": True}}, stamp, "a run")


def test_an_earlier_spelling_names_the_options_it_ignores(capsys):
    """`select --replay` accepted all options of `select`. Options needed under another key are not reported."""
    flags = [Setting(("data", "seed"), 3, "--seed"), Setting(("sampling", "seed"), 3, "--seed")]
    made = resolve("select", overrides=["replay=t", "limit=3", "beside=none"], flags=flags, environ={})
    assert made.sampling.seed == 3
    assert "specctl replay does not use limit=3, beside=none\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("buffer.max_mb=3", "a key of specctl online, not of specctl reason"),
        ("baselines=[vanilla]", "a key of specctl online, not of specctl reason"),
        ("bufer.max_mb=3", "unknown key"),
        ("reasoning.dept=3", "did you mean reasoning.depth?"),
    ],
)
def test_a_key_of_token_learning_is_refused_for_reasoning(override, says):
    (line,) = problems("online", overrides=["algo=lr", override])
    assert says in line


@pytest.mark.parametrize(
    "address", ["http://", "http://:8000", "http://b:99999", "http://[::1", "http://a b", "a:8000"]
)
def test_an_invalid_server_address_is_refused(address):
    with pytest.raises(ValueError, match="is not an address such as http://host:8000"):
        ServerRecipe(urls=[address])
    assert ServerRecipe(urls=["http://a:8000/v1/", "https://[::1]:1"]).urls == ["http://a:8000", "https://[::1]:1"]


@pytest.mark.parametrize("recipe", [SelectRecipe, OnlineRecipe])
@pytest.mark.parametrize(
    "device, gpu, companion",
    [("cuda", False, None), ("auto", True, None), ("auto", False, "retrieval"), ("cpu", True, "retrieval")],
)
def test_heads_draft_alone_on_a_gpu(recipe, device, gpu, companion, monkeypatch):
    """A hybrid has no device rounds, and CUDA graphs gain more than its datastore."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    assert recipe(target={"device": device}).companion == companion
    assert recipe(target={"device": device}, beside="lookup").companion == "lookup"


def test_a_removed_key_is_accepted_with_its_default_only(tmp_path):
    """A resolved recipe of an earlier version names every default."""
    file = tmp_path / "recipe.yaml"
    file.write_text("command: distill\nfilters: {near_prompts: 0.95, near_responses: null, loops: drop}\n")
    assert resolve("distill", file, environ={}).filters.loops == "drop"
    file.write_text("command: distill\nfilters: {near_prompts: 0.9}\n")
    (line,) = problems("distill", file)
    assert line == (
        f"{file}:2: filters.near_prompts: no longer a key: prompts are compared with `exclude` alone: leave it out"
    )
    (line,) = problems("distill", overrides=["filters.near_responses=0.9"])
    assert "no longer a key: responses are not compared" in line


@pytest.mark.parametrize(
    ("command", "override"),
    [
        ("train-drafter", "optimizer.betas=[0.9,1.0]"),
        ("train-drafter", "optimizer.betas=[1.0,0.9]"),
        ("train-drafter", "optimizer.momentum=1.0"),
        ("online", "learner.betas=[0.9,1.0]"),
        ("online", "learner.momentum=1.0"),
        ("reason", "reasoning.learning.betas=[0.9,1.0]"),
    ],
)
def test_an_average_without_decay_is_refused(command, override):
    """Adam divides by 1 - beta, and Muon's average of gradients stays 0."""
    (line,) = problems(command, overrides=[override])
    assert override.partition("=")[0] in line and "less than 1" in line


def test_draft_sizes_are_capped_at_the_nodes_of_a_step():
    """Drafters allocate by these sizes: with a depth of 10⁹, `eagle3` requested 2 TB."""
    sizes = ("depth", "width", "nodes", "children")
    drafting = resolve("generate", overrides=[f"drafting.{key}=1000000000" for key in sizes], environ={}).drafting
    assert [getattr(drafting, key) for key in sizes] == [62] * 4
    assert resolve("generate", overrides=["drafting.depth=5"], environ={}).drafting.depth == 5


@pytest.mark.parametrize(
    ("command", "key"),
    [
        ("train-router", "router.layers"),
        ("train-router", "router.hidden_size"),
        ("train-router", "router.max_length"),
        ("train-drafter", "drafter.hidden_size"),
        ("train-drafter", "drafter.intermediate_size"),
        ("train-drafter", "drafter.num_heads"),
        ("train-drafter", "drafter.num_kv_heads"),
        ("train-drafter", "drafter.num_layers"),
        ("train-drafter", "drafter.draft_heads"),
        ("train-drafter", "drafter.conv_kernel_size"),
        ("train-drafter", "ttt_steps"),
        ("train-drafter", "lora.rank"),
        ("reason", "reasoning.learning.lora_rank"),
    ],
)
def test_an_absurd_size_of_a_model_is_refused(command, key):
    """A router of a million layers was built for minutes."""
    (line,) = problems(command, overrides=[f"{key}=1048576"])
    assert key in line and "less than or equal to" in line


def test_a_huge_number_of_threads_is_refused():
    """PyTorch would start them all, or fail without naming the key."""
    (line,) = problems("generate", overrides=["resources.threads=1000000"])
    assert "resources.threads" in line and "less than or equal to 1024" in line


@pytest.mark.parametrize("command", ["[eval]", "{a: 1}", "7"])
def test_a_command_that_is_no_name_is_refused(tmp_path, command):
    """A list was an unexpected TypeError."""
    path = tmp_path / "r.yaml"
    path.write_text(f"command: {command}\n")
    with pytest.raises(RecipeError, match="command: must be one of"):
        command_of(path)
