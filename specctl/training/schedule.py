"""How long a run lasts and its learning rate along the way."""

from __future__ import annotations

import math
from dataclasses import dataclass

from specctl.decoding.target import Target
from specctl.recipe import TrainRecipe

EPOCHS = {"eagle3": 5, "lm": 3}
BATCH_TOKENS = {"cpu": 384, "cuda": 16_384}  # a small target learns from many small steps; a GPU wants to be filled
# AdamW: EAGLE-3's rate for hidden size 4,096; narrower heads take larger steps. Muon: measured at hidden size 256.
RATE_AT_4096 = {"adamw": 1e-4, "muon": 6e-4}


def batch_tokens(recipe: TrainRecipe, target: Target) -> int:
    """Response tokens of one optimizer step, over all processes."""
    return recipe.batch_tokens or BATCH_TOKENS[target.device.type]


@dataclass(frozen=True)
class Schedule:
    """`steps` optimizer steps at most, and `seconds` of training at most (inf without a limit)."""

    steps: int
    steps_per_epoch: int
    seconds: float
    peak: float
    floor: float
    warmup: float
    shape: str

    @classmethod
    def of(cls, recipe: TrainRecipe, target: Target, steps_per_epoch: int) -> Schedule:
        epochs = recipe.epochs or EPOCHS[recipe.arch]
        steps = recipe.max_steps or epochs * steps_per_epoch
        options = recipe.optimizer
        peak = options.lr or RATE_AT_4096[recipe.optimizer_type] * 4096 / target.hidden_size
        seconds = recipe.max_minutes * 60 if recipe.max_minutes else math.inf
        return cls(steps, steps_per_epoch, seconds, peak, options.final_lr, options.warmup, options.schedule)

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
