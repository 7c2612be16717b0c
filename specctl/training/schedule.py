"""Length of a training run, and its learning rate at every step."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from specctl.decoding.target import Target
from specctl.families import FAMILIES
from specctl.recipe import TrainRecipe

# Least and most response tokens per step. A small target learns from many small steps, and a GPU works best on large
# steps. But a head needs about `STEPS` steps. On 2,400 sql responses of SmolLM2-135M, 70 steps of 16,384 tokens gave
# mat 2.5, and 1,200 steps of 768 tokens gave 5.1 (held-out prompts, one H100).
BATCH_TOKENS = {"cpu": (384, 384), "cuda": (768, 16_384)}
STEPS = 1200
# The first draft position matters most, but each later step costs as much. On a CPU only a third of the positions takes
# part in the later steps. This has no measurable loss and makes six steps affordable instead of three.
TTT_STRIDE = {"cpu": 3, "cuda": 1}
# On a CPU the products with the vocabulary took 60 % of the gradient of an eagle3 head of SmolLM2-135M. After 120 steps
# with 3,072 of 24,576 tokens it has mat 1.93, after as many with all of them 1.91 (24 maths prompts). With only the
# likeliest tokens it had 1.70. On a GPU this was not tried.
SAMPLED_SOFTMAX = {"cpu": 3072, "cuda": 0}
# Learning rate of an adapter relative to training all weights: measured with eagle3 at ranks 16 to 64; 9 × diverges at
# rank 64.
LORA_RATE = 4.0


def batch_tokens(recipe: TrainRecipe, target: Target, tokens: float = math.inf) -> int:
    """Maximum response tokens of an optimizer step over all processes; each process still gets at least one text.

    `tokens`: response tokens of an epoch. If the recipe sets no size, batches of small data sets are smaller, so that a
    run has `STEPS` steps.
    """
    if recipe.batch_tokens is not None:
        return recipe.batch_tokens
    least, most = BATCH_TOKENS[target.device.type]
    epochs = recipe.epochs or FAMILIES[recipe.arch].epochs
    return round(min(most, max(least, epochs * tokens / STEPS)))


def ttt_stride(recipe: TrainRecipe, target: Target) -> int:
    """Stride of the response positions that take part in the later steps of the training-time test; 1 = all."""
    return recipe.ttt_stride or (TTT_STRIDE[target.device.type] if FAMILIES[recipe.arch].supports_stride else 1)


def sampled_softmax(recipe: TrainRecipe, target: Target) -> int:
    """Number of tokens in the softmax of a step; 0 = the whole draft vocabulary."""
    return SAMPLED_SOFTMAX[target.device.type] if recipe.sampled_softmax is None else recipe.sampled_softmax


@dataclass(frozen=True)
class Schedule:
    """Limits and learning rate of a run: at most `steps` optimizer steps and `seconds` of training (inf = no limit).

    The share `begun` was done in the first `first` steps, with other numbers of processes.
    """

    steps: int
    seconds: float
    peak: float
    floor: float
    warmup: float
    shape: str
    first: int = 0
    begun: float = 0.0

    @classmethod
    def of(cls, recipe: TrainRecipe, target: Target, steps_per_epoch: int) -> Schedule:
        steps = recipe.max_steps or _steps(recipe, target, steps_per_epoch)
        options = recipe.optimizer
        usual = FAMILIES[recipe.arch].rates[recipe.optimizer_type] * (LORA_RATE if recipe.lora.enabled else 1.0)
        peak = options.lr or usual * 4096 / target.hidden_size
        seconds = recipe.max_minutes * 60 if recipe.max_minutes else math.inf
        return cls(steps, seconds, peak, options.final_lr, options.warmup, options.schedule)

    def after(self, first: int, begun: float) -> Schedule:
        """The schedule of a run that has done the share `begun` in `first` steps of another length."""
        return replace(self, steps=first + math.ceil((1 - begun) * self.steps), first=first, begun=begun)

    def done(self, step: int) -> float:
        """Share of the run that is done after `step` steps."""
        return self.begun + (1 - self.begun) * (step - self.first) / max(1, self.steps - self.first)

    def ended(self, step: int, seconds: float) -> bool:
        return step >= self.steps or seconds >= self.seconds

    def rate(self, step: int, seconds: float) -> float:
        """Share of the peak learning rate after `step` steps: linear warm-up, then cosine, linear or constant.

        With a time limit, the schedule follows the larger of two shares, steps done and time used, so it always reaches
        its end.
        """
        done = min(1.0, max(self.done(step), seconds / self.seconds))
        if done < self.warmup:
            return min(1.0, max(done, 1 / self.steps) / self.warmup)
        left = 1 - (done - self.warmup) / max(1 - self.warmup, 1e-9)
        share = {"cosine": 0.5 - 0.5 * math.cos(math.pi * left), "linear": left, "constant": 1.0}[self.shape]
        return self.floor + (1 - self.floor) * share


def _steps(recipe: TrainRecipe, target: Target, steps_per_epoch: int) -> int:
    family = FAMILIES[recipe.arch]
    if recipe.epochs is None and family.cpu_tokens and target.device.type == "cpu":
        return max(steps_per_epoch, family.cpu_tokens // batch_tokens(recipe, target))
    return (recipe.epochs or family.epochs) * steps_per_epoch
