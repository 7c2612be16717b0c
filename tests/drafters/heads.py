"""Small heads with random weights."""

import torch

from specctl.drafters.eagle import drafter as eagle
from specctl.drafters.eagle3 import drafter as eagle3
from specctl.drafters.eagle3.head import Eagle3Head
from specctl.drafters.tree import TreeShape
from specctl.recipe import DrafterRecipe, TrainRecipe

SHAPE = TreeShape(3, 1, 3, 1, 0.0)


def eagle3_head(target, seed, vocabulary=512):
    torch.manual_seed(seed)
    architecture = eagle3.FAMILY.architecture(DrafterRecipe(vocab_size=vocabulary), target)
    head = Eagle3Head(architecture, torch.randperm(target.vocab_size)[:vocabulary].sort().values)
    head.initialise(target)
    return disturbed(head)


def disturbed(head):
    """Add noise to all parameters. Norms start at 1, so a mix-up between heads would go unnoticed."""
    for parameter in head.parameters():
        parameter.data += 0.1 * parameter.std(correction=0).clamp_min(0.3) * torch.randn_like(parameter)
    return head


def eagle_drafter(target, seed):
    torch.manual_seed(seed)
    head = eagle.FAMILY.build(TrainRecipe(arch="eagle"), target, lambda size: list(range(size)))
    return eagle.EagleDrafter(disturbed(head), target, SHAPE)
