"""Drafting with an EAGLE-1 head (Li et al. 2024, arXiv 2401.15077), bias-free, in EAGLE-2's dynamic trees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specctl.decoding.models.linear import DraftLinear
from specctl.decoding.target import Target
from specctl.drafters.eagle.head import EagleHead
from specctl.drafters.feature.drafter import FeatureDrafter
from specctl.drafters.feature.head import HeadConfig, head_config, restored
from specctl.drafters.tree import TreeShape, default_shape, shape_for
from specctl.errors import RecipeError
from specctl.recipe import DraftingRecipe, TrainRecipe


class EagleDrafter(FeatureDrafter):
    """Inference of an `EagleHead`, whose vocabulary head is the target's."""

    def __init__(self, head: EagleHead, target: Target, shape: TreeShape):
        super().__init__(head, head.layer, target, shape)
        token, feature = self.weight(head.fc).chunk(2, -1)
        # The token's half of the fusion depends on the token alone: tabulate it.
        self.token_part = (self.embedding.to(self.dtype) @ token.T).float()
        self.fc = DraftLinear(feature)
        self.head, self.scale = self.vocabulary_head(target)

    def feature(self, tapped: Tensor) -> Tensor:
        return tapped.float()

    def enter(self, tokens: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        x = F.embedding(tokens, self.token_part) + self.fc(features.to(self.dtype))
        return x, x.to(self.dtype)

    def to_head(self, hidden: Tensor) -> Tensor:
        return (hidden * self.scale).to(self.dtype)


def published(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The module's state as it is stored: its names are those of the published checkpoints."""
    return state


def restore(config: dict[str, Any], tensors: dict[str, Tensor]) -> EagleHead:
    """The module from the contents of a checkpoint. CheckpointError when they do not fit."""
    return restored(EagleHead, config, tensors)


def drafter(head: EagleHead, target: Target, drafting: DraftingRecipe) -> EagleDrafter:
    """Inference of `head`."""
    return EagleDrafter(head, target, shape_for(drafting, default_shape(target.device)))


def config(head: EagleHead, target: dict[str, Any]) -> dict[str, Any]:
    """config.json of a checkpoint; `target` is `Target.identity`."""
    return {"family": "eagle", "architecture": head.config.to_dict(), "target": target}


def prepare(head: EagleHead, recipe: TrainRecipe) -> None:
    """The training options of a recipe."""
    head.objective = recipe.distillation


def build(recipe: TrainRecipe, target: Target, frequent: Callable[[int], list[int]]) -> EagleHead:
    """A head for `target` that starts by handing its feature on.

    Raises RecipeError where the recipe asks for other features or a draft vocabulary: the family has neither.
    """
    options = recipe.drafter
    if options.taps is not None or options.vocab_size not in (None, target.vocab_size):
        raise RecipeError("an eagle drafter reads the target's last hidden state and has its vocabulary", "use eagle3")
    shape: HeadConfig = replace(
        head_config(options, target), taps=(target.num_layers,), draft_vocab_size=target.vocab_size
    )
    head = EagleHead(shape)
    with torch.no_grad():
        head.fc.weight.mul_(0.1)
        head.fc.weight[:, -shape.hidden_size :] += torch.eye(shape.hidden_size)
    return head
