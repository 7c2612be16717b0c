"""Interface of the training loop to a drafter family: the module, its batches, its loss, and the drafter it becomes."""

import os
import pkgutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from specctl.decoding.models.loading import with_fast_products
from specctl.decoding.protocols import Drafter
from specctl.decoding.target import Target
from specctl.drafters import checkpoint, lora, pool
from specctl.drafters.family import load_family
from specctl.drafters.lm.model import LMBatch
from specctl.drafters.lora import Adapter
from specctl.errors import CheckpointError, RecipeError
from specctl.families import FAMILIES
from specctl.recipe import DraftingRecipe, TrainRecipe
from specctl.training.data import Corpus, frequent_tokens
from specctl.training.example import Example
from specctl.training.feature_files import would_keep
from specctl.training.features import FeatureStore, slot_batch
from specctl.training.schedule import sampled_softmax, ttt_stride
from specctl.training.step_cost import Work, step_work

Loss = tuple[Tensor, Tensor, list[tuple[Tensor, Tensor]]]
"""(sum of losses, sum of weights, one such pair per draft step); the mean loss is Σ losses / Σ weights over all
ranks."""


class TrainableDrafter:
    """A drafter being trained. Each subclass makes the batches for one kind of families and runs them.

    Attributes:
        module: the family's module; `DrafterFamily` describes it.
        store: target features, for families that read them.
    """

    store: FeatureStore | None = None

    def __init__(self, recipe: TrainRecipe, target: Target, corpus: Corpus):
        self.recipe, self.target = recipe, target
        self.family = load_family(recipe.arch)
        self.base: Any = None  # the drafter that an adapter shares its weights with
        self.origin: dict[str, Any] = {}
        if recipe.init is not None:
            self.module: Any = self._restored(recipe.init)
        else:
            always = frozenset(target.eos_ids)
            self.module = self.family.build(recipe, target, lambda size: frequent_tokens(corpus.train, size, always))
        self.family.set_training_options(self.module, recipe)
        self.module.squash = target.squash
        self.module.to(target.device)

    def _restored(self, directory: Path) -> nn.Module:
        """Load the drafter that training starts from, with its draft vocabulary. `lora` freezes it and adds
        adapters."""
        drafter = pool.read_drafter(directory, self.target)
        if drafter.config["family"] != self.recipe.arch:
            raise CheckpointError(
                f"{directory} has family {drafter.config['family']}, not {self.recipe.arch}",
                f"use --arch {drafter.config['family']}",
            )
        if not self.recipe.lora.enabled:
            return pool.load_module(pool.merge_adapter(drafter), self.target)
        if "lora" in drafter.config:
            raise CheckpointError(
                f"{directory} is already an adapter", "adapt its base, or fine-tune it without --lora"
            )
        adaptable = FAMILIES[self.recipe.arch].lora_modules
        if not adaptable:
            raise RecipeError(f"drafters of family {self.recipe.arch} do not support LoRA adapters", "leave out --lora")
        module = pool.load_module(drafter, self.target)
        self.base = self.family.make_drafter(module, self.target, DraftingRecipe())
        lora.inject(module, self.recipe.lora, adaptable)
        place = os.path.relpath(directory.absolute(), self.recipe.output.absolute())
        origin = {"path": place, "sha256": checkpoint.weights_digest(drafter.path)}
        self.origin = {"lora": self.recipe.lora.model_dump(include={"rank", "alpha"}) | {"base": origin}}
        return module

    def retarget(self, target: Target) -> None:
        """Learn from another target with the same sizes and vocabulary; the caller sets a `store` for it."""
        self.target = target
        self.module.squash = target.squash

    def work(self, examples: list[Example], processes: int) -> Work:
        """Work of an example in a step, for dealing `examples` out: the same in all processes, and in a resumed run."""
        made_anew = self.store is not None and not would_keep(
            self.recipe.features, self.store.estimate(examples) // processes
        )
        return step_work(self.module, self.recipe, self.target, self.target.row_flops if made_anew else 0.0)

    def batch(self, examples: list[Example], step: int) -> Any:
        """Make the module's input for an optimizer step from the examples, target features included."""
        raise NotImplementedError

    def loss(self, engine: nn.Module, batch: Any) -> Loss:
        """Run the module through the engine and return its loss on a batch."""
        raise NotImplementedError

    def config(self) -> dict[str, Any]:
        """Contents of config.json in the drafter directory."""
        return self.family.checkpoint_config(self.module, self.target.identity) | self.origin

    def tensors(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Contents of model.safetensors in the drafter directory, from the module's state. Adapters are saved in bf16:
        the optimizer alone needs peft's fp32."""
        if self.base is not None:
            updates = lora.state(self.family.stored_state(state))
            return {name: tensor.to(torch.bfloat16) for name, tensor in updates.items()}
        return self.family.stored_state(state)

    def drafter(self, state: dict[str, Tensor], drafting: DraftingRecipe | None = None) -> Drafter:
        """Build a drafter for decoding with the weights of `state`; `drafting` None = the family's measured shape."""
        if self.base is not None:
            return self.base.adapted(Adapter.of(self.config(), self.tensors(state)))
        module = self.family.restore(self.config(), self.tensors(state))
        return self.family.make_drafter(module, self.target, drafting or DraftingRecipe())


class TrainableHead(TrainableDrafter):
    """Heads that read target features and distil the target's distributions.

    Their modules have `taps`, `steps` (number of draft depths that are trained), `t2d` [V] and `draft_ids` [Vd], and
    map (SlotBatch, embedding [V, H], target_head [Vd, H]) to (Σ loss, Σ weight, [steps, 2] of both sums per step).
    """

    def __init__(self, recipe: TrainRecipe, target: Target, corpus: Corpus):
        super().__init__(recipe, target, corpus)
        self.stride = ttt_stride(recipe, target)
        self.module.sampled_softmax = sampled_softmax(recipe, target)
        self.store: FeatureStore = FeatureStore(target, self.module.taps)
        self.retarget(target)

    def retarget(self, target: Target) -> None:
        super().retarget(target)
        self.target_head = with_fast_products(target.head_weight[self.module.draft_ids].contiguous())
        self.module.squash = target.squash.of(self.module.draft_ids)

    def batch(self, examples: list[Example], step: int) -> Any:
        features = self.store.get(examples)
        return slot_batch(examples, features, self.module.steps, self.module.t2d, self.stride, phase=step)

    def loss(self, engine: nn.Module, batch: Any) -> Loss:
        total, weight, steps = engine(batch, self.target.model.embedding, self.target_head)
        return total, weight, [(loss, count) for loss, count in steps]


class TrainableLM(TrainableDrafter):
    """Small language models as drafters. The objectives run the target, except cross-entropy on the response tokens."""

    def __init__(self, recipe: TrainRecipe, target: Target, corpus: Corpus):
        super().__init__(recipe, target, corpus)
        self._target_head: Tensor | None = None
        if recipe.resolved_objective != "ce":
            self.store = FeatureStore(target, ())

    def retarget(self, target: Target) -> None:
        super().retarget(target)
        self._target_head = None

    def batch(self, examples: list[Example], step: int) -> LMBatch:
        width = max(len(e.tokens) for e in examples)
        tokens = torch.tensor([[*e.tokens, *[0] * (width - len(e.tokens))] for e in examples])
        places = torch.arange(width)
        # The features have no distribution for a response's first token: it would come from the prompt's last position.
        skipped = 0 if self.store is None else 1
        # An earlier piece of the text has the first response token of this piece.
        start = torch.tensor([[e.prompt_length + max(skipped, e.draw[1] > 0)] for e in examples])
        stop = torch.tensor([[len(e.tokens)] for e in examples])
        mask = (places >= start) & (places < stop)
        teacher = None if self.store is None else torch.cat([f.teacher for f in self.store.get(examples)])
        device, starts = self.target.device, torch.tensor([[e.start] for e in examples])
        positions = (places + starts).to(device) if starts.any() else None
        return LMBatch(tokens.to(device), mask.to(device), teacher, positions)

    def loss(self, engine: nn.Module, batch: Any) -> Loss:
        if self.store is not None and self._target_head is None:
            self._target_head = with_fast_products(self.target.head_weight)
        total, weight = engine(batch, self._target_head)
        return total, weight, [(total.detach(), weight)]


def make_trainable(recipe: TrainRecipe, target: Target, corpus: Corpus) -> TrainableDrafter:
    """Build the `TrainableDrafter` of `recipe.arch`. RecipeError if it has no gradient checkpointing and the recipe
    asks for it."""
    trainable: TrainableDrafter = pkgutil.resolve_name(str(FAMILIES[recipe.arch].trainable))(recipe, target, corpus)
    if recipe.gradient_checkpointing:
        if not trainable.module.supports_checkpointing:
            raise RecipeError(
                f"arch {recipe.arch} does not support gradient checkpointing", "set gradient_checkpointing=false"
            )
        trainable.module.gradient_checkpointing = True
    return trainable
