"""Heads of one shape scored as one: N products of a few rows are one launch on a GPU, not N.

On a CPU this gains nothing: N packed products take as long as the batched one (7 heads of the built-in size, 37 and 47
rows, one thread: 0.9 to 1.2 times as long for each of the head's matrices), so there heads are scored one by one.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from specctl.decoding.draft import Drafter, Score
from specctl.decoding.layers import DraftLinear, Linear, RMSNorm
from specctl.decoding.state import DecodeState
from specctl.drafters.feature import FeatureDrafter


def teams(drafters: Sequence[Drafter]) -> list[list[int]]:
    """Places of the drafters that are scored together: feature heads of one shape on a GPU; others alone."""
    found: dict[Hashable, list[int]] = {}
    for place, drafter in enumerate(drafters):
        shape = _shape(drafter) if isinstance(drafter, FeatureDrafter) and drafter.device.type != "cpu" else None
        found.setdefault(place if shape is None else shape, []).append(place)
    return list(found.values())


def _shape(head: FeatureDrafter) -> Hashable | None:
    """What heads must share to be stacked; None for one that cannot be: its weights are packed, or adapted (LoRA)."""
    sizes: list[Hashable] = [type(head), head.taps, tuple(head._inv_freq.tolist())]
    for name, part in sorted(vars(head).items()):
        if isinstance(part, Linear):
            if part.packed:
                return None
            sizes.append((name, part.weight.shape, part.bias is None))
        elif isinstance(part, RMSNorm):
            sizes.append((name, float(part.floor)))
        elif name in PRODUCTS:
            return None
    return tuple(sizes)


PRODUCTS = {"qkv", "o", "gate_up", "down", "fc", "head"}
TABLES = {"token_input", "token_part"}  # [V, ·] what depends on the token alone


class Stacked:
    """N `heads` of one shape. Their weights become views of the stacked ones: nothing is stored twice."""

    def __init__(self, heads: Sequence[FeatureDrafter]):
        self.heads = list(heads)
        self._whole = copy.copy(heads[0])
        for name in vars(heads[0]):
            parts = [vars(head)[name] for head in heads]
            setattr(self._whole, name, _stack(name, parts))
            if name in TABLES:
                for head, part in zip(heads, getattr(self._whole, name).chunk(len(heads)), strict=True):
                    setattr(head, name, part)

    def score(self, state: DecodeState, spans: list[range], depths: int = 1) -> list[list[Score]]:
        """The scores of every head, as they are one by one."""
        return self._whole.score_as(self.heads, state, spans, depths)


def _stack(name: str, parts: list[Any]) -> Any:
    first = parts[0]
    if isinstance(first, Linear):
        shared = len({part.weight.data_ptr() for part in parts}) == 1  # the target's vocabulary head
        return first if shared else _Products(parts)
    if isinstance(first, RMSNorm):
        return _Norms(parts)
    return torch.cat(parts) if name in TABLES else first


class _Products:
    """N products of one shape; head n's rows are the n-th of N equal parts."""

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
    """N norms of one width, on rows as `_Products` has them."""

    def __init__(self, norms: list[RMSNorm]):
        self.count, self.norm = len(norms), copy.copy(norms[0])
        self.norm.scale = torch.stack([norm.scale for norm in norms])[:, None]

    def __call__(self, x: Tensor) -> Tensor:
        return self.norm(x.unflatten(0, (self.count, -1))).flatten(0, 1)
