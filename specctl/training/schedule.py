"""How long a run lasts and its learning rate along the way."""

from __future__ import annotations

import math
from dataclasses import dataclass

from specctl.decoding.target import Target
from specctl.families import FAMILIES
from specctl.recipe import TrainRecipe

# Least and most response tokens of a step. A small target learns from many small steps, and a GPU works best on large
# ones. But a head needs about as many steps as `STEPS` says: of SmolLM2-135M's 2,400 sql responses 70 steps of 16,384
# tokens made a head of 2.5 tokens per round, 1,200 steps of 768 one of 5.1 (held-out prompts, one H100).
BATCH_TOKENS = {"cpu": (384, 384), "cuda": (768, 16_384)}
STEPS = 1200
# The first draft position decides most, and the steps after it cost the same each: on a CPU a third of the positions
# goes on, which loses nothing measurable and pays for six steps instead of three.
TTT_STRIDE = {"cpu": 3, "cuda": 1}
LORA_RATE = (
    4.0  # of an adapter's rate to that of all weights: measured with eagle3 at ranks 16 to 64; 9 × diverges at 64
)


def batch_tokens(recipe: TrainRecipe, target: Target, tokens: float = math.inf) -> int:
    """Response tokens of one optimizer step at most, over all processes; but each has one text at least.

    `tokens`: response tokens of an epoch. Where the recipe sets no size, batches of few data are smaller, so that a run
    has `STEPS` steps.
    """
    if recipe.batch_tokens is not None:
        return recipe.batch_tokens
    least, most = BATCH_TOKENS[target.device.type]
    epochs = recipe.epochs or FAMILIES[recipe.arch].epochs
    return round(min(most, max(least, epochs * tokens / STEPS)))


def ttt_stride(recipe: TrainRecipe, target: Target) -> int:
    """Every how many-th response position takes part in the later steps of the training-time test."""
    return recipe.ttt_stride or (TTT_STRIDE[target.device.type] if FAMILIES[recipe.arch].strides else 1)


@dataclass(frozen=True)
class Schedule:
    """`steps` optimizer steps at most, and `seconds` of training at most (inf without a limit)."""

    steps: int
    seconds: float
    peak: float
    floor: float
    warmup: float
    shape: str

    @classmethod
    def of(cls, recipe: TrainRecipe, target: Target, steps_per_epoch: int) -> Schedule:
        steps = recipe.max_steps or _steps(recipe, target, steps_per_epoch)
        options = recipe.optimizer
        usual = FAMILIES[recipe.arch].rates[recipe.optimizer_type] * (LORA_RATE if recipe.lora.enabled else 1.0)
        peak = options.lr or usual * 4096 / target.hidden_size
        seconds = recipe.max_minutes * 60 if recipe.max_minutes else math.inf
        return cls(steps, seconds, peak, options.final_lr, options.warmup, options.schedule)

    def ended(self, step: int, seconds: float) -> bool:
        return step >= self.steps or seconds >= self.seconds

    def rate(self, step: int, seconds: float) -> float:
        """Share of the peak learning rate after `step` steps: linear warm-up, then cosine, linear or constant.

        With a time limit the schedule runs on whichever of steps and time is further, so that it is always finished.
        """
        done = min(1.0, max(step / self.steps, seconds / self.seconds))
        if done < self.warmup:
            return max(done, 1 / self.steps) / self.warmup
        left = 1 - (done - self.warmup) / max(1 - self.warmup, 1e-9)
        share = {"cosine": 0.5 - 0.5 * math.cos(math.pi * left), "linear": left, "constant": 1.0}[self.shape]
        return self.floor + (1 - self.floor) * share


def _steps(recipe: TrainRecipe, target: Target, steps_per_epoch: int) -> int:
    family = FAMILIES[recipe.arch]
    if recipe.epochs is None and family.cpu_tokens and target.device.type == "cpu":
        return max(steps_per_epoch, family.cpu_tokens // batch_tokens(recipe, target))
    return (recipe.epochs or family.epochs) * steps_per_epoch
