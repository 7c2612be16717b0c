"""EAGLE-1 drafts with the arithmetic of its training, has the losses of the paper, and is lossless."""

import pytest
import torch
import torch.nn.functional as F

from specctl.decoding.sampling import GREEDY
from specctl.drafters.eagle.drafter import FAMILY as eagle
from specctl.drafters.eagle.drafter import EagleDrafter
from specctl.drafters.tree import TreeShape
from specctl.errors import CheckpointError, RecipeError
from specctl.recipe import DrafterRecipe, TrainRecipe
from specctl.training.example import Example
from specctl.training.features import FeatureStore, slot_batch
from tests.toys.decoding import decode


@pytest.fixture(scope="module")
def head(target):
    torch.manual_seed(2)
    head = eagle.build(TrainRecipe(arch="eagle"), target, lambda size: list(range(size)))
    eagle.set_training_options(head, TrainRecipe(arch="eagle"))
    return head.eval()  # eval mode adds no noise


@pytest.fixture(scope="module")
def example(target, prompts):
    text = decode(target, [prompts[1]], sampling=GREEDY, max_new_tokens=12, seeds=[0])[0]
    return Example(0, "0", text.prompt_ids + text.output_ids, len(text.prompt_ids))


def trained_on(head, target, example, **changes):
    store = FeatureStore(target, head.taps)
    batch = slot_batch([example], store.get([example]), 1, head.t2d)
    for name, value in changes.items():
        setattr(batch, name, value)
    return head(batch, target.model.embedding, target.head_weight)


def test_the_feature_is_the_input_of_the_target_head(target, head, example):
    """The tap is the normalized last hidden state: the target's LM head turns it into the target's logits."""
    store = FeatureStore(target, head.taps)
    taps = store.get([example])[0].taps
    assert taps.shape[1] == target.hidden_size
    best = (taps[-3:] @ target.head_weight.T).argmax(-1)
    assert best.tolist() == example.tokens[len(taps) - 2 : len(taps) + 1]


def test_scored_logits_have_the_loss_that_training_reports(target, head, example):
    """Depth 1 reproduces the training loss; depth 2 differs because it reads the head's own features."""
    drafter = EagleDrafter(head, target, TreeShape(3, 1, 3, 1, 0.0))
    found = []
    decode(
        target, [example.tokens[: example.prompt_length]], sampling=GREEDY, seeds=[0], taps=drafter.taps,
        max_new_tokens=example.response_length,
        on_round=lambda state, *_: found.append(
            drafter.score(state, [range(example.prompt_length + 1, len(state.rows[0].ids))], 2)[0].logits
        ),
    )  # fmt: skip
    store = FeatureStore(target, head.taps)
    batch = slot_batch([example], store.get([example]), 1, head.t2d)
    teacher = (batch.teacher[:-1] @ target.head_weight.T).softmax(-1)
    expected = -(teacher * found[-1][0].log_softmax(-1)).sum()
    regression_free = head(batch, target.model.embedding, target.head_weight)[0]
    hidden = F.smooth_l1_loss(predicted(head, target, batch), batch.teacher[:-1], reduction="none").mean(-1).sum()
    torch.testing.assert_close(regression_free, hidden + 0.1 * expected, atol=1e-3, rtol=1e-4)
    assert not torch.allclose(found[-1][0, 1:], found[-1][1, 1:])


def predicted(head, target, batch):
    """Return the head's predicted features, caught by hooks in its last layer."""
    seen = []
    hook = head.layer.mlp.down_proj.register_forward_hook(lambda m, i, output: seen.append(output))
    before = head.layer.post_attention_layernorm.register_forward_hook(lambda m, inputs, o: seen.append(inputs[0]))
    head(batch, target.model.embedding, target.head_weight)
    hook.remove(), before.remove()
    return seen[0] + seen[1]


def test_noise_is_for_training_only(target, head, example):
    plain = trained_on(head, target, example)[0]
    torch.testing.assert_close(plain, trained_on(head, target, example)[0])
    head.train()
    noisy = trained_on(head, target, example)[0]
    head.eval()
    assert not torch.allclose(plain, noisy)


@pytest.mark.parametrize("shape", [TreeShape(3, 1, 3, 1, 0.0), TreeShape(4, 2, 8, 2, 0.0)])
def test_lossless(target, head, prompts, shape):
    drafter = EagleDrafter(head, target, shape)
    options = dict(sampling=GREEDY, max_new_tokens=16, seeds=[0] * 3)
    plain = [d.output_ids for d in decode(target, prompts, **options)]
    assert plain == [d.output_ids for d in decode(target, prompts, drafter=drafter, **options)]


def test_unsupported_options_and_incomplete_checkpoints_are_refused(target, head):
    with pytest.raises(RecipeError, match="uses the target's vocabulary"):
        recipe = TrainRecipe(arch="eagle", drafter=DrafterRecipe(vocab_size=100))
        eagle.build(recipe, target, lambda size: list(range(size)))
    state = head.state_dict()
    state.pop("fc.weight")
    with pytest.raises(CheckpointError, match=r"fc\.weight"):
        eagle.restore(eagle.checkpoint_config(head, target.identity), state)
