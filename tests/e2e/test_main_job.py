"""The main job: distill, train with the installed command, evaluate, generate; with real prompts if they are
available."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import specctl

__all__ = ["specctl"]

REAL = Path(__file__).resolve().parents[2].parent / "shared" / "data"
COMMAND = Path(sys.executable).with_name("specctl")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("main-job")


def installed(place, *arguments):
    """Run the installed command in its own process. Returns its JSON document."""
    command = [COMMAND, *map(str, arguments), "--json"]
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def prompts(split):
    file = REAL / f"sql.{split}.jsonl"
    return ["--prompts", file] if file.is_file() else []


def drafter_of_distilled_texts(specctl, place):
    """The directory of a drafter. Its data was written by one process, and another one trained it."""
    options = ["--limit", "24", "--max-new-tokens", "16", "--output-dir", place / "distilled" / "sql"]
    document = specctl("distill", "--domain", "sql", *map(str, (*prompts("train"), *options)), "--json").json
    assert (document["prompts"], document["responses"], document["rejected"]) == (24, 24, 0)
    steps = ["max_steps=2", "eval.every=1", "eval.prompts=2", "eval.fraction=0.2", "eval.max_new_tokens=8"]
    document = installed(place, "train-drafter", "--domain", "sql", *steps)
    assert document["steps"] == 2
    assert document["mat"] >= 1
    return document["drafter"]


def eval_is_lossless_and_has_both_baselines(specctl, place, drafter):
    options = ["--domain", "sql", *prompts("test"), "--limit", 2, "--max-new-tokens", 16, "--dtype", "fp32", "--json"]
    document = specctl("eval", *map(str, ("--drafter", place / drafter, "--drafter", "lookup", *options))).json
    rows = {row["drafter"]: row for row in document["rows"]}
    assert {"vanilla", "transformers", "lookup", Path(drafter).name} <= set(rows)
    assert rows["vanilla"]["mat"] == 1
    assert rows[Path(drafter).name]["mat"] >= 1
    assert document["lossless"]["mismatches"] == document["lossless_transformers"]["mismatches"] == 0


def exact_mode_is_equal_in_bf16_at_temperature_one(specctl, place, drafter):
    """Speculative text equals plain sampling with the same seed, token for token, without ties."""
    drafters = ["--drafter", place / drafter, "--drafter", "lookup", "baselines=[vanilla]"]
    prompted = ["--domain", "sql", *prompts("test"), "--limit", 2, "--max-new-tokens", 16]
    options = ["--temperature", 1.0, "--exact", "--dtype", "bf16", "--json"]
    lossless = specctl("eval", *map(str, (*drafters, *prompted, *options))).json["lossless"]
    assert lossless == {"sequences": 4, "mismatches": 0, "ties": 0}


def generate_shows_the_same_text_with_and_without(specctl, place, drafter):
    options = ["--drafter", str(place / drafter), "--dtype", "fp32", "--max-new-tokens", "24", "--json"]
    document = specctl("generate", "How many students are there?", *options).json
    assert document["identical"]
    assert document["text"]


def a_drafter_of_another_target_is_refused(specctl, place, drafter):
    config = json.loads((place / drafter / "config.json").read_text())
    assert config["family"] == "eagle3"
    shutil.copytree(place / drafter, "damaged")
    Path("damaged/config.json").write_text(json.dumps(config | {"target": {}}))
    done = specctl("generate", "Hello", "--drafter", "damaged", "--json")
    assert done.code == 4 and done.json["error"]["type"] == "CheckpointError"


def test_a_drafter_is_distilled_trained_evaluated_and_used(specctl, place):
    """One test, so that with several test processes only one of them trains the drafter."""
    drafter = drafter_of_distilled_texts(specctl, place)
    eval_is_lossless_and_has_both_baselines(specctl, place, drafter)
    exact_mode_is_equal_in_bf16_at_temperature_one(specctl, place, drafter)
    generate_shows_the_same_text_with_and_without(specctl, place, drafter)
    a_drafter_of_another_target_is_refused(specctl, place, drafter)
