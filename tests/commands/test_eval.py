"""`evaluate` end to end on a few prompts with the built-in target."""

import dataclasses
import json
import signal

import pyarrow.parquet as pq
import pytest
import rich.console
from transformers import LlamaForCausalLM

from specctl import progress
from specctl.cli.eval import LENGTHS
from specctl.cli.output import records
from specctl.commands.eval import evaluate, with_domains_of_drafters
from specctl.decoding import metrics
from specctl.decoding.controllers import PLAIN
from specctl.decoding.sampling import GREEDY
from specctl.drafters import checkpoint, pool
from specctl.drafters.lm.drafter import FAMILY as lm
from specctl.drafters.lm.model import LM, architecture
from specctl.errors import CheckpointError, DataError, Interrupted, SpecctlError, UsageError
from specctl.measuring import contenders, measured
from specctl.recipe import DataRecipe, DrafterRecipe, EvalRecipe, SamplingRecipe, TargetRecipe
from specctl.runs import Run
from tests.measuring.streams import contents
from tests.toys.decoding import decode

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
    """A drafter of exactly the text of plain decoding."""
    ids = [target.render([{"role": "user", "content": text}]) for text in QUESTIONS]
    decoded = decode(target, ids, sampling=GREEDY, max_new_tokens=64, seeds=[0] * len(ids))
    return scripted({tuple(d.prompt_ids): d.output_ids for d in decoded}, depth=4)


def recipe(prompts, **fields):
    own = {} if "{domain}" in str(prompts) else {"domain": ["sql"]}
    data = DataRecipe(**own | {"prompts": str(prompts)} | fields.pop("data", {}))
    sampling = SamplingRecipe(**{"max_new_tokens": 16, **fields.pop("sampling", {})})
    return EvalRecipe(data=data, sampling=sampling, target=TargetRecipe(dtype="fp32", device="cpu"), **fields)


def run_of(tmp_path, made):
    return Run.create("eval", made, tmp_path / "run")


def test_rows_lossless_counts_and_outputs_of_an_evaluation(tmp_path, prompts, target, perfect, scripted):
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


def test_drafters_from_paths_are_also_assistants_of_transformers(tmp_path, prompts, target):
    """Language models with equal directory names are reported by path."""
    for place in ("a/small", "b/small"):
        model = LM(LlamaForCausalLM(architecture(DrafterRecipe(preset="tiny"), target)))
        checkpoint.save(
            tmp_path / place,
            config=lm.checkpoint_config(model, target.identity),
            tensors=lm.stored_state(model.state_dict()),
            info={},
        )
    paths = [str(tmp_path / "a/small"), str(tmp_path / "b/small")]
    made = recipe(prompts, drafters=["lookup", paths[0]], pool=tmp_path / "b", limit=1)
    result = evaluate(made, run_of(tmp_path, made), target=target)
    baselines = ["vanilla", "transformers", "transformers+lookup"]
    assistants = [f"transformers+{path}" for path in paths]
    assert [row.drafter for row in result.rows] == ["lookup", *paths, *baselines, *assistants]
    assert result.lossless.mismatches == result.lossless_transformers.mismatches == 0


def test_rows_can_be_recomputed_from_the_records(tmp_path, prompts, target, perfect):
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


def test_rows_by_prompt_length(tmp_path, prompts, target, perfect, monkeypatch):
    """Every prompt is in one row per drafter. Buckets are 8, 16, … tokens here; with a single bucket there are no
    rows."""
    made = recipe(prompts, baselines=["vanilla"])
    assert evaluate(made, run_of(tmp_path, made), target=target, drafters={"perfect": perfect}).lengths == []
    monkeypatch.setattr(measured, "SHORTEST", 8)
    run = Run.create("eval", made, tmp_path / "again")
    result = evaluate(made, run, target=target, drafters={"perfect": perfect})
    sizes = {r["id"]: r["prompt_tokens"] for r in pq.read_table(run.dir / "records.parquet").to_pylist()}
    ours = [row for row in result.lengths if row.drafter == "perfect"]
    assert len(ours) > 1 and [row.prompts for row in ours] == [
        sum(row.over < size <= row.up_to for size in sizes.values()) for row in ours
    ]
    assert sum(row.tokens for row in ours) == result.rows[0].tokens
    assert {row.drafter for row in result.lengths} == {"perfect", "vanilla"}
    console = rich.console.Console(width=150)
    with console.capture() as shown:
        console.print(records([vars(row) for row in result.lengths], LENGTHS))
    assert "up to, tokens" in shown.get()


def test_a_changed_text_counts_as_a_mismatch(tmp_path, prompts, target, perfect, scripted, monkeypatch):
    """Negative control: decoding replaces a token, so the count must not stay 0."""
    believing = scripted({key: [7] * 64 for key in perfect.answers}, depth=3)
    honest = contenders.decode

    def broken(engine, requests):
        (decoded,) = honest(engine, requests)
        if engine.controller.drafter is PLAIN:
            return [decoded]
        return [dataclasses.replace(decoded, output_ids=[*decoded.output_ids[:2], 7, *decoded.output_ids[3:]])]

    monkeypatch.setattr(contenders, "decode", broken)
    made = recipe(prompts, baselines=["vanilla"])
    result = evaluate(made, run_of(tmp_path, made), target=target, drafters={"believing": believing})
    assert result.lossless.mismatches == result.lossless.sequences == 3


def test_sampled_texts_are_compared_only_in_exact_mode(tmp_path, prompts, target, perfect):
    for exact, sequences in ((True, 3), (False, 0)):
        made = recipe(prompts, baselines=["vanilla"], sampling={"temperature": 1.0, "exact": exact}, overwrite=True)
        result = evaluate(made, run_of(tmp_path, made), target=target, drafters={"perfect": perfect})
        assert (result.lossless.sequences, result.lossless.mismatches) == (sequences, 0)


def test_prompts_do_not_share_random_numbers():
    """With one seed for all prompts of equal length, repeats would not be independent."""
    prompts = [contenders.Prompt(id, [], "sql", "") for id in ("ab" * 16, "cd" * 16)]
    seeds = {contenders.Case(prompt, [1], 1).seed(repeat) for prompt in prompts for repeat in (0, 1)}
    assert len(seeds) == 4


def test_overlong_prompts_are_rejected_and_counted(tmp_path, prompts, target, perfect):
    with open(prompts, "a") as file:
        file.write(json.dumps({"prompt": "colour " * 5000}) + "\n")
    made = recipe(prompts, baselines=["vanilla"], data={"max_rejected": 0.5})
    run = run_of(tmp_path, made)
    result = evaluate(made, run, target=target, drafters={})
    assert result.rejected == 1 and result.rows[0].prompts == 3
    assert "prompts.jsonl:4" in (run.dir / "rejected.jsonl").read_text()
    with pytest.raises(DataError, match="context of 2048"):
        evaluate(recipe(prompts, baselines=["vanilla"]), run, target=target, drafters={})


@pytest.fixture
def stopping(scripted):
    """`stopping(n, action)`: a drafter that calls `action` in its n-th sequence; the first two are warm-up."""

    class Stopping(scripted):
        def __init__(self, when, action):
            super().__init__({}, 1)
            self.when, self.action, self.prompts = when, action, []

        def propose(self, state, budget):
            row = state.rows[0]
            if len(row.output) == 1:
                self.prompts.append(tuple(row.ids[: row.prompt_length]))
                if len(self.prompts) == self.when:
                    self.action()
            return super().propose(state, budget)

    yield Stopping
    progress.interrupts.reset()


def sigterm():
    progress.interrupts.handle(signal.SIGTERM)


def fail():
    raise RuntimeError("out of memory")


SHORT = {"max_new_tokens": 4}


def counts(result):
    return [(row.drafter, row.prompts, row.tokens, row.target_passes) for row in result.rows]


@pytest.mark.parametrize(
    ("when", "action", "error", "kept"),
    [(4, sigterm, Interrupted, 1), (5, fail, RuntimeError, 2), (3, fail, RuntimeError, 0)],
)
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, prompts, target, stopping, when, action, error, kept):
    """Finished prompts are not decoded again, a half-finished one is."""
    made = recipe(prompts, baselines=["vanilla"], output_dir=tmp_path / "run", save_outputs=True, sampling=SHORT)
    with pytest.raises(error) as caught:
        evaluate(made, run_of(tmp_path, made), target=target, drafters={"d": stopping(when, action)})
    if error is Interrupted:
        assert "after 1 of 3 prompts" in caught.value.message and "--resume" in caught.value.hint
        progress.interrupts.reset()
    assert pq.read_table(tmp_path / "run/records.parquet").num_rows == 2 * kept

    again, drafter = made.model_copy(update={"resume": True}), stopping(0, fail)
    resumed = evaluate(again, run_of(tmp_path, again), target=target, drafters={"d": drafter})
    assert len(drafter.prompts) == 2 + (3 - kept)
    assert resumed.lossless.sequences == 3 and resumed.lossless.mismatches == 0
    whole = evaluate(made, run_of(tmp_path, made), target=target, drafters={"d": stopping(0, fail)})
    assert counts(resumed) == counts(whole)
    outputs = [json.loads(line) for line in (tmp_path / "run/outputs.jsonl").read_text().splitlines()]
    assert len(outputs) == 6 and all(output["text"] for output in outputs)


def test_resuming_a_finished_run_decodes_nothing(tmp_path, prompts, target, perfect, stopping):
    """Another view of the same records (matrix, metric) is made from the records."""
    made = recipe(prompts, baselines=["vanilla"], output_dir=tmp_path / "run", sampling=SHORT)
    first = evaluate(made, run_of(tmp_path, made), target=target, drafters={"perfect": perfect})
    again = made.model_copy(update={"resume": True, "matrix": True, "metric": "accept_rate"})
    second = evaluate(again, run_of(tmp_path, again), target=target, drafters={"perfect": stopping(1, fail)})
    assert second.rows == first.rows
    assert second.matrix.values == [[1.0], [None]]


def test_the_rotation_of_contenders_continues_after_a_resume(tmp_path, prompts, target):
    """If each run began with the same contender, later contenders would have warmer caches."""

    def contender(name):
        def answer(turn, seeds):
            asked.append(name)
            return [{name: decoded}]

        return answer

    decoded = decode(target, [[5, 6]], sampling=GREEDY, max_new_tokens=2, seeds=[0])[0]
    turns = [[contenders.Case(contenders.Prompt(f"{n:032x}", [], "sql", ""), [1], 1)] for n in range(4)]
    found, asked = [contender(name) for name in "abc"], []
    records = contenders.measure(
        recipe(prompts),
        turns,
        found,
        contenders.Shown("eval", set()),
        contenders.RecordJournal(lambda records: tmp_path),
    )
    for done in (3, 2):
        asked.clear()
        earlier = [record for record in records if record.id in {case.prompt.id for (case,) in turns[:done]}]
        contenders.measure(
            recipe(prompts),
            turns,
            found,
            contenders.Shown("eval", set()),
            contenders.RecordJournal(lambda records: tmp_path, earlier),
        )
        assert "".join(asked) == "abcabc" + "".join(["abc", "bca", "cab", "abc"][done:])


@pytest.mark.parametrize(
    ("changes", "says"),
    [({"sampling": {**SHORT, "seed": 1}}, "sampling.seed was 0, is 1"), ({"limit": 2}, "limit was 100, is 2")],
)
def test_resuming_with_other_settings_is_refused(tmp_path, prompts, target, changes, says):
    made = recipe(prompts, baselines=["vanilla"], sampling=SHORT)
    evaluate(made, run_of(tmp_path, made), target=target, drafters={})
    options = {"baselines": ["vanilla"], "sampling": SHORT, "resume": True, "output_dir": tmp_path / "run"}
    other = recipe(prompts, **{**options, **changes})
    before = contents(tmp_path / "run")
    with pytest.raises(UsageError) as caught:
        evaluate(other, run_of(tmp_path, other), target=target, drafters={})
    assert says in caught.value.message and contents(tmp_path / "run") == before


def test_a_refused_start_keeps_the_files_of_the_earlier_run(tmp_path, prompts, target):
    """A drafter for another target, and unreadable prompts. The earlier result used to be deleted before these were
    read."""
    made = recipe(prompts, baselines=["vanilla"], sampling=SHORT, overwrite=True, output_dir=tmp_path / "run")
    run = run_of(tmp_path, made)
    run.result(dataclasses.asdict(evaluate(made, run, target=target, drafters={})))
    (tmp_path / "run/rejected.jsonl").write_text("{}\n")
    other = pool_of(tmp_path, target) / "sql-lm"
    found = checkpoint.load(other)
    found.config["target"]["vocab_hash"] = "0" * 16
    checkpoint.save(other, config=found.config, tensors=found.tensors, info=found.info, overwrite=True)
    before = contents(tmp_path / "run")
    unfit = made.model_copy(update={"drafters": [str(other)]})
    with pytest.raises(CheckpointError, match="is another model"):
        evaluate(unfit, run_of(tmp_path, unfit), target=target)
    prompts.write_text("{\n")
    with pytest.raises(DataError, match="1 of 1 prompts rejected"):
        evaluate(made, run_of(tmp_path, made), target=target, drafters={})
    assert contents(tmp_path / "run") == before


def test_resuming_with_a_retrained_drafter_is_refused(tmp_path, prompts, target):
    made = recipe(prompts, pool=pool_of(tmp_path, target), baselines=[], limit=1, sampling=SHORT)
    evaluate(made, run_of(tmp_path, made), target=target)
    with open(tmp_path / "pool/sql-lm/manifest.json", "a") as file:
        file.write(" ")
    again = made.model_copy(update={"resume": True, "output_dir": tmp_path / "run"})
    with pytest.raises(UsageError, match="sql-lm was"):
        evaluate(again, run_of(tmp_path, again), target=target)


def test_a_hybrid_has_the_domains_and_digest_of_its_head(tmp_path, prompts, target):
    head = pool_of(tmp_path, target) / "sql-lm"
    made = recipe(prompts, drafters=[f"{head}+lookup", "lookup"], baselines=["vanilla"], limit=2, sampling=SHORT)
    result = evaluate(made, run_of(tmp_path, made), target=target)
    assert [row.drafter for row in result.rows] == ["sql-lm+lookup", "lookup", "vanilla"]
    assert result.lossless.sequences == 4 and result.lossless.mismatches == 0
    assert pool.domains_of(f"{head}+lookup") == pool.domains_of(str(head)) == ["sql"]
    with open(head / "manifest.json", "a") as file:
        file.write(" ")
    again = made.model_copy(update={"resume": True, "output_dir": tmp_path / "run"})
    with pytest.raises(UsageError, match=r"sql-lm\+lookup was"):
        evaluate(again, run_of(tmp_path, again), target=target)


def test_unreadable_records_are_refused(tmp_path, prompts, target):
    made = recipe(prompts, baselines=["vanilla"], resume=True, output_dir=tmp_path / "run")
    run = run_of(tmp_path, made)
    (run.dir / "records.parquet").write_bytes(b"PAR1")
    with pytest.raises(SpecctlError, match="cannot continue"):
        evaluate(made, run, target=target, drafters={})


def pool_of(tmp_path, target):
    """A pool of two specialists and a generalist, as small as possible."""
    for name, domains in (("sql-lm", ["sql"]), ("chat-lm", ["chat"]), ("all-lm", ["chat", "sql"])):
        model = LM(LlamaForCausalLM(architecture(DrafterRecipe(preset="tiny", num_layers=1), target)))
        config, tensors = lm.checkpoint_config(model, target.identity), lm.stored_state(model.state_dict())
        checkpoint.save(tmp_path / "pool" / name, config=config, tensors=tensors, info={"domain": domains})
    return tmp_path / "pool"


def test_the_matrix_has_a_column_per_domain_of_the_drafters(tmp_path, prompts, target):
    """Each domain has its own file of prompts. Lookup counts as a baseline."""
    for domain in ("sql", "chat"):
        (tmp_path / f"{domain}.jsonl").write_text(prompts.read_text())
    pattern = tmp_path / "{domain}.jsonl"
    options = {"baselines": ["vanilla"], "limit": 2, "sampling": SHORT, "matrix": True}
    made = recipe(pattern, pool=pool_of(tmp_path, target), drafters=["lookup"], **options)
    made = with_domains_of_drafters(made)
    assert made.data.domain == ["chat", "sql"]
    result = evaluate(made, run_of(tmp_path, made), target=target)
    matrix = result.matrix
    assert matrix.domains == ["chat", "sql"]
    assert matrix.drafters == ["chat-lm", "sql-lm", "all-lm"]
    assert matrix.baselines == ["lookup", "vanilla"]
    mats = {(row.drafter, row.domain): row.mat for row in result.rows}
    names = [*matrix.drafters, *matrix.baselines]
    assert matrix.values == [[mats[name, domain] for domain in matrix.domains] for name in names]
    assert [(found.drafter, found.domain) for found in matrix.diagonal] == [("chat-lm", "chat"), ("sql-lm", "sql")]
    assert result.lossless.sequences == 2 * 2 * 4


def test_a_matrix_takes_its_domains_from_the_drafters_unless_named(tmp_path, prompts, target):
    pool = pool_of(tmp_path, target)
    named = recipe(prompts, pool=pool, matrix=True, data={"domain": ["sql"]})
    assert with_domains_of_drafters(named) is named
    assert with_domains_of_drafters(recipe(prompts, pool=pool)).data.domain == ["sql"], "no matrix: no change"
    with pytest.raises(UsageError, match="no drafter names the domain"):
        with_domains_of_drafters(recipe("{domain}.jsonl", drafters=["lookup"], matrix=True))


def test_contradictory_recipes_are_refused(tmp_path, prompts, target):
    made = recipe(prompts, baselines=[])
    with pytest.raises(UsageError, match="nothing to measure"):
        evaluate(made, run_of(tmp_path, made), target=target, drafters={})
    made = recipe(prompts, data={"domain": ["sql", "math"]})
    with pytest.raises(UsageError, match="one domain"):
        evaluate(made, run_of(tmp_path, made), target=target, drafters={})


def test_the_order_of_contenders_rotates(tmp_path, prompts, target):
    """The first contender meets cold caches, so each must be first equally often."""
    asked = []

    def contender(name):
        def answer(turn, seeds):
            asked.append(name)
            return [{}]

        return answer

    made = recipe(prompts)
    turns = [[contenders.Case(contenders.Prompt("ab" * 16, [], "sql", ""), [1], 1)]] * 3
    contenders.measure(
        made,
        turns,
        [contender(name) for name in "abc"],
        contenders.Shown("eval", set()),
        contenders.RecordJournal(lambda records: tmp_path),
    )
    assert "".join(asked) == "abcabc" + "abc" + "bca" + "cab"


def test_the_progress_bar_shows_the_mat_of_drafters(tmp_path, prompts, target, perfect, monkeypatch):
    shown = []
    monkeypatch.setattr(progress.Progress, "update", lambda self, advance=1, **fields: shown.append(fields["mat"]))
    made = recipe(prompts, baselines=["vanilla"])
    result = evaluate(made, run_of(tmp_path, made), target=target, drafters={"perfect": perfect})
    assert shown[-1] == result.rows[0].mat != metrics.mat([])


def test_later_turns_of_a_suite_follow_plain_decodings_answers(tmp_path, target):
    """There is one row per category. Without the first answer the later turn would be another prompt."""
    path = tmp_path / "question.jsonl"
    rows = [{"category": "math", "turns": ["What is 3 + 4?", "And doubled?"]}, {"category": "qa", "turns": ["Hi."]}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = EvalRecipe(
        data=DataRecipe(prompts=str(path)),
        sampling=SamplingRecipe(max_new_tokens=6),
        target=TargetRecipe(dtype="fp32", device="cpu"),
        drafters=["lookup"],
        baselines=["vanilla"],
        save_outputs=True,
    )
    run = run_of(tmp_path, made)
    result = evaluate(made, run, target=target)
    assert [(row.domain, row.prompts) for row in result.rows] == [("math", 2), ("math", 2), ("qa", 1), ("qa", 1)]
    assert result.later_turns == 1 and result.lossless.mismatches == 0 and result.lossless.sequences == 3
    assert not any(row.mat_interval for row in result.rows), "two turns of one conversation are one draw"
    ids = target.render([{"role": "user", "content": "What is 3 + 4?"}])
    (first,) = decode(target, [ids], sampling=GREEDY, max_new_tokens=6, seeds=[0])
    answer = target.tokenizer.decode(first.output_ids, skip_special_tokens=True)
    turns = [{"role": "user", "content": "What is 3 + 4?"}, {"role": "assistant", "content": answer}]
    second = target.render([*turns, {"role": "user", "content": "And doubled?"}])
    lengths = {record["prompt_tokens"] for record in pq.read_table(run.dir / "records.parquet").to_pylist()}
    assert {len(ids), len(second)} <= lengths
