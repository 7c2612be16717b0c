"""An online drafter drafts with the weights of its learner and saves these weights, for every family."""

import pytest
import torch

from specctl.adaptation.online_drafter import OnlineDrafter
from specctl.decoding.target import load_target
from specctl.drafters import checkpoint
from specctl.families import online_families
from specctl.training import schedule
from tests.adaptation.lessons import answered, taught
from tests.measuring.streams import QUESTIONS, recipe, write_copy, write_head


def test_learned_tied_weights_are_played_and_saved(tmp_path, tiny, tiny_directory):
    """Most small LMs use one matrix as embedding and as vocabulary head. If the old matrix were saved under the second
    name, loading it last would discard the learned embedding."""
    tied = write_copy(tmp_path / "lm", tiny, tiny_directory("qwen2"), 0.0)
    pupil = OnlineDrafter(recipe("unread.jsonl", tied, tiny, algo=["ogd"], baselines=[]), "ogd", tiny, 0)
    taught(pupil, [answered(pupil, tiny)])
    learnt = pupil.objective.parameters(pupil.played())["model.model.embed_tokens.weight"]
    before, after = (checkpoint.load(place).tensors for place in (tied, pupil.save(tmp_path / "learnt", {"mat": {}})))
    assert not torch.equal(learnt, before["model.embed_tokens.weight"])
    assert torch.equal(pupil.play().model.embedding, learnt)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert torch.equal(after[name], learnt), name


def test_all_texts_are_new_after_a_change_of_target(tmp_path, tiny):
    """With replay, a new target starts a new buffer, which numbers its texts from 0. A count kept from the old buffer
    would stop learning until as many texts had come as before."""
    head = write_head(tmp_path / "hydra", tiny, "hydra")
    pupil = OnlineDrafter(recipe("unread.jsonl", head, tiny, algo=["ogd"], buffer={"replay": 1.0}), "ogd", tiny, 0)
    taught(pupil, [answered(pupil, tiny)])
    pupil.retarget(tiny)
    (lesson,), _ = taught(pupil, [answered(pupil, tiny)])
    assert (lesson.outcome.status, lesson.texts) == ("updated", len(QUESTIONS) - 1), "all but the one that judges"


def test_held_out_texts_are_learned_from_with_the_next_chunk(tmp_path, tiny):
    """Each text is learned from once, and a held-out text only after it has judged an update. Without replay, the
    drafter then forgets the text."""
    head = write_head(tmp_path / "hydra", tiny, "hydra")
    pupil = OnlineDrafter(
        recipe("unread.jsonl", head, tiny, algo=["ogd"], learner={"holdout": 0.4, "rest": 0}), "ogd", tiny, 0
    )
    chunks = [answered(pupil, tiny) for _ in range(3)]
    learnt, batches = [], pupil.batches

    def noted(examples):
        learnt.append([example.index for example in examples])
        return batches(examples)

    pupil.batches = noted
    lessons, _ = taught(pupil, chunks)
    assert [lesson.texts for lesson in lessons] == [3, 5, 5]
    judges, packed = ([texts for texts in learnt if (len(texts) == 1) == one] for one in (True, False))
    assert packed == [[0, 1, 2], [3, 4, 5, 6, 7], [8, 9, 10, 11, 12]]
    assert judges == [[3], [4], [8], [9], [13], [14]] and [*pupil.buffer.texts] == [13, 14]


def test_no_text_counts_as_learned_while_learning_rests(tmp_path, tiny):
    """`texts` once counted the texts that were offered."""
    head = write_head(tmp_path / "hydra", tiny, "hydra")
    pupil = OnlineDrafter(recipe("unread.jsonl", head, tiny, algo=["ogd"]), "ogd", tiny, 0)
    chunk = answered(pupil, tiny)
    pupil.watchdog.restore(pupil.watchdog.state() | {"rest": torch.tensor([1, 1])})
    (lesson,), _ = taught(pupil, [chunk])
    assert (lesson.outcome.status, lesson.texts, lesson.tokens) == ("rested", 0, 0) and not pupil.buffer.texts


@pytest.mark.parametrize("family", ["eagle", "eagle3", "hydra"])
def test_a_drafter_learns_from_a_target_in_fp16(tmp_path, tiny, family):
    """The learner then computes in fp32, without the autocast that would accept features of any precision."""
    half = load_target(tiny.name, device="cpu", dtype="fp16")
    head = write_head(tmp_path / family, half, family)
    pupil = OnlineDrafter(recipe("unread.jsonl", head, half, algo=["ogd"]), "ogd", half, 0)
    (lesson,), _ = taught(pupil, [answered(pupil, half)])
    assert lesson.outcome.status == "updated"


@pytest.mark.parametrize("family", sorted(online_families()))
def test_learning_from_verdicts_needs_no_layers_of_the_target(tmp_path, tiny, tiny_directory, family):
    """A learner in a separate process gets a target without layers. Equal chunks must give it equal weights."""
    if family == "lm":
        head = write_copy(tmp_path / "lm", tiny, tiny_directory("llama"), 0.3)
    else:
        head = write_head(tmp_path / family, tiny, family)
    made = recipe("unread.jsonl", head, tiny, algo=["ogd"])
    ends = load_target(**made.target.loading, whole=False)
    assert not ends.whole
    whole, spare = (OnlineDrafter(made, "ogd", target, 0) for target in (tiny, ends))
    chunks = [answered(whole, tiny) for _ in range(2)]
    start, ((_, lesson), learnt), (_, found) = whole.played(), taught(whole, chunks), taught(spare, chunks)
    assert lesson.outcome.status == "updated" and not torch.equal(learnt, start)
    torch.testing.assert_close(found, learnt, rtol=0, atol=0)


def test_muon_takes_orthogonal_steps_and_leaves_vocabulary_matrices(tmp_path, tiny):
    """The vocabulary head is the largest part of a small head, and training it cost time without a gain."""
    head = write_head(tmp_path / "eagle3", tiny, "eagle3")
    learner = {"lr": 1e-3, "holdout": 0.0, "optimizer": "muon"}
    pupil = OnlineDrafter(recipe("unread.jsonl", head, tiny, algo=["ogd"], learner=learner), "ogd", tiny, 0)
    before = pupil.objective.state(pupil.played())
    (lesson,), after = taught(pupil, [answered(pupil, tiny)])
    assert lesson.outcome.steps == 1
    after = pupil.objective.state(after)
    moved = {name: (after[name] - before[name]).float() for name in after if not torch.equal(after[name], before[name])}
    assert {"fc.weight", "midlayer.self_attn.q_proj.weight", "norm.weight"} <= set(moved)
    assert not any("lm_head" in name or "embed" in name for name in moved)
    step = moved["midlayer.self_attn.q_proj.weight"]
    values = torch.linalg.svdvals(step) / (1e-3 * 0.2 * max(step.shape) ** 0.5)
    assert values.median() > 0.3 and values.max() < 1.4, "all directions are about as long"


def test_a_lesson_changes_every_layer_and_drafting_continues(tmp_path, tiny):
    """A head with two layers drafts the second chunk with the weights of the first lesson."""
    head = write_head(tmp_path / "eagle3", tiny, "eagle3", num_layers=2)
    learner = {"lr": 1e-3, "holdout": 0.0}
    pupil = OnlineDrafter(recipe("unread.jsonl", head, tiny, algo=["ogd"], learner=learner), "ogd", tiny, 0)
    before = checkpoint.load(head).tensors
    for _ in range(2):
        (lesson,), _ = taught(pupil, [answered(pupil, tiny)])
        assert lesson.outcome.status == "updated"
        after = checkpoint.load(pupil.save(tmp_path / "learnt", {"mat": {}})).tensors
        assert before.keys() == after.keys()
        layers = [name for name in before if name.startswith(("midlayer.", "layers.1."))]
        assert len(layers) == 10 + 9 and not any(torch.equal(before[name], after[name]) for name in layers)
        assert torch.equal(pupil.play().upper[0].post_norm.weight, after["layers.1.post_attention_layernorm.weight"])
        before = after


def test_a_chunk_makes_several_steps_on_every_device(tmp_path, tiny, monkeypatch):
    """On a GPU, an update was once one or two steps of 16,384 tokens. It raised the loss, so every update was
    refused."""
    monkeypatch.setitem(schedule.BATCH_TOKENS, "cpu", (16, 16_384))
    head = write_head(tmp_path / "hydra", tiny, "hydra")
    pupil = OnlineDrafter(recipe("unread.jsonl", head, tiny, algo=["ogd"], learner={"holdout": 0.0}), "ogd", tiny, 0)
    (lesson,), _ = taught(pupil, [answered(pupil, tiny)])
    assert lesson.outcome.steps >= len(QUESTIONS) - 1
