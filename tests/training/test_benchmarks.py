"""The benchmark against speculators: both sides get the same data and compute the same losses before they are timed."""

import os
import re
import sys
from pathlib import Path

import pytest
import torch

from specctl.drafters.dflash import head as dflash_head
from specctl.drafters.eagle3 import head as eagle3_head
from specctl.errors import SpecctlError, UsageError
from specctl.training.data import batches
from tests.benchmarks import against_speculators, comparison
from tests.benchmarks.comparison import LIKE, PACKED, Measured
from tests.benchmarks.comparison_ours import losses, read_features, shared, trainer_for, write
from tests.benchmarks.training import COMPARED


@pytest.fixture(scope="module")
def written(distilled, tmp_path_factory):
    """Return (our trainer with features, settings and tensors of the shared file, path of the file)."""
    place = tmp_path_factory.mktemp("comparison")
    trainer = trainer_for(place, distilled, "eagle3", LIKE)
    write(shared(place), trainer, steps=9)
    return trainer, *against_speculators.read(str(shared(place))), shared(place)


def test_shared_features_are_read_back_unchanged(written):
    """Catches an off-by-one in a range, which would shift the features of a document."""
    trainer, _, _, file = written
    found, kept = read_features(file), trainer.trainable.store.kept
    assert found.keys() == kept.keys()
    for document, features in kept.items():
        for name in ("taps", "teacher", "best"):
            assert torch.equal(getattr(found[document], name), getattr(features, name))


def test_both_sides_run_the_documents_of_the_trainer_steps(written):
    """This holds beyond the first epoch too; other documents per step would be different work."""
    trainer, settings, _, _ = written
    epochs = [batches(trainer.corpus.train, trainer.batch_tokens, seed=0, epoch=epoch) for epoch in (0, 1, 2, 3)]
    order = [[e.index for e in batch] for epoch in epochs for batch in epoch]
    assert len(epochs[0]) < 9
    assert settings["batches"] == order[:9]


def test_a_packed_row_holds_the_slots_of_each_document(written):
    """Slot i holds token i + 1, features of i and the target state at i + 1; both sides train the same slots."""
    trainer, settings, tensors, _ = written
    batch = settings["batches"][0]
    row = against_speculators.slot_rows(settings, tensors, batch)
    ours = trainer.trainable.batch([trainer.corpus.train[document] for document in batch], 0)
    assert torch.equal(row["input_ids"][0], ours.key_tokens)
    assert torch.equal(row["hidden_states"][0], ours.features)
    assert torch.equal(row["position_ids"][0], ours.key_positions + 1)
    count = len(ours.query_rows)
    assert torch.equal(row["verifier_last_hidden_states"][0, ours.query_rows], ours.teacher[:count])
    assert torch.equal(row["loss_mask"][0, ours.query_rows], ours.in_draft_vocab[:count])
    assert row["loss_mask"].sum() == ours.in_draft_vocab[:count].sum()
    assert row["document_ids"][0].bincount().tolist() == [stop - start for start, stop in ours.layout.slots]


def test_a_packed_row_of_blocks_holds_the_tokens_of_each_document(written):
    """Position i holds token i, features of i and the target state at i. Blocks start where ours do, and once more per
    document."""
    trainer, settings, tensors, _ = written
    batch = settings["batches"][0]
    examples = [trainer.corpus.train[document] for document in batch]
    blocks = settings | {"architecture": settings["architecture"] | {"block_size": 8}}
    row = against_speculators.token_rows(blocks, tensors, batch)
    texts = [torch.tensor([0, *example.tokens[1:-1], 0]) for example in examples]
    assert torch.equal(row["input_ids"][0], torch.cat([*texts, torch.zeros(8, dtype=torch.long)]))
    ours = trainer.trainable.batch(examples, 0)
    start = torch.cat([torch.full((stop - start,), 2 * n) for n, (start, stop) in enumerate(ours.layout.slots)])
    slots = torch.arange(len(ours.features)) + start
    assert torch.equal(row["hidden_states"][0, slots], ours.features)
    behind = slots[ours.query_rows] + 1
    assert torch.equal(row["verifier_last_hidden_states"][0, behind], ours.teacher[: len(behind)])
    last = [int(end) + 2 * n for n, (_, end) in enumerate(ours.layout.slots)]
    assert row["loss_mask"][0].nonzero()[:, 0].tolist() == sorted([*behind.tolist(), *(end + 1 for end in last)])
    assert row["max_anchors"] == row["loss_mask"].sum()


def test_the_vocabulary_head_is_frozen_for_the_comparison_only(written, distilled, tmp_path):
    trainer, *_ = written
    assert not trainer.trainable.module.lm_head.weight.requires_grad
    assert trainer_for(tmp_path, distilled, "eagle3", "default").trainable.module.lm_head.weight.requires_grad


def test_turns_add_up_to_the_number_of_steps():
    assert comparison.turns(7) == [3, 3, 1]
    assert comparison.turns(6) == [3, 3]


def test_different_losses_are_not_compared():
    comparison.require_equal([2.0, 3.0], [2.001, 3.001])
    with pytest.raises(SpecctlError, match="same thing"):
        comparison.require_equal([2.0, 3.0], [2.0, 3.2])
    with pytest.raises(SpecctlError, match="same thing"):
        comparison.require_equal([2.0, float("nan")], [2.0, 3.0])


def test_rates_are_computed_over_all_turns():
    sides = {name: Measured(1, 2**30, [1.0], 2**31, [300, 100], [1.0, 1.0]) for name in comparison.NAMES}
    sides[PACKED].seconds = [4.0, 1.0]
    text = "\n".join(comparison.report(sides))
    assert "2.50 × speculators, documents packed (turns 1.00 to 4.00)" in text


def test_an_interpreter_without_speculators_is_refused():
    for python in (sys.executable, "/nowhere/python"):
        with pytest.raises(UsageError):
            comparison.require_speculators(Path(python))


def test_the_other_side_runs_without_specctl():
    source = Path(against_speculators.__file__).read_text()
    assert not re.search(r"^\s*(from|import) specctl", source, re.MULTILINE)


@pytest.fixture
def python():
    """Return an interpreter with speculators 0.9."""
    if "SPECCTL_SPECULATORS_PYTHON" not in os.environ:
        pytest.skip("SPECCTL_SPECULATORS_PYTHON names no interpreter with speculators 0.9")
    return Path(os.environ["SPECCTL_SPECULATORS_PYTHON"])


@pytest.mark.slow
@pytest.mark.parametrize("arch", COMPARED)
def test_speculators_computes_the_same_losses(python, distilled, tmp_path, monkeypatch, arch):
    """In fp32, so that rounding cannot hide differences in weights, shifts, masks, positions or attention."""
    trainer = trainer_for(tmp_path, distilled, arch, LIKE, dtype="fp32")
    with torch.no_grad():  # fresh attention is nearly uniform and would hide a wrong key or position
        for name, parameter in trainer.trainable.module.named_parameters():
            if "self_attn" in name:
                parameter.mul_(4)
    write(shared(tmp_path), trainer, steps=1)
    command = [str(python), "-I", against_speculators.__file__, str(shared(tmp_path)), PACKED]
    with comparison.started(command) as side:
        theirs = comparison.answer(side)["losses"]
    assert comparison.furthest(losses(trainer), theirs) < 1e-5
    keyless(monkeypatch, arch)
    assert comparison.furthest(losses(trainer), theirs) > 1e-4  # the check notices one missing key


def keyless(monkeypatch, arch):
    """Drop the last key of each step, or of each block, from the attention of our side."""
    if arch == "dflash":
        block = dflash_head.block_attention
        monkeypatch.setattr(
            dflash_head, "block_attention", lambda q, k, v, own, layout: block(q, k, v, own[:, :, :-1], layout)
        )
        return
    step = eagle3_head.ttt_attention
    monkeypatch.setattr(
        eagle3_head, "ttt_attention", lambda q, k, v, keys, values, at: step(q, k, v, keys[:-1], values[:-1], at)
    )


@pytest.mark.slow
@pytest.mark.parametrize("arch", COMPARED)
def test_every_side_runs_the_same_steps(python, distilled, arch):
    measured = comparison.compare(distilled, python, steps=1, arch=arch)
    assert measured.keys() == comparison.NAMES.keys()
    assert len({tuple(one.tokens) for one in measured.values()}) == 1
