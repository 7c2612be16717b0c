"""Medusa checkpoints use the names of the published files."""

import torch

from specctl.drafters.medusa.drafter import FAMILY as medusa
from specctl.recipe import DrafterRecipe, TrainRecipe


def build(target, **options):
    recipe = TrainRecipe(arch="medusa", drafter=DrafterRecipe(draft_heads=2, **options))
    return medusa.build(recipe, target, lambda size: list(range(size)))


def test_stored_names_are_the_published_names(target):
    names = {f"{k}.{part}" for k in range(2) for part in ("0.linear.weight", "0.linear.bias", "1.weight")}
    assert set(medusa.stored_state(build(target).state_dict())) == names
    assert set(medusa.stored_state(build(target, vocab_size=64).state_dict())) == names | {"d2t", "t2d"}


def test_a_fresh_head_predicts_like_the_target(target):
    """Blocks start at zero (Cai et al., §2.1.1), so every head starts with the target's own prediction."""
    module, states = build(target), torch.randn(3, target.hidden_size)
    for k in range(2):
        torch.testing.assert_close(module.vocabulary(k)(module.hidden(k, states)), states @ target.head_weight.T)
