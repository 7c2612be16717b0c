"""A lean forward for Llama-shaped decoders: preallocated KV, packed weights, no per-call bookkeeping.

Covers Llama, Mistral, Qwen2 and Qwen3 dense models (grouped-query attention, attention biases, QK-norm, any static RoPE
scaling). Everything else runs through `transformers`' own forward (`hf.py`) behind the same two methods.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from specctl.decoding.cache import KVCache
from specctl.decoding.models.layers import Linear, RMSNorm, attend
from specctl.decoding.models.supported import ropes
from specctl.decoding.plan import Plan
from specctl.decoding.rope import Rope

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


class LeanModel:
    """Runs steps of a Llama-shaped model, built from a loaded `transformers` model, with which it shares what it does
    not have to pack.

    Args:
        consume: empty every layer of `model` once it is packed. The two together never hold more than the weights and
            one layer, and `model` is of no use afterwards.
    """

    def __init__(self, model, consume: bool = False):
        config = model.config
        body = model.model
        self.dtype = model.dtype
        self.device = body.embed_tokens.weight.device
        self.heads = config.num_attention_heads
        self.kv_heads = config.num_key_value_heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        self.scale = self.head_dim**-0.5
        self.hidden_size = config.hidden_size
        self.embedding = body.embed_tokens.weight.detach()
        self.layers = []
        for layer in body.layers:
            self.layers.append(_LeanLayer(layer, config, self.dtype))
            for parameter in layer.parameters() if consume else ():
                parameter.data = parameter.new_empty(0)
        self.norm = RMSNorm(body.norm.weight, config.rms_norm_eps, self.dtype)
        self.head = Linear(model.lm_head.weight, model.lm_head.bias)
        self._rotary = body.rotary_emb
        self._rope: Rope | None = None

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        cache = KVCache(
            len(self.layers), batch, self.kv_heads, capacity, self.head_dim, dtype=self.dtype, device=self.device
        )
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
        heads, kv = self.heads, self.kv_heads
        table = rope.at(plan, heads + kv, kv)
        x = F.embedding(tokens.reshape(-1), self.embedding).float()
        kept = {0: x} if 0 in taps else {}
        for index, layer in enumerate(self.layers):
            qkv = layer.qkv(layer.input_norm(x)).view(batch * rows, heads + 2 * kv, self.head_dim)
            if layer.q_norm is not None and layer.k_norm is not None:
                q, k, v = qkv.split((heads, kv, kv), 1)
                qkv = torch.cat((layer.q_norm(q.float()), layer.k_norm(k.float()), v), 1)
            qkv = rope.rotate(qkv, table)
            cache.write(index, qkv[:, heads:], plan)
            q = qkv[:, :heads].unflatten(0, (batch, rows))
            x = x + layer.o(attend(q, cache, index, plan, self.scale))
            gate, up = layer.gate_up(layer.post_norm(x)).chunk(2, -1)
            x = x + layer.down(F.silu(gate).mul_(up))
            if index + 1 in taps:
                kept[index + 1] = x
        hidden = self.norm(x)
        if len(self.layers) in taps:
            kept[len(self.layers)] = hidden  # transformers' last hidden state is the normed one
        tapped = None
        if taps:
            tapped = torch.cat([kept[tap].to(self.dtype) for tap in taps], -1).view(batch, rows, -1)
        return hidden.view(batch, rows, -1), tapped

    def normed(self, states: Tensor) -> Tensor:
        """h [..., H] of the last layer's output [..., H], as `forward` makes it."""
        return self.norm(states.float())

    def logits(self, hidden: Tensor) -> Tensor:
        """Vocabulary logits of h [..., H] (after the final norm)."""
        return self.head(hidden)
