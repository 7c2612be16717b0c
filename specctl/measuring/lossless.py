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

# Largest difference of two logits that the order of summation may cause. Measured on the built-in target (largest
# logits 10–20; 1 row, 8 rows, whole prefill, `transformers`' own forward): the top-2 margin differs by up to 2e-5 in
# fp32, and by 0.25 in bf16, where neighboring numbers are 0.06–0.125 apart; fp16 steps are 8 times finer than bf16. In
# bf16 a tenth of all positions have so small a margin, so nine of ten real errors are still seen as mismatches.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.03, torch.bfloat16: 0.25}


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
    """Difference of logits up to which a divergence counts as a tie; 0 demands equal text."""
    return 0.0 if sampling.exact else TOLERANCE[target.dtype]


def compare(target: Target, prompt_ids: list[int], a: list[int], b: list[int], tolerance: float) -> Agreement:
    """Compare two answers to one prompt at their first divergence.

    It is a tie if the target, run once over the common prefix, puts both tokens within `tolerance` of its best token.
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
    return "tie" if gap.item() <= tolerance else "mismatch"


def next_token_logits(target: Target, ids: list[int]) -> torch.Tensor:
    """fp32 logits [V] after `ids`, from one forward pass in the target's dtype without a KV cache of earlier tokens."""
    logits, _, _ = target.prefill([ids], target.model.new_cache(1, len(ids)))
    return logits[0].float()
