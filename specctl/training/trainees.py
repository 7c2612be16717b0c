"""What the training loop needs of a family: a module, batches, a loss, and the drafter it makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from specctl.decoding.draft import Drafter
from specctl.decoding.target import Target
from specctl.drafters import eagle3, lm
from specctl.drafters.eagle3_head import Eagle3Head
from specctl.errors import RecipeError
from specctl.recipe import DraftingRecipe, TrainRecipe
from specctl.training.data import Corpus, Example, frequent_tokens
from specctl.training.features import FeatureStore, slot_batch
from specctl.training.schedule import ttt_stride


class Trainee(Protocol):
    """A drafter being trained."""

    @property
    def module(self) -> nn.Module: ...

    @property
    def store(self) -> FeatureStore | None:
        """Target features, for families that read them."""
        ...

    def batch(self, examples: list[Example], step: int) -> Any:
        """The examples as the module's input at an optimizer step, target features included."""
        ...

    def loss(self, engine: nn.Module, batch: Any) -> tuple[Tensor, Tensor, list[tuple[Tensor, Tensor]]]:
        """(sum of losses, its weight, per-step pairs of the same): loss = Σ sums / Σ weights over ranks."""
        ...

    def drafter(self, tensors: dict[str, Tensor]) -> Drafter:
        """A drafter with these weights, to decode with."""
        ...

    def config(self) -> dict[str, Any]:
        """config.json of the drafter directory."""
        ...


class Eagle3Trainee:
    """EAGLE-3: target features, training-time test, draft vocabulary from the responses."""

    def __init__(self, recipe: TrainRecipe, target: Target, corpus: Corpus, drafting: DraftingRecipe):
        _check_objective(recipe, "soft_ce")
        self.recipe, self.target, self.drafting = recipe, target, drafting
        self.stride = ttt_stride(recipe, target)
        architecture = eagle3.architecture(recipe.drafter, target)
        always = frozenset(target.eos_ids)
        ids = frequent_tokens(corpus.train, architecture.draft_vocab_size, always)
        self.module: Eagle3Head = Eagle3Head(architecture, torch.tensor(ids), recipe.ttt_steps, recipe.ttt_decay)
        eagle3.initialise(self.module, target)
        self.module.to(target.device)
        self.store: FeatureStore | None = FeatureStore(target, architecture.taps)
        self.teacher_head = target.head_weight[torch.tensor(ids, device=target.device)].contiguous()

    def batch(self, examples: list[Example], step: int) -> Any:
        assert self.store is not None
        features = self.store.get(examples)
        return slot_batch(examples, features, self.recipe.ttt_steps, self.module.t2d, self.stride, phase=step)

    def loss(self, engine: nn.Module, batch: Any) -> tuple[Tensor, Tensor, list[tuple[Tensor, Tensor]]]:
        total, weight, steps = engine(batch, self.target.model.embedding, self.teacher_head)
        return total, weight, [(loss, count) for loss, count in steps]

    def drafter(self, tensors: dict[str, Tensor]) -> Drafter:
        return eagle3.from_checkpoint(self.config(), tensors, self.target, self.drafting)

    def config(self) -> dict[str, Any]:
        return eagle3.config(self.module.config, self.target.identity)


class LMTrainee:
    """Small decoder: cross-entropy on the responses' tokens; the target is not run."""

    store: FeatureStore | None = None

    def __init__(self, recipe: TrainRecipe, target: Target, corpus: Corpus, drafting: DraftingRecipe):
        _check_objective(recipe, "ce")
        self.target, self.drafting = target, drafting
        self.module: lm.LM = lm.build(target, recipe.drafter).to(target.device)

    def batch(self, examples: list[Example], step: int) -> dict[str, Tensor]:
        width = max(len(e.tokens) for e in examples)
        tokens = torch.tensor([e.tokens + [0] * (width - len(e.tokens)) for e in examples])
        places = torch.arange(width)
        start = torch.tensor([[e.prompt_length] for e in examples])
        stop = torch.tensor([[len(e.tokens)] for e in examples])
        mask = (places >= start) & (places < stop)
        return {"tokens": tokens.to(self.target.device), "mask": mask.to(self.target.device)}

    def loss(self, engine: nn.Module, batch: Any) -> tuple[Tensor, Tensor, list[tuple[Tensor, Tensor]]]:
        total, weight = engine(batch)
        return total, weight, [(total.detach(), weight)]

    def drafter(self, tensors: dict[str, Tensor]) -> Drafter:
        named = {name.removeprefix("model."): value for name, value in tensors.items()}
        return lm.from_checkpoint(self.config(), named, self.target, self.drafting)

    def config(self) -> dict[str, Any]:
        return lm.config(self.module)


def _check_objective(recipe: TrainRecipe, only: str) -> None:
    if recipe.objective not in ("auto", only):
        raise RecipeError(f"arch {recipe.arch} trains with the objective {only}, not {recipe.objective}")


TRAINEES: dict[str, Callable[..., Trainee]] = {"eagle3": Eagle3Trainee, "lm": LMTrainee}


def make_trainee(recipe: TrainRecipe, target: Target, corpus: Corpus) -> Trainee:
    """The trainee of `recipe.arch`, drafting with the measured defaults of its family."""
    return TRAINEES[recipe.arch](recipe, target, corpus, DraftingRecipe())
