"""Fixtures for the tests of logs and traces."""

import json

import pytest

from specctl.distillation.generate import distill
from specctl.recipe import DistillRecipe
from specctl.runs import Run


@pytest.fixture
def go(tmp_path, text):
    """Return `run(rows)`, which gives the result of `distill --from-log` on these rows."""

    def run(rows, output="out", **fields):
        path = tmp_path / "traffic.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        (tmp_path / "run").mkdir(exist_ok=True)
        recipe = {"log": str(path), "output_dir": tmp_path / output, "shard_size": 5, "batch_size": 4, **fields}
        return distill(DistillRecipe.model_validate(recipe), Run(tmp_path / "run"), target=text)

    return run
