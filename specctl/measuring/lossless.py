"""Losslessness: is speculative text the text of plain decoding?

Verification reads several rows in one forward where plain decoding reads one, so kernels add in another order and the
last bits of the logits differ. Where the target's two best tokens are closer than that noise, either may win; such a
divergence is a tie, any other one a mismatch. `exact` decoding has one shape for both: there equality is demanded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from specctl.decoding.target import Target
from specctl.recipe import DraftingRecipe, SamplingRecipe

Agreement = Literal["equal", "tie", "mismatch"]

# Largest difference of two logits that may come from the order of summation. Measured on the built-in target (largest
# logits 10–20; 1 row, 8 rows, whole prefill, `transformers`' own forward): differences of the top-2 margin up to 2e-5
# in fp32 and 0.25 in bf16, where neighbouring numbers are 0.06–0.125 apart; fp16 has 8 times finer steps than bf16.
# A tenth of all positions are that close in bf16, so nine of ten real errors are still seen as mismatches.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.03, torch.bfloat16: 0.25}


@dataclass
class Losslessness:
    """Sequences compared, and how many of them diverged really (`mismatches`) or by rounding (`ties`)."""

    sequences: int = 0
    mismatches: int = 0
    ties: int = 0

    def add(self, agreement: Agreement) -> None:
        self.sequences += 1
        self.mismatches += agreement == "mismatch"
        self.ties += agreement == "tie"


def comparable(sampling: SamplingRecipe, drafting: DraftingRecipe) -> bool:
    """Whether the text of a drafter must be plain decoding's, token for token.

    Greedy: always. Sampling: where both draw from the same logits (`exact`) with the same random numbers, which the
    match rule does; the ratio rule of sampled proposals keeps the distribution, not the text.
    """
    return sampling.temperature == 0 or (sampling.exact and drafting.proposal == "deterministic")


def tolerance(target: Target, sampling: SamplingRecipe) -> float:
    """Logit difference that counts as a tie; 0 demands equal text."""
    return 0.0 if sampling.exact else TOLERANCE[target.dtype]


def compare(target: Target, prompt_ids: list[int], a: list[int], b: list[int], tolerance: float) -> Agreement:
    """Compare two answers to one prompt, at their first divergence.

    It is a tie when the target, run once over the common prefix, puts both tokens within `tolerance` of its best one.
    (Stricter than a small top-2 margin, which would also excuse a third token.) An answer that merely stops earlier is
    a mismatch, and with `tolerance` 0 so is every divergence.
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
    """fp32 logits [V] after `ids`, computed in the target's dtype by one forward without history."""
    logits, _, _ = target.prefill([ids], target.model.new_cache(1, len(ids)))
    return logits[0].float()
