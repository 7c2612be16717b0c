"""Runs of lookahead reasoning: their files, resuming, and refused inputs."""

import gc
import importlib
import json
import shutil

import pyarrow.parquet as pq
import pytest
import torch
from datasets import load_dataset

from specctl import progress
from specctl.drafters import checkpoint
from specctl.drafters.pool import load_drafter
from specctl.errors import CheckpointError, DataError, Interrupted, UsageError
from specctl.lab.reason.recipe import ReasonRecipe
from specctl.lab.reasoning.lookahead import Lookahead
from specctl.lab.reasoning.modes import load_draft_lm
from specctl.recipe import DraftingRecipe, TargetRecipe
from specctl.recipe.train import CheckpointRecipe
from tests.measuring.streams import (
    QUESTIONS,
    contents,
    learnt,
    lines,
    metrics,
    weights,
    write_copy,
    write_prompts,
)

MODES = ["target", "draft", "lr", "online-lr", "osd-lr"]
LEARNERS = MODES[3:]
TIMES = {"elapsed_s", "seconds", "draft_s", "judge_s", "learning_s"}
PASSES = [0, 1]


@pytest.fixture(scope="module", autouse=True)
def few_objects():
    """Each lesson runs the garbage collector twice. Import trl before and freeze its objects, to save that time."""
    importlib.import_module("trl")
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def draft(tmp_path_factory, tiny):
    return write_copy(tmp_path_factory.mktemp("copy") / "lm", tiny, tiny.name, 0.01)


@pytest.fixture(scope="module")
def make(tmp_path_factory, tiny, draft):
    """A recipe on five prompts, two per chunk."""
    prompts = write_prompts(tmp_path_factory.mktemp("prompts"))

    def made(**fields):
        own = {"draft": str(draft), "temperature": 0.0, "budget": 12, "answer_tokens": 3, "step_tokens": 3, "depth": 2}
        own |= {"learning": {"lr": 1e-3, "epochs": 1, "batch": 4}, **fields.pop("reasoning", {})}
        options = {
            "algo": LEARNERS,
            "target": TargetRecipe(name=tiny.name, dtype="fp32", device="cpu"),
            "data": {"prompts": str(prompts), **fields.pop("data", {})},
            "stream": {"chunk": 2, "shuffle": True},
            "checkpoint": CheckpointRecipe(every=2, keep=9),
            "seeds": PASSES,
        }
        return ReasonRecipe(**options | {"reasoning": own} | fields)

    return made


@pytest.fixture(scope="module")
def whole(tmp_path_factory, make, tiny):
    """An uninterrupted run: its directory and its result."""
    place = tmp_path_factory.mktemp("whole") / "run"
    return place, learnt(place, make(), tiny)[0]


def traces(place):
    return [json.loads(line) for line in (place / "traces.jsonl").read_text().splitlines()]


def timeless(rows):
    return [{key: value for key, value in row.items() if key not in TIMES} for row in rows]


def pairs(place):
    return [pq.read_table(path).to_pylist() for path in sorted((place / "pairs").iterdir())]


def same_runs(one, other):
    """Check that two runs are equal bit for bit, except for times and for the cache statistics of a restarted judge."""

    def chunks(place):
        rows = timeless(lines(place))
        for row in rows:
            row["judge"] = {key: row["judge"].get(key) for key in ("pairs", "identical", "aligned", "unanswered")}
        return rows

    assert chunks(one) == chunks(other)
    assert timeless(traces(one)) == timeless(traces(other))
    assert timeless(metrics(one)) == timeless(metrics(other))
    assert pairs(one) == pairs(other)
    for name in [mode + seed for mode in LEARNERS for seed in ("", "-seed1")]:
        ours, theirs = weights(one, name), weights(other, name)
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours), name


def again(place, made, tiny):
    return learnt(place, made.model_copy(update={"resume": True, "output_dir": place}), tiny)[0]


def test_reported_numbers_follow_from_the_traces(whole):
    place, found = whole
    rows, written = {row.mode: row for row in found.modes}, traces(place)
    assert (list(rows), found.algo, found.chunks, found.prompts) == (MODES, "online-lr", 6, 2 * len(QUESTIONS))
    for mode, row in rows.items():
        own = [trace for trace in written if trace["mode"] == mode]
        assert row.prompts == len(own) == found.prompts
        assert row.tokens == sum(len(trace["ids"]) for trace in own)
        assert row.seconds == pytest.approx(sum(trace["seconds"] for trace in own))
        accepted, rejected = (sum(trace[name] for trace in own) for name in ("accepted", "rejected"))
        assert row.step_acceptance.value == (accepted / (accepted + rejected) if accepted + rejected else None)
    assert rows["lr"].step_acceptance.value > 0.2, "the test needs a draft LM that is sometimes right"
    assert (
        rows["target"].speedup.value == 1 and rows["online-lr"].speedup_with_learning < rows["online-lr"].speedup.value
    )
    compared = {(one.mode, one.than): one.step_acceptance for one in found.differences}
    assert list(compared) == [("online-lr", "lr"), ("online-lr", "osd-lr"), ("osd-lr", "lr")]
    gained = rows["online-lr"].step_acceptance.value - rows["lr"].step_acceptance.value
    assert compared["online-lr", "lr"].value == pytest.approx(gained) and compared["online-lr", "lr"].interval
    assert [(row.seed, row.mode) for row in found.per_seed] == [(seed, mode) for seed in PASSES for mode in MODES]
    assert [(row.chunk, row.mode) for row in found.per_chunk] == [(n, mode) for n in (1, 2, 3) for mode in MODES]
    for mode, counts in found.judges.items():
        assert counts["asked"] + counts["cached"] + counts["identical"] == counts["pairs"] > 0, mode
    assert list(found.judges) == MODES[2:]
    assert rows["target"].cut > rows["target"].rounds / 2, "this target rarely writes the delimiter"


def test_greedy_texts_equal_the_targets(whole):
    """The exact judge accepts only equal steps. Negative control: the draft LM alone writes other texts."""
    texts = {mode: [trace["ids"] for trace in traces(whole[0]) if trace["mode"] == mode] for mode in MODES}
    for mode in MODES[2:]:
        assert texts[mode] == texts["target"], mode
    assert texts["draft"] != texts["target"]


def test_preference_pairs_can_be_loaded_as_a_dataset(whole, tmp_path):
    found = load_dataset(str(whole[0] / "pairs"), split="train", cache_dir=str(tmp_path))
    assert {"mode", "seed", "chunk", "prompt_ids", "chosen_ids", "rejected_ids", "chosen", "rejected"} < {
        *found.features
    }
    assert {*found["mode"]} == {"lr", *LEARNERS} and {*found["seed"]} == {*PASSES}
    assert all(chosen != rejected for chosen, rejected in zip(found["chosen_ids"], found["rejected_ids"], strict=True))
    counted = sum(row["pairs"] for row in lines(whole[0]) if row["mode"] == "osd-lr")
    assert found["mode"].count("osd-lr") == counted > 0


def test_learned_draft_lms_can_be_loaded_as_drafters(whole, tiny, draft):
    place, found = whole
    start = checkpoint.load(draft).tensors
    for mode in LEARNERS:
        assert found.drafters[mode] == str(place / "drafters" / mode)
        assert any(not torch.equal(value, start[name]) for name, value in weights(place, mode).items())
        assert load_drafter(found.drafters[mode], tiny, DraftingRecipe())
        assert checkpoint.read_info(found.drafters[mode])["learnt"].startswith(f"{mode}, 3 chunks")


@pytest.fixture
def stop(monkeypatch):
    """`stop(n)`: send SIGTERM before the n-th answer."""
    answer = Lookahead.answer

    def at(turn):
        turns = iter(range(1, 1000))

        def interrupted(self, arrival):
            if next(turns) == turn:
                progress.interrupts.handle(15)
            return answer(self, arrival)

        monkeypatch.setattr(Lookahead, "answer", interrupted)

    yield at
    progress.interrupts.reset()


@pytest.mark.slow
def test_a_run_interrupted_within_a_chunk_is_resumed(tmp_path, make, tiny, whole, stop):
    """During the second pass: the unfinished chunk is dropped and repeated."""
    warm_ups = 2
    stop(len(MODES) * (warm_ups + len(QUESTIONS) + 2) + 3)
    with pytest.raises(Interrupted) as caught:
        learnt(tmp_path / "run", make(), tiny)
    progress.interrupts.reset()
    assert "after 4 chunks" in caught.value.message and "--resume" in caught.value.hint
    found = again(tmp_path / "run", make(), tiny)
    same_runs(tmp_path / "run", whole[0])
    assert [row.agreement for row in found.modes] == [row.agreement for row in whole[1].modes]


def test_lines_after_the_last_checkpoint_are_dropped_on_resume(tmp_path, make, tiny, whole):
    """A kill -9 while the next chunk is written leaves an incomplete line, and pairs that will be written again."""
    place = shutil.copytree(whole[0], tmp_path / "run")
    for state in sorted((place / "checkpoints").iterdir())[3:]:
        shutil.rmtree(state)
    with open(place / "traces.jsonl", "a") as file:
        file.write('{"mode": "lr", "se')
    again(place, make(), tiny)
    same_runs(place, whole[0])
    (place / "chunks.jsonl").write_text("")
    with pytest.raises(CheckpointError, match="lacks chunks"):
        again(place, make(), tiny)


def test_resuming_with_other_settings_or_weights_is_refused(tmp_path, make, tiny, whole, draft):
    """A refused resume changes nothing in the directory."""
    place = shutil.copytree(whole[0], tmp_path / "run")
    before = contents(place)
    with pytest.raises(UsageError, match=r"reasoning\.depth was 2, is 1"):
        again(place, make(reasoning={"depth": 1}), tiny)
    with pytest.raises(UsageError, match="algo was"):
        again(place, make(algo=["lr"]), tiny)
    kept = draft.rename(draft.parent / "kept")
    try:
        write_copy(draft, tiny, tiny.name, 0.02)
        with pytest.raises(UsageError, match="lm was"):
            again(place, make(), tiny)
    finally:
        shutil.rmtree(draft)
        kept.rename(draft)
    assert contents(place) == before


def test_a_learned_transformers_model_can_be_a_draft_lm_again(tmp_path, make, tiny, tiny_directory):
    """It has no manifest. Lookup speculates within the steps."""
    own = {"draft": tiny_directory("llama-bias-tied"), "drafter": "lookup"}
    made = make(algo=["osd-lr"], seeds=[0], data={"limit": 2}, reasoning=own)
    found = learnt(tmp_path / "run", made, tiny)[0]
    again = load_draft_lm(found.drafters["osd-lr"], tiny)
    before = load_draft_lm(tiny_directory("llama-bias-tied"), tiny)
    assert again.model.config.architectures == before.model.config.architectures
    assert not all(map(torch.equal, again.model.parameters(), before.model.parameters()))


def test_an_unreachable_judge_aligns_only_identical_steps(tmp_path, make, tiny, capsys):
    """The failure is reported once, and counted."""
    judge = {"kind": "model", "name": "m", "endpoint": "http://127.0.0.1:9/v1", "timeout_s": 1.0}
    found = learnt(tmp_path / "run", make(algo=["lr"], seeds=[0], reasoning={"judge": judge}), tiny)[0]
    counts = found.judges["lr"]
    assert counts["unanswered"] == counts["asked"] > 0 and counts["aligned"] == counts["identical"]
    assert capsys.readouterr().err.count("gave no verdict") == 1
    assert found.modes[2].agreement == found.modes[0].agreement


def test_without_baselines_there_are_no_comparisons(tmp_path, make, tiny):
    found = learnt(tmp_path / "run", make(algo=["lr"], seeds=[0], reasoning={"baselines": []}), tiny)[0]
    (row,) = found.modes
    assert (row.mode, row.prompts, row.agreement.value, row.speedup.value) == ("lr", len(QUESTIONS), None, None)
    assert (found.differences, found.drafters) == ([], {})


def test_an_update_with_nan_is_refused_and_reported(tmp_path, make, tiny, draft, capsys):
    learning = {"lr": 1e30, "epochs": 2, "batch": 1}
    made = make(algo=["osd-lr"], seeds=[0], data={"limit": 2}, reasoning={"learning": learning})
    found = learnt(tmp_path / "run", made, tiny)[0]
    assert any(row.refused for row in found.per_chunk)
    assert "osd-lr: a loss or weight was not finite, so chunk 1" in capsys.readouterr().err
    assert all(torch.isfinite(value).all() for value in weights(tmp_path / "run", "osd-lr").values())


def test_texts_without_answers_have_no_agreement(whole):
    """The texts of a random target contain no answers."""
    for row in whole[1].modes:
        assert (row.agreement.value, row.agreement.interval, row.unanswered) == (None, None, row.prompts)


def test_unusable_draft_lms_are_refused(tmp_path, make, tiny, draft):
    """Another tokenizer without a chat template, and a missing drafter of the domain."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny.name)
    tokenizer.add_tokens(["zebra"])
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path / "other")
    model = AutoModelForCausalLM.from_pretrained(tiny.name)
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(tmp_path / "other")
    with pytest.raises(DataError, match="another tokenizer"):
        learnt(tmp_path / "run", make(reasoning={"draft": str(tmp_path / "other")}), tiny)
    with pytest.raises(CheckpointError, match="prompts-lm"):
        learnt(tmp_path / "run", make(reasoning={"draft": None}), tiny)
