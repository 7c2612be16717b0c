"""Base classes of drafter families: build, train, store, restore and run the drafters of one architecture."""

import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn

from specctl.decoding.protocols import Drafter
from specctl.decoding.target import Target
from specctl.drafters.blueprint import WEIGHTS, build_with_weights, config_error
from specctl.drafters.feature.head import DraftConfig, DraftHead, HeadConfig
from specctl.drafters.tree import TreeShape, default_shape, shape_for
from specctl.errors import CheckpointError
from specctl.families import FAMILIES
from specctl.recipe import DrafterRecipe, DraftingRecipe, TrainRecipe


class DrafterFamily(ABC):
    """Base class of families. A `module` is the content of one drafter: weights or a datastore.

    A module has a method `check(target)`, which raises CheckpointError if it was made for another target. Modules that
    learn by gradient descent are `nn.Module`s, and their families implement `build`. Other families implement `collect`
    and `tensors`.

    Attributes:
        name: key of the family in `families.FAMILIES`.
    """

    def __init__(self, name: str):
        self.name = name

    @abstractmethod
    def restore(self, config: dict[str, Any], tensors: dict[str, Tensor]) -> Any:
        """Rebuild a module from a checkpoint's config.json and model.safetensors, in the state for decoding.

        Raises CheckpointError, with a message that begins with the file name, if they do not fit.
        """

    @abstractmethod
    def make_drafter(self, module: Any, target: Target, drafting: DraftingRecipe) -> Drafter:
        """Build the drafter that runs the module, with a copy of its weights in the target's dtype."""

    @abstractmethod
    def stored_architecture(self, module: Any) -> dict[str, Any]:
        """Value of "architecture" in config.json."""

    def checkpoint_config(self, module: Any, target: dict[str, Any]) -> dict[str, Any]:
        """Content of config.json for a checkpoint of this module; `target` is `Target.identity`."""
        return {"family": self.name, "architecture": self.stored_architecture(module), "target": target}

    def build(self, recipe: TrainRecipe, target: Target, frequent: Callable[[int], list[int]]) -> nn.Module:
        """Build a new module to train, initialized from the target if the family supports it.

        `frequent(n)` returns a draft vocabulary: the n most frequent tokens of the training responses.
        """
        raise NotImplementedError

    def set_training_options(self, module: Any, recipe: TrainRecipe) -> None:
        """Set the training options of a recipe; `restore` leaves the module in the state for decoding."""
        module.objective = recipe.resolved_objective

    def stored_state(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Convert a module's state dict to the stored names, which are the names of published checkpoints."""
        return state

    def collect(self, texts: Iterable[tuple[list[int], int]]) -> Any:
        """Build a module without gradient steps from all texts, each given as (tokens, prompt length)."""
        raise NotImplementedError

    def tensors(self, module: Any) -> dict[str, Tensor]:
        """Content of model.safetensors for a checkpoint of a collected module."""
        raise NotImplementedError


class HeadFamily(DrafterFamily):
    """Base class of families of heads that read the target's features.

    Attributes:
        head, config, drafter: classes of the module, its shape, and the drafter that runs it.
    """

    head: type[DraftHead]
    config: type[DraftConfig] = HeadConfig
    drafter: Callable[[Any, Target, TreeShape], Drafter]

    @staticmethod
    def default_shape(device: torch.device) -> TreeShape:
        """Default shape of the draft trees on a device."""
        return default_shape(device)

    def architecture(self, recipe: DrafterRecipe, target: Target) -> DraftConfig:
        """Shape of a new head as the recipe sets it; options left out follow the target's own layers."""
        raise NotImplementedError

    def build(self, recipe: TrainRecipe, target: Target, frequent: Callable[[int], list[int]]) -> nn.Module:
        """Raises CheckpointError for a target with embeddings of another width than its layers, such as OPT-350m."""
        width, hidden = target.model.embedding.shape[1], target.config.hidden_size
        if width != hidden:
            raise CheckpointError(
                f"heads read hidden states and embeddings of one width, but the target has {hidden} and {width}",
                "use --arch lm or --arch retrieval, or --drafter lookup",
            )
        return self.new_head(self.architecture(recipe.drafter, target), target, frequent)

    def new_head(self, shape: DraftConfig, target: Target, frequent: Callable[[int], list[int]]) -> DraftHead:
        """Build a head of this shape that is initialized from `target`."""
        size = shape.draft_vocab_size
        ids = (torch.tensor(frequent(size)),) if size < shape.vocab_size else ()
        head = self.head(shape, *ids)
        head.initialise(target)
        return head

    def restore(self, config: dict[str, Any], tensors: dict[str, Tensor]) -> DraftHead:
        shape = self.config.from_dict(config.get("architecture"))
        head = build_with_weights(lambda: self.head(shape), tensors)
        if not bool(((head.draft_ids >= 0) & (head.draft_ids < head.config.vocab_size)).all()):
            raise config_error(WEIGHTS, "d2t", f"maps draft tokens to ids outside 0 … {head.config.vocab_size - 1}")
        return head

    def make_drafter(self, module: Any, target: Target, drafting: DraftingRecipe) -> Drafter:
        return self.drafter(module, target, shape_for(drafting, self.default_shape(target.device)))

    def stored_architecture(self, module: Any) -> dict[str, Any]:
        return module.config.to_dict()

    def set_training_options(self, module: Any, recipe: TrainRecipe) -> None:
        super().set_training_options(module, recipe)
        module.decay = recipe.ttt_decay
        if FAMILIES[self.name].unrolls_steps:
            module.steps = recipe.ttt_steps


def load_family(name: str) -> DrafterFamily:
    """Import a family. `name` is a key of `FAMILIES`."""
    return cast(DrafterFamily, pkgutil.resolve_name(FAMILIES[name].implementation))
