"""What `hydra` and `medusa` share: one head for each draft depth on the target's last state, and their distillation.

Slot i of a sequence holds the target's state h_i after its final norm and the token x_{i+1}; head k = 0, 1, … predicts
x_{i+2+k}. Every head has a vocabulary matrix of its own, as in the published files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specctl.decoding.target import Target
from specctl.drafters.eagle3_head import SlotBatch
from specctl.drafters.objectives import soft_cross_entropy
from specctl.recipe import DrafterRecipe

DRAFT_HEADS = 4  # of both papers' released heads


@dataclass(frozen=True)
class HeadsConfig:
    """Shape of a set of heads. `taps` index `transformers`' hidden_states; `vocab_size` is the target's."""

    hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    draft_heads: int
    num_layers: int
    taps: tuple[int, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"taps": list(self.taps)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        return cls(**{**values, "taps": tuple(values["taps"])})


def common_shape(recipe: DrafterRecipe, target: Target, layers: int) -> dict[str, Any]:
    """The fields of a `HeadsConfig` for `target`; the published files know no smaller draft vocabulary than its own."""
    return {
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": min(recipe.vocab_size or target.vocab_size, target.vocab_size),
        "draft_heads": recipe.draft_heads or DRAFT_HEADS,
        "num_layers": recipe.num_layers or layers,
        "taps": (target.num_layers,),
    }


def draft_ids(config: HeadsConfig, frequent: Callable[[int], list[int]]) -> Tensor | None:
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


class DepthHeads(nn.Module):
    """Base of the modules: the draft vocabulary, and what the trainer asks for."""

    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: HeadsConfig, draft_ids: Tensor | None = None, decay: float = 1.0):
        """`draft_ids` [Vd] sorted target ids of the draft vocabulary (None when they come with a state dict)."""
        super().__init__()
        self.config, self.decay = config, decay
        ids = torch.arange(config.draft_vocab_size) if draft_ids is None else draft_ids
        member = torch.zeros(config.vocab_size, dtype=torch.bool)
        member[ids] = True
        # As in EAGLE-3 files, which are the only ones to know them: they are stored where they say something.
        partial = config.draft_vocab_size < config.vocab_size
        self.register_buffer("d2t", ids - torch.arange(config.draft_vocab_size), persistent=partial)
        self.register_buffer("t2d", member, persistent=partial)

    @property
    def taps(self) -> tuple[int, ...]:
        return self.config.taps

    @property
    def steps(self) -> int:
        return self.config.draft_heads

    @property
    def draft_ids(self) -> Tensor:
        """[Vd] target id of every draft token."""
        return self.d2t + torch.arange(self.config.draft_vocab_size, device=self.d2t.device)

    def distil(self, logits: Iterable[Tensor], batch: SlotBatch, target_head: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Soft cross-entropy of every head's logits [N, Vd], one after another, to the target's distributions.

        All N response slots train all heads (`later_rows` is not used: a head has its own weights, and what one learns
        is no use to another).

        Returns:
            (Σ_k decay^k Σ loss, Σ_k decay^k · valid slots, [heads, 2] sums of (loss, valid slots) per head).
        """
        with torch.no_grad():
            teacher = F.linear(batch.teacher.to(target_head.dtype), target_head)
            teacher = teacher.float().softmax(-1).to(teacher.dtype)
        rows = len(batch.query_rows)
        sums = []
        for k, z in enumerate(logits):
            valid = (batch.left > k) & batch.inside[k : k + rows]
            losses = soft_cross_entropy(z, teacher[k : k + rows], valid)
            sums.append(torch.stack((losses.sum(), valid.sum().to(losses.dtype))))
        by_head = torch.stack(sums)
        decay = self.decay ** torch.arange(len(sums), device=by_head.device)
        total, weight = decay.to(by_head.dtype) @ by_head
        return total, weight.detach(), by_head.detach()


@torch.no_grad()
def start_from_target(head: nn.Linear, ids: Tensor, target: Target) -> None:
    """A vocabulary matrix starts as the target's own."""
    head.weight.copy_(target.head_weight[ids.to(target.device)].float())
    if head.bias is not None:
        nn.init.zeros_(head.bias)
