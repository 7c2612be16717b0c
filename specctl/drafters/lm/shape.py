"""Shape of the chains that a small LM drafts."""

from dataclasses import dataclass, replace

import torch

from specctl.recipe import DraftingRecipe


@dataclass(frozen=True)
class ChainShape:
    """Limits of a chain: at most `depth` tokens, ending with the first token of joint probability below `stop_below`.

    `sampled` draws the tokens if the target samples (accepted by the ratio rule `rule`); otherwise they are the most
    probable ones. Ending the chain at a token does not bias the sampling: whether a prefix is continued depends on the
    prefix alone.
    """

    depth: int
    stop_below: float
    sampled: bool
    rule: str = "token"


def shape_for(drafting: DraftingRecipe, device: torch.device) -> ChainShape:
    """Default shape for a device, overridden by the values set in the recipe.

    On a CPU a draft step for a small target costs at least a fifth of a verification, so only likely tokens are worth
    drafting. On a GPU reading the probabilities back to the host costs as much as the step, so chains never end early.
    """
    shape = ChainShape(7, 0.25, False) if device.type == "cpu" else ChainShape(5, 0.0, False)
    given = {key: value for key in ("depth", "stop_below") if (value := getattr(drafting, key)) is not None}
    return replace(shape, **given, sampled=drafting.proposal == "sampled", rule=drafting.rule)
