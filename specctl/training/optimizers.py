"""Optimizers for small heads: AdamW, and Muon for the matrices with AdamW for the rest."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from specctl.recipe import OptimizerRecipe

# Matrices whose rows are tokens, and one of a single row: Muon's geometry does not fit them.
EMBEDDING_LIKE = ("lm_head", "embed_tokens", "confidence_head")


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon (Jordan et al. 2024) on hidden matrices, AdamW on norms and vocabulary matrices, as one optimizer.

    An engine takes one optimizer with one list of groups. Both halves are torch's own; this class forwards to them and
    presents their groups and states together. Updates of a Muon matrix are scaled to AdamW's typical size (Liu et al.
    2025), so that one `lr` with a factor for the AdamW part serves both.
    """

    def __init__(self, matrices: list[nn.Parameter], others: list[nn.Parameter], options: OptimizerRecipe, lr: float):
        betas = (options.betas[0], options.betas[1])
        decay = options.weight_decay
        self.parts = (
            torch.optim.Muon(
                matrices, lr=lr, momentum=options.momentum, weight_decay=decay, adjust_lr_fn="match_rms_adamw"
            ),
            torch.optim.AdamW(others, lr=lr * options.other_lr, betas=betas, weight_decay=decay),
        )
        super().__init__([{"params": matrices, "lr": lr}, {"params": others, "lr": lr * options.other_lr}], {})
        self.param_groups = [group for part in self.parts for group in part.param_groups]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self.param_groups = [group for part in self.parts for group in part.param_groups]


def make_optimizer(module: nn.Module, kind: str, options: OptimizerRecipe, lr: float) -> torch.optim.Optimizer:
    """`kind` ("adamw" or "muon") over the trainable parameters of `module`."""
    named = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    betas = (options.betas[0], options.betas[1])
    if kind == "adamw":
        return torch.optim.AdamW([p for _, p in named], lr=lr, betas=betas, weight_decay=options.weight_decay)
    matrices = [p for name, p in named if p.ndim == 2 and not any(part in name for part in EMBEDDING_LIKE)]
    chosen = {id(p) for p in matrices}
    return MuonWithAdamW(matrices, [p for _, p in named if id(p) not in chosen], options, lr)
