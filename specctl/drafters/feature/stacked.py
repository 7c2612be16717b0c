"""Score several draft heads in one forward: N small matrix products become one launch on a GPU.

Heads of the same shape are stacked on a GPU. On a CPU this gains nothing, so heads are scored one by one: N packed
products take 0.9 to 1.2 times as long as the batched one (each matrix of 7 heads of the built-in size, 37 and 47 rows,
one thread).

LoRA adapters of one base share one forward of the base on any device, plus a batched low-rank product for each of its
matrices.
"""

import copy
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from specctl.decoding.models.layers import RMSNorm, RMSNorms
from specctl.decoding.models.linear import DraftLinear, Linear
from specctl.decoding.protocols import Drafter
from specctl.decoding.records import Score
from specctl.decoding.state import DecodeState
from specctl.drafters.feature.drafter import FeatureDrafter
from specctl.drafters.feature.layer import HeadWeights
from specctl.drafters.lora import LowRank


def scoring_groups(drafters: Sequence[Drafter]) -> list[list[int]]:
    """Group the drafters that are scored together, as lists of indices.

    Feature heads on one base form a group, including the base. On a GPU, heads of one shape do too. Other drafters stay
    alone.
    """
    bases = {place: _base(head) for place, head in enumerate(drafters) if isinstance(head, FeatureDrafter)}
    sharing = {base for base, count in Counter(bases.values()).items() if count > 1}
    found: dict[Hashable, list[int]] = {}
    for place, drafter in enumerate(drafters):
        team: Hashable = None
        if isinstance(drafter, FeatureDrafter):
            on_gpu = drafter.device.type != "cpu"
            team = bases[place] if bases[place] in sharing else _shape(drafter) if on_gpu else None
        found.setdefault(place if team is None else team, []).append(place)
    return list(found.values())


def _base(head: FeatureDrafter) -> Hashable:
    """Identity of the base's products: equal for the base and all its adapters."""
    held = ([vars(layer)[name] for name in sorted(PRODUCTS & vars(layer).keys())] for layer in (head, *head.upper))
    return tuple(id(part.base if isinstance(part, LowRank) else part) for parts in held for part in parts)


def _shape(head: FeatureDrafter) -> Hashable | None:
    """Shape key of a head, or None if it cannot be stacked because its weights are packed or adapted (LoRA)."""
    layers = [_sizes(layer) for layer in (head, *head.upper)]
    if any(sizes is None for sizes in layers):
        return None
    return (type(head), head.taps, head.window, *head._inv_freq.tolist(), *layers)


def _sizes(layer: HeadWeights) -> Hashable | None:
    """Shape key of the weights that an object holds itself, or None if they cannot be stacked."""
    sizes: list[Hashable] = []
    for name, part in sorted(vars(layer).items()):
        if isinstance(part, Linear):
            if part.packed:
                return None
            sizes.append((name, part.weight.shape, part.bias is None))
        elif isinstance(part, RMSNorm):
            sizes.append((name, part.weight.shape, float(part.floor)))
        elif isinstance(part, bool):
            sizes.append((name, part))
        elif name in PRODUCTS:
            return None
    return tuple(sizes)


PRODUCTS = {"qkv", "o", "gate_up", "down", "fc", "head"}
TABLES = {"token_input", "token_part"}  # tables [V, ·] that depend on the token alone


class Stacked:
    """N `heads` of one shape, scored together.

    The weights of the single heads become views of the stacked ones, so no weight is stored twice.
    """

    def __init__(self, heads: Sequence[FeatureDrafter]):
        self.heads = list(heads)
        self._whole = _stacked(heads)
        for name in TABLES & vars(heads[0]).keys():
            parts = [vars(head)[name] for head in heads]
            if not _one(parts):
                self._whole.stride = len(self._whole.embedding)
                for head, part in zip(heads, getattr(self._whole, name).chunk(len(heads)), strict=True):
                    setattr(head, name, part)

    def score(self, state: DecodeState, spans: list[range], depths: int = 1) -> list[list[Score]]:
        """Score all heads, with the same results as separate calls."""
        return self._whole.score_as(self.heads, state, spans, depths)


def _stacked(layers: Sequence[Any]) -> Any:
    """A copy of the first of several heads or layers, with the weights of all of them."""
    whole = copy.copy(layers[0])
    for name in vars(whole):
        setattr(whole, name, _stack(name, [vars(layer)[name] for layer in layers]))
    return whole


def _stack(name: str, parts: list[Any]) -> Any:
    first = parts[0]
    if _one(parts):
        return first
    if name == "upper":
        return [_stacked(layers) for layers in zip(*parts, strict=True)]
    if any(isinstance(part, LowRank) for part in parts):
        return _Updated(parts)
    if isinstance(first, Linear):
        shared = len({part.weight.data_ptr() for part in parts}) == 1  # the target's vocabulary head
        return first if shared else _Products(parts)
    if isinstance(first, RMSNorm):
        return _Norms(parts)
    return torch.cat(parts) if name in TABLES else first


def _one(parts: list[Any]) -> bool:
    return all(part is parts[0] for part in parts)


class _Updated:
    """One product with N low-rank updates, not all empty; the product's weights are read once for all rows."""

    def __init__(self, parts: list[Linear | LowRank]):
        updates = {n: part for n, part in enumerate(parts) if isinstance(part, LowRank)}
        first = next(iter(updates.values()))
        rank = max(len(update.down) for update in updates.values())
        self.base = first.base
        self.down = first.down.new_zeros(len(parts), rank, first.down.shape[1])  # [N, r, in]
        self.up = first.up.new_zeros(len(parts), rank, first.up.shape[1])  # [N, r, out]
        for n, update in updates.items():
            for whole, part in ((self.down, "down"), (self.up, "up")):
                mine = whole[n, : len(update.down)]
                setattr(update, part, mine.copy_(getattr(update, part)))

    def __call__(self, x: Tensor) -> Tensor:
        y = self.base(x)
        rows = x.unflatten(0, (len(self.down), -1))
        y.unflatten(0, (len(self.down), -1)).baddbmm_(torch.bmm(rows, self.down.transpose(1, 2)), self.up)
        return y


class _Products:
    """N products of one shape; the rows are split into N equal parts, one per head."""

    def __init__(self, products: list[DraftLinear]):
        self.weight = torch.stack([product.weight for product in products])  # [N, out, in]
        biases = [product.bias for product in products if product.bias is not None]
        self.bias = torch.stack(biases)[:, None] if biases else None
        for product, weight in zip(products, self.weight, strict=True):
            product.weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.unflatten(0, (len(self.weight), -1))
        y = torch.bmm(rows, self.weight.transpose(1, 2))
        return (y if self.bias is None else y.add_(self.bias)).flatten(0, 1)


class _Norms:
    """N norms of one width, on rows split as in `_Products`."""

    def __init__(self, norms: list[RMSNorm]):
        first = norms[0]
        self.count, self.shape = len(norms), first.weight.shape
        self.norm = RMSNorms(torch.stack([norm.weight for norm in norms])[:, None], first.eps, first.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        return self.norm(x.unflatten(0, (self.count, -1))).flatten(0, 1)
