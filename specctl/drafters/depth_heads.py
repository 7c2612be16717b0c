"""What `hydra` and `medusa` share: one head for each draft depth on the target's last state, and their distillation.

Slot i of a sequence holds the target's state h_i after its final norm and the token x_{i+1}; head k = 0, 1, … predicts
x_{i+2+k}. Every head has a vocabulary matrix of its own, as in the published files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specctl.decoding.target import Target
from specctl.drafters.head import DraftHead, HeadConfig, SlotBatch, head_config
from specctl.errors import RecipeError
from specctl.recipe import DrafterRecipe, TrainRecipe

DRAFT_HEADS = 4  # of both papers' released heads


@dataclass(frozen=True)
class DepthConfig(HeadConfig):
    """Shape of a set of heads: `draft_heads` of `num_layers` each. The rest is that of a layer which they may share."""

    draft_heads: int
    num_layers: int


def depth_config(recipe: DrafterRecipe, target: Target, layers: int) -> DepthConfig:
    """Heads for `target`. By default the draft vocabulary is the target's own: the published files know no other.

    Raises RecipeError where the recipe asks for other features.
    """
    if recipe.taps is not None:
        raise RecipeError(
            "these heads read the target's last hidden state", hint="leave drafter.taps out, or use eagle3"
        )
    known = vars(head_config(recipe, target)) | {
        "taps": (target.num_layers,),
        "draft_vocab_size": min(recipe.vocab_size or target.vocab_size, target.vocab_size),
    }
    return DepthConfig(**known, draft_heads=recipe.draft_heads or DRAFT_HEADS, num_layers=recipe.num_layers or layers)


def draft_ids(config: HeadConfig, frequent: Callable[[int], list[int]]) -> Tensor | None:
    """Of a draft vocabulary smaller than the target's: its most frequent tokens (`pool.Family.build`)."""
    size = config.draft_vocab_size
    return torch.tensor(frequent(size)) if size < config.vocab_size else None


class ResBlock(nn.Module):
    """skip(x) + silu(linear(x)), which starts as skip(x): the identity, or a projection of several states to one."""

    def __init__(self, size: int, states: int = 1):
        super().__init__()
        self.linear = nn.Linear(states * size, size)
        self.res_connection = nn.Linear(states * size, size) if states > 1 else nn.Identity()
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.res_connection(x) + F.silu(self.linear(x))


class DepthHeads(DraftHead):
    """Base of the modules."""

    config: DepthConfig

    def __init__(self, config: DepthConfig, draft_ids: Tensor | None = None):
        # The published files have no draft vocabulary: it is stored where it says something.
        super().__init__(config, draft_ids, stored=config.draft_vocab_size < config.vocab_size)
        self.steps = config.draft_heads

    def distil(self, logits: Iterable[Tensor], batch: SlotBatch, target_head: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The sums of `DraftHead.sums` over every head's logits [n_k, Vd], computed one after another.

        Args:
            logits: of head 0 at all N response slots, of the others at `later_rows`.
        """
        teacher = self.teacher(batch, target_head)
        losses, valid = [], []
        for k, z in enumerate(logits):
            row = batch.later_rows if k else torch.arange(len(z), device=z.device)
            loss, used = self.losses_at(z, row, torch.tensor(k, device=z.device), batch, teacher)
            losses.append(loss)
            valid.append(used)
        return self.sums(torch.cat(losses), torch.cat(valid), [len(part) for part in losses])


def prepare(module: DepthHeads, recipe: TrainRecipe) -> None:
    """The training options of a recipe."""
    module.decay, module.objective = recipe.ttt_decay, recipe.distillation


@torch.no_grad()
def start_from_target(head: nn.Linear, ids: Tensor, target: Target) -> None:
    """A vocabulary matrix starts as the target's own."""
    head.weight.copy_(target.head_weight[ids.to(target.device)].float())
    if head.bias is not None:
        nn.init.zeros_(head.bias)
