"""Drafter of family `eagle3`: an EAGLE-3 head (Li et al. 2025, arXiv 2503.01840), drafting chains or dynamic trees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from specctl.decoding.target import Target
from specctl.drafters.eagle3.head import Eagle3Config, Eagle3Head
from specctl.drafters.feature.drafter import FeatureDrafter
from specctl.drafters.feature.fusion import FusedInput, fusion_shape
from specctl.drafters.feature.head import restore_head
from specctl.drafters.tree import TreeShape, default_shape, shape_for
from specctl.recipe import DrafterRecipe, DraftingRecipe, TrainRecipe


class Eagle3Drafter(FeatureDrafter, FusedInput):
    """Runs an `Eagle3Head` for drafting. With `norm_output` its cached states are taken after the final norm."""

    def __init__(self, head: Eagle3Head, target: Target, shape: TreeShape):
        super().__init__(head, head.midlayer, target, shape)
        self.fuse(head, self.embedding)
        self.output_norm = self.norm if head.config.norm_output else None

    def to_head(self, hidden: Tensor) -> Tensor:
        return hidden.to(self.dtype) if self.output_norm is not None else self.norm(hidden)


def stored_state(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the state unchanged: the module already has the names of the published checkpoints."""
    return state


def restore(config: dict[str, Any], tensors: dict[str, Tensor]) -> Eagle3Head:
    """Rebuild the module from the contents of a checkpoint. Raises CheckpointError if they do not fit."""
    return restore_head(Eagle3Head, config, tensors, Eagle3Config)


def make_drafter(head: Eagle3Head, target: Target, drafting: DraftingRecipe) -> Eagle3Drafter:
    """Build the drafter that runs `head`."""
    return Eagle3Drafter(head, target, shape_for(drafting, default_shape(target.device)))


def checkpoint_config(head: Eagle3Head, target: dict[str, Any]) -> dict[str, Any]:
    """Content of a checkpoint's config.json; `target` is `Target.identity`."""
    return {"family": "eagle3", "architecture": head.config.to_dict(), "target": target}


def set_training_options(head: Eagle3Head, recipe: TrainRecipe) -> None:
    """Set the training options of a recipe."""
    head.steps, head.decay, head.objective = recipe.ttt_steps, recipe.ttt_decay, recipe.resolved_objective
    head.paced = recipe.uses_d_pace


def build(recipe: TrainRecipe, target: Target, frequent: Callable[[int], list[int]]) -> Eagle3Head:
    """Build a head that is initialized from `target`."""
    shape = architecture(recipe.drafter, target)
    head = Eagle3Head(shape, torch.tensor(frequent(shape.draft_vocab_size)))
    head.initialise(target)
    return head


def architecture(recipe: DrafterRecipe, target: Target) -> Eagle3Config:
    """Shape of a head as the recipe sets it; options left out follow the target's own layers."""
    return Eagle3Config(
        **fusion_shape(recipe, target), norm_output=True if recipe.norm_output is None else recipe.norm_output
    )
