"""Drafting with an EAGLE-3 head: a chain, or a dynamic tree (EAGLE-2, Li et al. 2024, arXiv 2406.16858, §4)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specctl import kernels
from specctl.decoding.cache import KVCache, Plan, plan_rows
from specctl.decoding.draft import PADDING, DraftTree
from specctl.decoding.layers import DraftLinear, RMSNorm, Rope, attend
from specctl.decoding.state import DecodeState
from specctl.decoding.target import Target
from specctl.drafters.eagle3_head import Eagle3Config, Eagle3Head
from specctl.errors import CheckpointError
from specctl.recipe import DrafterRecipe, DraftingRecipe, TrainRecipe


@dataclass(frozen=True)
class Shape:
    """Shape of a draft.

    `depth` expansions at most; each expands the `width` most probable nodes of the last level into `children`
    candidates; the `nodes` candidates of highest joint probability are kept. A level whose best joint probability is
    under `stop_below` is not expanded: a draft that will be rejected costs as much as one that will not.
    """

    depth: int
    width: int
    nodes: int
    children: int
    stop_below: float

    @property
    def chain(self) -> bool:
        return self.width == 1 and self.children == 1


@dataclass
class _Memory:
    """The head's own cache: slots 0 .. cached−1 hold keys and values made from the target's features."""

    cache: KVCache
    cached: list[int]
    hidden: Tensor  # [B, H] the layer's output at the last slot, before its norm
    logits: Tensor  # [B, Vd]

    def select(self, index: Tensor) -> None:
        self.cache.select(index)
        self.cached = [self.cached[b] for b in index.tolist()]
        self.hidden, self.logits = self.hidden[index], self.logits[index]


class Eagle3Drafter:
    """Inference of an `Eagle3Head`: weights fused and packed as the target's are."""

    def __init__(self, head: Eagle3Head, target: Target, shape: Shape):
        config = head.config
        dtype, device = target.dtype, target.device
        self.config, self.shape, self.taps = config, shape, config.taps
        self.embedding = target.model.embedding

        def weight(module: torch.nn.Linear) -> Tensor:
            return module.weight.detach().to(device, dtype)

        def norm(module: torch.nn.RMSNorm) -> RMSNorm:
            return RMSNorm(module.weight.detach().to(device), config.rms_norm_eps, dtype)

        layer = head.midlayer
        attention, mlp = layer.self_attn, layer.mlp
        self.fc = DraftLinear(weight(head.fc))
        self.qkv = DraftLinear(torch.cat([weight(p) for p in (attention.q_proj, attention.k_proj, attention.v_proj)]))
        self.o = DraftLinear(weight(attention.o_proj))
        self.gate_up = DraftLinear(torch.cat((weight(mlp.gate_proj), weight(mlp.up_proj))))
        self.down = DraftLinear(weight(mlp.down_proj))
        self.hidden_norm, self.post_norm = norm(layer.hidden_norm), norm(layer.post_attention_layernorm)
        self.norm, self.head = norm(head.norm), DraftLinear(weight(head.lm_head))
        # The first half of the layer's input depends on the token alone: tabulate it.
        self.token_input = norm(layer.input_layernorm)(self.embedding.float())
        self.d2t = head.draft_ids.to(device)
        self._to_target = self.d2t.tolist()
        self._inv_freq = head.inv_freq.to(device)
        self._rope: Rope | None = None

    def _tables(self, memory: _Memory, steps: int) -> list[tuple[Tensor, Tensor]]:
        """Rotary tables of the drafting steps of a round, made at once."""
        heads, kv = self.config.num_heads, self.config.num_kv_heads
        return self._rope_for(memory.cache.capacity).ahead(memory.cached, steps, heads + kv, kv)

    def _rope_for(self, capacity: int) -> Rope:
        if self._rope is None or self._rope.cos.shape[0] < capacity:
            angle = torch.arange(capacity, device=self._inv_freq.device)[:, None].float() * self._inv_freq
            angle = torch.cat((angle, angle), -1)
            dtype = self.token_input.dtype
            self._rope = Rope(angle.cos().to(dtype), angle.sin().to(dtype))
        return self._rope

    def _layer(
        self,
        tokens: Tensor,
        features: Tensor,
        cache: KVCache,
        plan: Plan,
        table: tuple[Tensor, Tensor],
        last: list[int] | None = None,
    ) -> Tensor:
        """Run the layer over rows [B, T]: features [B·T, H] fp32 (after `fc`, or the layer's own output).

        With `last`, only row last[b] of each sequence is carried beyond keys and values. Returns [B·T or B, H] fp32.
        """
        config = self.config
        batch, rows = tokens.shape
        heads, kv = config.num_heads, config.num_kv_heads
        inputs = torch.cat((F.embedding(tokens.reshape(-1), self.token_input), self.hidden_norm(features)), -1)
        qkv = self.qkv(inputs).view(batch * rows, heads + 2 * kv, config.head_dim)
        qkv = Rope.rotate(qkv, table)
        cache.write(0, qkv[:, heads:], plan)
        query = qkv[:, :heads]
        if last is not None:
            if rows > 1:
                kept = torch.tensor([b * rows + row for b, row in enumerate(last)], device=tokens.device)
                query, features = query[kept], features[kept]
            rows = 1
            ends = [start + row for start, row in zip(plan.base, last, strict=True)]
            plan = plan_rows(ends, 1, device=cache.store.device, dtype=cache.store.dtype)
        attended = attend(query.unflatten(0, (batch, rows)), cache, 0, plan, config.head_dim**-0.5)
        x = features + self.o(attended)
        gate, up = self.gate_up(self.post_norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate).mul_(up))

    def _memory(self, state: DecodeState) -> _Memory:
        memory = state.memory.get(self)
        if memory is None:
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
            hidden = torch.zeros(state.batch, config.hidden_size, device=state.device)
            logits = torch.zeros(state.batch, config.draft_vocab_size, dtype=state.dtype, device=state.device)
            memory = state.memory[self] = _Memory(cache, [0] * state.batch, hidden, logits)
        return memory

    def invalidate(self, state: DecodeState) -> None:
        """Forget keys and values; the next `advance` recomputes them from the retained features."""
        state.memory.pop(self, None)

    def advance(self, state: DecodeState) -> None:
        """Fill slots `cached` .. len−2 (slot i = features of position i with the token after it) of every row."""
        memory = self._memory(state)
        assert state.features is not None, "the loop retains no features for this drafter: pass its taps"
        ends = state.cached
        width = max(end - start for start, end in zip(memory.cached, ends, strict=True))
        if width == 0:
            return
        # Every sequence runs its last `width` slots again, new or not: no padding row can lie behind the cache's end.
        starts = [max(end - width, 0) for end in ends]
        counts = [end - start for start, end in zip(starts, ends, strict=True)]
        tokens = torch.tensor(
            [
                row.ids[start + 1 :][:width] + [0] * (width - count)
                for row, start, count in zip(state.rows, starts, counts, strict=True)
            ],
            device=state.device,
        )
        if state.batch == 1:
            features = state.features[0, starts[0] : ends[0]]
        else:
            where = torch.tensor(starts, device=state.device)[:, None] + torch.arange(width, device=state.device)
            features = state.features[torch.arange(state.batch, device=state.device)[:, None], where]
            features = features.reshape(state.batch * width, -1)
        plan = plan_rows(starts, width, device=state.device, dtype=state.dtype)
        # A row with nothing new (finished, waiting to be dropped) runs a padding row whose result is not used.
        last = [max(count - 1, 0) for count in counts]
        kv = self.config.num_kv_heads
        table = self._rope_for(memory.cache.capacity).at(plan, self.config.num_heads + kv, kv)
        hidden = self._layer(tokens, self.fc(features).float(), memory.cache, plan, table, last)
        memory.hidden, memory.logits = hidden, self.head(self.norm(hidden))
        memory.cached = list(ends)

    def propose(self, state: DecodeState, budget: int) -> DraftTree:
        """A chain or tree from the last committed token, never deeper than a sequence has room for."""
        self.advance(state)
        memory = self._memory(state)
        assert memory.cached == state.cached, "stale draft cache"
        depth = min(self.shape.depth, max(row.room for row in state.rows), budget)
        if depth <= 0:
            return DraftTree.from_chains([[] for _ in state.rows], state.device)
        # Exact mode promises bitwise equality for chains; a tree's siblings sit between the rows it keeps.
        if self.shape.chain or state.exact_rows:
            return self._chain(state, memory, depth)
        return self._tree(state, memory, depth, budget)

    def _chain(self, state: DecodeState, memory: _Memory, depth: int) -> DraftTree:
        hidden, logits = memory.hidden, memory.logits
        chains: list[list[int]] = [[] for _ in state.rows]
        joint = [0.0] * state.batch
        floor = _log(self.shape.stop_below)
        tables = self._tables(memory, depth)
        for step in range(depth):
            logprob, index = kernels.expand_topk(logits, 1)
            for b, (gain, token) in enumerate(zip(logprob[:, 0].tolist(), index[:, 0].tolist(), strict=True)):
                joint[b] += gain
                chains[b].append(self._to_target[token])
            if step + 1 == depth or max(joint) < floor:
                break
            tokens = torch.tensor([chain[-1:] for chain in chains], device=state.device)
            plan = plan_rows([c + step for c in memory.cached], 1, device=state.device, dtype=state.dtype)
            hidden = self._layer(tokens, hidden, memory.cache, plan, tables[step])
            logits = self.head(self.norm(hidden))
        return DraftTree.from_chains(chains, state.device)

    def _tree(self, state: DecodeState, memory: _Memory, depth: int, budget: int) -> DraftTree:
        growing = [_Tree() for _ in state.rows]
        width, children = self.shape.width, min(self.shape.children, self.config.draft_vocab_size)
        logprob, index = kernels.expand_topk(memory.logits, children)
        for tree, gains, ids in zip(growing, logprob.tolist(), index.tolist(), strict=True):
            tree.add(-1, gains, [self._to_target[i] for i in ids])
        hidden = memory.hidden[:, None].expand(-1, width, -1)  # every child of the root continues the last slot
        floor = _log(self.shape.stop_below)
        tables = self._tables(memory, depth)
        for step in range(depth - 1):
            frontiers = [tree.frontier(width) for tree in growing]
            if max(tree.joint[frontier[0]] for tree, frontier in zip(growing, frontiers, strict=True)) < floor:
                break
            tokens = torch.tensor(
                [[t.tokens[n] for n in f] for t, f in zip(growing, frontiers, strict=True)], device=state.device
            )
            if step and width > 1:
                source = torch.tensor(
                    [t.source(f) for t, f in zip(growing, frontiers, strict=True)], device=state.device
                )
                hidden = hidden.gather(1, source.unsqueeze(-1).expand(-1, -1, hidden.shape[-1]))
            plan = self._plan(state, memory, growing, frontiers, step)
            table = tables[step]
            if width > 1 and state.batch > 1:
                table = (table[0].repeat_interleave(width, 0), table[1].repeat_interleave(width, 0))
            rows = self._layer(tokens, hidden.reshape(state.batch * width, -1), memory.cache, plan, table)
            hidden = rows.view(state.batch, width, -1)
            logprob, index = kernels.expand_topk(self.head(self.norm(rows)), children)
            gains, ids = logprob.view(state.batch, width, -1).tolist(), index.view(state.batch, width, -1).tolist()
            for tree, frontier, gain, token in zip(growing, frontiers, gains, ids, strict=True):
                for place, node in enumerate(frontier):
                    tree.expanded[node] = step * width + place
                    tree.add(node, gain[place], [self._to_target[i] for i in token[place]])
        return _best(growing, min(self.shape.nodes, budget), state.device)

    def _plan(
        self, state: DecodeState, memory: _Memory, growing: list[_Tree], frontiers: list[list[int]], step: int
    ) -> Plan:
        """Row w of this step sits behind the committed slots and the rows of earlier steps, and attends the committed
        slots, its ancestors' rows and itself."""
        width = self.shape.width
        base = [cached + step * width for cached in memory.cached]
        positions = torch.tensor([[cached + step] * width for cached in memory.cached], device=state.device)
        if width == 1 and len(set(base)) == 1:
            return Plan(base, positions, base[0] + 1, None, False, True)
        span = max(base) + width
        mask = torch.full((state.batch, 1, width, span), float("-inf"), dtype=state.dtype, device=state.device)
        for b, (tree, frontier) in enumerate(zip(growing, frontiers, strict=True)):
            start = memory.cached[b]
            mask[b, 0, :, :start] = 0
            for place, node in enumerate(frontier):
                seen = [start + tree.expanded[a] for a in tree.ancestors(node)] + [base[b] + place]
                mask[b, 0, place, seen] = 0
        return Plan(base, positions, span, mask, False, False)


class _Tree:
    """A draft tree while it grows: parallel lists over candidates, in the order they were found."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.joint: list[float] = []  # log probability of the path from the root
        self.expanded: dict[int, int] = {}  # node → its row behind the committed slots
        self.level = range(0)  # nodes found by the last expansion

    def add(self, parent: int, gains: list[float], tokens: list[int]) -> None:
        start = len(self.tokens)
        fresh = start if parent == -1 or self._level_of(parent) else self.level.start
        score = self.joint[parent] if parent >= 0 else 0.0
        self.tokens += tokens
        self.parents += [parent] * len(tokens)
        self.joint += [score + gain for gain in gains]
        self.level = range(fresh, len(self.tokens))

    def _level_of(self, parent: int) -> bool:
        """True when `parent` is of the current level, so that its children open the next one."""
        return parent in self.level

    def frontier(self, width: int) -> list[int]:
        """The `width` most probable nodes of the last level (repeated when there are fewer)."""
        best = sorted(self.level, key=lambda node: -self.joint[node])[:width]
        return best + best[-1:] * (width - len(best))

    def source(self, frontier: list[int]) -> list[int]:
        """Place of each node's parent among the rows of the step before."""
        rows = [self.expanded[self.parents[node]] for node in frontier]
        return [row % len(frontier) for row in rows]

    def ancestors(self, node: int) -> list[int]:
        found = []
        while (node := self.parents[node]) >= 0:
            found.append(node)
        return found


def _best(growing: list[_Tree], nodes: int, device: torch.device) -> DraftTree:
    """The `nodes` candidates of highest joint probability. A child is never more probable than its parent and is found
    later, so a stable choice keeps the tree connected and parents first."""
    tokens, parents = [], []
    for tree in growing:
        kept = sorted(sorted(range(len(tree.tokens)), key=lambda node: -tree.joint[node])[:nodes])
        place = {node: i for i, node in enumerate(kept)} | {-1: -1}
        tokens.append([tree.tokens[node] for node in kept])
        parents.append([place[tree.parents[node]] for node in kept])
    width = max(map(len, tokens))
    for row, links in zip(tokens, parents, strict=True):
        links += [PADDING] * (width - len(links))
        row += [0] * (width - len(row))
    return DraftTree(torch.tensor(tokens, device=device), torch.tensor(parents, device=device), chain=False)


def _log(probability: float) -> float:
    return math.log(probability) if probability > 0 else -math.inf


def default_shape(device: torch.device) -> Shape:
    """On a CPU (measured on the built-in target) a chain with the runners-up of each depth as leaves: they cost no
    forward of the head, and a dozen rows cost the target little more than one. A GPU takes a larger tree (EAGLE-2)."""
    if device.type == "cpu":
        return Shape(depth=12, width=1, nodes=14, children=3, stop_below=0.05)
    return Shape(depth=6, width=8, nodes=48, children=8, stop_below=0.0)


def shape_for(drafting: DraftingRecipe, device: torch.device) -> Shape:
    """The measured default with what a `DraftingRecipe` sets."""
    default = default_shape(device)
    fields = ("depth", "width", "nodes", "children", "stop_below")
    given = {name: value for name in fields if (value := getattr(drafting, name, None)) is not None}
    return Shape(**{**vars(default), **given})


def published(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The module's state as it is stored: its names are those of the published checkpoints."""
    return state


def restore(config: dict[str, Any], tensors: dict[str, Tensor]) -> Eagle3Head:
    """The module from the contents of a checkpoint. CheckpointError when they do not fit."""
    try:
        head = Eagle3Head(Eagle3Config.from_dict(config["architecture"]))
        head.load_state_dict(tensors)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"eagle3 drafter: weights and architecture do not fit: {error}") from error
    return head


def drafter(head: Eagle3Head, target: Target, drafting: DraftingRecipe) -> Eagle3Drafter:
    """Inference of `head`."""
    return Eagle3Drafter(head, target, shape_for(drafting, target.device))


def config(head: Eagle3Head, target: dict[str, Any]) -> dict[str, Any]:
    """config.json of a checkpoint; `target` is `Target.identity`."""
    return {"family": "eagle3", "architecture": head.config.to_dict(), "target": target}


def build(recipe: TrainRecipe, target: Target, frequent: Callable[[int], list[int]]) -> Eagle3Head:
    """A head for `target` that starts from it."""
    shape = architecture(recipe.drafter, target)
    head = Eagle3Head(shape, torch.tensor(frequent(shape.draft_vocab_size)), recipe.ttt_steps, recipe.ttt_decay)
    initialise(head, target)
    return head


def architecture(recipe: DrafterRecipe, target: Target) -> Eagle3Config:
    """A head for `target`, shaped by a `DrafterRecipe`; what it leaves out follows the target's own layers."""
    text = target.config
    heads = recipe.num_heads or text.num_attention_heads
    dim = (
        target.hidden_size // heads
        if recipe.num_heads
        else getattr(text, "head_dim", None) or target.hidden_size // heads
    )
    rope = getattr(text, "rope_parameters", None) or {}
    return Eagle3Config(
        hidden_size=target.hidden_size,
        intermediate_size=recipe.intermediate_size or getattr(text, "intermediate_size", 4 * target.hidden_size),
        num_heads=heads,
        num_kv_heads=recipe.num_kv_heads or getattr(text, "num_key_value_heads", None) or heads,
        head_dim=dim,
        vocab_size=target.vocab_size,
        draft_vocab_size=min(recipe.vocab_size or min(32_000, target.vocab_size // 2), target.vocab_size),
        taps=tuple(recipe.taps or default_taps(target.num_layers)),
        rms_norm_eps=getattr(text, "rms_norm_eps", 1e-6),
        rope_theta=float(rope.get("rope_theta", 10_000.0)),
        max_position_embeddings=target.context_length,
    )


def default_taps(layers: int) -> tuple[int, ...]:
    """EAGLE-3's choice, hidden_states[2], [n//2], [n−3]; spread evenly where the model is too shallow for it."""
    return (2, layers // 2, layers - 3) if layers >= 7 else (max(1, layers // 3), max(1, 2 * layers // 3), layers)


@torch.no_grad()
def initialise(head: Eagle3Head, target: Target) -> None:
    """Start from the target: its vocabulary head, its final norm, and the last tapped state passed through `fc`."""
    size = head.config.hidden_size
    ids = head.draft_ids.to(target.device)
    head.lm_head.weight.copy_(target.head_weight[ids].float())
    if target.norm_weight is not None:
        head.norm.weight.copy_(target.norm_weight.float())
    head.fc.weight.mul_(0.1)
    head.fc.weight[:, -size:] += torch.eye(size)
