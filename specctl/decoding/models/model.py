"""Interface between a target and the implementation of its model."""

from typing import Protocol

import torch
from torch import Tensor

from specctl.decoding.cache import KVCache
from specctl.decoding.plan import Plan

# Rows of one forward, padding included. A few hundred rows keep an H100 busy. With an 8B target, 8,192 rows take about
# 2 GB of activations; 64 prompts of 4,096 tokens at once would take 60 GB.
PREFILL_ROWS = 8192


class Model(Protocol):
    """Interface that a target's model implements: `LeanModel`, `HFModel` or `LayerlessModel`.

    Attributes:
        prefill_rows: most rows of one forward of a prefill.
    """

    dtype: torch.dtype
    device: torch.device
    hidden_size: int
    embedding: Tensor
    prefill_rows: int

    def new_cache(self, batch: int, capacity: int) -> KVCache: ...
    def forward(
        self, tokens: Tensor, cache: KVCache, plan: Plan, taps: tuple[int, ...]
    ) -> tuple[Tensor, Tensor | None]: ...
    def normed(self, states: Tensor) -> Tensor: ...
    def logits(self, hidden: Tensor) -> Tensor: ...
