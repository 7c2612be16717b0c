"""The main job through the installed command: distil, train, measure, look; on real prompts where they are at hand."""

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


@pytest.fixture(scope="module")
def run(place):
    def installed(*arguments):
        done = subprocess.run([COMMAND, *map(str, arguments)], cwd=place, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr[-3000:]
        return done

    return installed


def prompts(split):
    file = REAL / f"sql.{split}.jsonl"
    return ["--prompts", file] if file.is_file() else []


@pytest.fixture(scope="module")
def drafter(run, place):
    done = run("distill", "--domain", "sql", *prompts("train"), "--limit", 32, "--max-new-tokens", 24, "--json")
    document = json.loads(done.stdout)
    assert (document["prompts"], document["responses"], document["rejected"]) == (32, 32, 0)
    steps = ["max_steps=12", "eval.every=6", "eval.prompts=3", "eval.fraction=0.2", "eval.max_new_tokens=16"]
    document = json.loads(run("train-drafter", "--domain", "sql", *steps, "--json").stdout)
    assert document["steps"] == 12
    assert document["mat"] >= 1
    return document["drafter"]


def eval_is_lossless_and_has_both_baselines(run, drafter):
    options = ["--domain", "sql", *prompts("test"), "--limit", 3, "--max-new-tokens", 24, "--dtype", "fp32", "--json"]
    document = json.loads(run("eval", "--drafter", drafter, "--drafter", "lookup", *options).stdout)
    rows = {row["drafter"]: row for row in document["rows"]}
    assert {"vanilla", "transformers", "lookup", Path(drafter).name} <= set(rows)
    assert rows["vanilla"]["mat"] == 1
    assert rows[Path(drafter).name]["mat"] >= 1
    assert document["lossless"]["mismatches"] == document["lossless_transformers"]["mismatches"] == 0


def exact_mode_is_equal_in_bf16_at_temperature_one(specctl, place, drafter):
    """Speculative text equals plain sampling's with the same seed, token for token: ties do not occur either."""
    drafters = ["--drafter", place / drafter, "--drafter", "lookup", "baselines=[vanilla]"]
    prompted = ["--domain", "sql", *prompts("test"), "--limit", 3, "--max-new-tokens", 24]
    options = ["--temperature", 1.0, "--exact", "--dtype", "bf16", "--json"]
    lossless = specctl("eval", *map(str, (*drafters, *prompted, *options))).json["lossless"]
    assert lossless == {"sequences": 6, "mismatches": 0, "ties": 0}


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


def test_main_job(run, specctl, place, drafter):
    """One test, so that one process of several trains the drafter."""
    eval_is_lossless_and_has_both_baselines(run, drafter)
    exact_mode_is_equal_in_bf16_at_temperature_one(specctl, place, drafter)
    generate_shows_the_same_text_with_and_without(specctl, place, drafter)
    a_drafter_of_another_target_is_refused(specctl, place, drafter)
