"""`eval-server`: acceptance, times, and the speedup over the same target without a drafter."""

import json
from collections import Counter
from dataclasses import asdict

import pytest

from specctl.cli.eval_server import predicted_speedups
from specctl.commands.eval_server import evaluate_server, predict_worth
from specctl.distillation.messages import prompt_id
from specctl.errors import DataError
from specctl.measuring import measured
from specctl.recipe import EvalServerRecipe
from specctl.runs import Run
from tests.cli.conftest import specctl
from tests.conftest import holding
from tests.toys.engine import FakeEngine

__all__ = ["specctl"]

COUNTERS = """vllm:spec_decode_num_drafts_total{engine="0"} %d
vllm:spec_decode_num_draft_tokens_total{engine="0"} %d
vllm:spec_decode_num_accepted_tokens_total{engine="0"} %d
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} %d
"""


@pytest.fixture
def go(tmp_path):
    def run(engine, baseline=None, **fields):
        recipe = {"data": {"domain": ["sql", "math"]}, "limit": 6, "server": {"urls": [engine.locked]}, **fields}
        if baseline is not None:
            recipe["baseline_server"] = {"urls": [baseline.locked]}
        made = EvalServerRecipe.model_validate(recipe)
        run = Run.create("eval-server", made, tmp_path / "run")
        result = evaluate_server(made, run)
        run.result(asdict(result))
        assert holding(run.dir, "HUSH") == [], "passwords of addresses are not stored"
        assert (run.dir / "requests.jsonl").stat().st_mode & 0o077 == 0
        return result

    return run


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_rows_compare_the_server_with_its_baseline(go, text, tmp_path, kind):
    with (
        FakeEngine(text.tokenizer, kind, seconds=0.02) as engine,
        FakeEngine(text.tokenizer, kind, seconds=0.06) as plain,
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
        assert ours.first_token_s <= ours.first_token_p95_s and base.first_token_s >= 0.06
    assert [load.concurrency for load in result.worth] == [1, 3]
    for load in result.worth:
        assert (load.mat, load.mats) == (2.0, [2.0, 2.5, 3.0]), "a round of two drafted tokens has at most three tokens"
        assert load.break_even == pytest.approx(load.round_s / load.step_s)
    lines = [json.loads(line) for line in (tmp_path / "run" / "requests.jsonl").read_text().splitlines()]
    assert len(lines) == 6 * len(rows) and sum(len(line["output_ids"]) for line in lines) == sum(r.tokens for r in rows)


def test_cached_prompts_are_counted_for_each_server(go, text):
    """From the growth of vLLM's counters during the requests, or None if an engine does not report them."""
    page = 'vllm:prefix_cache_queries_total{engine="0"} %d\nvllm:prefix_cache_hits_total{engine="0"} %d\n'
    seen = []

    def counted():
        seen.append(100 + 40 * len(seen))
        return page % (seen[-1], seen[-1] // 4)

    with FakeEngine(text.tokenizer) as engine, FakeEngine(text.tokenizer) as plain:
        engine.scraped = counted
        rows = go(engine, plain, data={"domain": ["sql"]}, concurrency=[1]).servers
    assert [row.cached_prompt for row in rows] == [0.25, None]


def test_cached_prompts_of_sglang_come_from_its_answers(go, text):
    with FakeEngine(text.tokenizer, "sglang") as engine:
        engine.cached = 3
        (row,) = go(engine, data={"domain": ["sql"]}, concurrency=[1]).servers
    assert 0 < row.cached_prompt < 1


def test_acceptance_comes_from_counters_if_answers_lack_it(go, text):
    with FakeEngine(text.tokenizer) as engine:
        scraped = []

        def page():
            scraped.append(10 * (len(scraped) + 1))
            return COUNTERS % tuple(scraped[-1] * many for many in (1, 3, 2, 1))

        engine.scraped = page
        row = go(engine, data={"domain": ["sql"]}, concurrency=[2]).servers[0]
    assert (row.mat, row.acceptance_by_position, row.mat_interval) == (3.0, [1.0], None)
    assert predict_worth([row], [2.0]) == [], "breaking even needs a baseline"


def test_a_prompt_refused_by_the_server_is_named(go, text):
    refused = pytest.raises(DataError, match=r"refuses .*maximum context length")
    with FakeEngine(text.tokenizer, faults=lambda number: "refused" if number == 5 else None) as engine, refused:
        go(engine, concurrency=[1])


SUITE = [
    {"question_id": 1, "category": "writing", "turns": ["Compose a post.", "Rewrite it.", "Shorten it."]},
    {"question_id": 2, "category": "writing", "turns": ["Write a poem."]},
    {"question_id": 3, "category": "math", "turns": ["What is 7 + 5?", "And doubled?"]},
]


@pytest.fixture
def suite(tmp_path):
    file = tmp_path / "question.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in SUITE))
    return {"prompts": str(file)}


def test_later_turns_follow_the_answers_of_the_same_server(go, text, suite, tmp_path):
    """Without that answer, or after the answer of another server, the second turn would be another prompt."""
    with FakeEngine(text.tokenizer) as engine, FakeEngine(text.tokenizer) as plain:
        engine.histogram = [1, 1]
        plain.text = lambda ids, *rest: FakeEngine.text(plain, ids[1:], *rest)  # the baseline gives other answers
        result = go(engine, plain, data=suite, concurrency=[1, 2])
    assert [(row.domain, row.requests) for row in result.servers[::4]] == [("writing", 4), ("math", 2)]
    assert result.later_turns == 3
    lines = [json.loads(line) for line in (tmp_path / "run" / "requests.jsonl").read_text().splitlines()]
    told = {(line["server"], line["concurrency"], line["id"], line["turn"]): line for line in lines}
    assert len(told) == len(lines) == 4 * 6 and {line["turn"] for line in lines} == {0, 1, 2}
    users = {tuple(row["turns"]): row for row in SUITE}
    for server in ("server", "baseline"):
        for words in users:
            id = prompt_id([{"role": "user", "content": turn} for turn in words])
            messages = []
            for number, turn in enumerate(words):
                messages.append({"role": "user", "content": turn})
                line = told[server, 2, id, number]
                assert line["prompt_ids"] == text.render(messages)
                answer = text.tokenizer.decode(line["output_ids"], skip_special_tokens=True)
                messages.append({"role": "assistant", "content": answer})
    pairs = [row for row in result.servers if row.server == "server"]
    assert all(row.same_texts == 0 and row.speedup is not None for row in pairs)


def test_turns_beyond_the_context_are_left_out(go, text, suite, tmp_path):
    with FakeEngine(text.tokenizer) as engine:
        first = [text.render([{"role": "user", "content": row["turns"][0]}]) for row in SUITE]
        engine.context = max(map(len, first)) + 1
        result = go(engine, data=suite, concurrency=[1])
    assert result.later_turns == 0 and sum(row.requests for row in result.servers) == 3


def test_rows_by_prompt_length(go, text, tmp_path, monkeypatch):
    """A mean over all prompts hides that acceptance falls with the length of the context."""
    monkeypatch.setattr(measured, "SHORTEST", 64)
    file = tmp_path / "mixed.jsonl"
    words = [" ".join(["table"] * many) for many in (1, 2, 20, 90)]
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in words))
    with FakeEngine(text.tokenizer) as engine, FakeEngine(text.tokenizer) as plain:
        engine.histogram = [1, 2, 1]
        result = go(engine, plain, data={"prompts": str(file)}, concurrency=[2])
        short = go(engine, data={"domain": ["sql"]}, limit=1, concurrency=[2])
    sizes = [len(text.render([{"role": "user", "content": prompt}])) for prompt in words]
    want = Counter(measured.bucket(size) for size in sizes)
    assert len(want) > 1 and short.lengths == []
    ours = [row for row in result.lengths if row.server == "server"]
    assert {row.up_to: row.requests for row in ours} == want
    assert all(row.mat == 2.0 and row.speedup is not None and row.over < row.up_to for row in ours)
    assert [row.speedup for row in result.lengths if row.server == "baseline"] == [None] * len(want)


@pytest.mark.parametrize(("tokens", "up_to"), [(1, 512), (512, 512), (513, 1024), (1024, 1024), (32_000, 32_768)])
def test_length_buckets_are_powers_of_two_from_512(tokens, up_to):
    assert measured.bucket(tokens) == up_to


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"sampling": {"exact": True}}, "exact is for decoding in this process"),
        ({"seeds": [0, 1]}, "at most 1 item"),
        ({"concurrency": []}, "at least 1"),
        ({"mats": [0.5]}, "greater than or equal to 1"),
    ],
)
def test_contradictory_recipes_are_refused(fields, says):
    with pytest.raises(ValueError, match=says):
        EvalServerRecipe.model_validate({"server": {"urls": ["http://a"]}} | fields, strict=False)


def test_the_command_prints_rows_and_predictions(text, tmp_path, specctl):
    with FakeEngine(text.tokenizer) as engine:
        engine.histogram = [1, 2, 1]
        arguments = (
            "eval-server",
            "--server",
            engine.url,
            "--baseline-server",
            engine.url,
            "--limit",
            "3",
            "--domain=sql",
        )
        done = specctl(*arguments, "--concurrency", "1,2", "--mats", "2,2.75,9")
    assert done.code == 0, done.err
    assert "× baseline" in done.out and "same texts" in done.out and "transformers" not in done.out
    assert "× at mat 2.75" in done.out and "mat 9" not in done.out and "synthetic_acceptance_length" in done.out
    specctl.ok("report", *map(str, (tmp_path / "runs").iterdir()), "--output-dir", "page")


def test_only_users_of_vllm_are_told_to_check_a_prediction_in_vllm():
    """A laptop with llama.cpp was told to run vLLM on a GPU."""
    loads = [{"mats": [2.0], "concurrency": 1, "mat": 1.5, "break_even": 1.2, "speedups": [1.6]}]
    engines = ("vllm 0.32.0", "llama.cpp b1", "sglang 1")
    texts = {engine: str(predicted_speedups(loads, engine)[1:]) for engine in engines}
    assert [engine for engine, text in texts.items() if "vLLM" in text] == ["vllm 0.32.0"]
    assert all("with the cost of this one" in text for text in texts.values())


def test_the_command_reports_later_turns_of_a_suite(text, suite, specctl):
    with FakeEngine(text.tokenizer) as engine:
        arguments = ("eval", "--server", engine.url, "--prompts", suite["prompts"], "--concurrency", "2")
        done = specctl(*arguments)
    assert done.code == 0, done.err
    assert "writing" in done.out and "3 prompts are later turns of conversations and follow the server's" in done.out
