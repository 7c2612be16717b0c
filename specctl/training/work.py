"""How much work a text is in a training step: FLOPs by token, attention left out."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from specctl.decoding.target import Target
from specctl.families import FAMILIES
from specctl.recipe import TrainRecipe
from specctl.training.example import Example
from specctl.training.schedule import ttt_stride

KEYS = 0.2  # of a pass of a head: a position of a prompt is only a key and a value of it, behind the fusion of the taps


@dataclass(frozen=True)
class Work:
    """FLOPs of every token of a text, and those that a token of its response takes besides."""

    token: float
    response: float

    def __call__(self, example: Example) -> float:
        return self.token * len(example.tokens) + self.response * example.response_length


def step_work(drafter: nn.Module, recipe: TrainRecipe, target: Target, target_flops: float) -> Work:
    """The work of a text in a step: the drafter forward and backward, and `target_flops` a token for the target's
    forward where features are made anew in every step (0 where they are kept)."""
    flops = 6.0 * matrix_parameters(drafter)
    if not reads_features(drafter):
        return Work(flops + target_flops, 0.0)
    return Work(KEYS * flops + target_flops, flops * (passes(drafter, recipe, target) - KEYS))


def passes(drafter: nn.Module, recipe: TrainRecipe, target: Target) -> float:
    """Rows of the drafter's layers for every response position: of the training-time test, or of blocks."""
    if block := getattr(getattr(drafter, "config", None), "block_size", 0):
        return block / ttt_stride(recipe, target)
    if shares := getattr(drafter, "shares", None):
        return float(sum(shares()))
    again = recipe.ttt_steps - 1 if FAMILIES[recipe.arch].unrolls else 0
    return 1 + again / ttt_stride(recipe, target)


def reads_features(drafter: nn.Module) -> bool:
    """Whether training the drafter runs the target."""
    return bool(getattr(drafter, "taps", ()))


def matrix_parameters(drafter: nn.Module) -> int:
    """Parameters that every position is multiplied with."""
    tables = ("embed_tokens", "markov_w1", "predecessor_codebook", "base_kernel")
    return sum(
        p.numel() for name, p in drafter.named_parameters() if p.ndim >= 2 and not any(t in name for t in tables)
    )
