"""Layouts of Llama-shaped decoder layers: what the lean step must know about a model type to compute its layers.

The lean step stacks the projections q, k, v and gate, up, and rotates element i of a head with element i + D/2. Some
models store fused projections, rotate neighboring elements, or rotate only a part of each head. Their query and key
rows are reordered on loading. Attention scores stay the same, because queries and keys are reordered alike.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from specctl.decoding.models.supported import DENSE, context_limit, ropes, window_size

GEMMA = {"gemma", "gemma3_text"}
"""Model types that store the weights of norms minus one, and multiply the embeddings by the root of their width."""
GRANITE = {"granite", "granitemoehybrid"}
"""Model types that multiply embeddings, attention scores, layers' outputs and logits by constants."""
NORMS = {"input_norm": "input_layernorm", "post_norm": "post_attention_layernorm"}
OUTPUT_NORMS = {"o_norm": "post_attention_layernorm", "down_norm": "post_feedforward_layernorm"}
OTHER_NORMS = {
    **dict.fromkeys(("exaone4", "olmo2", "olmo3"), OUTPUT_NORMS),
    "gemma3_text": {
        "input_norm": "input_layernorm",
        "o_norm": "post_attention_layernorm",
        "post_norm": "pre_feedforward_layernorm",
        "down_norm": "post_feedforward_layernorm",
    },
    "glm4": NORMS | {"o_norm": "post_self_attn_layernorm", "down_norm": "post_mlp_layernorm"},
}
"""Norms of model types that normalize the outputs of attention and MLP."""
NORMED_OUTPUTS = {kind for kind, norms in OTHER_NORMS.items() if "input_norm" not in norms}
"""Model types that normalize the outputs of attention and MLP, and not their inputs. C++ cannot compute them."""
MODEL_TYPES = DENSE | GEMMA | GRANITE | NORMED_OUTPUTS
MODEL_TYPES |= {"cwm", "ernie4_5", "glm", "glm4", "helium", "internlm3", "iquestcoder", "ministral", "phi3", "seed_oss"}
MODEL_TYPES |= {"smollm3"}
"""Model types with Llama's layers, up to the options of `LayerLayout`."""
MLP_NAMES = {"granitemoehybrid": {"gate_up": ["shared_mlp.input_linear"], "down": ["shared_mlp.output_linear"]}}
"""Names of projections that differ from Llama's."""
FUSED_QKV, FUSED_GATE_UP = {"phi3"}, {"glm", "glm4", "phi3"}
NEIGHBORS = {"ernie4_5", "glm", "glm4", "helium"}
"""Model types that rotate element 2i of a head with element 2i + 1."""
PARTIAL = {"glm", "glm4", "phi3"}
"""Model types that rotate a part of each head. For other types, `transformers` ignores `partial_rotary_factor`."""
UNROTATED = "none"  # in `LayerLayout.ropes`
GELU = "gelu_pytorch_tanh"


def head_dim_of(config) -> int:
    """Width of an attention head, which not every configuration states."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def rotated_dims(config) -> int:
    """Number of elements of a head that RoPE rotates."""
    return int(head_dim_of(config) * rotary_factor(config))


def rotary_factor(config) -> float:
    """Configured part of a head that RoPE rotates."""
    return next((rope.get("partial_rotary_factor") or 1.0 for rope in ropes(config).values()), 1.0)


def mlp_width(config) -> int:
    """Width of the MLP between its projections."""
    width: int = config.shared_intermediate_size if config.model_type in MLP_NAMES else config.intermediate_size
    return width


@dataclass(frozen=True)
class LayerLayout:
    """Layout of a model's layers.

    Attributes:
        names: names of the projections in a layer, by the product that stacks them.
        norms: names of the norms, of the residual stream (which some models lack) and of the outputs of `o` and `down`.
        offset: number that is added to the stored weights of norms.
        gelu: the activation is GELU's tanh approximation, not SiLU.
        order: order of the rows of the stacked q, k, v projection (None = as stored).
        eps: ε of the norms.
        embedding: factor of the embeddings in the residual stream.
        tapped: factor from the residual stream to the hidden states of `transformers`.
        attention: factor of the attention scores.
        logits: divisor of the logits.
        ropes: the rotary table of each layer: "" = the only one of the model, UNROTATED = none, otherwise the table of
            this type of layers.
        windows: number of positions that a row of each layer attends, its own included (None = all).
    """

    names: dict[str, list[str]]
    norms: dict[str, str]
    order: Tensor | None
    ropes: list[str]
    windows: list[int | None]
    eps: float
    attention: float
    offset: float = 0.0
    gelu: bool = False
    embedding: float = 1.0
    tapped: float = 1.0
    logits: float = 1.0

    @classmethod
    def of(cls, config, heads: int, kv_heads: int) -> LayerLayout:
        """The layout of a configuration, for layers with this number of heads."""
        kind, gemma = config.model_type, config.model_type in GEMMA
        names = {
            "qkv": ["self_attn.qkv_proj"] if kind in FUSED_QKV else [f"self_attn.{one}_proj" for one in "qkv"],
            "o": ["self_attn.o_proj"],
            "gate_up": ["mlp.gate_up_proj"] if kind in FUSED_GATE_UP else ["mlp.gate_proj", "mlp.up_proj"],
            "down": ["mlp.down_proj"],
        } | MLP_NAMES.get(kind, {})
        layout = cls(
            names,
            OTHER_NORMS.get(kind, NORMS),
            _row_order(config, heads, kv_heads),
            _ropes(config),
            _windows(config),
            config.rms_norm_eps,
            (config.query_pre_attn_scalar if kind == "gemma3_text" else head_dim_of(config)) ** -0.5,
            offset=1.0 if gemma else 0.0,
            gelu=activation(config) == GELU,
            embedding=config.hidden_size**0.5 if gemma else 1.0,
        )
        if kind not in GRANITE:
            return layout
        # Granite multiplies all that its layers add by r. A stream that is divided by r needs no such factor, and its
        # norms are the same with ε / r².
        residual = config.residual_multiplier
        return replace(
            layout,
            eps=layout.eps / residual**2,
            attention=config.attention_multiplier,
            embedding=config.embedding_multiplier / residual,
            tapped=residual,
            logits=logits_divisor(config),
        )

    def norm_weight(self, norm) -> Tensor:
        """The weight of a norm of the model, as a factor."""
        weight: Tensor = norm.weight.detach()
        return weight.float() + self.offset if self.offset else weight


def activation(config) -> str:
    """Name of the activation in the MLP."""
    return getattr(config, "hidden_activation" if config.model_type == "gemma3_text" else "hidden_act", "silu")


def logits_divisor(config) -> float:
    """Number by which a model divides the products with its vocabulary head."""
    return config.logits_scaling if config.model_type in GRANITE else 1.0


def _ropes(config) -> list[str]:
    if config.model_type == "smollm3":
        return ["" if rotated else UNROTATED for rotated in config.no_rope_layers]
    if config.model_type == "granitemoehybrid" and config.position_embedding_type != "rope":
        return [UNROTATED] * config.num_hidden_layers
    if config.model_type == "exaone4" and config.sliding_window is not None:
        return ["" if kind == "sliding_attention" else UNROTATED for kind in config.layer_types]
    by_type = any(isinstance(value, dict) for value in (getattr(config, "rope_parameters", None) or {}).values())
    return list(config.layer_types) if by_type else [""] * config.num_hidden_layers


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
