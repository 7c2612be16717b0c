"""Modes side by side over a stream: which of them learn, from which pairs, and resuming."""

import copy

import pytest
import torch
from transformers import LlamaForCausalLM

from specctl.adaptation.stream import EncodedPrompt
from specctl.distillation.prompts import Prompt
from specctl.drafters import checkpoint
from specctl.drafters.lm.drafter import FAMILY as lm
from specctl.drafters.lm.model import LM, architecture
from specctl.errors import CheckpointError
from specctl.lab.reasoning.judge import Judge, make_judge
from specctl.lab.reasoning.modes import DraftLM, Reasoning, load_draft_lm
from specctl.lab.reasoning.options import LookaheadRecipe
from specctl.lab.reasoning.rows import acceptance_difference, row
from specctl.measuring.measured import Measured
from specctl.recipe import DrafterRecipe

MODES = ["target", "draft", "lr", "osd-lr", "online-lr"]
RECIPE = LookaheadRecipe(
    temperature=0.0, budget=16, answer_tokens=4, step_tokens=8, depth=2, learning={"lr": 1e-3, "epochs": 1, "batch": 4}
)


@pytest.fixture(scope="module")
def target(shallow):
    """Three of the ten layers: these tests compare modes."""
    return shallow


@pytest.fixture(scope="module")
def draft(target):
    torch.manual_seed(0)
    recipe = DrafterRecipe(preset="tiny", hidden_size=32, num_heads=2, intermediate_size=32, num_layers=1)
    return DraftLM("small", LlamaForCausalLM(architecture(recipe, target)), target.tokenizer)


@pytest.fixture(scope="module")
def arrivals(target):
    def made(n):
        messages = [{"role": "user", "content": f"What is {n} + {n}?"}]
        return EncodedPrompt(Prompt(f"p{n}", messages, "math", f"f:{n}", f"#### {2 * n}"), target.render(messages))

    return [made(n) for n in range(1, 5)]


def reasoning(target, draft, modes=MODES, **changes):
    return Reasoning(target, draft, RECIPE.model_copy(update=changes), modes, judge=make_judge(RECIPE.judge))


def rows(records):
    """One row per mode over all chunks of `records`."""
    traces = {mode: [trace for record in records for trace in record.traces[mode]] for mode in records[0].traces}
    seconds = {mode: sum(record.learning_s.get(mode, 0.0) for record in records) for mode in traces}
    return [row(mode, own, traces["target"], seconds[mode]) for mode, own in traces.items()]


@pytest.fixture(scope="module")
def whole(target, draft, arrivals):
    """(records, reasoning, state after the first chunk) of two chunks in all modes."""
    run = reasoning(target, draft)
    first, state = run.chunk(arrivals[:2]), copy.deepcopy(run.state())
    return [first, run.chunk(arrivals[2:])], run, state


def test_every_mode_answers_every_prompt_and_only_learners_have_lessons(whole, arrivals):
    records, run, _ = whole
    assert [record.chunk for record in records] == [1, 2]
    for record, expected in zip(records, (arrivals[:2], arrivals[2:]), strict=True):
        assert list(record.traces) == MODES
        for traces in record.traces.values():
            assert [trace.prompt_id for trace in traces] == [one.prompt.id for one in expected]
        assert set(record.lessons) == set(record.learning_s) == {"osd-lr", "online-lr"}
        assert all(lesson.pairs and lesson.steps for lesson in record.lessons.values())
    assert set(run.judges) == {"lr", "osd-lr", "online-lr"}


def test_learning_changes_only_the_learners_draft_lm(whole, draft, target):
    _, run, _ = whole
    fresh = reasoning(target, draft, ["lr"])
    assert not fresh.learners
    for mode in ("osd-lr", "online-lr"):
        learnt = run.learners[mode].model.get_output_embeddings().weight
        assert not torch.equal(learnt, draft.model.get_output_embeddings().weight)
        assert torch.equal(run._answering[mode].draft.writer.model.head_weight, learnt), "learned weights"
    assert torch.equal(run._answering["lr"].draft.writer.model.head_weight, draft.model.get_output_embeddings().weight)
    assert torch.equal(run._answering["draft"].target.model.head_weight, draft.model.get_output_embeddings().weight)


def test_with_the_exact_judge_every_mode_has_the_targets_text(whole):
    """Greedy, in fp32: every accepted step equals the target's."""
    records, *_ = whole
    for record in records:
        for mode in ("lr", "osd-lr", "online-lr"):
            assert [t.ids for t in record.traces[mode]] == [t.ids for t in record.traces["target"]]


def test_a_restored_run_equals_an_uninterrupted_one(whole, target, draft, arrivals):
    records, run, state = whole
    second = reasoning(target, draft)
    second.restore(copy.deepcopy(state), 1)
    record = second.chunk(arrivals[2:])
    assert record.chunk == 2
    assert {m: [t.ids for t in ts] for m, ts in record.traces.items()} == {
        m: [t.ids for t in ts] for m, ts in records[1].traces.items()
    }
    assert record.lessons == records[1].lessons
    assert all(torch.equal(value, run.state()[name]) for name, value in second.state().items())
    with pytest.raises(CheckpointError, match="osd-lr"):
        reasoning(target, draft, ["lr", "online-lr"]).restore(state, 1)


def test_rows_summarize_the_traces(whole):
    records, *_ = whole
    found = {row.mode: row for row in rows(records)}
    assert list(found) == MODES
    alone, online = found["target"], found["online-lr"]
    assert alone.avg_len.value == 1 and alone.step_acceptance.value is None and alone.agreement.value in (1.0, None)
    assert online.avg_len.value >= 1 and 0 <= online.step_acceptance.value <= 1
    assert online.step_acceptance.interval[0] <= online.step_acceptance.value <= online.step_acceptance.interval[1]
    assert online.prompts == 4 and online.learning_s > 0 and alone.learning_s == 0
    assert online.tflops > alone.tflops > 0
    assert alone.speedup.value == alone.speedup_with_learning == 1
    assert online.speedup_with_learning < online.speedup.value == alone.seconds / online.seconds
    assert sum(alone.stops.values()) == 4
    assert [row.prompts for row in rows(records[:1])] == [2] * 5


def test_modes_are_compared_on_the_same_prompts(whole):
    records, *_ = whole
    traces = {mode: [t for record in records for t in record.traces[mode]] for mode in MODES}
    assert acceptance_difference(traces["lr"], traces["lr"]) == Measured(0, (0, 0))
    assert acceptance_difference(traces["lr"], traces["target"]) == Measured(), "mode `target` drafts nothing"
    with pytest.raises(ValueError, match="different prompts"):
        acceptance_difference(traces["lr"], traces["lr"][1:])


def test_agreement_compares_answers_with_the_targets(whole):
    """If the target has no answer, the prompt does not count. A missing answer of another mode is a disagreement."""
    records, *_ = whole
    record = copy.deepcopy(records[0])
    for trace, answer in zip(record.traces["target"], ("12", None), strict=True):
        trace.answer = answer
    for trace, answer in zip(record.traces["lr"], ("12.0", "7"), strict=True):
        trace.answer = answer
    for trace in record.traces["draft"]:
        trace.answer = None
    found = {row.mode: row.agreement.value for row in rows([record])}
    assert (found["target"], found["lr"], found["draft"]) == (1.0, 1.0, 0.0)


def test_every_mode_has_its_own_copy_of_the_judge(target, draft, arrivals):
    asked = []

    def ask(pairs):
        asked.append(pairs)
        return [True] * len(pairs)

    run = Reasoning(target, draft, RECIPE, ["lr", "osd-lr"], judge=Judge(ask))
    record = run.chunk(arrivals[:1])
    assert run.judges["lr"].tally == run.judges["osd-lr"].tally and run.judges["lr"].tally.asked
    assert record.traces["lr"][0].accepted > 0
    for mismatch in record.traces["lr"][0].mismatches:
        ends = [bool(target.eos_ids & {*step}) for step in (mismatch.chosen, mismatch.rejected)]
        assert sum(ends) == 1, "equal steps mismatch only if one of them ends the text"


def test_a_draft_lm_is_loaded_from_a_specctl_or_transformers_directory(target, draft, tmp_path, tiny_directory):
    module = LM(draft.model)
    tensors = lm.stored_state(module.state_dict())
    ours = checkpoint.save(
        tmp_path / "ours", config=lm.checkpoint_config(module, target.identity), tensors=tensors, info={}
    )
    loaded = load_draft_lm(str(ours), target)
    assert all(map(torch.equal, loaded.model.parameters(), draft.model.parameters()))
    assert loaded.tokenizer is target.tokenizer
    assert load_draft_lm(tiny_directory("llama"), target).model.dtype == torch.float32


def test_a_head_is_refused_as_a_draft_lm(target, tmp_path):
    from specctl.drafters.family import load_family
    from specctl.recipe import TrainRecipe

    medusa = load_family("medusa")
    module = medusa.build(
        TrainRecipe(arch="medusa", drafter=DrafterRecipe(draft_heads=1)), target, lambda n: list(range(n))
    )
    place = checkpoint.save(
        tmp_path / "head",
        config=medusa.checkpoint_config(module, target.identity),
        tensors=medusa.stored_state(module.state_dict()),
        info={},
    )
    with pytest.raises(CheckpointError, match="medusa"):
        load_draft_lm(str(place), target)
