"""Medusa's files are those of its own repository."""

import torch

from specctl.drafters.medusa.drafter import FAMILY as medusa
from specctl.recipe import DrafterRecipe, TrainRecipe


def build(target, **options):
    recipe = TrainRecipe(arch="medusa", drafter=DrafterRecipe(draft_heads=2, **options))
    return medusa.build(recipe, target, lambda size: list(range(size)))


def test_names_of_the_published_files(target):
    names = {f"{k}.{part}" for k in range(2) for part in ("0.linear.weight", "0.linear.bias", "1.weight")}
    assert set(medusa.stored_state(build(target).state_dict())) == names
    assert set(medusa.stored_state(build(target, vocab_size=64).state_dict())) == names | {"d2t", "t2d"}


def test_it_starts_as_the_target_itself(target):
    """Blocks start at zero (Cai et al., §2.1.1): every head first predicts what the target's own head does."""
    module, states = build(target), torch.randn(3, target.hidden_size)
    for k in range(2):
        torch.testing.assert_close(module.vocabulary(k)(module.hidden(k, states)), states @ target.head_weight.T)
