"""Gradient checkpointing of the EAGLE-3 head gives the same numbers and saves less for backward."""

import pytest
import torch

from specctl.drafters.eagle3.drafter import FAMILY
from specctl.drafters.eagle3.head import Eagle3Head
from specctl.drafters.feature.fusion import default_taps
from specctl.errors import CheckpointError
from specctl.recipe import DrafterRecipe
from specctl.training.example import Example
from specctl.training.features import FeatureStore, slot_batch

STEPS = 4


@pytest.fixture(scope="module")
def head(target):
    torch.manual_seed(1)
    head = Eagle3Head(FAMILY.architecture(DrafterRecipe(vocab_size=512), target), torch.arange(512))
    head.steps, head.decay = STEPS, 0.8
    return head


@pytest.fixture(scope="module")
def inputs(target, head):
    random = torch.Generator().manual_seed(0)
    sizes = ((40, 12), (57, 30), (31, 3))
    examples = [
        Example(i, str(i), torch.randint(5, 500, (size,), generator=random).tolist(), prompt)
        for i, (size, prompt) in enumerate(sizes)
    ]
    batch = slot_batch(examples, FeatureStore(target, head.taps).get(examples), STEPS, head.t2d, stride=2)
    return batch, target.model.embedding, target.head_weight[head.draft_ids]


def run(head, inputs, checkpointing):
    """Return losses, gradients, and the bytes saved by the forward pass for the backward pass."""
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    head.gradient_checkpointing = checkpointing
    head.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        total, weight, steps = head(*inputs)
    total.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in head.named_parameters()}
    parameters = {parameter.untyped_storage().data_ptr() for parameter in head.parameters()}
    return (total.detach(), weight, steps), gradients, sum(n for at, n in kept.items() if at not in parameters)


def test_checkpointing_changes_no_loss_or_gradient(head, inputs):
    (losses, gradients, _), (theirs, expected, _) = (run(head, inputs, on) for on in (True, False))
    for ours, other in zip(losses, theirs, strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-6, atol=1e-6)
    for name in expected:
        scale = expected[name].abs().max()
        torch.testing.assert_close(gradients[name] / scale, expected[name] / scale, rtol=1e-6, atol=1e-6)


def test_checkpointing_saves_less_than_half_for_backward(head, inputs):
    on, off = (run(head, inputs, on)[2] for on in (True, False))
    assert on < 0.5 * off


def test_the_order_of_the_draft_vocabulary_does_not_change_the_loss(target, head, inputs, monkeypatch):
    """An imported head may have its draft tokens in another order. The labels of `ce` were looked up as if the ids
    were sorted: the head learned other tokens, or training stopped with an index error."""
    order = torch.randperm(512)
    tensors = {**head.state_dict(), "d2t": order - torch.arange(512)}
    tensors["lm_head.weight"] = head.lm_head.weight[order]
    shuffled = Eagle3Head(head.config, torch.arange(512))
    shuffled.load_state_dict(tensors)
    shuffled.steps, shuffled.decay = STEPS, 0.8
    for objective in ("ce", "soft_ce"):
        totals = []
        for one in (head, shuffled):
            monkeypatch.setattr(one, "objective", objective)
            totals.append(one(*inputs[:2], target.head_weight[one.draft_ids])[0])
        torch.testing.assert_close(*totals)


def test_a_draft_vocabulary_that_does_not_fit_is_refused_at_load(target, head):
    """Otherwise the first draft would fail, with an error that does not name the file."""
    identity, tensors = target.identity, head.state_dict()
    shape = FAMILY.checkpoint_config(head, identity)
    assert FAMILY.restore(shape, tensors).config == head.config
    larger = {**shape, "architecture": shape["architecture"] | {"draft_vocab_size": target.vocab_size + 1}}
    with pytest.raises(
        CheckpointError, match=f"draft vocabulary has {target.vocab_size + 1} tokens, but the target has"
    ):
        FAMILY.restore(larger, tensors)
    with pytest.raises(CheckpointError, match=f"ids outside 0 … {target.vocab_size - 1}"):
        FAMILY.restore(shape, tensors | {"d2t": tensors["d2t"] + target.vocab_size})


@pytest.mark.parametrize("layers", [4, 5, 6, 7, 32])
def test_a_head_can_be_exported_by_default(layers):
    """The head of a target with four layers read hidden_states[4], after the last layer: no engine provides it."""
    taps = default_taps(layers)
    assert list(taps) == sorted({*taps}) and len(taps) == 3 and taps[0] > 0 and taps[-1] < layers
