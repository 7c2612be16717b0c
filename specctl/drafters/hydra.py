"""Family `hydra`: drafting with Hydra heads (Ankner et al. 2024, arXiv 2402.05109), one forward a level of the tree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specctl.decoding.cache import KVCache, plan_rows
from specctl.decoding.layers import RMSNorm, Rope, attend
from specctl.decoding.state import DecodeState
from specctl.decoding.target import Target
from specctl.drafters.depth_drafter import DepthDrafter
from specctl.drafters.depth_heads import common_shape, draft_ids, start_from_target
from specctl.drafters.hydra_head import HydraConfig, HydraHeads
from specctl.drafters.static_tree import Shape
from specctl.errors import CheckpointError
from specctl.recipe import DrafterRecipe, DraftingRecipe, TrainRecipe

ACCURACY = (0.6, 0.14, 0.07, 0.04, 0.03, 0.02, 0.015, 0.01, 0.008, 0.006)
LAYERS = 4  # of each head's MLP
DROPOUT = 0.2


@dataclass
class _Memory:
    """The prefix layer's keys and values of slots 0 .. cached−1, and its output at the last of them [B, H]."""

    cache: KVCache
    cached: list[int]
    prefix: Tensor

    def select(self, index: Tensor) -> None:
        self.cache.select(index)
        self.cached = [self.cached[b] for b in index.tolist()]
        self.prefix = self.prefix[index]


class HydraDrafter(DepthDrafter):
    """Inference of `HydraHeads`: the prefix attention runs once a round over the committed slots."""

    grounded = True

    config: HydraConfig

    def __init__(self, module: HydraHeads, target: Target, shape: Shape):
        super().__init__(module, target, shape, ACCURACY)
        self.embedding = target.model.embedding

        def norm(weight: Tensor) -> RMSNorm:
            return RMSNorm(weight.detach().to(self.device), self.config.rms_norm_eps, self.dtype)

        prefix: Any = module.prefix_embeding_layer
        mlps: Any = module.hydra_mlp
        vocabulary: Any = module.hydra_lm_head
        layer, self._inv_freq = prefix.layers[0], prefix.inv_freq.to(self.device)
        attention, mlp = layer.self_attn, layer.mlp
        self.qkv = self._linear(attention.q_proj, attention.k_proj, attention.v_proj)
        self.o = self._linear(attention.o_proj)
        self.gate_up, self.down = self._linear(mlp.gate_proj, mlp.up_proj), self._linear(mlp.down_proj)
        self.input_norm, self.post_norm = (
            norm(layer.input_layernorm.weight),
            norm(layer.post_attention_layernorm.weight),
        )
        self.norm = norm(prefix.norm.weight)
        self.first = [self._linear(mlp[1].res_connection, mlp[1].linear) for mlp in mlps]
        self.again = [self._linear(mlp[-1].linear) for mlp in mlps]
        self.heads = [self._linear(head[1]) for head in vocabulary]
        self._rope: Rope | None = None

    def _logits(self, k: int, states: Tensor, tokens: Tensor) -> Tensor:
        inputs = torch.cat((states, F.embedding(tokens, self.embedding).flatten(1)), -1)
        skip, gate = self.first[k](inputs).chunk(2, -1)
        x = skip + F.silu(gate)
        for _ in range(self.config.num_layers - 1):
            x = x + F.silu(self.again[k](x))
        return self.heads[k](x)

    def advance(self, state: DecodeState) -> None:
        """Run the prefix layer over the slots cached .. len−2 of every row."""
        memory = state.memory.get(self)
        if memory is None:
            memory = state.memory[self] = self._memory(state)
        width = max(end - start for start, end in zip(memory.cached, state.cached, strict=True))
        if width > 0:
            memory.prefix = self._read(state, memory, width, every=False)[0]
            memory.cached = list(state.cached)

    def _memory(self, state: DecodeState) -> _Memory:
        config = self.config
        cache = KVCache(
            1,
            state.batch,
            config.num_kv_heads,
            state.capacity,
            config.head_dim,
            dtype=state.dtype,
            device=state.device,
        )
        prefix = torch.zeros(state.batch, config.hidden_size, dtype=state.dtype, device=state.device)
        return _Memory(cache, [0] * state.batch, prefix)

    def _last(self, state: DecodeState) -> Tensor:
        memory: _Memory = state.memory[self]
        assert memory.cached == state.cached, "stale draft cache"
        return memory.prefix

    def _states(self, state: DecodeState, width: int) -> tuple[Tensor, list[int]]:
        states, starts = self._read(state, state.memory[self], width, every=True)
        return states.unflatten(0, (state.batch, width)), starts

    def _read(self, state: DecodeState, memory: _Memory, width: int, every: bool) -> tuple[Tensor, list[int]]:
        """The prefix layer over every sequence's last `width` slots, seen before or not: no padding row can lie behind
        the cache's end. Returns its output at all of them [B·width, H], or at the last [B, H], and the first slots."""
        config, heads, kv = self.config, self.config.num_heads, self.config.num_kv_heads
        features, starts = super()._states(state, width)
        x = features.flatten(0, 1).float()
        plan = plan_rows(starts, width, device=state.device, dtype=state.dtype)
        qkv = self.qkv(self.input_norm(x)).view(-1, heads + 2 * kv, config.head_dim)
        qkv = Rope.rotate(qkv, self._rope_for(memory.cache.capacity).at(plan, heads + kv, kv))
        memory.cache.write(0, qkv[:, heads:], plan)
        query = qkv[:, :heads]
        if not every:
            ends = [end - 1 for end in state.cached]
            last = [b * width + end - start for b, (start, end) in enumerate(zip(starts, ends, strict=True))]
            kept = torch.tensor(last, device=state.device)
            query, x = query[kept], x[kept]
            plan = plan_rows(ends, 1, device=state.device, dtype=state.dtype)
        attended = attend(query.unflatten(0, (state.batch, -1)), memory.cache, 0, plan, config.head_dim**-0.5)
        x = x + self.o(attended)
        gate, up = self.gate_up(self.post_norm(x)).chunk(2, -1)
        return self.norm(x + self.down(F.silu(gate).mul_(up))), starts

    def _rope_for(self, capacity: int) -> Rope:
        if self._rope is None or self._rope.cos.shape[0] < capacity:
            self._rope = Rope.of(self._inv_freq, torch.arange(capacity, device=self.device), self.dtype)
        return self._rope


def default_shape(device: torch.device) -> Shape:
    """The default on this kind of device."""
    if device.type == "cpu":
        return Shape(depth=4, width=1, nodes=10, children=3, stop_below=0.05)
    return Shape(depth=4, width=16, nodes=60, children=10, stop_below=0.0)


def published(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The module's state as it is stored: its names are those of the published `hydra_lm_head`, where the module of
    `hydra_mlp.K.3` is written again under K.5, K.7, … for every further layer."""
    return state


def restore(config: dict[str, Any], tensors: dict[str, Tensor]) -> HydraHeads:
    """The module from the contents of a checkpoint. CheckpointError when they do not fit."""
    try:
        module = HydraHeads(HydraConfig.from_dict(config["architecture"]))
        module.load_state_dict(tensors)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"hydra drafter: weights and architecture do not fit: {error}") from error
    return module


def drafter(module: HydraHeads, target: Target, drafting: DraftingRecipe) -> HydraDrafter:
    """Inference of `module`."""
    return HydraDrafter(module, target, default_shape(target.device).given(drafting))


def config(module: HydraHeads, target: dict[str, Any]) -> dict[str, Any]:
    """config.json of a checkpoint; `target` is `Target.identity`."""
    return {"family": "hydra", "architecture": module.config.to_dict(), "target": target}


def build(recipe: TrainRecipe, target: Target, frequent: Callable[[int], list[int]]) -> HydraHeads:
    """Heads for `target` that start from it."""
    shape = architecture(recipe.drafter, target)
    module = HydraHeads(shape, draft_ids(shape, frequent), recipe.ttt_decay, DROPOUT)
    initialise(module, target)
    return module


def architecture(recipe: DrafterRecipe, target: Target) -> HydraConfig:
    """Heads for `target`; the prefix layer follows the target's own layers where the recipe leaves it out."""
    text = target.config
    heads = recipe.num_heads or text.num_attention_heads
    dim = None if recipe.num_heads else getattr(text, "head_dim", None)
    rope = getattr(text, "rope_parameters", None) or {}
    return HydraConfig(
        **common_shape(recipe, target, LAYERS),
        intermediate_size=recipe.intermediate_size or getattr(text, "intermediate_size", 4 * target.hidden_size),
        num_heads=heads,
        num_kv_heads=recipe.num_kv_heads or getattr(text, "num_key_value_heads", None) or heads,
        head_dim=dim or target.hidden_size // heads,
        rms_norm_eps=getattr(text, "rms_norm_eps", 1e-6),
        rope_theta=float(rope.get("rope_theta", 10_000.0)),
        max_position_embeddings=target.context_length,
    )


@torch.no_grad()
def initialise(module: HydraHeads, target: Target) -> None:
    """Start from the target: its vocabulary head behind every MLP, which passes the prefix state on."""
    size = module.config.hidden_size
    parts: Any = zip(module.hydra_mlp, module.hydra_lm_head, strict=True)
    for mlp, head in parts:
        start_from_target(head[1], module.draft_ids, target)
        mlp[1].res_connection.weight.mul_(0.1)
        mlp[1].res_connection.weight[:, :size] += torch.eye(size)
