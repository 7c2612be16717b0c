"""Commands under torchrun with a slice of the target per process: only one process writes, and texts do not change."""

import json
import re

import pytest

from specctl import api
from specctl.errors import RecipeError
from specctl.recipe.resolve import Setting, resolve
from tests.decoding.test_parallel import torchrun

COMMANDS = {
    "eval": {"drafters": ["lookup"], "baselines": ["vanilla"], "limit": 2, "save_outputs": True},
    "distill": {"data.limit": 5, "batch_size": 2},
    "select": {"arms.names": ["lookup", "suffix"], "limit": 2, "save_outputs": True},
}
COMMON = {"target.dtype": "fp32", "target.device": "cpu", "sampling.max_new_tokens": 12}


def texts(directory):
    """The texts that a command has written, by prompt and drafter."""
    path = next(path for name in ("outputs.jsonl", "shard-*.jsonl") for path in directory.glob(name))
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {(row["id"], row.get("drafter")): row.get("output_ids") or row["response_ids"] for row in rows}


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """(working directory, stdout by command, stderr) of two processes that run all commands. Their start takes most of
    the time."""
    place, lines = tmp_path_factory.mktemp("two"), []
    for command, own in COMMANDS.items():
        settings = [f"{key}={json.dumps(value)}" for key, value in (COMMON | own).items()]
        output = ["--output-dir", f"two-{command}", "--json"]
        lines.append(json.dumps([command, *settings, "target.tensor_parallel=2", *output]))
    done = torchrun("-m", "tests.commands.in_turn", *lines, cwd=place)
    assert done.returncode == 0, done.stderr[-3000:]
    told, decoder, at = {}, json.JSONDecoder(), 0
    for command in COMMANDS:
        told[command], at = decoder.raw_decode(done.stdout, at)
        at += len(done.stdout) - at - len(done.stdout[at:].lstrip())
    assert at == len(done.stdout), "one document per command"
    return place, told, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_two_processes_write_the_files_of_one(command, two, tmp_path, monkeypatch):
    """Two writers would damage the directory, and two documents on stdout would not be valid JSON."""
    monkeypatch.chdir(tmp_path)
    settings = COMMON | COMMANDS[command]
    place, told, said = two
    assert told[command]["command"] == command
    assert len(re.findall(r"responses to", said)) == 1  # `distill` prints this in one process only
    made = [Setting(tuple(key.split(".")), value, key) for key, value in settings.items()]
    made.append(Setting(("output_dir",), "one", "output_dir"))
    api.execute(command, resolve(command, flags=made))
    assert texts(place / f"two-{command}") == texts(tmp_path / "one")
    names = [
        sorted(path.name for path in directory.iterdir()) for directory in (tmp_path / "one", place / f"two-{command}")
    ]
    assert names[0] == names[1]
    if command == "distill":
        assert [len(list((where / "runs").iterdir())) for where in (tmp_path, place)] == [1, 1]


@pytest.mark.parametrize(
    ("command", "key", "value", "reason"),
    [
        ("bench", None, None, "for generate, distill, eval, select and train-drafter"),
        ("train-drafter", "features.mode", "online", "set features.mode=cached"),
        ("eval", "limit", 1, "baseline transformers works only in one process"),
        ("distill", "server.urls", ["http://localhost:1"], "server works only in one process"),
        ("distill", "data.prompts", "-", "an input on stdin works only in one process"),
        ("distill", "log", "answers.jsonl", "log works only in one process"),
        ("select", "record", "table.parquet", "is for generate, distill, eval, select and train-drafter"),
        ("generate", "target.device_map", "auto", "exclude each other"),
    ],
)
def test_options_that_slices_do_not_support_are_refused_before_loading(command, key, value, reason):
    settings = [Setting(("target", "tensor_parallel"), 2, "a flag")]
    settings += [Setting(tuple(key.split(".")), value, "a flag")] if key else []
    with pytest.raises(RecipeError, match=reason):
        resolve(command, flags=settings)
