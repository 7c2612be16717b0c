"""Run-time weights of draft heads, and decoder layers with a KV cache that read the target's features."""

import copy
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from specctl.decoding.cache import KVCache
from specctl.decoding.device.device_batch import CommittedSlots
from specctl.decoding.models.layers import RMSNorm, add_norm, attend, fuses, gated
from specctl.decoding.models.linear import DraftLinear, Linear
from specctl.decoding.models.native import PRODUCTS, NativeStep, native_step
from specctl.decoding.plan import Plan, plan_rows
from specctl.decoding.rope import Rope
from specctl.decoding.state import DecodeState, lagging_sequences
from specctl.decoding.target import Target
from specctl.drafters.feature.head import DraftHead, HeadConfig, HeadLayer, NormedLayer
from specctl.drafters.lora import Adapter, FusedPart
from specctl.kernels.self_check import LayerShape

Table = Callable[[], tuple[Tensor, Tensor]]
"""Function that builds the rotary table of some rows; it is lazy because the C++ step does not need one."""
Projected = tuple[Tensor, Tensor, Tensor]
"""Inputs of a layer's attention: the residual stream [N, H] fp32 before the layer, its keys concatenated with values
[N, 2·Hkv, D], and its queries [N, Hq, D], rotated."""
Attention = Callable[[int, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Attention of a layer: (its place, then what `Projected` holds) → the residual stream and the attention output, of all
rows or of the needed ones."""


class HeadWeights:
    """Copies of a module's weights, fused and packed like the target's; LoRA adapters can update them."""

    q_norm: RMSNorm | None = None
    k_norm: RMSNorm | None = None

    def __init__(self, module: nn.Module, target: Target):
        self.device, self.dtype = target.device, target.dtype
        self._names = {id(part): name for name, part in module.named_modules()}  # by id: no reference to the module
        self._parts: dict[Linear, list[FusedPart]] = {}

    def weight(self, module: nn.Linear) -> Tensor:
        """Weight of a projection in the target's dtype, on the target's device."""
        return module.weight.detach().to(self.device, self.dtype)

    def linear(self, *modules: nn.Linear) -> Linear:
        """Fuse projections of the same input into one product; either all of them have a bias or none has."""
        biases = [module.bias.detach().to(self.device, self.dtype) for module in modules if module.bias is not None]
        weight = torch.cat([self.weight(module) for module in modules])
        product = DraftLinear(weight, torch.cat(biases) if biases else None)
        self._parts[product] = [(self._names[id(module)], module.out_features) for module in modules]
        return product

    def take_layer(self, layer: HeadLayer) -> None:
        """Copy the projections and the norms of a decoder layer, except for the norm before the attention."""
        attention, mlp = layer.self_attn, layer.mlp
        self.shape_of_layer = shape_of(layer)
        if attention.q_norm is not None and attention.k_norm is not None:
            self.q_norm, self.k_norm = self.rms_norm(attention.q_norm), self.rms_norm(attention.k_norm)
        self.qkv = self.linear(attention.q_proj, attention.k_proj, attention.v_proj)
        self.o = self.linear(attention.o_proj)
        self.gate_up = self.linear(mlp.gate_proj, mlp.up_proj)
        self.down = self.linear(mlp.down_proj)
        self.post_norm = self.rms_norm(layer.post_attention_layernorm)

    def rotated(self, inputs: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
        """Queries, keys and values [N, Hq + 2·Hkv, D] for inputs [N, ·] of the projections, normed and rotated."""
        _, _, heads, kv_heads, dim, _ = self.shape_of_layer
        qkv = self.qkv(inputs).view(len(inputs), -1, dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k, v = qkv.split((heads, kv_heads, kv_heads), 1)
            qkv = torch.cat((self.q_norm(q.float()), self.k_norm(k.float()), v), 1)
        return Rope.rotate(qkv, table)

    def vocabulary_head(self, target: Target) -> tuple[DraftLinear, float]:
        """Target's vocabulary head as a product, and the scale of its inputs.

        The target's logit cap is left out, as it would not change the order of the tokens.
        """
        shift = target.squash.shift
        bias = None if shift is None else shift.to(self.dtype)
        return DraftLinear(target.head_weight.to(self.dtype), bias), target.squash.scale

    def rms_norm(self, module: nn.RMSNorm) -> RMSNorm:
        assert module.eps is not None
        return RMSNorm(module.weight.detach().to(self.device), module.eps, self.dtype)

    def adapted(self, adapter: Adapter) -> Self:
        """Return a copy of this drafter with low-rank updates; it shares all weights but has separate caches."""
        twin = copy.copy(self)
        for name, value in vars(self).items():
            setattr(twin, name, self._updated(value, adapter))
        return twin

    def _updated(self, value: Any, adapter: Adapter) -> Any:
        if isinstance(value, Linear):
            return adapter.on(value, self._parts.get(value, []), self.device)
        if isinstance(value, HeadWeights):
            return value.adapted(adapter)
        return [self._updated(part, adapter) for part in value] if isinstance(value, list) else value


@dataclass
class FeatureMemory:
    """KV cache of the layers: slots 0 .. cached−1 hold keys and values computed from the target's features."""

    cache: KVCache
    cached: list[int]
    hidden: Tensor  # [B, H] output of the last layer at the last slot, before its norm

    def select(self, index: Tensor) -> None:
        self.cache.select(index)
        self.cached = [self.cached[b] for b in index.tolist()]
        self.hidden = self.hidden[index]

    def renew(self, b: int) -> None:
        self.cached[b], self.cache.skipped[b] = 0, range(0)

    @property
    def nbytes(self) -> int:
        return self.cache.nbytes + self.hidden.nbytes


class FeatureReader(HeadWeights, ABC):
    """Base class of heads that keep keys and values computed from the target's features.

    Slot i holds the feature of position i.

    Attributes:
        layers: number of decoder layers with keys and values.
        size: width of the state carried from one round to the next; 0 = no state.
        reach: slots that a draft needs after the committed ones, beyond the slots of the target's step.
    """

    layers = 1

    @property
    def reach(self) -> int:
        return 0

    def __init__(self, head: DraftHead, config: HeadConfig, inv_freq: Tensor, target: Target):
        super().__init__(head, target)
        self.taps = head.config.taps
        self.size = config.hidden_size
        self.heads, self.kv_heads, self.dim = config.num_heads, config.num_kv_heads, config.head_dim
        self._inv_freq = inv_freq.to(self.device)
        self.key = object()  # key of its memory; twins that differ only in tree shape share it
        self._rope: Rope | None = None

    def adapted(self, adapter: Adapter) -> Self:
        twin = super().adapted(adapter)
        twin.key = object()
        return twin

    @abstractmethod
    def feature(self, tapped: Tensor) -> Tensor:
        """Fuse tapped target states [N, F] to features [N, H] in fp32."""

    @abstractmethod
    def _fill(self, state: DecodeState, memory: FeatureMemory, b: int, slots: range) -> None:
        """Fill some slots of sequence b."""

    @abstractmethod
    def _fill_last(self, state: DecodeState, memory: FeatureMemory, width: int) -> None:
        """Fill every sequence's last `width` slots, new or not, so no padding row can lie past the cache's end."""

    @abstractmethod
    def read_at(self, new: CommittedSlots, cache: KVCache, span: int) -> Tensor:
        """Fill the slots that a device-side round has added. Returns the state [B, size] for the next round."""

    def _rope_for(self, capacity: int) -> Rope:
        if self._rope is None or self._rope.cos.shape[0] < capacity:
            self._rope = Rope.of(self._inv_freq, torch.arange(capacity, device=self.device), self.dtype)
        return self._rope

    def _memory(self, state: DecodeState) -> FeatureMemory:
        memory = state.memory.get(self.key)
        if memory is None:
            hidden = torch.zeros(state.batch, self.size, device=state.device)
            memory = state.memory[self.key] = FeatureMemory(self._new_cache(state), [0] * state.batch, hidden)
        elif memory.cache.capacity < state.capacity + self.reach:
            memory.cache = memory.cache.moved_to(self._new_cache(state))
        return memory

    def _new_cache(self, state: DecodeState) -> KVCache:
        options = dict(dtype=state.dtype, device=state.device)
        capacity = state.capacity + self.reach
        cache = KVCache(self.layers, state.batch, self.kv_heads, capacity, self.dim, **options)
        cache.rope = self._rope_for(capacity)
        return cache

    def invalidate(self, state: DecodeState) -> None:
        """Forget keys and values; the next `advance` recomputes them from the retained features."""
        state.memory.pop(self.key, None)

    def lag(self, state: DecodeState) -> list[int]:
        """Number of committed slots per sequence that the next `advance` fills."""
        memory = state.memory.get(self.key)
        cached = [0] * state.batch if memory is None else memory.cached
        pairs = list(zip(cached, state.cached, strict=True))
        assert all(start <= end for start, end in pairs), "stale draft cache"
        return [state.catch_up.count(start, end) for start, end in pairs]

    def advance(self, state: DecodeState) -> None:
        """Fill slots `cached` .. len−2 of every row, except the slots that the catch-up policy skips.

        Slot i holds the feature of position i and the token after it.
        """
        self.lag(state)  # asserts that the cache is not stale
        memory = self._memory(state)
        fill = partial(self._fill, state, memory)
        memory.cached = state.catch_up.skip(memory.cache, memory.cached, state.cached, fill)
        missing = [end - start for start, end in zip(memory.cached, state.cached, strict=True)]
        lagging = lagging_sequences(missing, state.device)
        for b in lagging:
            fill(b, range(memory.cached[b], state.cached[b]))
        width = max((count for b, count in enumerate(missing) if b not in lagging), default=0)
        if width > 0:
            self._fill_last(state, memory, width)
        memory.cached = list(state.cached)

    def fill_skipped(self, state: DecodeState, asked: list[int]) -> None:
        """Fill the skipped slots from `asked` [B] on, and a window before them."""
        memory = self.current(state)
        width = state.catch_up.slots_to_reread(memory.cache, asked, state.cached)
        if width > 0:
            self._fill_last(state, memory, width)

    def current(self, state: DecodeState) -> FeatureMemory:
        """Return the memory, which must reach the last committed token."""
        memory = self._memory(state)
        assert memory.cached == state.cached, "stale draft cache"
        return memory


class UpperLayer(HeadWeights):
    """Decoder layer over the output rows of the previous layer."""

    def __init__(self, head: DraftHead, layer: NormedLayer, target: Target):
        super().__init__(head, target)
        self.take_layer(layer)
        self.input_norm = self.rms_norm(layer.input_layernorm)

    def project(self, x: Tensor, table: tuple[Tensor, Tensor]) -> Projected:
        """Project rows [N, H] of the previous layer's output."""
        qkv, heads = self.rotated(self.input_norm(x), table), self.shape_of_layer.heads
        return x, qkv[:, heads:], qkv[:, :heads]


class FeatureLayer(FeatureReader):
    """Decoder layers, the first over (token, feature) pairs: slot i holds the feature of position i and the token after
    it.

    Attributes:
        upper: layers after the first.
        window: number of positions that a row attends to, including its own (None = all up to its own). A window frees
            no cache memory.
        output_norm: norm applied to the last layer's output before the next step reads it (None = no norm).
    """

    upper: Sequence[UpperLayer] = ()
    window: int | None = None
    output_norm: RMSNorm | None = None

    def __init__(self, head: DraftHead, layer: HeadLayer, target: Target):
        super().__init__(head, layer.config, layer.inv_freq, target)
        self.take_layer(layer)
        self._native: tuple[object, NativeStep | None] | None = None

    @abstractmethod
    def layer_input(self, tokens: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """Map tokens [N] and features [N, H] to the residual stream [N, H] fp32 and the input of the projections."""

    def _tables(self, memory: FeatureMemory, steps: int, width: int = 1) -> list[Table]:
        """Rotary tables of a round's drafting steps, for `width` rows per sequence, all built on first use."""
        heads, cached = self.heads + self.kv_heads, list(memory.cached)
        made = functools.cache(lambda: self._rope_for(memory.cache.capacity).ahead(cached, steps, heads, self.kv_heads))

        def table(step: int) -> tuple[Tensor, Tensor]:
            cos, sin = made()[step]
            return (cos.repeat_interleave(width, 0), sin.repeat_interleave(width, 0)) if width > 1 else (cos, sin)

        return [partial(table, step) for step in range(steps)]

    def _layer(
        self, tokens: Tensor, features: Tensor, cache: KVCache, plan: Plan, table: Table, last: list[int] | None = None
    ) -> Tensor:
        """Run the layers over rows [B, T] of tokens and features [B·T, ·]. Returns [B·T or B, H] fp32.

        With `last`, the last layer computes the keys and values of all rows, but the output of row last[b] only.
        """
        step = self._native_step(cache, plan)
        if step is not None:
            return self._run_native(step, tokens, features, cache, plan, last)
        rope, only = table(), None if last is None else self._rows_from(cache, plan, last)
        return self._run_layers(
            self._project(tokens.reshape(-1), features, rope), rope, self._cached_attention(cache, plan, only)
        )

    def _run_layers(self, entered: Projected, table: tuple[Tensor, Tensor], attended: Attention) -> Tensor:
        """Run all layers, from the projections of the first. Returns the rows [n, H] fp32 of the last layer."""
        x = layer_output(self, *attended(0, *entered))
        for place, layer in enumerate(self.upper, 1):
            x = layer_output(layer, *attended(place, *layer.project(x, table)))
        return x if self.output_norm is None else self.output_norm(x).float()

    def _native_step(self, cache: KVCache, plan: Plan) -> NativeStep | None:
        """Return the layers as a C++ step (`decoding/models/native.py`), or None if that cannot run this plan."""
        layers = [self, *self.upper]
        products = tuple(getattr(layer, name) for layer in layers for name in PRODUCTS)
        if self._native is None or self._native[0] != products:  # an adapted twin has other products
            self._native = products, native_step(layers, self.output_norm, self.shape_of_layer, int8=True)
        step = self._native[1]
        near = self.window is None or plan.span <= self.window
        return step if step is not None and near and not any(cache.skipped) and step.supports(cache, plan) else None

    def _run_native(
        self, step: NativeStep, tokens: Tensor, features: Tensor, cache: KVCache, plan: Plan, last: list[int] | None
    ) -> Tensor:
        """`_layer` in one C++ call, which computes all rows."""
        residual, entered = self.layer_input(self.seen(tokens, plan).reshape(-1), features)
        x = (residual.clone() if residual is features else residual).contiguous()  # the step changes x in place
        normed, _ = step.forward(x, cache, plan, self._rope_for(cache.capacity), entered=entered)
        if self.output_norm is not None:
            x = normed.float()
        if last is None:
            return x
        return x.view(*tokens.shape, -1)[torch.arange(len(last)), torch.tensor(last)]

    def seen(self, tokens: Tensor, plan: Plan) -> Tensor:
        """Tokens [B, T] of a plan's rows in the form that `layer_input` reads."""
        return tokens

    def _cached_attention(self, cache: KVCache, plan: Plan, only: tuple[Tensor, Plan] | None) -> Attention:
        """Attention that writes the keys and values of each layer to the cache, and attends to it.

        With `only`, the other rows of the last layer are not computed: indices of its rows, and their plan.
        """
        batch = len(plan.positions)
        # In a single layer no other row attends. Masking all rows of a long prompt would be quadratic.
        whole = plan if only is not None and self.layers == 1 else self._masked(cache, plan)

        def attended(place: int, residual: Tensor, pairs: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
            cache.write(place, pairs, plan)
            seen = whole
            if only is not None and place + 1 == self.layers:
                kept, seen = only
                query, residual = query[kept], residual[kept]
            return residual, attend(query.unflatten(0, (batch, -1)), cache, place, seen, self.dim**-0.5)

        return attended

    def _masked(self, cache: KVCache, plan: Plan) -> Plan:
        dtype = cache.store.dtype
        return plan.with_window(self.window, dtype).without_slots(cache.skipped, dtype)

    def _rows_from(self, cache: KVCache, plan: Plan, first: list[int], count: int = 1) -> tuple[Tensor, Plan]:
        """Indices of `count` rows of each sequence from row first[b] on, among all rows of a plan, and their plan."""
        rows, store = plan.positions.shape[1], cache.store
        kept = torch.tensor([b * rows + row + i for b, row in enumerate(first) for i in range(count)])
        starts = [start + row for start, row in zip(plan.base, first, strict=True)]
        part = plan_rows(starts, count, device=store.device, dtype=store.dtype)
        return kept.to(store.device), self._masked(cache, part)

    def read_at(self, new: CommittedSlots, cache: KVCache, span: int) -> Tensor:
        features = self.feature(select_taps(new.tapped.flatten(0, 1), new.taps, self.taps))
        return self.rows_at(new.tokens, features, cache, new.plan(span, cache.store.dtype), new.last)

    def rows_at(
        self, tokens: Tensor, features: Tensor, cache: KVCache, plan: Plan, last: Tensor | None = None
    ) -> Tensor:
        """Run the layers over rows [B, T] at positions known only on the device (`plan_at`). Returns [B·T or B, H].

        With `last` [B], the last layer computes the keys and values of all rows, but the output of that row only.
        """
        batch, rows = tokens.shape
        rope = cache.rope or self._rope_for(cache.capacity)
        table = rope.at(plan, self.heads + self.kv_heads, self.kv_heads)
        only = None
        if last is not None:
            only = torch.arange(batch, device=last.device) * rows + last, self._masked(cache, plan.row(last))
        return self._run_layers(
            self._project(tokens.flatten(), features, table), table, self._cached_attention(cache, plan, only)
        )

    def _project(self, tokens: Tensor, features: Tensor, table: tuple[Tensor, Tensor]) -> Projected:
        """Project rows of tokens [N] and features [N, H] for the first layer."""
        residual, inputs = self.layer_input(tokens, features)
        qkv = self.rotated(inputs, table)
        return residual, qkv[:, self.heads :], qkv[:, : self.heads]

    def _fill(self, state: DecodeState, memory: FeatureMemory, b: int, slots: range) -> None:
        assert state.features is not None
        start, end = slots.start, slots.stop
        tokens = torch.tensor([state.rows[b].ids[start + 1 : end + 1]], device=state.device)
        plan = plan_rows([start], len(slots), device=state.device, dtype=state.dtype)
        features = self.feature(select_taps(state.features[b, start:end], state.taps, self.taps))
        last = [len(slots) - 1]
        table = self._table_of(memory, plan)
        memory.hidden[b] = self._layer(tokens, features, memory.cache.sequence(b), plan, table, last)[0]

    def _table_of(self, memory: FeatureMemory, plan: Plan) -> Table:
        rope = self._rope_for(memory.cache.capacity)
        return partial(rope.at, plan, self.heads + self.kv_heads, self.kv_heads)

    def _fill_last(self, state: DecodeState, memory: FeatureMemory, width: int) -> None:
        memory.hidden, _ = self.read(state, width, every=False)

    def last(self, state: DecodeState) -> Tensor:
        """Output [B, H] of the last layer at every sequence's last slot."""
        return self.current(state).hidden

    def read(self, state: DecodeState, width: int, every: bool) -> tuple[Tensor, list[int]]:
        """Run every sequence's last `width` slots, new or not, so no padding row can lie past the cache's end.

        Returns the last layer's output at all these slots [B·width, H] or only at the last ones [B, H], and the first
        slot of each sequence.
        """
        memory = self._memory(state)
        features, starts = last_slots(state, width, self.taps)
        memory.cache.mark_written(starts)
        counts = [end - start for start, end in zip(starts, state.cached, strict=True)]
        tokens = torch.tensor(
            [
                row.ids[start + 1 :][:width] + [0] * (width - count)
                for row, start, count in zip(state.rows, starts, counts, strict=True)
            ],
            device=state.device,
        )
        plan = plan_rows(starts, width, device=state.device, dtype=state.dtype)
        # A sequence without new slots (finished, not yet dropped) runs a padding row; its result is not used.
        last = None if every else [max(count - 1, 0) for count in counts]
        table = self._table_of(memory, plan)
        return self._layer(tokens, self.feature(features), memory.cache, plan, table, last), starts


def shape_of(layer: HeadLayer) -> LayerShape:
    """Sizes of a head's decoder layer."""
    config, inner = layer.config, layer.mlp.down_proj.in_features
    return LayerShape(config.hidden_size, inner, config.num_heads, config.num_kv_heads, config.head_dim, False)


def layer_output(layer: FeatureLayer | UpperLayer, residual: Tensor, attended: Tensor) -> Tensor:
    """Output [N, H] fp32 of a layer, from its residual stream and the attention output [N, Hq·D]."""
    fuse = fuses(layer.device, layer.dtype, layer.shape_of_layer)
    x, y = add_norm(residual, layer.o(attended), layer.post_norm, fuse)
    return x + layer.down(gated(layer.gate_up(y), fuse))


def select_taps(tapped: Tensor, kept: tuple[int, ...], taps: tuple[int, ...]) -> Tensor:
    """Select the states of a drafter's `taps` from the states [N, F] that are `kept` for all drafters of a pool."""
    if taps == kept:
        return tapped
    parts = tapped.chunk(len(kept), -1)
    return torch.cat([parts[kept.index(tap)] for tap in taps], -1) if taps else tapped[..., :0]


def last_slots(state: DecodeState, width: int, taps: tuple[int, ...]) -> tuple[Tensor, list[int]]:
    """Target features [B·width, F] of every sequence's last `width` slots, and the first of these slots.

    A sequence with fewer slots repeats its last one. The memory past it may never have been written, and a NaN among
    the keys spreads to all results even if it is masked.
    """
    assert state.features is not None, "the decoding loop keeps no features for this drafter: pass its taps"
    starts = [max(end - width, 0) for end in state.cached]
    if state.batch == 1:
        return select_taps(state.features[0, starts[0] : state.cached[0]], state.taps, taps), starts
    where = torch.tensor(starts, device=state.device)[:, None] + torch.arange(width, device=state.device)
    where = torch.minimum(where, torch.tensor(state.cached, device=state.device)[:, None] - 1)
    rows = torch.arange(state.batch, device=state.device)[:, None]
    return select_taps(state.features[rows, where].flatten(0, 1), state.taps, taps), starts
