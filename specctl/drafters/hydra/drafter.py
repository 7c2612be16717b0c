"""Drafter of family `hydra` (Ankner et al. 2024, arXiv 2402.05109): one forward per level of a static tree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specctl.decoding.device.device_batch import DeviceBatch
from specctl.decoding.records import DraftTree
from specctl.decoding.state import DecodeState
from specctl.decoding.target import Target
from specctl.drafters.depth import head as depth_heads
from specctl.drafters.depth.drafter import DepthDrafter
from specctl.drafters.depth.head import draft_ids, heads_shape, start_from_target
from specctl.drafters.depth.static_tree import StaticTree, default_shape
from specctl.drafters.feature.head import head_config, restore_head
from specctl.drafters.feature.layer import FeatureLayer
from specctl.drafters.feature.rounds import ReaderRounds
from specctl.drafters.hydra.head import HydraConfig, HydraHeads
from specctl.drafters.tree import TreeShape, shape_for
from specctl.recipe import DraftingRecipe, TrainRecipe

# Share of the target's tokens at each rank, measured on the built-in target (sql, 450 steps); similar at all depths.
ACCURACY = (0.62, 0.085, 0.045, 0.04, 0.035, 0.02, 0.017, 0.012, 0.012, 0.008)
LAYERS = 4  # layers of each head's MLP


class PrefixStates(FeatureLayer):
    """Runs the prefix attention, which reads the target's features alone, not the tokens."""

    def __init__(self, module: HydraHeads, target: Target):
        layer = module.prefix_embeding_layer.layer
        super().__init__(module, layer, target)
        self.input_norm, self.norm = (
            self.rms_norm(layer.input_layernorm),
            self.rms_norm(module.prefix_embeding_layer.norm),
        )

    def feature(self, tapped: Tensor) -> Tensor:
        return tapped.float()

    def layer_input(self, tokens: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        return features, self.input_norm(features)


class HydraDrafter(DepthDrafter):
    """Runs `HydraHeads` for drafting; the prefix attention runs once per round, over the new slots."""

    reads_tokens = True

    def __init__(self, module: HydraHeads, target: Target, shape: TreeShape):
        super().__init__(module, target, shape, ACCURACY)
        self.embedding = target.model.embedding
        self.repeats = module.config.num_layers - 1
        self.prefix = PrefixStates(module, target)
        mlps: Any = module.hydra_mlp
        heads: Any = module.hydra_lm_head
        self.first = [self.linear(mlp[1].res_connection, mlp[1].linear) for mlp in mlps]
        self.again = [self.linear(mlp[-1].linear) for mlp in mlps]
        self.heads = [self.linear(head[-1]) for head in heads]

    def logits(self, k: int, states: Tensor, tokens: Tensor) -> Tensor:
        inputs = torch.cat((states, F.embedding(tokens, self.embedding).flatten(1)), -1)
        skip, gate = self.first[k](inputs).chunk(2, -1)
        x = skip + F.silu(gate)
        for _ in range(self.repeats):
            x = x + F.silu(self.again[k](x))
        return self.heads[k](x)

    def states(self, state: DecodeState, width: int) -> tuple[Tensor, list[int]]:
        self.prefix.fill_skipped(state, [end - width for end in state.cached])
        hidden, starts = self.prefix.read(state, width, every=True)
        return self.prefix.norm(hidden), starts

    def last(self, state: DecodeState) -> Tensor:
        return self.prefix.norm(self.prefix.last(state))

    def advance(self, state: DecodeState) -> None:
        """Run the prefix attention over the new slots."""
        self.prefix.advance(state)

    def lag(self, state: DecodeState) -> list[int]:
        return self.prefix.lag(state)

    def invalidate(self, state: DecodeState) -> None:
        """Forget keys and values; the next `advance` recomputes them from the retained features."""
        self.prefix.invalidate(state)

    def rounds(self, tree: StaticTree, state: DecodeState) -> HydraRounds:
        return HydraRounds(self, tree, state)


class HydraRounds(ReaderRounds):
    """Device-side rounds that draft a static tree from the output of the prefix attention."""

    def __init__(self, drafter: HydraDrafter, tree: StaticTree, state: DecodeState):
        super().__init__(drafter.prefix, state, len(tree.levels), 1 + len(tree.paths))
        self.drafter, self.tree = drafter, tree

    def propose(self, sequences: DeviceBatch, span: int) -> DraftTree:
        return self.drafter.draft_at(self.tree, sequences, self.drafter.prefix.norm(self.hidden))


def set_training_options(module: HydraHeads, recipe: TrainRecipe) -> None:
    """Set the training options of a recipe."""
    depth_heads.set_training_options(module, recipe)
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = recipe.dropout


def stored_state(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the state unchanged: the module already has the names of the published `hydra_lm_head`.

    There the module `hydra_mlp.K.3` appears again under K.5, K.7, … for every further layer.
    """
    return state


def restore(config: dict[str, Any], tensors: dict[str, Tensor]) -> HydraHeads:
    """Rebuild the module from the contents of a checkpoint. Raises CheckpointError if they do not fit."""
    return restore_head(HydraHeads, config, tensors, HydraConfig)


def make_drafter(module: HydraHeads, target: Target, drafting: DraftingRecipe) -> HydraDrafter:
    """Build the drafter that runs `module`."""
    return HydraDrafter(module, target, shape_for(drafting, default_shape(target.device)))


def checkpoint_config(module: HydraHeads, target: dict[str, Any]) -> dict[str, Any]:
    """Content of a checkpoint's config.json; `target` is `Target.identity`."""
    return {"family": "hydra", "architecture": module.config.to_dict(), "target": target}


def build(recipe: TrainRecipe, target: Target, frequent: Callable[[int], list[int]]) -> HydraHeads:
    """Build heads that start as the target's vocabulary head after an MLP that passes the prefix state through."""
    layer = vars(head_config(recipe.drafter, target))
    shape = HydraConfig(**layer | heads_shape(recipe.drafter, target, LAYERS))
    module = HydraHeads(shape, draft_ids(shape, frequent))
    parts: Any = zip(module.hydra_mlp, module.hydra_lm_head, strict=True)
    with torch.no_grad():
        for mlp, head in parts:
            start_from_target(head[-1], module.draft_ids, target)
            mlp[1].res_connection.weight.mul_(0.1)
            mlp[1].res_connection.weight[:, : shape.hidden_size] += torch.eye(shape.hidden_size)
    return module
