"""LoRA adapters of a drafter (Hu et al. 2021, arXiv 2106.09685): trained with peft, run on the base's weights.

An adapter is a specialist with a few per cent of its base's bytes. All adapters of a pool run on one copy of the base,
so switching between them copies nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated, Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from specctl.decoding.models.linear import Linear
from specctl.decoding.protocols import Drafter
from specctl.drafters.blueprint import CONFIG, WEIGHTS, check_finite, config_error, read, shortened_repr
from specctl.errors import RecipeError
from specctl.recipe import LoraRecipe

FusedPart = tuple[str, int]
"""Projection inside a fused linear product: (module name, number of outputs)."""

Product = tuple[Tensor, Tensor, Tensor | None]
"""Linear product x Wᵀ + b as (x [n, in], W [out, in], b [out] or None)."""


class LowRank:
    """Linear product with a low-rank update: x Wᵀ + (x Aᵀ) Bᵀ, with A [r, in] and B [out, r], already scaled."""

    def __init__(self, base: Linear, down: Tensor, up: Tensor):
        self.base, self.down, self.up = base, down.contiguous(), up.T.contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        return self.base(x).addmm_(F.linear(x, self.down), self.up)


@dataclass(frozen=True)
class LoraBase:
    """Base drafter of an adapter: its path relative to the adapter, and the digest of its weights."""

    path: Annotated[str, Field(max_length=1024)]
    sha256: Annotated[str, Field(max_length=64)]


@dataclass(frozen=True)
class LoraConfig:
    """Section "lora" in an adapter's config.json; the rest of the file is its base's."""

    rank: Annotated[int, Field(strict=True, gt=0, le=1 << 16)]
    alpha: Annotated[float, Field(strict=True, gt=0, le=1e6)]
    base: LoraBase | None = None

    @classmethod
    def of(cls, config: dict[str, Any]) -> LoraConfig:
        """Parse the section. CheckpointError names the key that is wrong."""
        return read(cls, config["lora"], "lora")


@dataclass(frozen=True)
class Adapter:
    """Weights of an adapter. `pairs` maps a module name to (A [r, in], B [out, r]), with B scaled by alpha / r."""

    pairs: dict[str, tuple[Tensor, Tensor]]

    @classmethod
    def of(cls, config: dict[str, Any], tensors: dict[str, Tensor]) -> Adapter:
        """Read the adapter from the contents of a checkpoint. Raises CheckpointError if they are not an adapter's."""
        shape = LoraConfig.of(config)
        for name, tensor in tensors.items():
            half, other = (UP, DOWN) if name.endswith(UP) else (DOWN, UP)
            if not name.endswith(half):
                raise config_error(WEIGHTS, shortened_repr(name), "is not a matrix of a LoRA update")
            if name.removesuffix(half) + other not in tensors:
                raise config_error(WEIGHTS, shortened_repr(name), "lacks the other matrix of its LoRA update")
            if tensor.dim() != 2 or shape.rank not in tensor.shape:
                raise config_error(
                    WEIGHTS, name, f"has shape {list(tensor.shape)}, but {CONFIG} says rank {shape.rank}"
                )
            check_finite(name, tensor)
        downs = {name.removesuffix(DOWN): tensor for name, tensor in tensors.items() if name.endswith(DOWN)}
        scale = shape.alpha / shape.rank
        return cls({name: (down, tensors[name + UP] * scale) for name, down in downs.items()})

    def check(self, base: dict[str, Tensor]) -> None:
        """Raise CheckpointError if the adapter does not fit a drafter with the weights `base`."""
        for name, (down, up) in self.pairs.items():
            weight = base.get(f"{name}.weight")
            if weight is None:
                raise config_error(WEIGHTS, name, "updates a matrix that its base does not have")
            if (len(up), down.shape[1]) != tuple(weight.shape) or up.shape[1] != len(down):
                sizes = f"A {list(down.shape)} and B {list(up.shape)}"
                raise config_error(WEIGHTS, name, f"{sizes} do not fit the matrix of the base, {list(weight.shape)}")

    def on(self, linear: Linear, parts: Sequence[FusedPart], device: torch.device) -> Linear | LowRank:
        """Return `linear`, a fused product of `parts`, with this adapter's updates; unchanged if no part is adapted."""
        found = [(name, size, *self.pairs[name]) for name, size in parts if name in self.pairs]
        if not found:
            return linear
        down = torch.cat([down for _, _, down, _ in found])
        starts = accumulate((size for _, size in parts), initial=0)
        offsets = {name: start for (name, _), start in zip(parts, starts, strict=False)}
        up = torch.zeros(sum(size for _, size in parts), len(down))
        column = 0
        for name, size, _, part in found:
            up[offsets[name] : offsets[name] + size, column : column + part.shape[1]] = part.float()
            column += part.shape[1]
        return LowRank(linear, down.to(device, linear.dtype), up.to(device, linear.dtype))

    def merge(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the base's `tensors` with the updates added: a drafter that stands alone."""
        merged = dict(tensors)
        for name, (down, up) in self.pairs.items():
            weight = merged[f"{name}.weight"]
            merged[f"{name}.weight"] = (weight.float() + up.float() @ down.float()).to(weight.dtype)
        return merged


@runtime_checkable
class AdaptableDrafter(Drafter, Protocol):
    """Drafter that low-rank updates can change."""

    def adapted(self, adapter: Adapter) -> Drafter:
        """Return a copy of this drafter with the updates; it shares all weights but has separate caches."""
        ...


UP, DOWN = ".lora_B.weight", ".lora_A.weight"


def inject(module: nn.Module, recipe: LoraRecipe, adaptable: Sequence[str]) -> None:
    """Freeze `module` and add low-rank updates to the projections named in the recipe, by default all `adaptable` ones.

    Raises RecipeError for a projection that the family does not adapt.
    """
    wanted = recipe.modules or list(adaptable)
    unknown = [name for name in wanted if name not in adaptable]
    if unknown:
        raise RecipeError(f"lora.modules: unknown {', '.join(unknown)}", f"use some of {', '.join(adaptable)}")
    import peft

    config = peft.LoraConfig(r=recipe.rank, lora_alpha=recipe.alpha, target_modules=wanted)  # type: ignore[arg-type]
    peft.inject_adapter_in_model(config, module)


def as_single_product(layer: Any, x: Tensor) -> Product:
    """Return a linear layer as one product (x, W, b), even if `inject` has adapted the layer.

    W x + s·B A x equals the matrix [W, s·B] times the input concatenated with A x, so callers need no separate case.
    """
    if isinstance(layer, nn.Linear):
        return x, layer.weight, layer.bias
    base, (name,) = layer.get_base_layer(), layer.active_adapters
    low = layer.lora_A[name](x)
    weight = torch.cat((base.weight, layer.scaling[name] * layer.lora_B[name].weight), 1)
    return torch.cat((x, low.to(x.dtype)), 1), weight, base.bias


def state(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Extract the updates from the state of an injected module, keyed by the names of their projections."""
    return {name.replace(".default.", "."): tensor for name, tensor in tensors.items() if ".lora_" in name}
