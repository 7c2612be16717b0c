"""`eval --server`: acceptance, times and what is gained over the same target without a drafter."""

import json
import subprocess
import sys

import pytest

from specctl.commands.eval import evaluate
from specctl.decoding.target_text import load_target_text
from specctl.errors import DataError
from specctl.recipe import EvalRecipe
from specctl.runs import Run
from tests.toys.engine import FakeEngine

COUNTERS = """vllm:spec_decode_num_drafts_total{engine="0"} %d
vllm:spec_decode_num_draft_tokens_total{engine="0"} %d
vllm:spec_decode_num_accepted_tokens_total{engine="0"} %d
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} %d
"""


@pytest.fixture(scope="module")
def text():
    return load_target_text("builtin")


@pytest.fixture
def go(tmp_path):
    def run(engine, baseline=None, **fields):
        recipe = {"data": {"domain": ["sql", "math"]}, "limit": 6, "server": {"urls": [engine.url]}, **fields}
        if baseline is not None:
            recipe["baseline_server"] = {"urls": [baseline.url]}
        (tmp_path / "run").mkdir(exist_ok=True)
        return evaluate(EvalRecipe.model_validate(recipe), Run(tmp_path / "run"))

    return run


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_rows_of_both_servers(go, text, tmp_path, kind):
    with (
        FakeEngine(text.tokenizer, kind, seconds=0.02) as engine,
        FakeEngine(text.tokenizer, kind, seconds=0.2) as plain,
    ):
        engine.histogram = [1, 2, 1]
        result = go(engine, plain, concurrency=[1, 3])
        assert 1 < engine.most <= 3
    rows = result.servers
    assert [(row.server, row.domain, row.concurrency) for row in rows] == [
        (server, domain, many) for domain in ("sql", "math") for many in (1, 3) for server in ("server", "baseline")
    ]
    for ours, base in zip(rows[::2], rows[1::2], strict=True):
        assert (ours.mat, ours.acceptance_by_position) == (2.0, [0.75, 0.25]) and ours.mat_interval == (2.0, 2.0)
        assert (base.mat, base.speedup, base.same_texts) == (None, None, None)
        assert ours.speedup_interval[0] <= ours.speedup <= ours.speedup_interval[1]
        assert ours.same_texts == ours.requests == 6 and ours.tokens == base.tokens
        assert ours.first_token_s <= ours.first_token_p95_s and base.first_token_s >= 0.2
    lines = [json.loads(line) for line in (tmp_path / "run" / "requests.jsonl").read_text().splitlines()]
    assert len(lines) == 6 * len(rows) and sum(len(line["output_ids"]) for line in lines) == sum(r.tokens for r in rows)


def test_counters_of_the_engine_where_texts_say_nothing(go, text):
    with FakeEngine(text.tokenizer) as engine:
        scraped = []

        def page():
            scraped.append(10 * (len(scraped) + 1))
            return COUNTERS % tuple(scraped[-1] * many for many in (1, 3, 2, 1))

        engine.scraped = page
        row = go(engine, data={"domain": ["sql"]}, concurrency=[2]).servers[0]
    assert (row.mat, row.acceptance_by_position, row.mat_interval) == (3.0, [1.0], None)


def test_a_prompt_that_is_refused_is_named(go, text):
    refused = pytest.raises(DataError, match=r"refuses .*maximum context length")
    with FakeEngine(text.tokenizer, faults=lambda number: "refused" if number == 5 else None) as engine, refused:
        go(engine, concurrency=[1])


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"drafters": ["lookup"]}, "drafters is about drafting in this process"),
        ({"matrix": True, "pool": "x"}, "this process"),
        ({"resume": True, "output_dir": "x"}, "resume is about"),
        ({"seeds": [0, 1]}, "one seed"),
        ({"server": {}, "baseline_server": {"urls": ["http://a"]}}, "name that, too"),
        ({"concurrency": []}, "at least 1"),
    ],
)
def test_recipes_that_contradict_themselves(fields, says):
    with pytest.raises(ValueError, match=says):
        EvalRecipe.model_validate({"server": {"urls": ["http://a"]}} | fields, strict=False)


def test_the_command(text, tmp_path):
    with FakeEngine(text.tokenizer) as engine:
        arguments = ("eval", "--server", engine.url, "--baseline-server", engine.url, "--limit", "3", "--domain", "sql")
        done = subprocess.run(
            [sys.executable, "-m", "specctl", *arguments, "--concurrency", "1,2"],
            capture_output=True, text=True, cwd=tmp_path,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "× baseline" in done.stdout and "same texts" in done.stdout and "transformers" not in done.stdout
    page = subprocess.run(
        [sys.executable, "-m", "specctl", "report", *map(str, (tmp_path / "runs").iterdir()), "--output-dir", "page"],
        capture_output=True, text=True, cwd=tmp_path,
    )  # fmt: skip
    assert page.returncode == 0, page.stderr
