"""Modules with one head per draft depth, the base of `hydra` and `medusa`, and their distillation loss.

Slot i of a sequence holds the target's state h_i after its final norm and the token x_{i+1}. Head k = 0, 1, … predicts
x_{i+2+k}. Every head has a separate vocabulary matrix, as in the published files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specctl.decoding.target import Target
from specctl.drafters.blueprint import Count
from specctl.drafters.feature.head import DraftConfig, DraftHead, Losses, SlotBatch
from specctl.drafters.lora import as_single_product
from specctl.errors import RecipeError
from specctl.recipe import DrafterRecipe, TrainRecipe

DRAFT_HEADS = 4  # same number as Hydra's released heads; Medusa's have up to 5


@dataclass(frozen=True)
class HeadsConfig(DraftConfig):
    """Shape of `draft_heads` heads of `num_layers` layers each."""

    draft_heads: Count
    num_layers: Count


def heads_shape(recipe: DrafterRecipe, target: Target, layers: int) -> dict[str, Any]:
    """Fields of a `HeadsConfig` as the recipe sets them.

    The draft vocabulary defaults to the target's, as the published files support no other. Raises RecipeError if the
    recipe asks for other features.
    """
    if recipe.taps is not None:
        raise RecipeError("hydra and medusa heads read the target's last hidden state", hint="leave drafter.taps out")
    return {
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": min(recipe.vocab_size or target.vocab_size, target.vocab_size),
        "taps": (target.num_layers,),
        "draft_heads": recipe.draft_heads or DRAFT_HEADS,
        "num_layers": recipe.num_layers or layers,
    }


def draft_ids(config: HeadsConfig, frequent: Callable[[int], list[int]]) -> Tensor | None:
    """Draft vocabulary [Vd] of the most frequent tokens, or None if it equals the target's vocabulary.

    `frequent` is described in `pool.TrainableFamily.build`.
    """
    size = config.draft_vocab_size
    return torch.tensor(frequent(size)) if size < config.vocab_size else None


class ResBlock(nn.Module):
    """Residual block skip(x) + silu(linear(x)); skip is the identity, or a projection of several states.

    The linear part starts at zero, so the block starts as skip(x).
    """

    def __init__(self, size: int, states: int = 1):
        super().__init__()
        self.linear = nn.Linear(states * size, size)
        self.res_connection = nn.Linear(states * size, size) if states > 1 else nn.Identity()
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.res_connection(x) + F.silu(self.linear(x))


class DepthHeads(DraftHead):
    """Base class of modules with one head per draft depth."""

    config: HeadsConfig

    def __init__(self, config: HeadsConfig, draft_ids: Tensor | None = None):
        # The published files have no draft vocabulary, so it is stored only if it differs from the target's.
        super().__init__(config, draft_ids, stored=config.draft_vocab_size < config.vocab_size)
        self.steps = config.draft_heads

    def states(self, batch: SlotBatch) -> Tensor:
        """Text representation [N, H] that the heads read at each response slot."""
        raise NotImplementedError

    def hidden(self, k: int, inputs: Tensor) -> Tensor:
        """Input [n, H] of head k's vocabulary matrix, from the head's inputs [n, ·]."""
        raise NotImplementedError

    def vocabulary(self, k: int) -> nn.Linear:
        """Vocabulary matrix of head k."""
        raise NotImplementedError

    def inputs(self, k: int, batch: SlotBatch, states: Tensor, row: Tensor, embedding: Tensor) -> Tensor:
        """Input [n, ·] of head k at the response slots `row` [n] with the `states` [n, H]."""
        raise NotImplementedError

    def forward(self, batch: SlotBatch, embedding: Tensor, target_head: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Loss of all heads over a batch, one head after another, with teacher-forced tokens.

        Head 0 learns from all response slots, the other heads from `later_rows`. Returns the results of
        `DraftHead.aggregate_losses`.

        Args:
            embedding: [V, H] the target's (frozen) token embedding.
            target_head: [Vd, H] the rows of the target's vocabulary head that belong to the draft vocabulary.
        """
        states, teacher = self.states(batch), self.teacher(batch, target_head)
        found = []
        for k in range(self.steps):
            row = batch.later_rows if k else torch.arange(len(states), device=states.device)
            x = self.hidden(k, self.inputs(k, batch, states[row] if k else states, row, embedding))
            found.append(
                self.distill_losses(as_single_product(self.vocabulary(k), x), [row], range(k, k + 1), batch, teacher)
            )
        total, each, valid, share = zip(*found, strict=True)
        losses = Losses(torch.stack(total).sum(), torch.cat(each), torch.cat(valid), torch.cat(share))
        return self.aggregate_losses(losses, [len(part) for part in each])


def set_training_options(module: DepthHeads, recipe: TrainRecipe) -> None:
    """Set the training options of a recipe."""
    module.decay, module.objective = recipe.ttt_decay, recipe.resolved_objective


@torch.no_grad()
def start_from_target(head: nn.Linear, ids: Tensor, target: Target) -> None:
    """Initialize a vocabulary matrix from the target's vocabulary head."""
    head.weight.copy_(target.squash.scale * target.head_weight[ids.to(target.device)].float())
    if head.bias is not None:
        nn.init.zeros_(head.bias)
