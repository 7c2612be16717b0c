"""Steps through `transformers`' own forward, for architectures that the lean step does not cover.

The model writes into our preallocated cache through transformers' cache-layer interface and takes our 4-D mask, so
rollback, trees and ragged batches work exactly as on the lean path. So does a model whose layers `accelerate` has
spread over several GPUs: its hooks carry the rows from one to the next, keys and values stay where their layer is, and
what leaves this file is on the device of the embedding.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from specctl.decoding.cache import KVCache, Plan


class ShardedCache(KVCache):
    """Keys and values where the layers are: one `KVCache` for each device of a model that is spread over several."""

    def __init__(self, devices: list[torch.device], batch: int, heads: int, capacity: int, head_dim: int, *, dtype):
        """`devices`: that of every layer."""
        self.parts = {
            device: KVCache(devices.count(device), batch, heads, capacity, head_dim, dtype=dtype, device=device)
            for device in dict.fromkeys(devices)
        }
        self.capacity = capacity
        self.places = [(device, devices[:layer].count(device)) for layer, device in enumerate(devices)]
        self._views()

    def _views(self) -> None:
        self.keys = [self.parts[device].keys[index] for device, index in self.places]
        self.values = [self.parts[device].values[index] for device, index in self.places]
        self.batch = next(iter(self.parts.values())).batch

    def write(self, layer: int, pairs: Tensor, plan: Plan) -> None:
        device, index = self.places[layer]
        self.parts[device].write(index, pairs, replace(plan, positions=plan.positions.to(pairs.device)))

    def compact(self, sequence: int, start: int, path: list[int]) -> None:
        for part in self.parts.values():
            part.compact(sequence, start, path)

    def sequence(self, index: int) -> ShardedCache:
        alone = copy.copy(self)
        alone.parts = {device: part.sequence(index) for device, part in self.parts.items()}
        alone._views()
        return alone

    def select(self, index: Tensor) -> None:
        for device, part in self.parts.items():
            part.select(index.to(device))
        self._views()


class _Layer(CacheLayerMixin):
    """Hands a layer's new keys and values to the KVCache and returns the slots that attention reads."""

    is_sliding = False

    def __init__(self, store: KVCache, index: int, plan: Plan):
        super().__init__()
        self.store, self.index, self.plan = store, index, plan
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the store is preallocated."""

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        pairs = torch.cat((key_states, value_states), 1).transpose(1, 2).flatten(0, 1)
        self.store.write(self.index, pairs, self.plan)
        span = self.plan.span
        return self.store.keys[self.index][:, :, :span], self.store.values[self.index][:, :, :span]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.plan.span, 0

    def get_seq_length(self) -> int:
        return max(self.plan.base)

    def get_max_length(self) -> int:
        return self.store.capacity


class HFModel:
    """The same interface as `LeanModel` over any decoder-only `transformers` model with a key/value cache."""

    def __init__(self, model):
        config = model.config.get_text_config()
        self.model = model
        self.dtype = model.dtype
        self.device = model.get_input_embeddings().weight.device
        self.hidden_size = config.hidden_size
        self.embedding = model.get_input_embeddings().weight.detach()
        self.kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        # Padding rows may stand behind the context; learned positions end there.
        self.last_position = (getattr(config, "max_position_embeddings", None) or 1 << 31) - 1
        self.num_layers = config.num_hidden_layers
        self.window = getattr(config, "sliding_window", None)
        layer_types = set(getattr(config, "layer_types", None) or [])
        self.mixed = len(layer_types) > 1
        self.layer_devices = _layer_devices(model, self.num_layers)
        self.sliding = self.window is not None and ("sliding_attention" in layer_types or not layer_types)

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        shape = (batch, self.kv_heads, capacity, self.head_dim)
        if set(self.layer_devices) != {self.device}:
            return ShardedCache(self.layer_devices, *shape, dtype=self.dtype)
        return KVCache(self.num_layers, *shape, dtype=self.dtype, device=self.device)

    def _masks(self, plan: Plan, batch: int, rows: int) -> Tensor | dict[str, Tensor] | None:
        if plan.causal and not self.sliding:
            return None  # plain causal attention, which SDPA does without a quadratic mask
        full = plan.mask
        if full is None:
            slots = torch.arange(plan.span, device=self.device)
            start = torch.tensor(plan.base, device=self.device).view(-1, 1, 1)
            allowed = slots.view(1, 1, -1) <= start + torch.arange(rows, device=self.device).view(1, -1, 1)
            full = torch.zeros(batch, rows, plan.span, dtype=self.dtype, device=self.device)
            full = full.masked_fill_(~allowed, float("-inf")).unsqueeze(1)
        full = full.expand(batch, 1, rows, plan.span)
        if not self.sliding or self.window is None:
            return {"full_attention": full} if self.mixed else full
        behind = self._slot_positions(plan, batch) <= plan.positions.unsqueeze(-1) - self.window
        narrow = full.masked_fill(behind.unsqueeze(1), float("-inf"))
        return {"full_attention": full, "sliding_attention": narrow} if self.mixed else narrow

    def _slot_positions(self, plan: Plan, batch: int) -> Tensor:
        """[B, 1, span] absolute position held by each cache slot (a draft node's slot is not its position)."""
        slots = torch.arange(plan.span, device=self.device).expand(batch, -1).clone()
        rows = plan.positions.shape[1]
        where = torch.tensor(plan.base, device=self.device).unsqueeze(1) + torch.arange(rows, device=self.device)
        slots.scatter_(1, where, plan.positions.expand(batch, -1))
        return slots.unsqueeze(1)

    def forward(
        self, tokens: Tensor, cache: KVCache, plan: Plan, taps: tuple[int, ...]
    ) -> tuple[Tensor, Tensor | None]:
        """As `LeanModel.forward`."""
        batch, rows = tokens.shape
        layers: list[Any] = [_Layer(cache, index, plan) for index in range(self.num_layers)]
        output = self.model(
            input_ids=tokens,
            position_ids=plan.positions.expand(batch, -1).clamp(max=self.last_position),
            attention_mask=self._masks(plan, batch, rows),
            past_key_values=Cache(layers=layers),
            use_cache=True,
            output_hidden_states=True,
            logits_to_keep=1,
        )
        states = output.hidden_states
        tapped = torch.cat([states[tap].to(self.device, self.dtype) for tap in taps], -1) if taps else None
        return states[-1].to(self.device), tapped

    def logits(self, hidden: Tensor) -> Tensor:
        """As `LeanModel.logits`, with a final soft-cap where the configuration has one (Gemma 2)."""
        logits = self.model.get_output_embeddings()(hidden).to(self.device)
        cap = getattr(self.model.config.get_text_config(), "final_logit_softcapping", None)
        return torch.tanh(logits / cap) * cap if cap else logits


def _layer_devices(model, layers: int) -> list[torch.device]:
    """The device of every decoder layer, wherever the architecture keeps the list of them."""
    embedding = model.get_input_embeddings().weight.device
    blocks = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == layers]
    return [next(block.parameters()).device for block in blocks[0]] if blocks else [embedding] * layers
