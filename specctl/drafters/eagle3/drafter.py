"""Drafting with an EAGLE-3 head (Li et al. 2025, arXiv 2503.01840): a chain, or a dynamic tree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specctl.decoding.models.layers import RMSNorms
from specctl.decoding.target import Target
from specctl.drafters.eagle3.head import Eagle3Config, Eagle3Head
from specctl.drafters.feature.drafter import FeatureDrafter
from specctl.drafters.feature.head import head_config, restored
from specctl.drafters.tree import TreeShape, default_shape, shape_for
from specctl.families import FAMILIES
from specctl.recipe import DrafterRecipe, DraftingRecipe, TrainRecipe


class Eagle3Drafter(FeatureDrafter):
    """Inference of an `Eagle3Head`. With `norm_output` the states that it keeps are behind the final norm."""

    def __init__(self, head: Eagle3Head, target: Target, shape: TreeShape):
        super().__init__(head, head.midlayer, target, shape)
        self.norm_before_residual, self.norm_output = head.config.norm_before_residual, head.config.norm_output
        self.window = head.config.sliding_window
        self.tapped_norms = self._tapped_norms(head)
        self.fc = self.linear(head.fc)
        self.hidden_norm, self.norm = self.rms_norm(head.midlayer.hidden_norm), self.rms_norm(head.norm)
        self.head = self.linear(head.lm_head)
        # The first half of the layer's input depends on the token alone: tabulate it.
        self.token_input = self.rms_norm(head.midlayer.input_layernorm)(self.embedding.float())

    def _tapped_norms(self, head: Eagle3Head) -> RMSNorms | None:
        """None where the tapped states are fused as they are."""
        weights = [norm.weight.detach().to(self.device) for norm in head.tapped_norms]
        return RMSNorms(torch.stack(weights), head.config.rms_norm_eps, self.dtype) if weights else None

    def feature(self, tapped: Tensor) -> Tensor:
        norms = self.tapped_norms
        if norms is not None:
            tapped = norms(tapped.float().unflatten(-1, norms.shape)).flatten(-2)
        return self.fc(tapped).float()

    def enter(self, tokens: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        normed = self.hidden_norm(features)
        residual = normed.float() if self.norm_before_residual else features
        return residual, torch.cat((F.embedding(tokens, self.token_input), normed), -1)

    def _leave(self, residual: Tensor, attended: Tensor) -> Tensor:
        x = super()._leave(residual, attended)
        return self.norm(x).float() if self.norm_output else x

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden.to(self.dtype) if self.norm_output else self.norm(hidden))


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


def build(recipe: TrainRecipe, target: Target, frequent: Callable[[int], list[int]]) -> Eagle3Head:
    """A head for `target` that starts from it."""
    shape = architecture(recipe.drafter, target)
    head = Eagle3Head(shape, torch.tensor(frequent(shape.draft_vocab_size)))
    initialise(head, target)
    return head


def architecture(recipe: DrafterRecipe, target: Target) -> Eagle3Config:
    """Shaped by the recipe; what it leaves out follows the target's own layers."""
    vocabulary = recipe.vocab_size or min(32_000, target.vocab_size // 2)
    taps = tuple(recipe.taps or default_taps(target.num_layers))
    layer = vars(head_config(recipe, target))
    chosen = {"taps": taps, "draft_vocab_size": min(vocabulary, target.vocab_size)}
    options = {key: getattr(recipe, key) for key in FAMILIES["eagle3"].options}
    # Measured on the built-in target (sql, 300 steps): these two norms make 4.0 mat of 3.2, norm_before_fc 3.7.
    usual = {"fc_norm": not recipe.norm_before_fc, "norm_output": True}
    return Eagle3Config(**layer | chosen | options | {key: on for key, on in usual.items() if options[key] is None})


def default_taps(layers: int) -> tuple[int, ...]:
    """EAGLE-3's choice, hidden_states[2], [n//2], [n−3]; spread evenly where the model is too shallow for it."""
    return (2, layers // 2, layers - 3) if layers >= 7 else (max(1, layers // 3), max(1, 2 * layers // 3), layers)


@torch.no_grad()
def initialise(head: Eagle3Head, target: Target) -> None:
    """Start from the target: its vocabulary head, its final norm, and the last tapped state passed through `fc`."""
    size = head.config.hidden_size
    ids = head.draft_ids.to(target.device)
    head.lm_head.weight.copy_(target.squash.scale * target.head_weight[ids].float())
    if target.norm_weight is not None:
        head.norm.weight.copy_(target.norm_weight.float())
    head.fc.weight.mul_(0.1)
    head.fc.weight[:, -size:] += torch.eye(size)
