"""Interface between a target and the implementation of its model."""

from typing import Protocol

import torch
from torch import Tensor

from specctl.decoding.cache import KVCache
from specctl.decoding.plan import Plan


class Model(Protocol):
    """Interface that a target's model implements: `LeanModel`, `HFModel` or `LayerlessModel`."""

    dtype: torch.dtype
    device: torch.device
    hidden_size: int
    embedding: Tensor

    def new_cache(self, batch: int, capacity: int) -> KVCache: ...
    def forward(
        self, tokens: Tensor, cache: KVCache, plan: Plan, taps: tuple[int, ...]
    ) -> tuple[Tensor, Tensor | None]: ...
    def normed(self, states: Tensor) -> Tensor: ...
    def logits(self, hidden: Tensor) -> Tensor: ...
