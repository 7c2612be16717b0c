"""Shapes of the drafts of a small LM."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from specctl.recipe import DraftingRecipe


@dataclass(frozen=True)
class ChainShape:
    """A chain of at most `depth` tokens, ended by the first token whose joint probability is under `stop_below`.

    `sampled` draws the tokens (ratio rule, by `rule`) where the target samples; otherwise they are the most probable
    ones. That a token ends the chain biases neither rule: whether a prefix is drafted further depends on itself alone.
    """

    depth: int
    stop_below: float
    sampled: bool
    rule: str = "token"


def shape_for(drafting: DraftingRecipe, device: torch.device) -> ChainShape:
    """The default of the device with what the recipe sets.

    A draft step of a small target costs a CPU a good fifth of a verification: only likely tokens are worth one. On a
    GPU reading the probabilities back costs as much as the step.
    """
    shape = ChainShape(7, 0.25, False) if device.type == "cpu" else ChainShape(5, 0.0, False)
    given = {key: value for key in ("depth", "stop_below") if (value := getattr(drafting, key)) is not None}
    return replace(shape, **given, sampled=drafting.proposal == "sampled", rule=drafting.rule)
