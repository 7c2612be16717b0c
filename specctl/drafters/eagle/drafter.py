"""Drafter of family `eagle`: an EAGLE-1 head (Li et al. 2024, arXiv 2401.15077), bias-free, in EAGLE-2's trees."""

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
from specctl.drafters.feature.head import HeadConfig, head_config, restore_head
from specctl.drafters.tree import TreeShape, default_shape, shape_for
from specctl.errors import RecipeError
from specctl.recipe import DraftingRecipe, TrainRecipe


class EagleDrafter(FeatureDrafter):
    """Runs an `EagleHead` for drafting, with the target's vocabulary head."""

    def __init__(self, head: EagleHead, target: Target, shape: TreeShape):
        super().__init__(head, head.layer, target, shape)
        token, feature = self.weight(head.fc).chunk(2, -1)
        # Half of the fusion depends on the token alone, so it is tabulated.
        self.token_part = (self.embedding.to(self.dtype) @ token.T).float()
        self.fc = DraftLinear(feature)
        self.head, self.scale = self.vocabulary_head(target)

    def feature(self, tapped: Tensor) -> Tensor:
        return tapped.float()

    def layer_input(self, tokens: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        x = F.embedding(tokens, self.token_part) + self.fc(features.to(self.dtype))
        return x, x.to(self.dtype)

    def to_head(self, hidden: Tensor) -> Tensor:
        return (hidden * self.scale).to(self.dtype)


def stored_state(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the state unchanged: the module already has the names of the published checkpoints."""
    return state


def restore(config: dict[str, Any], tensors: dict[str, Tensor]) -> EagleHead:
    """Rebuild the module from the contents of a checkpoint. Raises CheckpointError if they do not fit."""
    return restore_head(EagleHead, config, tensors)


def make_drafter(head: EagleHead, target: Target, drafting: DraftingRecipe) -> EagleDrafter:
    """Build the drafter that runs `head`."""
    return EagleDrafter(head, target, shape_for(drafting, default_shape(target.device)))


def checkpoint_config(head: EagleHead, target: dict[str, Any]) -> dict[str, Any]:
    """Content of a checkpoint's config.json; `target` is `Target.identity`."""
    return {"family": "eagle", "architecture": head.config.to_dict(), "target": target}


def set_training_options(head: EagleHead, recipe: TrainRecipe) -> None:
    """Set the training options of a recipe."""
    head.objective = recipe.resolved_objective


def build(recipe: TrainRecipe, target: Target, frequent: Callable[[int], list[int]]) -> EagleHead:
    """Build a head for `target` that initially passes its feature through.

    Raises RecipeError if the recipe asks for other features or a draft vocabulary, as the family supports neither.
    """
    options = recipe.drafter
    if options.taps is not None or options.vocab_size not in (None, target.vocab_size):
        raise RecipeError(
            "an eagle drafter reads the target's last hidden state and uses the target's vocabulary", "use eagle3"
        )
    shape: HeadConfig = replace(
        head_config(options, target), taps=(target.num_layers,), draft_vocab_size=target.vocab_size
    )
    head = EagleHead(shape)
    with torch.no_grad():
        head.fc.weight.mul_(0.1)
        head.fc.weight[:, -shape.hidden_size :] += torch.eye(shape.hidden_size)
    return head
