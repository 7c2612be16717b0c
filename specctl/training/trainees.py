"""What the training loop needs of a family: a module, batches, a loss, and the drafter it makes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from specctl.decoding.draft import Drafter
from specctl.decoding.target import Target
from specctl.drafters import pool
from specctl.errors import RecipeError
from specctl.recipe import DraftingRecipe, TrainRecipe
from specctl.training.data import Corpus, Example, frequent_tokens
from specctl.training.features import FeatureStore, slot_batch
from specctl.training.schedule import ttt_stride

Loss = tuple[Tensor, Tensor, list[tuple[Tensor, Tensor]]]
"""(sum of losses, its weight, pairs of the same per draft step): the mean loss is Σ sums / Σ weights over all ranks."""


class Trainee:
    """A drafter being trained; subclasses make the batches of a kind of families, and run them.

    Attributes:
        module: the family's module. What it holds besides, its family knows (`pool.Family`).
        store: target features, for families that read them.
    """

    store: FeatureStore | None = None

    def __init__(self, recipe: TrainRecipe, target: Target, corpus: Corpus):
        self.recipe, self.target = recipe, target
        self.family = pool.trainable(recipe.arch)

        def frequent(size: int) -> list[int]:
            return frequent_tokens(corpus.train, size, frozenset(target.eos_ids))

        self.module: Any = self.family.build(recipe, target, frequent).to(target.device)

    def batch(self, examples: list[Example], step: int) -> Any:
        """The examples as the module's input at an optimizer step, target features included."""
        raise NotImplementedError

    def loss(self, engine: nn.Module, batch: Any) -> Loss:
        """The module's loss on a batch, through the engine."""
        raise NotImplementedError

    def config(self) -> dict[str, Any]:
        """config.json of the drafter directory."""
        return self.family.config(self.module, self.target.identity)

    def tensors(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """model.safetensors of the drafter directory, from the module's state."""
        return self.family.published(state)

    def drafter(self, state: dict[str, Tensor]) -> Drafter:
        """A drafter with the weights of `state`, to decode with."""
        module = self.family.restore(self.config(), self.tensors(state))
        return self.family.drafter(module, self.target, DraftingRecipe())


class FeatureTrainee(Trainee):
    """Heads that read target features and distil its distributions: eagle, eagle3, hydra, medusa.

    Their modules have `taps`, `steps` (draft depths that are trained), `t2d` [V] and `draft_ids` [Vd], and map
    (SlotBatch, embedding [V, H], target_head [Vd, H]) to (Σ loss, Σ weight, [steps, 2] of both per step).
    """

    def __init__(self, recipe: TrainRecipe, target: Target, corpus: Corpus):
        super().__init__(recipe, target, corpus)
        self.stride = ttt_stride(recipe, target)
        self.store: FeatureStore = FeatureStore(target, self.module.taps)
        self.target_head = target.head_weight[self.module.draft_ids].contiguous()

    def batch(self, examples: list[Example], step: int) -> Any:
        features = self.store.get(examples)
        return slot_batch(examples, features, self.module.steps, self.module.t2d, self.stride, phase=step)

    def loss(self, engine: nn.Module, batch: Any) -> Loss:
        total, weight, steps = engine(batch, self.target.model.embedding, self.target_head)
        return total, weight, [(loss, count) for loss, count in steps]


class LMTrainee(Trainee):
    """Small decoders: cross-entropy on the responses' tokens; the target is not run."""

    def batch(self, examples: list[Example], step: int) -> dict[str, Tensor]:
        width = max(len(e.tokens) for e in examples)
        tokens = torch.tensor([e.tokens + [0] * (width - len(e.tokens)) for e in examples])
        places = torch.arange(width)
        start = torch.tensor([[e.prompt_length] for e in examples])
        stop = torch.tensor([[len(e.tokens)] for e in examples])
        mask = (places >= start) & (places < stop)
        return {"tokens": tokens.to(self.target.device), "mask": mask.to(self.target.device)}

    def loss(self, engine: nn.Module, batch: Any) -> Loss:
        total, weight = engine(batch)
        return total, weight, [(total.detach(), weight)]


OBJECTIVES = {"lm": ("ce",)}


def make_trainee(recipe: TrainRecipe, target: Target, corpus: Corpus) -> Trainee:
    """The trainee of `recipe.arch`, drafting with the measured defaults of its family."""
    allowed = OBJECTIVES.get(recipe.arch, ("soft_ce",))
    if recipe.objective not in ("auto", *allowed):
        raise RecipeError(f"arch {recipe.arch} trains with {' or '.join(allowed)}, not {recipe.objective}")
    kind = LMTrainee if recipe.arch == "lm" else FeatureTrainee
    return kind(recipe, target, corpus)
