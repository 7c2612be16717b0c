"""Family `medusa`: heads that each predict one of the next tokens from the target's last state alone (Cai et al. 2024,
arXiv 2401.10774, "Medusa-1"), and drafts of all heads at once as a static tree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specctl.decoding.target import Target
from specctl.drafters.depth_drafter import DepthDrafter
from specctl.drafters.depth_heads import DepthHeads, HeadsConfig, ResBlock, common_shape, draft_ids, start_from_target
from specctl.drafters.eagle3_head import SlotBatch
from specctl.drafters.static_tree import Shape
from specctl.errors import CheckpointError, RecipeError
from specctl.recipe import DraftingRecipe, TrainRecipe

ACCURACY = (0.55, 0.14, 0.07, 0.04, 0.03, 0.02, 0.015, 0.01, 0.008, 0.006)


class MedusaHeads(DepthHeads):
    """Head k is a `ResBlock` and a vocabulary matrix."""

    def __init__(self, config: HeadsConfig, draft_ids: Tensor | None = None, decay: float = 1.0):
        super().__init__(config, draft_ids, decay)
        self.blocks = nn.ModuleList([ResBlock(config.hidden_size) for _ in range(config.draft_heads)])
        self.lm_head = nn.ModuleList(
            [nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False) for _ in range(config.draft_heads)]
        )

    def head(self, k: int, states: Tensor) -> Tensor:
        """Logits [N, Vd] of head k from the target's states [N, H]."""
        return self.lm_head[k](self.blocks[k](states))

    def forward(self, batch: SlotBatch, embedding: Tensor, target_head: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Loss of all heads over a batch; see `DepthHeads.distil`. `embedding` is not read: tokens play no part."""
        states = batch.features[batch.query_rows].float()
        return self.distil((self.head(k, states) for k in range(self.config.draft_heads)), batch, target_head)


class MedusaDrafter(DepthDrafter):
    """Inference of `MedusaHeads`; nothing is kept between rounds."""

    grounded = False

    def __init__(self, module: MedusaHeads, target: Target, shape: Shape):
        super().__init__(module, target, shape, ACCURACY)
        blocks: Any = module.blocks
        heads: Any = module.lm_head
        self.blocks = [self._linear(block.linear) for block in blocks]
        self.heads = [self._linear(head) for head in heads]

    def _logits(self, k: int, states: Tensor, tokens: Tensor) -> Tensor:
        return self.heads[k](states + F.silu(self.blocks[k](states)))


def default_shape(device: torch.device) -> Shape:
    """The default on this kind of device."""
    if device.type == "cpu":
        return Shape(depth=4, width=1, nodes=10, children=4, stop_below=0.05)
    return Shape(depth=5, width=16, nodes=60, children=10, stop_below=0.0)


def published(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The module's state as it is stored: under the names of the published `medusa_lm_head`."""
    return {_published(name): tensor for name, tensor in state.items()}


def _published(name: str) -> str:
    """There head K is a `Sequential` of its block, `K.0`, and its vocabulary matrix, `K.1`."""
    part, _, rest = name.partition(".")
    head, _, leaf = rest.partition(".")
    return f"{head}.{('blocks', 'lm_head').index(part)}.{leaf}" if rest else name


def restore(config: dict[str, Any], tensors: dict[str, Tensor]) -> MedusaHeads:
    """The module from the contents of a checkpoint. CheckpointError when they do not fit."""
    try:
        module = MedusaHeads(HeadsConfig.from_dict(config["architecture"]))
        ours = {_published(name): name for name in module.state_dict()}
        module.load_state_dict({ours.get(name, name): tensor for name, tensor in tensors.items()})
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"medusa drafter: weights and architecture do not fit: {error}") from error
    return module


def drafter(module: MedusaHeads, target: Target, drafting: DraftingRecipe) -> MedusaDrafter:
    """Inference of `module`."""
    return MedusaDrafter(module, target, default_shape(target.device).given(drafting))


def config(module: MedusaHeads, target: dict[str, Any]) -> dict[str, Any]:
    """config.json of a checkpoint; `target` is `Target.identity`."""
    return {"family": "medusa", "architecture": module.config.to_dict(), "target": target}


def build(recipe: TrainRecipe, target: Target, frequent: Callable[[int], list[int]]) -> MedusaHeads:
    """Heads for `target` that start as its own.

    Raises:
        RecipeError: more than one layer, which the published format has no place for.
    """
    shape = HeadsConfig(**common_shape(recipe.drafter, target, layers=1))
    if shape.num_layers != 1:
        raise RecipeError("a medusa head has one layer", hint="leave drafter.num_layers out, or train hydra")
    module = MedusaHeads(shape, draft_ids(shape, frequent), recipe.ttt_decay)
    heads: Any = module.lm_head
    for head in heads:
        start_from_target(head, module.draft_ids, target)
    return module
