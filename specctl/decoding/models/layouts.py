"""Layouts of Llama-shaped decoder layers: what the lean step must know about a model type to read its weights.

The lean step stacks the projections q, k, v and gate, up, and rotates element i of a head with element i + D/2. Some
models store fused projections, rotate neighboring elements, or rotate only a part of each head. Their query and key
rows are reordered on loading. Attention scores stay the same, because queries and keys are reordered alike.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from specctl.decoding.models.supported import DENSE, context_limit, ropes, window_size

MODEL_TYPES = DENSE | {"ernie4_5", "glm", "granite", "helium", "phi3", "seed_oss", "smollm3"}
"""Model types with Llama's layers, up to the layout of their weights and Granite's multipliers."""
FUSED_QKV, FUSED_GATE_UP = {"phi3"}, {"glm", "phi3"}
NEIGHBORS = {"ernie4_5", "glm", "helium"}
"""Model types that rotate element 2i of a head with element 2i + 1."""
UNROTATED = "none"  # in `LayerLayout.ropes`


def head_dim_of(config) -> int:
    """Width of an attention head, which not every configuration states."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def rotated_dims(config) -> int:
    """Number of elements of a head that RoPE rotates."""
    factor = next((rope.get("partial_rotary_factor", 1.0) for rope in ropes(config).values()), 1.0)
    return int(head_dim_of(config) * factor)


@dataclass(frozen=True)
class LayerLayout:
    """Layout of a model's layers.

    Attributes:
        names: names of the projections in a layer, by the product that stacks them.
        order: order of the rows of the stacked q, k, v projection; None = as stored.
        eps: ε of the norms.
        embedding: factor of the embeddings in the residual stream.
        tapped: factor from the residual stream to the hidden states of `transformers`.
        attention: factor of the attention scores.
        logits: divisor of the logits.
        ropes: the rotary table of each layer: "" = the only one of the model, UNROTATED = none.
        windows: number of positions that a row attends in each layer, its own included; None = all.
    """

    names: dict[str, list[str]]
    order: Tensor | None
    ropes: list[str]
    windows: list[int | None]
    eps: float
    attention: float
    embedding: float = 1.0
    tapped: float = 1.0
    logits: float = 1.0

    @classmethod
    def of(cls, config, heads: int, kv_heads: int) -> LayerLayout:
        """The layout of a configuration, for layers with this number of heads."""
        kind, eps = config.model_type, config.rms_norm_eps
        names = {
            "qkv": ["self_attn.qkv_proj"] if kind in FUSED_QKV else [f"self_attn.{one}_proj" for one in "qkv"],
            "o": ["self_attn.o_proj"],
            "gate_up": ["mlp.gate_up_proj"] if kind in FUSED_GATE_UP else ["mlp.gate_proj", "mlp.up_proj"],
            "down": ["mlp.down_proj"],
        }
        order = _row_order(config, heads, kv_heads)
        ropes = [""] * config.num_hidden_layers
        if kind == "smollm3":
            ropes = ["" if rotated else UNROTATED for rotated in config.no_rope_layers]
        windows = _windows(config)
        if kind != "granite":
            return cls(names, order, ropes, windows, eps, head_dim_of(config) ** -0.5)
        # Granite multiplies all that its layers add by r. A stream that is divided by r needs no such factor, and its
        # norms are the same with ε / r².
        residual = config.residual_multiplier
        multipliers = config.attention_multiplier, config.embedding_multiplier / residual, residual
        return cls(names, order, ropes, windows, eps / residual**2, *multipliers, logits_divisor(config))


def logits_divisor(config) -> float:
    """Number by which a model divides the products with its vocabulary head."""
    return config.logits_scaling if config.model_type == "granite" else 1.0


def _windows(config) -> list[int | None]:
    """Window of each layer, or None where it attends to all positions of a context."""
    window, limit = window_size(config), context_limit(config)
    if window is None or (limit is not None and window >= limit):
        return [None] * config.num_hidden_layers
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return [window if kind == "sliding_attention" else None for kind in kinds]


def _row_order(config, heads: int, kv_heads: int) -> Tensor | None:
    """Order of the rows of the stacked q, k, v projection in which RoPE rotates element i of a head with element
    i + D/2. Elements that RoPE leaves alone are at the end of each half. None = as stored."""
    dim, rotated = head_dim_of(config), rotated_dims(config)
    elements = torch.arange(dim)
    turned, rest = elements[:rotated], elements[rotated:].chunk(2) if rotated < dim else (elements[:0],) * 2
    pairs = (turned[0::2], turned[1::2]) if config.model_type in NEIGHBORS else turned.chunk(2)
    order = torch.cat((pairs[0], rest[0], pairs[1], rest[1]))
    if torch.equal(order, elements):
        return None
    starts = torch.arange(heads + kv_heads)[:, None] * dim
    return torch.cat(((starts + order).flatten(), torch.arange(kv_heads * dim) + starts.numel() * dim))


def rotary_tables(cos: Tensor, sin: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Tables [P, D] for reordered heads from a model's own tables [P, R]. Elements that RoPE leaves alone get cos 1 and
    sin 0."""
    half, rest = cos.shape[-1] // 2, (dim - cos.shape[-1]) // 2
    cos, sin = F.pad(cos[:, :half], (0, rest), value=1.0), F.pad(sin[:, :half], (0, rest))
    return torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
