"""Memory of `distill` does not grow with the texts of its prompts."""

import json
import subprocess
import sys

import pytest


def run(count):
    command = [sys.executable, "-m", "tests.distillation.million", str(count)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@pytest.mark.slow
def test_a_prompt_takes_less_than_a_kilobyte():
    """At 1 KB each plus half a GB, a million prompts fit into 1.5 GB; prompt objects would take 4 KB."""
    few, many = run(5_000), run(25_000)
    assert many["peak_mb"] - few["peak_mb"] < 20
    assert many["responses"] == 24_750, "copies are a part of the test"


@pytest.mark.slow
def test_a_million_prompts_fit_into_one_and_a_half_gigabytes():
    assert run(1_000_000)["peak_mb"] < 1500
