"""Lean forward for Llama-shaped decoders: preallocated KV cache, packed weights, no per-call bookkeeping.

Covers dense models with Llama's layers (`layouts.py`): grouped-query attention, biases, QK-norm, partial RoPE, any
static RoPE scaling. All other models run through `transformers`' own forward (`hf.py`), with the same interface.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specctl import kernels
from specctl.decoding.attention import serves, serves_pages
from specctl.decoding.cache import KVCache
from specctl.decoding.models import gguf_target
from specctl.decoding.models.gguf_target import Weight
from specctl.decoding.models.layers import RMSNorm, Unnormed, add_norm, attend, fuses, gated
from specctl.decoding.models.layouts import (
    GELU,
    MODEL_TYPES,
    NORMED_OUTPUTS,
    PARTIAL,
    UNROTATED,
    LayerLayout,
    activation,
    head_dim_of,
    mlp_width,
    rotary_factor,
    rotary_tables,
    rotated_dims,
)
from specctl.decoding.models.linear import Linear, VocabularyHead
from specctl.decoding.models.loading import is_gguf, pick_dtype
from specctl.decoding.models.model import PREFILL_ROWS
from specctl.decoding.models.native import PRODUCTS, fits, native_step
from specctl.decoding.models.native import ROWS as NATIVE_ROWS
from specctl.decoding.models.parallel import WHOLE, Slice
from specctl.decoding.models.supported import ATTENTION, DENSE, FP8, context_limit, quantisation, ropes, window_size
from specctl.decoding.paged import PagedCache
from specctl.decoding.pages import PagePool, PoolLayout
from specctl.decoding.plan import BITS, Plan
from specctl.decoding.rope import Rope
from specctl.environment import switch
from specctl.errors import UsageError
from specctl.kernels import native
from specctl.kernels.native import GroupedWeights
from specctl.kernels.self_check import LayerShape

QUANTIZED = "quantized weights"  # a reason of `unsupported_reason`
# Frequencies that depend on the sequence length do not fit into one table. Those of LongRoPE change only beyond the
# original context, where sequences end (`context_limit`).
DYNAMIC_ROPE = {"dynamic"}
SHORTEST_WINDOW = BITS  # `Plan.with_window`: the rows of a draft must lie within the window
WINDOWED_PREFILL_ROWS = 1024  # of a model with windows, which masks all rows of a prompt: quadratic memory


def unsupported_reason(config) -> str | None:
    """Reason why the lean step cannot compute this configuration exactly, or None if it can."""
    if config.model_type not in MODEL_TYPES:
        return f"model type {config.model_type!r} is not one of {', '.join(sorted(MODEL_TYPES))}"
    if getattr(config, "num_local_experts", 0) or set(getattr(config, "layer_types", None) or ()) - ATTENTION:
        return "experts, or layers without attention"  # of Granite 4
    if activation(config) not in ("silu", GELU):
        return f"activation {activation(config)!r}"
    if getattr(config, "attn_logit_softcapping", None) or getattr(config, "final_logit_softcapping", None):
        return "capped logits"
    if getattr(config, "use_bidirectional_attention", False):
        return "bidirectional attention"
    window = window_size(config)
    if window is not None and window < SHORTEST_WINDOW:
        return f"a sliding window of {window} positions, which is shorter than a draft may be"
    if dynamic := DYNAMIC_ROPE & ropes(config).keys():
        return f"RoPE variant {min(dynamic)!r}"
    if config.model_type not in PARTIAL and rotary_factor(config) != 1:
        return "a partial rotary factor, which transformers ignores or refuses for this model type"
    if rotated_dims(config) % 2 or head_dim_of(config) % 2:
        return "an odd number of rotated dimensions"
    if getattr(config, "quantization_config", None):
        return QUANTIZED
    return None


def reason_here(config) -> str | None:
    """`unsupported_reason` of the model that loading makes here: without a GPU `transformers` dequantizes fp8."""
    reason = unsupported_reason(config)
    kept = reason != QUANTIZED or quantisation(config).get("quant_method") != FP8 or torch.cuda.is_available()
    return reason if kept else None


def pick_target_dtype(dtype: str, device: torch.device, config) -> torch.dtype:
    """Resolve a dtype name for a target with this configuration, like `pick_dtype`.

    On a CPU, `auto` is bf16 also where the C++ step computes the target: it reads half as many bytes as in fp32.
    """
    if dtype != "auto" or device.type != "cpu" or reason_here(config) is not None:
        return pick_dtype(dtype, device)
    possible = fits(config.hidden_size, mlp_width(config), head_dim_of(config))
    in_native = possible and config.model_type not in NORMED_OUTPUTS
    return torch.bfloat16 if in_native and native.library() is not None else pick_dtype(dtype, device)


def stored_weights(name: str, config, device: torch.device, dtype: torch.dtype) -> dict[str, Weight] | None:
    """Weights of a GGUF file for a step that reads them quantized, or None where they are dequantized.

    Only the C++ step reads them, so the dtype is bf16. The environment variable SPECCTL_GGUF=dequantized turns it off.
    """
    usable = is_gguf(name) and device.type == "cpu" and dtype == torch.bfloat16 and not unsupported_reason(config)
    if not usable or switch("SPECCTL_GGUF") == "dequantized" or native.library() is None:
        return None
    return gguf_target.quantized_weights(name, dtype)


def check_slices(name: str, config, count: int) -> None:
    """Raise UsageError if the lean step cannot run the target `name` in `count` tensor-parallel slices
    (`parallel.py`)."""
    reason = unsupported_reason(config)
    if reason is None and config.model_type not in DENSE:
        reason = f"model type {config.model_type!r} is not one of {', '.join(sorted(DENSE))}"
    if reason is None:
        heads, kv_heads, inner = config.num_attention_heads, config.num_key_value_heads, config.intermediate_size
        if heads % count:
            reason = f"{heads} attention heads are not divisible by {count}"
        elif kv_heads % count and count % kv_heads:
            reason = f"{kv_heads} KV heads cannot be shared among {count} processes"
        elif inner % count:
            reason = f"intermediate_size {inner} is not divisible by {count}"
    if reason is not None:
        hint = "change target.tensor_parallel, or set target.device_map=auto"
        raise UsageError(f"target {name} cannot be split into {count} slices: {reason}", hint)


def _stacked(products: Sequence[Any]) -> Tensor:
    """The weights of several products on one input as one matrix: a view if they follow each other in memory
    (`place_together`), otherwise a copy."""
    weights = [product.weight.detach() for product in products]
    first, end = weights[0], weights[0].data_ptr()
    block = first.untyped_storage().data_ptr()
    for weight in weights:
        if weight.untyped_storage().data_ptr() != block or weight.data_ptr() != end or not weight.is_contiguous():
            return torch.cat(weights)
        end += weight.nbytes
    return first.as_strided((sum(map(len, weights)), first.shape[1]), first.stride())


@torch.no_grad()
def place_together(model) -> None:
    """Move the weights that a `LeanModel` stacks next to each other in memory, and leave them the model's parameters.

    A `LeanModel` built afterwards shares them, as long as it packs no products for a CPU. So a model that is being
    trained can decode without a second copy of its weights. The values do not change.
    """
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for products in ((attention.q_proj, attention.k_proj, attention.v_proj), (mlp.gate_proj, mlp.up_proj)):
            sizes = [len(product.weight) for product in products]
            for product, rows in zip(products, _stacked(products).split(sizes), strict=True):
                product.weight.data = rows


def _quantized(stored: Mapping[str, Weight], *names: str) -> GroupedWeights | None:
    """Weights of several products on one input as `stored`, or None if they were dequantized."""
    held = [stored[f"{name}.weight"] for name in names if f"{name}.weight" in stored]
    parts = [part for weight in held if (part := weight.quantized()) is not None]
    return GroupedWeights.stacked(parts) if len(parts) == len(names) else None


class _LeanLayer:
    """Products and norms of a layer.

    Attributes:
        table: place of its rotary table in `LeanModel.tables`.
        window: number of positions that a row attends (None = all).
        wide: the norms of queries and keys are over all heads, not over each head.
    """

    table = 0
    window: int | None = None

    def __init__(self, layer, layout: LayerLayout, dtype: torch.dtype, stored: Mapping[str, Weight], prefix: str):
        attention = layer.self_attn

        def linear(product: str) -> Linear:
            names, modules = layout.names[product], [layer.get_submodule(name) for name in layout.names[product]]
            biases = [module.bias.detach() for module in modules if module.bias is not None]
            bias = torch.cat(biases) if biases else None
            weight = _quantized(stored, *(f"{prefix}.{name}" for name in names)) or _stacked(modules)
            if product == "qkv" and layout.order is not None:
                weight, bias = weight[layout.order], None if bias is None else bias[layout.order]
            return Linear(weight, bias)

        self.qkv, self.o, self.gate_up, self.down = (linear(product) for product in PRODUCTS)

        unnormed = Unnormed(dtype)

        def norm(found) -> RMSNorm:
            return RMSNorm(layout.norm_weight(found), layout.eps, dtype)

        norms = {name: norm(layer.get_submodule(place)) for name, place in layout.norms.items()}
        self.input_norm, self.post_norm = norms.get("input_norm", unnormed), norms.get("post_norm", unnormed)
        self.o_norm, self.down_norm = norms.get("o_norm"), norms.get("down_norm")
        self.q_norm = self.k_norm = None
        if getattr(attention, "q_norm", None) is not None:
            self.q_norm, self.k_norm = norm(attention.q_norm), norm(attention.k_norm)
        self.eps = layout.eps
        self.wide = self.q_norm is not None and len(self.q_norm.weight) != attention.head_dim

    @property
    def head_norms(self) -> tuple[Tensor | None, Tensor | None, float]:
        """Weights [D] of the norms of each query and key head (None without such norms), and their ε."""
        norms = (None, None) if self.wide else (self.q_norm, self.k_norm)
        weights = [None if norm is None else norm.weight for norm in norms]
        return weights[0], weights[1], self.eps

    def normed(self, qkv: Tensor, kv: int) -> Tensor:
        """qkv [N, heads + 2·kv, D] with normalized queries and keys."""
        assert self.q_norm is not None and self.k_norm is not None
        q, k, v = qkv.split((qkv.shape[1] - 2 * kv, kv, kv), 1)
        parts = [
            norm(part.flatten(1).float()).view_as(part) if self.wide else norm(part.float())
            for norm, part in ((self.q_norm, q), (self.k_norm, k))
        ]
        return torch.cat((*parts, v), 1)


class LeanModel:
    """Llama-shaped model with lean steps. It is built from a loaded `transformers` model and shares all weights that
    need no packing.

    Args:
        consume: empty every layer of `model` once it is packed. Memory then never exceeds the weights plus one layer,
            and `model` is unusable afterwards.
        part: the tensor-parallel slice of the target that `model` holds (`parallel.load_slice`). All ranks run the same
            forwards.
        stored: `stored_weights` of the target. `model` lacks the weights that stay quantized.

    Attributes:
        quantized: whether the layers have the quantized weights of a GGUF file.
    """

    def __init__(self, model, consume: bool = False, part: Slice = WHOLE, stored: Mapping[str, Weight] | None = None):
        config = model.config
        body = model.model
        self.dtype = model.dtype
        self.device = body.embed_tokens.weight.device
        self.quantized, stored = stored is not None, stored or {}
        self.part = part
        self.heads = len(part.of(config.num_attention_heads))
        self.kv_heads = len(part.of(config.num_key_value_heads))
        self.head_dim = head_dim_of(config)
        self.layout = LayerLayout.of(config, self.heads, self.kv_heads)
        self.hidden_size = config.hidden_size
        self.embedding = body.embed_tokens.weight.detach()
        self.layers = []
        for index, layer in enumerate(body.layers):
            self.layers.append(_LeanLayer(layer, self.layout, self.dtype, stored, f"model.layers.{index}"))
            for parameter in layer.parameters() if consume else ():
                parameter.data = parameter.new_empty(0)
        self.tables = list(dict.fromkeys(self.layout.ropes)) or [""]
        kinds = zip(self.layers, self.layout.ropes, self.layout.windows, strict=False)
        for own, rope, window in kinds:  # a target may be loaded without its layers
            own.table, own.window = self.tables.index(rope), window
        self.window = next(filter(None, self.layout.windows), None)
        self.norm = RMSNorm(self.layout.norm_weight(body.norm), self.layout.eps, self.dtype)
        normed = any(layer.head_norms[0] is not None for layer in self.layers)
        inner = len(part.of(mlp_width(config)))
        self._shape = LayerShape(self.hidden_size, inner, self.heads, self.kv_heads, self.head_dim, normed)
        self.vocab_size = self.embedding.shape[0]
        head = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
        self.head = VocabularyHead(_quantized(stored, head) or model.lm_head.weight, model.lm_head.bias)
        self._rotary: Any = getattr(body, "rotary_emb", None)
        # Positions at which LongRoPE has the frequencies of the original context.
        self._rotary_limit = context_limit(config) if "longrope" in ropes(config) else None
        self._rope: Rope | None = None
        in_native = self.part.count == 1 and config.model_type not in NORMED_OUTPUTS
        self._native = native_step(self.layers, self.norm, self._shape) if in_native else None
        if self._native is not None:
            self._native.model.scale, self._native.model.gelu = self.layout.attention, self.layout.gelu
        # Every row of a C++ step has the same bits however many rows run, so a text does not depend on what was cached.
        on_torch = PREFILL_ROWS if self.window is None else WINDOWED_PREFILL_ROWS
        self.prefill_rows = on_torch if self._native is None else NATIVE_ROWS

    def with_own_layers(self) -> LeanModel:
        """A copy with layers of its own, which share all weights and may get other products. It never runs in C++: that
        step has pointers to the products of this model."""
        twin = copy.copy(self)
        twin.layers, twin._native = [copy.copy(layer) for layer in self.layers], None
        return twin

    def new_cache(self, batch: int, capacity: int, pool: PagePool | None = None) -> KVCache:
        """A cache for `batch` sequences; in pages of `pool`, which has the layout `form`, if it is given."""
        if pool is None:
            sizes = len(self.layers), batch, self.kv_heads, capacity, self.head_dim
            cache = KVCache(*sizes, dtype=self.dtype, device=self.device)
        else:
            cache = PagedCache(pool, batch, capacity)
        cache.rope = self._rope_for(capacity)
        return cache

    @property
    def products(self) -> list[Linear]:
        """The vocabulary head, and the products of all layers."""
        return [self.head, *(getattr(layer, name) for layer in self.layers for name in PRODUCTS)]

    @property
    def native(self) -> bool:
        """Whether steps can run in C++ (`native.py`)."""
        return self._native is not None

    @property
    def form(self) -> PoolLayout:
        """Layout of this model's page pool."""
        return PoolLayout(len(self.layers), self.kv_heads, self.head_dim, self.dtype, self.device)

    @property
    def by_kernel(self) -> bool:
        """Whether its attention runs on our kernel (`attention.serves`)."""
        return serves(self.device, self.dtype, self.heads, self.kv_heads, self.head_dim)

    @property
    def pages(self) -> bool:
        """Whether keys and values lie in pages: on a GPU with an attention kernel that has passed a trial with pages.
        Tensor-parallel slices never use pages, as each rank would have a different number. SPECCTL_KV=paged|contiguous
        overrides, except for slices."""
        if self.part.count > 1:
            return False
        if chosen := switch("SPECCTL_KV"):
            return chosen == "paged"
        if self.device.type != "cuda" or not self.by_kernel:
            return False
        return serves_pages(self.device, self.dtype, self.heads, self.kv_heads, self.head_dim)

    def _rope_for(self, capacity: int) -> Rope:
        if self._rope is None or self._rope.cos.shape[0] < capacity:
            positions = torch.arange(max(capacity, 1), device=self.device).unsqueeze(0)
            if self._rotary_limit is not None:
                positions = positions.clamp(max=self._rotary_limit - 1)  # no text gets there
            first, *others = (Rope(*self._rotation(name, positions)) for name in self.tables)
            first.others = others
            self._rope = first
        return self._rope

    def _rotation(self, name: str, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The table `name` of `LayerLayout.ropes` at positions [1, P]: cos and sin [P, D]."""
        if name == UNROTATED:
            cos = torch.ones(positions.shape[1], self.head_dim, dtype=self.dtype, device=self.device)
            return cos, torch.zeros_like(cos)
        cos, sin = self._rotary(self.embedding[:1], positions, *([name] if name else []))
        return rotary_tables(cos[0].to(self.dtype), sin[0].to(self.dtype), self.head_dim)

    def forward(
        self, tokens: Tensor, cache: KVCache, plan: Plan, taps: tuple[int, ...]
    ) -> tuple[Tensor, Tensor | None]:
        """Run one forward over tokens [B, T]. Returns (h [B, T, H] after the final norm, tapped states [B, T,
        len(taps)·H]).

        A tap is an index into `transformers`' `hidden_states`: 0 = embeddings, i = output of layer i.
        """
        batch, rows = tokens.shape
        rope = cache.rope or self._rope_for(cache.capacity)
        x = F.embedding(tokens.reshape(-1), self.embedding).float()
        if self.layout.embedding != 1:
            x = x * self.layout.embedding
        heads, kv = self.heads, self.kv_heads
        fuse = fuses(self.device, self.dtype, self._shape)
        if self._native is not None and not fuse and self._native.supports(cache, plan):
            y, kept = self._native.forward(x, cache, plan, rope, taps)
            y = y.view(batch, rows, -1)
            return y, self._features(kept, taps, y)
        ropes, narrow = (rope, *rope.others), plan.with_window(self.window, self.dtype)
        if fuse:
            positions, slots = plan.positions.contiguous(), cache.slots(plan, rows).contiguous()
        else:
            tables = [one.at(plan, heads + kv, kv) for one in ropes]
        norms = [*(layer.input_norm for layer in self.layers[1:]), self.norm]  # the norm after each layer
        kept = {0: x.to(self.dtype)} if 0 in taps else {}
        y = self.layers[0].input_norm(x)
        for index, (layer, norm) in enumerate(zip(self.layers, norms, strict=True)):
            qkv = layer.qkv(y).view(batch * rows, heads + 2 * kv, self.head_dim)
            if layer.wide or (layer.q_norm is not None and not fuse):
                qkv = layer.normed(qkv, kv)
            if fuse:
                own = ropes[layer.table]
                q = kernels.rope_and_cache(
                    qkv, own.cos, own.sin, positions, slots, cache.rows[index], *layer.head_norms
                )
            else:
                qkv = Rope.rotate(qkv, tables[layer.table])
                cache.write(index, qkv[:, heads:], plan)
                q = qkv[:, :heads].unflatten(0, (batch, rows))
            seen = plan if layer.window is None else narrow
            added = self.part.sum(layer.o(attend(q, cache, index, seen, self.layout.attention)))
            if layer.o_norm is not None:
                added = layer.o_norm(added.float())
            x, y = add_norm(x, added, layer.post_norm, fuse)
            added = self.part.sum(layer.down(gated(layer.gate_up(y), fuse, self.layout.gelu)))
            if layer.down_norm is not None:
                added = layer.down_norm(added.float())
            x, y = add_norm(x, added, norm, fuse)
            if index + 1 in taps:
                kept[index + 1] = x.to(self.dtype)
        if len(self.layers) in taps:
            kept[len(self.layers)] = y  # `transformers`' last hidden state is after the final norm
        y = y.view(batch, rows, -1)
        return y, self._features(kept, taps, y)

    def _features(self, kept: dict[int, Tensor], taps: tuple[int, ...], y: Tensor) -> Tensor | None:
        """The states [B · T, H] of all taps side by side, [B, T, len(taps) · H], in the scale of `transformers`. `y`
        [B, T, H] gives the shape."""
        if not taps:
            return None
        if self.layout.tapped != 1:
            kept = {tap: x if tap == len(self.layers) else x * self.layout.tapped for tap, x in kept.items()}
        return torch.cat([kept[tap] for tap in taps], -1).view(*y.shape[:2], -1)

    def normed(self, states: Tensor) -> Tensor:
        """Apply the final norm to outputs [..., H] of the last layer, as `forward` does."""
        return self.norm(states.float() / self.layout.tapped)

    def logits(self, hidden: Tensor) -> Tensor:
        """Vocabulary logits of h [..., H] (after the final norm), in fp32 if the head keeps its fp32 sums."""
        logits = self.part.gather(self.head(hidden), self.vocab_size)
        return logits if self.layout.logits == 1 else logits / self.layout.logits
