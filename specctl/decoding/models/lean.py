"""Lean forward for Llama-shaped decoders: preallocated KV cache, packed weights, no per-call bookkeeping.

Covers Llama, Mistral, Qwen2 and Qwen3 dense models (grouped-query attention, attention biases, QK-norm, any static RoPE
scaling). All other models run through `transformers`' own forward (`hf.py`), with the same interface.
"""

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
from specctl.decoding.models.layers import RMSNorm, add_norm, attend, fuses, gated
from specctl.decoding.models.linear import Linear, VocabularyHead
from specctl.decoding.models.loading import is_gguf, pick_dtype
from specctl.decoding.models.model import PREFILL_ROWS
from specctl.decoding.models.native import PRODUCTS, fits, native_step
from specctl.decoding.models.native import ROWS as NATIVE_ROWS
from specctl.decoding.models.parallel import WHOLE, Slice
from specctl.decoding.models.supported import DENSE, ropes
from specctl.decoding.paged import PagedCache
from specctl.decoding.pages import PagePool, PoolLayout
from specctl.decoding.plan import Plan
from specctl.decoding.rope import Rope
from specctl.environment import switch
from specctl.errors import UsageError
from specctl.kernels import native
from specctl.kernels.native import GroupedWeights
from specctl.kernels.self_check import LayerShape

# Frequencies that depend on the sequence length do not fit into one table.
DYNAMIC_ROPE = {"dynamic", "longrope"}


def unsupported_reason(config) -> str | None:
    """Reason why the lean step cannot compute this configuration exactly, or None if it can."""
    if config.model_type not in DENSE:
        return f"model type {config.model_type!r} is not one of {', '.join(sorted(DENSE))}"
    if getattr(config, "hidden_act", "silu") != "silu":
        return f"activation {config.hidden_act!r}"
    if "sliding_attention" in (getattr(config, "layer_types", None) or []):
        return "sliding-window attention"
    if config.model_type == "mistral" and getattr(config, "sliding_window", None):
        return "sliding-window attention"
    for kind, rope in ropes(config).items():
        if kind in DYNAMIC_ROPE:
            return f"RoPE variant {kind!r}"
        if rope.get("partial_rotary_factor", 1.0) != 1.0:
            return "partial rotary embedding"
    if getattr(config, "quantization_config", None):
        return "quantized weights"
    return None


def head_dim_of(config) -> int:
    """Width of an attention head, which not every configuration states."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def pick_target_dtype(dtype: str, device: torch.device, config) -> torch.dtype:
    """Resolve a dtype name for a target with this configuration, like `pick_dtype`.

    On a CPU, `auto` is bf16 also where the C++ step computes the target: it reads half as many bytes as in fp32.
    """
    if dtype != "auto" or device.type != "cpu" or unsupported_reason(config) is not None:
        return pick_dtype(dtype, device)
    possible = fits(config.hidden_size, config.intermediate_size, head_dim_of(config))
    return torch.bfloat16 if possible and native.library() is not None else pick_dtype(dtype, device)


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
    def __init__(self, layer, config, dtype: torch.dtype, stored: Mapping[str, Weight], prefix: str):
        attention, eps = layer.self_attn, config.rms_norm_eps

        def linear(block: str, *names: str) -> Linear:
            products = [getattr(getattr(layer, block), name) for name in names]
            biases = [product.bias.detach() for product in products if product.bias is not None]
            quantized = _quantized(stored, *(f"{prefix}.{block}.{each}" for each in names))
            return Linear(quantized or _stacked(products), torch.cat(biases) if biases else None)

        self.qkv = linear("self_attn", "q_proj", "k_proj", "v_proj")
        self.o = linear("self_attn", "o_proj")
        self.gate_up = linear("mlp", "gate_proj", "up_proj")
        self.down = linear("mlp", "down_proj")
        self.input_norm = RMSNorm(layer.input_layernorm.weight, eps, dtype)
        self.post_norm = RMSNorm(layer.post_attention_layernorm.weight, eps, dtype)
        self.q_norm = self.k_norm = None
        if getattr(attention, "q_norm", None) is not None:
            self.q_norm = RMSNorm(attention.q_norm.weight, eps, dtype)
            self.k_norm = RMSNorm(attention.k_norm.weight, eps, dtype)

    @property
    def head_norms(self) -> tuple[Tensor | None, Tensor | None, float]:
        """Weights [D] of the query and key norms (None without such norms), and their ε."""
        weights = [None if norm is None else norm.weight for norm in (self.q_norm, self.k_norm)]
        return weights[0], weights[1], self.input_norm.eps


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
        self.scale = self.head_dim**-0.5
        self.hidden_size = config.hidden_size
        self.embedding = body.embed_tokens.weight.detach()
        self.layers = []
        for index, layer in enumerate(body.layers):
            self.layers.append(_LeanLayer(layer, config, self.dtype, stored, f"model.layers.{index}"))
            for parameter in layer.parameters() if consume else ():
                parameter.data = parameter.new_empty(0)
        self.norm = RMSNorm(body.norm.weight, config.rms_norm_eps, self.dtype)
        normed = any(layer.q_norm is not None for layer in self.layers)
        inner = len(part.of(config.intermediate_size))
        self._shape = LayerShape(self.hidden_size, inner, self.heads, self.kv_heads, self.head_dim, normed)
        self.vocab_size = self.embedding.shape[0]
        head = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
        self.head = VocabularyHead(_quantized(stored, head) or model.lm_head.weight, model.lm_head.bias)
        self._rotary = body.rotary_emb
        self._rope: Rope | None = None
        self._native = native_step(self.layers, self.norm, self._shape) if self.part.count == 1 else None
        # Every row of a C++ step has the same bits however many rows run, so a text does not depend on what was cached.
        self.prefill_rows = PREFILL_ROWS if self._native is None else NATIVE_ROWS

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
            positions = torch.arange(capacity, device=self.device).unsqueeze(0)
            cos, sin = self._rotary(self.embedding[:1], positions)
            self._rope = Rope(cos[0].to(self.dtype), sin[0].to(self.dtype))
        return self._rope

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
        heads, kv = self.heads, self.kv_heads
        fuse = fuses(self.device, self.dtype, self._shape)
        if self._native is not None and not fuse and self._native.supports(cache, plan):
            y, kept = self._native.forward(x, cache, plan, rope, taps)
            y = y.view(batch, rows, -1)
            return y, _side_by_side(kept, taps, y)
        if fuse:
            positions, slots = plan.positions.contiguous(), cache.slots(plan, rows).contiguous()
        else:
            table = rope.at(plan, heads + kv, kv)
        norms = [*(layer.input_norm for layer in self.layers[1:]), self.norm]  # the norm after each layer
        kept = {0: x.to(self.dtype)} if 0 in taps else {}
        y = self.layers[0].input_norm(x)
        for index, (layer, norm) in enumerate(zip(self.layers, norms, strict=True)):
            qkv = layer.qkv(y).view(batch * rows, heads + 2 * kv, self.head_dim)
            if fuse:
                q = kernels.rope_and_cache(
                    qkv, rope.cos, rope.sin, positions, slots, cache.rows[index], *layer.head_norms
                )
            else:
                if layer.q_norm is not None and layer.k_norm is not None:
                    q, k, v = qkv.split((heads, kv, kv), 1)
                    qkv = torch.cat((layer.q_norm(q.float()), layer.k_norm(k.float()), v), 1)
                qkv = rope.rotate(qkv, table)
                cache.write(index, qkv[:, heads:], plan)
                q = qkv[:, :heads].unflatten(0, (batch, rows))
            attended = self.part.sum(layer.o(attend(q, cache, index, plan, self.scale)))
            x, y = add_norm(x, attended, layer.post_norm, fuse)
            x, y = add_norm(x, self.part.sum(layer.down(gated(layer.gate_up(y), fuse))), norm, fuse)
            if index + 1 in taps:
                kept[index + 1] = x.to(self.dtype)
        if len(self.layers) in taps:
            kept[len(self.layers)] = y  # `transformers`' last hidden state is after the final norm
        y = y.view(batch, rows, -1)
        return y, _side_by_side(kept, taps, y)

    def normed(self, states: Tensor) -> Tensor:
        """Apply the final norm to outputs [..., H] of the last layer, as `forward` does."""
        return self.norm(states.float())

    def logits(self, hidden: Tensor) -> Tensor:
        """Vocabulary logits of h [..., H] (after the final norm), in fp32 if the head keeps its fp32 sums."""
        return self.part.gather(self.head(hidden), self.vocab_size)


def _side_by_side(kept: dict[int, Tensor], taps: tuple[int, ...], y: Tensor) -> Tensor | None:
    """Concatenate the states [B · T, H] of all taps to [B, T, len(taps) · H]; `y` [B, T, H] gives the shape."""
    return torch.cat([kept[tap] for tap in taps], -1).view(*y.shape[:2], -1) if taps else None
