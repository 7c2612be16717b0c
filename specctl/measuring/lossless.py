"""Losslessness check: comparison of a drafter's answers with plain decoding, token by token.

Verification runs several rows in one forward pass, plain decoding runs one. Kernels then sum in another order, so the
last bits of the logits differ. If the target's two best tokens are closer than that noise, either may win: such a
divergence is a tie, any other one a mismatch. `exact` decoding uses the same shapes for both, and equality is demanded.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from specctl.decoding.target import Target
from specctl.recipe import DraftingRecipe, SamplingRecipe

Agreement = Literal["equal", "tie", "mismatch"]

# Largest difference of two logits that the order of summation may cause, relative to the largest logit: two to four
# steps between neighboring numbers in half precision. On a CPU (5 rows against a prefill, 128 positions each) the top-2
# margin differed by up to 0.0076 of the best logit on the built-in target in bf16, and by 0.0067 on SmolLM2, which has
# logits of 14 to 40; by less than 1e-6 in fp32. A fixed difference would be one step for a logit above 32.
TOLERANCE = {torch.float32: 2**-14, torch.float16: 2**-9, torch.bfloat16: 2**-6}
# Against `transformers`, where our steps round the inputs of quantized weights to bytes. On 240 development prompts of
# five domains (SmolLM2, Q4_1, 17,770 tokens), the best tokens differed at 455 places. Our logits of the two were more
# than 1/64 of the largest apart at 14 of these, more than 1/32 at one (0.041), and more than 1/16 at none.
TOLERANCE_OF_BYTES = 2**-4


@dataclass
class Losslessness:
    """Number of sequences compared, of real divergences (`mismatches`), and of divergences by rounding (`ties`)."""

    sequences: int = 0
    mismatches: int = 0
    ties: int = 0

    def add(self, agreement: Agreement) -> None:
        self.sequences += 1
        self.mismatches += agreement == "mismatch"
        self.ties += agreement == "tie"


def comparable(sampling: SamplingRecipe, drafting: DraftingRecipe) -> bool:
    """Whether a drafter's text must equal plain decoding's, token for token.

    With greedy decoding it always must. With sampling it must if both draw from the same logits (`exact`) with the same
    random numbers, as the match rule does. The ratio rule of sampled proposals preserves the distribution, not the
    text.
    """
    return sampling.temperature == 0 or (sampling.exact and drafting.proposal == "deterministic")


def tolerance(target: Target, sampling: SamplingRecipe) -> float:
    """Difference of logits, relative to the largest, up to which a divergence is a tie; 0 demands equal text."""
    return 0.0 if sampling.exact else TOLERANCE[target.dtype]


def tolerance_of_transformers(target: Target) -> float:
    """Difference of logits, relative to the largest, up to which our plain decoding and `transformers` tie. As these
    are two implementations, even `exact` allows ties."""
    return TOLERANCE_OF_BYTES if target.quantized else TOLERANCE[target.dtype]


def compare(target: Target, prompt_ids: list[int], a: list[int], b: list[int], tolerance: float) -> Agreement:
    """Compare two answers to one prompt at their first divergence.

    It is a tie if the target, run once over the common prefix, puts both tokens within `tolerance` of its best token,
    as a fraction of its largest logit.
    (This is stricter than a small top-2 margin, which would also excuse a third token.) If one answer merely stops
    earlier, that is a mismatch; with `tolerance` 0 every divergence is one.
    """
    if a == b:
        return "equal"
    if tolerance == 0:
        return "mismatch"
    shared = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
    if shared is None:
        return "mismatch"
    logits = next_token_logits(target, prompt_ids + a[:shared])
    gap = logits.max() - logits[[a[shared], b[shared]]].min()
    return "tie" if (gap <= tolerance * logits.abs().max()).item() else "mismatch"


def next_token_logits(target: Target, ids: list[int]) -> torch.Tensor:
    """fp32 logits [V] after `ids`, from one forward pass in the target's dtype without a KV cache of earlier tokens."""
    logits, _, _ = target.prefill([ids], target.model.new_cache(1, len(ids)))
    return logits[0].float()
