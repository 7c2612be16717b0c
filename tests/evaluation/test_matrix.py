"""`evaluate` end to end on a few prompts of the built-in target."""

import dataclasses
import json
import signal

import pyarrow.parquet as pq
import pytest
from transformers import LlamaForCausalLM

from specctl import progress
from specctl.decoding.loop import decode
from specctl.decoding.sampling import GREEDY
from specctl.drafters import lm
from specctl.errors import DataError, Interrupted, UsageError
from specctl.evaluation import measure, metrics
from specctl.evaluation.matrix import evaluate
from specctl.formats import checkpoint
from specctl.recipe import DataRecipe, DrafterRecipe, EvalRecipe, SamplingRecipe, TargetRecipe
from specctl.runs import Run

QUESTIONS = ["Table: singer\nColumns: name, age\n\nQuestion: How old is Ann?", "What is 3 + 4?", "Name a colour."]
CONTRACT = {
    *("drafter", "domain", "mat", "mat_macro", "accept_rate", "acceptance_by_position", "tokens_per_s"),
    *("vanilla_tokens_per_s", "speedup", "target_passes", "tokens"),
}


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in QUESTIONS))
    return path


@pytest.fixture(scope="module")
def perfect(target, scripted):
    """Drafts what plain decoding writes."""
    ids = [target.render([{"role": "user", "content": text}]) for text in QUESTIONS]
    decoded = decode(target, ids, sampling=GREEDY, max_new_tokens=64, seeds=[0] * len(ids))
    return scripted({tuple(d.prompt_ids): d.output_ids for d in decoded}, depth=4)


def recipe(prompts, **fields):
    data = DataRecipe(prompts=str(prompts), **fields.pop("data", {}))
    sampling = SamplingRecipe(max_new_tokens=16, **fields.pop("sampling", {}))
    return EvalRecipe(data=data, sampling=sampling, target=TargetRecipe(dtype="fp32", device="cpu"), **fields)


def run_of(tmp_path, made):
    return Run.create("eval", made, tmp_path / "run")


def test_the_whole_matrix(tmp_path, prompts, target, perfect, scripted):
    made = recipe(prompts, save_outputs=True)
    bad = scripted({key: [7] * 64 for key in perfect.answers}, depth=3)
    run = run_of(tmp_path, made)
    result = evaluate(made, run, target=target, drafters={"perfect": perfect, "bad": bad})
    document = run.result(dataclasses.asdict(result))

    rows = {row["drafter"]: row for row in document["rows"]}
    assert list(rows) == ["perfect", "bad", "vanilla", "transformers", "transformers+lookup"]
    for row in rows.values():
        assert set(row) >= CONTRACT
        assert row["domain"] == "sql" and row["prompts"] == 3
        assert row["tokens_per_s"] > 0 and row["vanilla_tokens_per_s"] > 0 and row["transformers_tokens_per_s"] > 0
        assert row["speedup"] == pytest.approx(row["tokens_per_s"] / row["vanilla_tokens_per_s"])
        assert row["speedup_interval"][0] <= row["speedup_interval"][1]
    assert rows["perfect"]["accept_rate"] == 1.0 and rows["perfect"]["mat"] > 3
    assert rows["bad"]["accept_rate"] < 0.2
    assert rows["vanilla"]["mat"] == rows["transformers"]["mat"] == rows["vanilla"]["speedup"] == 1.0
    assert rows["vanilla"]["accept_rate"] is None
    assert document["lossless"] == {"sequences": 6, "mismatches": 0, "ties": 0}
    assert document["lossless_transformers"]["sequences"] == 3
    assert document["lossless_transformers"]["mismatches"] == 0
    assert json.loads((run.dir / "result.json").read_text())["rows"][0]["drafter"] == "perfect"

    outputs = [json.loads(line) for line in (run.dir / "outputs.jsonl").read_text().splitlines()]
    assert len(outputs) == 3 * 5
    fields = {"id", "prompt_ids", "output_ids", "text", "target_passes", "accepted", "drafted", "drafter"}
    assert all(fields <= output.keys() for output in outputs)


def test_drafters_and_assistants_of_a_recipe(tmp_path, prompts, target):
    """From paths: a language model is a drafter here and an assistant there; equal names are told apart."""
    for place in ("a/small", "b/small"):
        model = lm.LM(LlamaForCausalLM(lm.architecture(DrafterRecipe(preset="tiny"), target)))
        checkpoint.save(
            tmp_path / place,
            config=lm.config(model, target.identity),
            tensors=lm.published(model.state_dict()),
            info={},
        )
    paths = [str(tmp_path / "a/small"), str(tmp_path / "b/small")]
    made = recipe(prompts, drafters=["lookup", paths[0]], pool=tmp_path / "b", limit=1)
    result = evaluate(made, run_of(tmp_path, made), target=target)
    baselines = ["vanilla", "transformers", "transformers+lookup"]
    assistants = [f"transformers+{path}" for path in paths]
    assert [row.drafter for row in result.rows] == ["lookup", *paths, *baselines, *assistants]
    assert result.lossless.mismatches == result.lossless_transformers.mismatches == 0


def test_records_are_enough_to_recompute_the_rows(tmp_path, prompts, target, perfect):
    made = recipe(prompts, baselines=["vanilla"], seeds=[0, 1])
    run = run_of(tmp_path, made)
    result = evaluate(made, run, target=target, drafters={"perfect": perfect})
    records = pq.read_table(run.dir / "records.parquet").to_pylist()
    assert len(records) == 3 * 2 * 2
    mine = [record for record in records if record["drafter"] == "perfect"]
    row = result.rows[0]
    assert row.tokens / row.target_passes == row.mat
    assert sum(r["tokens"] for r in mine) == row.tokens and sum(r["target_passes"] for r in mine) == row.target_passes
    assert sum(r["tokens"] for r in mine) / sum(r["decode_s"] for r in mine) == pytest.approx(row.tokens_per_s)
    assert {r["agreement"] for r in mine} == {"equal"}
    assert {r["agreement"] for r in records if r["drafter"] == "vanilla"} == {None}
    assert row.transformers_tokens_per_s is row.speedup_transformers is None


def test_a_drafter_that_changes_the_text_is_caught(tmp_path, prompts, target, perfect, scripted, monkeypatch):
    """Negative control: with a verification that believes every draft, the count must not stay 0."""
    believing = scripted({key: [7] * 64 for key in perfect.answers}, depth=3)
    honest = measure.decode

    def broken(*args, drafter=None, **options):
        (decoded,) = honest(*args, drafter=drafter, **options)
        if drafter is None:
            return [decoded]
        return [dataclasses.replace(decoded, output_ids=[*decoded.output_ids[:2], 7, *decoded.output_ids[3:]])]

    monkeypatch.setattr(measure, "decode", broken)
    made = recipe(prompts, baselines=["vanilla"])
    result = evaluate(made, run_of(tmp_path, made), target=target, drafters={"believing": believing})
    assert result.lossless.mismatches == result.lossless.sequences == 3


def test_sampling_is_equal_in_exact_mode_and_not_compared_otherwise(tmp_path, prompts, target, perfect):
    for exact, sequences in ((True, 3), (False, 0)):
        made = recipe(prompts, baselines=["vanilla"], sampling={"temperature": 1.0, "exact": exact}, overwrite=True)
        result = evaluate(made, run_of(tmp_path, made), target=target, drafters={"perfect": perfect})
        assert (result.lossless.sequences, result.lossless.mismatches) == (sequences, 0)


def test_prompts_do_not_share_random_numbers():
    """With one seed for all prompts of equal length, repeats would be no independent draws."""
    prompts = [measure.Prompt(id, [], "sql", "") for id in ("ab" * 16, "cd" * 16)]
    seeds = {measure.Case(prompt, [1], 1).seed(repeat) for prompt in prompts for repeat in (0, 1)}
    assert len(seeds) == 4


def test_over_long_prompts_are_rejected_and_counted(tmp_path, prompts, target, perfect):
    with open(prompts, "a") as file:
        file.write(json.dumps({"prompt": "colour " * 5000}) + "\n")
    made = recipe(prompts, baselines=["vanilla"], data={"max_rejected": 0.5})
    run = run_of(tmp_path, made)
    result = evaluate(made, run, target=target, drafters={})
    assert result.rejected == 1 and result.rows[0].prompts == 3
    assert "prompts.jsonl:4" in (run.dir / "rejected.jsonl").read_text()
    with pytest.raises(DataError, match="context of 2048"):
        evaluate(recipe(prompts, baselines=["vanilla"]), run, target=target, drafters={})


def test_an_interrupt_keeps_the_records(tmp_path, prompts, target, scripted):
    made = recipe(prompts, baselines=["vanilla"])
    run = run_of(tmp_path, made)

    class Stopping(scripted):
        calls = 0

        def propose(self, state, budget):
            if len(state.rows[0].output) == 1:
                Stopping.calls += 1
            if Stopping.calls == 4:  # two warm-ups, two prompts
                progress.interrupts._note(signal.SIGTERM, None)
            return super().propose(state, budget)

    try:
        with pytest.raises(Interrupted, match="after 2 of 3 prompts"):
            evaluate(made, run, target=target, drafters={"stopping": Stopping({}, 1)})
    finally:
        progress.interrupts.reset()
    assert pq.read_table(run.dir / "records.parquet").num_rows == 4


def test_contradictions(tmp_path, prompts, target):
    made = recipe(prompts, baselines=[])
    with pytest.raises(UsageError, match="nothing to measure"):
        evaluate(made, run_of(tmp_path, made), target=target, drafters={})
    made = recipe(prompts, data={"domain": ["sql", "math"]})
    with pytest.raises(UsageError, match="one domain"):
        evaluate(made, run_of(tmp_path, made), target=target, drafters={})


def test_order_rotates(tmp_path, prompts, target):
    """Who always goes first meets cold caches: each contender must lead equally often."""
    asked = []

    def contender(name):
        def answer(ids, room, seed):
            asked.append(name)
            return {}

        return answer

    made = recipe(prompts)
    cases = [measure.Case(measure.Prompt("ab" * 16, [], "sql", ""), [1], 1)] * 3
    measure.measure(made, run_of(tmp_path, made), cases, [contender(name) for name in "abc"], set())
    assert "".join(asked) == "abcabc" + "abc" + "bca" + "cab"


def test_the_bar_shows_mat_of_drafters(tmp_path, prompts, target, perfect, monkeypatch):
    shown = []
    monkeypatch.setattr(progress.Progress, "update", lambda self, advance=1, **fields: shown.append(fields["mat"]))
    made = recipe(prompts, baselines=["vanilla"])
    result = evaluate(made, run_of(tmp_path, made), target=target, drafters={"perfect": perfect})
    assert shown[-1] == result.rows[0].mat != metrics.mat([])
