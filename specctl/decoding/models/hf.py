"""Steps through `transformers`' own forward, for architectures that the lean step does not cover.

The model writes into our preallocated cache through transformers' cache-layer interface and takes our 4-D mask.
Rollback, trees and ragged batches therefore work exactly as on the lean path. This also works for a model that
`accelerate` has spread over several GPUs. Its hooks carry the rows from one GPU to the next; keys and values stay on
their layer's GPU; all results of this module are on the embedding's device.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer
from transformers.modeling_outputs import BaseModelOutputWithPast

from specctl.decoding.cache import KVCache
from specctl.decoding.models.model import PREFILL_ROWS
from specctl.decoding.models.supported import context_limit, window_size
from specctl.decoding.plan import Plan, additive_mask
from specctl.errors import UsageError
from specctl.kernels import Ancestry


class ShardedCache(KVCache):
    """KV cache of a model that is spread over several devices: one `KVCache` per device."""

    def __init__(self, devices: list[torch.device], batch: int, heads: int, capacity: int, head_dim: int, *, dtype):
        """`devices`: the device of every layer."""
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

    def first_rows(self, sequence: int, count: int) -> Tensor:
        """A copy of the first rows of a sequence, on the first layer's device."""
        rows = [self.parts[device].rows[index][sequence, :count] for device, index in self.places]
        return torch.stack([layer.to(rows[0].device) for layer in rows])

    def set_first_rows(self, sequence: int, rows: Tensor) -> None:
        for (device, index), layer in zip(self.places, rows, strict=True):
            self.parts[device].rows[index][sequence, : len(layer)] = layer.to(device)

    def compact(self, sequence: int, start: int, path: list[int]) -> None:
        for part in self.parts.values():
            part.compact(sequence, start, path)

    def sub_batch(self, start: int, stop: int) -> ShardedCache:
        some = copy.copy(self)
        some.parts = {device: part.sub_batch(start, stop) for device, part in self.parts.items()}
        some._views()
        return some

    def moved_to(self, larger: KVCache) -> KVCache:
        assert isinstance(larger, ShardedCache)
        for device, part in self.parts.items():
            part.moved_to(larger.parts[device])
        return larger

    def select(self, index: Tensor) -> None:
        for device, part in self.parts.items():
            part.select(index.to(device))
        self._views()


class _CacheLayer(CacheLayerMixin):
    """Cache layer for transformers that stores new keys and values in a `KVCache` and returns the slots to attend.

    The store is as wide as the widest layer's keys or values. For narrower ones, the rest of a row stays zero.
    """

    is_sliding = False

    def __init__(self, store: KVCache, index: int, plan: Plan):
        super().__init__()
        self.store, self.index, self.plan = store, index, plan
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """No-op: the store is preallocated."""

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        keys, values = self.store.keys[self.index], self.store.values[self.index]
        heads, dim = keys.shape[1], keys.shape[3]
        padded = [
            new
            if new.shape[1] == heads and new.shape[3] == dim
            else F.pad(new, (0, dim - new.shape[3], 0, 0, 0, heads - new.shape[1]))
            for new in (key_states, value_states)
        ]
        self.store.write(self.index, torch.cat(padded, 1).transpose(1, 2).flatten(0, 1), self.plan)
        span = self.plan.span
        return (
            keys[:, : key_states.shape[1], :span, : key_states.shape[3]],
            values[:, : value_states.shape[1], :span, : value_states.shape[3]],
        )

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.plan.span, 0

    def get_seq_length(self) -> int:
        return max(self.plan.base)

    def get_max_length(self) -> int:
        return self.store.capacity


class _States(BaseModelOutputWithPast):
    """Decoder output with hidden states only. Other fields that an architecture may read are None."""

    def __getattr__(self, name: str) -> None:
        return None


class _Passed(nn.Module):
    """Replacement for a model's decoder: returns its input embeddings as the last hidden state. It has the decoder's
    attributes, such as a factor of the logits."""

    def __init__(self, original: nn.Module):
        super().__init__()
        self.original = [original]  # in a list, and so no submodule

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattribute__("original")[0], name)

    @property
    def decoder(self) -> _Passed:
        """This module itself: OPT and similar models call this attribute."""
        return self

    def forward(self, *args, inputs_embeds: Tensor, **kwargs) -> _States:
        return _States(last_hidden_state=inputs_embeds)


def without_decoder(model: Any, child: str) -> Any:
    """A copy of a model without its decoder, which is in the child module `child`: the head, and an architecture's
    operations before and after it (scales, caps)."""
    tail = copy.copy(model)
    tail._modules = model._modules | {child: _Passed(model._modules[child])}
    return tail


def logits_of(tail: Any, hidden: Tensor) -> Tensor:
    """Logits [..., V] of final hidden states [..., H], by a model of `without_decoder`."""
    rows = hidden.reshape(1, -1, hidden.shape[-1])
    # Not `tail(…)`: `accelerate`'s hooks on the model would run the decoder.
    logits: Tensor = type(tail).forward(tail, inputs_embeds=rows, use_cache=False).logits
    return logits.view(*hidden.shape[:-1], -1)


class HFModel:
    """Model with the interface of `LeanModel`, for any decoder-only `transformers` model with a key/value cache."""

    def __init__(self, model):
        config = model.config.get_text_config()
        self.model = model
        prefix = model.base_model_prefix if model.base_model is not model else "model"
        self.body = getattr(model, prefix)
        self.tail = without_decoder(model, prefix)
        self.dtype = model.dtype
        self.device = model.get_input_embeddings().weight.device
        self.hidden_size = config.hidden_size
        self.prefill_rows = PREFILL_ROWS
        self.embedding = model.get_input_embeddings().weight.detach()
        # Padding rows may exceed the context, where learned positions end and some RoPE frequencies change.
        self.last_position = (context_limit(config) or 1 << 31) - 1
        self.num_layers = config.num_hidden_layers
        # Gemma 3n has several streams of hidden states; attention and MLP read only this one.
        self.stream: int | None = getattr(config, "altup_active_idx", None)
        self.window = window_size(config)
        self.mixed = len(set(getattr(config, "layer_types", None) or [])) > 1
        stored = self._stored()
        shapes = [part.shape for pair in stored if pair is not None for part in pair]
        self.kv_heads, self.head_dim = max(shape[1] for shape in shapes), max(shape[3] for shape in shapes)
        self.layer_devices = [self.device if pair is None else pair[0].device for pair in stored]

    @torch.no_grad()
    def _stored(self) -> list[tuple[Tensor, Tensor] | None]:
        """Keys and values [1, heads, 1, D] of each layer for one token, None for a layer that stores nothing. No
        configuration field gives their shapes for all architectures."""
        layers: list[Any] = [DynamicLayer() for _ in range(self.num_layers)]
        token = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        self.body(input_ids=token, position_ids=token, past_key_values=Cache(layers=layers), use_cache=True)
        return [(layer.keys, layer.values) if layer.is_initialized else None for layer in layers]

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        shape = (batch, self.kv_heads, capacity, self.head_dim)
        if set(self.layer_devices) != {self.device}:
            return ShardedCache(self.layer_devices, *shape, dtype=self.dtype)
        return KVCache(self.num_layers, *shape, dtype=self.dtype, device=self.device)

    def _masks(self, plan: Plan, batch: int, rows: int) -> Tensor | dict[str, Tensor] | None:
        if plan.causal and self.window is None:
            return None  # plain causal attention, which SDPA does without a quadratic mask
        full = plan.mask
        if full is None:
            base = torch.tensor(plan.base, device=self.device)
            full = additive_mask(Ancestry(base, rows).allowed(rows, plan.span), self.dtype)
        full = full.expand(batch, 1, rows, plan.span)
        if self.window is None:
            return {"full_attention": full} if self.mixed else full
        narrow = replace(plan, mask=full).with_window(self.window, self.dtype).mask
        assert narrow is not None
        return {"full_attention": full, "sliding_attention": narrow} if self.mixed else narrow

    def forward(
        self, tokens: Tensor, cache: KVCache, plan: Plan, taps: tuple[int, ...]
    ) -> tuple[Tensor, Tensor | None]:
        """Run one forward, like `LeanModel.forward`."""
        batch, rows = tokens.shape
        plan = plan.masked(self.dtype)
        layers: list[Any] = [_CacheLayer(cache, index, plan) for index in range(self.num_layers)]
        output = self.body(
            input_ids=tokens,
            position_ids=plan.positions.expand(batch, -1).clamp(max=self.last_position),
            attention_mask=self._masks(plan, batch, rows),
            past_key_values=Cache(layers=layers),
            use_cache=True,
            output_hidden_states=bool(taps),
        )
        tapped = None
        if taps:
            states = output.hidden_states
            if self.stream is not None:
                states = (*(streams[self.stream] for streams in states[:-1]), output.last_hidden_state)
            tapped = torch.cat([states[tap].to(self.device, self.dtype) for tap in taps], -1)
        return output.last_hidden_state.to(self.device), tapped

    def normed(self, states: Tensor) -> Tensor:
        """Apply the final norm, like `LeanModel.normed`, with the body's last module under any name."""
        place = next((parameter.device for parameter in self._norm.parameters()), self.device)
        return self._norm(states.to(place, self.dtype)).to(self.device)

    @cached_property
    @torch.no_grad()
    def _norm(self) -> nn.Module:
        """The module with the body's last hidden state as its output. UsageError if there is none."""
        made: list[tuple[nn.Module, Any]] = []
        hooks = [
            module.register_forward_hook(lambda module, _, output: made.append((module, output)))
            for module in self.body.modules()
        ]
        token = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        try:
            last = self.body(input_ids=token, position_ids=token, use_cache=False).last_hidden_state
        finally:
            for hook in hooks:
                hook.remove()
        for module, output in reversed(made):
            if isinstance(module, nn.Dropout) or any(parameter.ndim > 1 for parameter in module.parameters()):
                continue  # a model that ends without a norm, or an embedding without layers
            # Not `is`: some architectures reshape the output before they return it.
            if isinstance(output, Tensor) and (output.data_ptr(), output.numel()) == (last.data_ptr(), last.numel()):
                return module
        raise UsageError(f"{type(self.model).__name__} does not end with a norm that can be applied separately")

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute logits, like `LeanModel.logits`, with the model's own code. This includes heads of two layers and
        scaled or capped logits."""
        return logits_of(self.tail, hidden).to(self.device)
