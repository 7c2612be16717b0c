"""Drafting with an EAGLE-3 head (Li et al. 2025, arXiv 2503.01840): a chain, or a dynamic tree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from specctl.decoding.target import Target
from specctl.drafters.eagle3.head import Eagle3Config, Eagle3Head
from specctl.drafters.feature.drafter import FeatureDrafter
from specctl.drafters.feature.fusion import FusedInput, fusion_shape
from specctl.drafters.feature.head import restored
from specctl.drafters.tree import TreeShape, default_shape, shape_for
from specctl.recipe import DrafterRecipe, DraftingRecipe, TrainRecipe


class Eagle3Drafter(FeatureDrafter, FusedInput):
    """Inference of an `Eagle3Head`. With `norm_output` the states that it keeps are behind the final norm."""

    def __init__(self, head: Eagle3Head, target: Target, shape: TreeShape):
        super().__init__(head, head.midlayer, target, shape)
        self.fuse(head, self.embedding)
        self.output_norm = self.norm if head.config.norm_output else None

    def to_head(self, hidden: Tensor) -> Tensor:
        return hidden.to(self.dtype) if self.output_norm is not None else self.norm(hidden)


def published(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The module's state as it is stored: its names are those of the published checkpoints."""
    return state


def restore(config: dict[str, Any], tensors: dict[str, Tensor]) -> Eagle3Head:
    """The module from the contents of a checkpoint. CheckpointError when they do not fit."""
    return restored(Eagle3Head, config, tensors, Eagle3Config)


def drafter(head: Eagle3Head, target: Target, drafting: DraftingRecipe) -> Eagle3Drafter:
    """Inference of `head`."""
    return Eagle3Drafter(head, target, shape_for(drafting, default_shape(target.device)))


def config(head: Eagle3Head, target: dict[str, Any]) -> dict[str, Any]:
    """config.json of a checkpoint; `target` is `Target.identity`."""
    return {"family": "eagle3", "architecture": head.config.to_dict(), "target": target}


def prepare(head: Eagle3Head, recipe: TrainRecipe) -> None:
    """The training options of a recipe."""
    head.steps, head.decay, head.objective = recipe.ttt_steps, recipe.ttt_decay, recipe.distillation
    head.paced = recipe.paced


def build(recipe: TrainRecipe, target: Target, frequent: Callable[[int], list[int]]) -> Eagle3Head:
    """A head for `target` that starts from it."""
    shape = architecture(recipe.drafter, target)
    head = Eagle3Head(shape, torch.tensor(frequent(shape.draft_vocab_size)))
    head.initialise(target)
    return head


def architecture(recipe: DrafterRecipe, target: Target) -> Eagle3Config:
    """Shaped by the recipe; what it leaves out follows the target's own layers."""
    return Eagle3Config(
        **fusion_shape(recipe, target), norm_output=True if recipe.norm_output is None else recipe.norm_output
    )
