"""A lean forward for Llama-shaped decoders: preallocated KV, packed weights, no per-call bookkeeping.

Covers Llama, Mistral, Qwen2 and Qwen3 dense models (grouped-query attention, attention biases, QK-norm, any static RoPE
scaling). Everything else runs through `transformers`' own forward (`hf.py`) behind the same two methods.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from specctl import kernels
from specctl.decoding import paged
from specctl.decoding.attention import serves, serves_pages
from specctl.decoding.cache import KVCache
from specctl.decoding.models.fused import LayerShape, fuses
from specctl.decoding.models.layers import RMSNorm, add_norm, attend, gated
from specctl.decoding.models.linear import Linear, VocabularyHead
from specctl.decoding.models.native import Packed, native_step
from specctl.decoding.models.parallel import WHOLE, Slice
from specctl.decoding.models.supported import ropes
from specctl.decoding.pages import Form, PagePool
from specctl.decoding.plan import Plan
from specctl.decoding.rope import Rope
from specctl.errors import UsageError

FAMILIES = {"llama", "mistral", "qwen2", "qwen3"}
# Frequencies that change with the sequence length cannot be tabulated once.
DYNAMIC_ROPE = {"dynamic", "longrope"}


def why_not(config) -> str | None:
    """None when the lean step computes this configuration exactly; otherwise the reason it cannot."""
    if config.model_type not in FAMILIES:
        return f"model type {config.model_type!r} is not one of {', '.join(sorted(FAMILIES))}"
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
        return "quantised weights"
    return None


def why_not_sliced(config, count: int) -> str | None:
    """None when the lean step computes this configuration in so many slices (`parallel.py`); otherwise the reason it
    cannot."""
    reason = why_not(config)
    if reason is not None:
        return reason
    heads, kv_heads, inner = config.num_attention_heads, config.num_key_value_heads, config.intermediate_size
    if heads % count:
        return f"{heads} attention heads cannot be divided by {count}"
    if kv_heads % count and count % kv_heads:
        return f"{kv_heads} key heads cannot be shared by {count} processes"
    return f"the inner size of {inner} cannot be divided by {count}" if inner % count else None


def check_slices(name: str, config, count: int) -> None:
    """Raise UsageError where the target `name` cannot be in so many slices."""
    reason = why_not_sliced(config, count)
    if reason is not None:
        hint = "another target.tensor_parallel, or target.device_map=auto"
        raise UsageError(f"target {name} cannot be in {count} slices: {reason}", hint)


class _LeanLayer:
    def __init__(self, layer, config, dtype: torch.dtype):
        attention, mlp, eps = layer.self_attn, layer.mlp, config.rms_norm_eps
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        bias = None
        if projections[0].bias is not None:
            bias = torch.cat([p.bias.detach() for p in projections])
        self.qkv = Linear(torch.cat([p.weight.detach() for p in projections]), bias)
        self.o = Linear(attention.o_proj.weight, attention.o_proj.bias)
        self.gate_up = Linear(
            torch.cat([mlp.gate_proj.weight.detach(), mlp.up_proj.weight.detach()]),
            torch.cat([mlp.gate_proj.bias.detach(), mlp.up_proj.bias.detach()])
            if mlp.gate_proj.bias is not None
            else None,
        )
        self.down = Linear(mlp.down_proj.weight, mlp.down_proj.bias)
        self.input_norm = RMSNorm(layer.input_layernorm.weight, eps, dtype)
        self.post_norm = RMSNorm(layer.post_attention_layernorm.weight, eps, dtype)
        self.q_norm = self.k_norm = None
        if getattr(attention, "q_norm", None) is not None:
            self.q_norm = RMSNorm(attention.q_norm.weight, eps, dtype)
            self.k_norm = RMSNorm(attention.k_norm.weight, eps, dtype)

    @property
    def head_norms(self) -> tuple[Tensor | None, Tensor | None, float]:
        """Weights [D] of the norms of queries and of keys, if there are any, and their ε."""
        weights = [None if norm is None else norm.weight for norm in (self.q_norm, self.k_norm)]
        return weights[0], weights[1], self.input_norm.eps


class LeanModel:
    """Runs steps of a Llama-shaped model, built from a loaded `transformers` model, with which it shares what it does
    not have to pack.

    Args:
        consume: empty every layer of `model` once it is packed. The two together never hold more than the weights and
            one layer, and `model` is of no use afterwards.
        part: the slice of a target that `model` holds (`parallel.load_slice`); all processes run the same forwards.
    """

    def __init__(self, model, consume: bool = False, part: Slice = WHOLE):
        config = model.config
        body = model.model
        self.dtype = model.dtype
        self.device = body.embed_tokens.weight.device
        self.part = part
        self.heads = len(part.of(config.num_attention_heads))
        self.kv_heads = len(part.of(config.num_key_value_heads))
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.scale = self.head_dim**-0.5
        self.hidden_size = config.hidden_size
        self.embedding = body.embed_tokens.weight.detach()
        self.layers = []
        for layer in body.layers:
            self.layers.append(_LeanLayer(layer, config, self.dtype))
            for parameter in layer.parameters() if consume else ():
                parameter.data = parameter.new_empty(0)
        self.norm = RMSNorm(body.norm.weight, config.rms_norm_eps, self.dtype)
        normed = any(layer.q_norm is not None for layer in self.layers)
        self.inner = len(part.of(config.intermediate_size))
        self._shape = LayerShape(self.hidden_size, self.inner, self.heads, self.kv_heads, self.head_dim, normed)
        self.vocab_size = self.embedding.shape[0]
        self.head = VocabularyHead(model.lm_head.weight, model.lm_head.bias)
        self._rotary = body.rotary_emb
        self._rope: Rope | None = None
        sizes = self.hidden_size, self.inner, self.heads, self.kv_heads, self.head_dim, self.scale
        packed = Packed(self.dtype, self.device, self.layers, self.norm, *sizes)
        self._native = native_step(packed) if self.part.count == 1 else None

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        cache = KVCache(
            len(self.layers), batch, self.kv_heads, capacity, self.head_dim, dtype=self.dtype, device=self.device
        )
        cache.rope = self._rope_for(capacity)
        return cache

    @property
    def native(self) -> bool:
        """Whether its steps are the C++ step's (`native.py`)."""
        return self._native is not None

    @property
    def form(self) -> Form:
        """The form of a pool of this model's keys and values."""
        return Form(len(self.layers), self.kv_heads, self.head_dim, self.dtype, self.device)

    @property
    def by_kernel(self) -> bool:
        """Whether attention of its steps is a kernel of ours (`attention.serves`)."""
        return serves(self.device, self.dtype, self.heads, self.kv_heads, self.head_dim)

    @property
    def pages(self) -> bool:
        """Whether its texts' keys and values are to lie in pages: on a GPU where attention is a kernel that has shown
        that it reads them, and in one slice. SPECCTL_KV=paged|contiguous overrides, but for slices: each would have
        another number of pages."""
        if self.part.count > 1:
            return False
        if chosen := paged.asked():
            return chosen == "paged"
        if self.device.type != "cuda" or not self.by_kernel:
            return False
        return serves_pages(self.device, self.dtype, self.heads, self.kv_heads, self.head_dim)

    def paged_cache(self, pool: PagePool, batch: int, capacity: int) -> KVCache:
        """As `new_cache`, in a pool of this model's form."""
        cache = paged.PagedCache(pool, batch, capacity)
        cache.rope = self._rope_for(capacity)
        return cache

    def _rope_for(self, capacity: int) -> Rope:
        if self._rope is None or self._rope.cos.shape[0] < capacity:
            positions = torch.arange(capacity, device=self.device).unsqueeze(0)
            cos, sin = self._rotary(self.embedding[:1], positions)
            self._rope = Rope(cos[0].to(self.dtype), sin[0].to(self.dtype))
        return self._rope

    def forward(
        self, tokens: Tensor, cache: KVCache, plan: Plan, taps: tuple[int, ...]
    ) -> tuple[Tensor, Tensor | None]:
        """One forward of tokens [B, T]: returns (h [B, T, H] after the final norm, tapped states [B, T, len(taps)·H]).

        A tap is an index into `transformers`' `hidden_states`: 0 = embeddings, i = output of layer i.
        """
        batch, rows = tokens.shape
        rope = cache.rope or self._rope_for(cache.capacity)
        x = F.embedding(tokens.reshape(-1), self.embedding).float()
        heads, kv = self.heads, self.kv_heads
        fuse = fuses(self.device, self.dtype, self._shape)
        if self._native is not None and not fuse and self._native.computes(cache, plan):
            y, kept = self._native.forward(x, cache, plan, rope, taps)
            y = y.view(batch, rows, -1)
            return y, _side_by_side(kept, taps, y)
        if fuse:
            positions, slots = plan.positions.contiguous(), cache.slots(plan, rows).contiguous()
        else:
            table = rope.at(plan, heads + kv, kv)
        norms = [*(layer.input_norm for layer in self.layers[1:]), self.norm]  # behind each layer
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
            kept[len(self.layers)] = y  # transformers' last hidden state is the normed one
        y = y.view(batch, rows, -1)
        return y, _side_by_side(kept, taps, y)

    def normed(self, states: Tensor) -> Tensor:
        """h [..., H] of the last layer's output [..., H], as `forward` makes it."""
        return self.norm(states.float())

    def logits(self, hidden: Tensor) -> Tensor:
        """Vocabulary logits of h [..., H] (after the final norm), in fp32 where the head keeps its sums."""
        return self.part.gather(self.head(hidden), self.vocab_size)


def _side_by_side(kept: dict[int, Tensor], taps: tuple[int, ...], y: Tensor) -> Tensor | None:
    """The kept states [B · T, H] of every tap [B, T, len(taps) · H], of as many rows as `y` [B, T, H]."""
    return torch.cat([kept[tap] for tap in taps], -1).view(*y.shape[:2], -1) if taps else None
