"""Drafting with a one-layer head that lives on the target's features: what eagle and eagle3 share."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from specctl import kernels
from specctl.decoding.cache import KVCache, Plan, plan_rows
from specctl.decoding.draft import DraftTree, Score
from specctl.decoding.layers import DraftLinear, Linear, RMSNorm, Rope, attend
from specctl.decoding.state import DecodeState
from specctl.decoding.target import Target
from specctl.drafters.head import DraftHead, HeadLayer
from specctl.drafters.lora import Adapter, Part
from specctl.drafters.tree import GrowingTree, Shape, best
from specctl.drafters.ttt_attention import Layout, ranges
from specctl.drafters.ttt_attention import attention as ttt_attention


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


class FeatureDrafter(ABC):
    """One decoder layer over (token, feature) pairs; weights fused and packed as the target's are.

    Slot i holds the feature of position i and the token after it, and predicts the token after that. Behind the
    committed slots the layer's own outputs serve as features.
    """

    def __init__(self, head: DraftHead, layer: HeadLayer, target: Target, shape: Shape):
        config = head.config
        self.shape, self.taps, self.size = shape, config.taps, config.hidden_size
        self.heads, self.kv_heads, self.dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.device, self.dtype, self.eps = target.device, target.dtype, config.rms_norm_eps
        self.embedding = target.model.embedding
        self._names = {module: name for name, module in head.named_modules()}
        self._parts: dict[Linear, list[Part]] = {}
        attention, mlp = layer.self_attn, layer.mlp
        self.qkv = self.linear(attention.q_proj, attention.k_proj, attention.v_proj)
        self.o = self.linear(attention.o_proj)
        self.gate_up = self.linear(mlp.gate_proj, mlp.up_proj)
        self.down = self.linear(mlp.down_proj)
        self.post_norm = self.rms_norm(layer.post_attention_layernorm)
        self.ids = head.draft_ids.to(self.device)
        self._to_target = self.ids.tolist()
        self._inv_freq = head.inv_freq.to(self.device)
        self._rope: Rope | None = None

    def weight(self, module: torch.nn.Linear) -> Tensor:
        """A projection's weight where and in what the target computes."""
        return module.weight.detach().to(self.device, self.dtype)

    def linear(self, *modules: torch.nn.Linear) -> Linear:
        """Projections of one input as one product."""
        product = DraftLinear(torch.cat([self.weight(module) for module in modules]))
        self._parts[product] = [(self._names[module], module.out_features) for module in modules]
        return product

    def adapted(self, adapter: Adapter) -> Self:
        """This drafter with low-rank updates: it shares every weight and has caches of its own."""
        twin = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, Linear):
                setattr(twin, name, adapter.on(value, self._parts.get(value, []), self.device))
        return twin

    def rms_norm(self, module: torch.nn.RMSNorm) -> RMSNorm:
        return RMSNorm(module.weight.detach().to(self.device), self.eps, self.dtype)

    @abstractmethod
    def feature(self, tapped: Tensor) -> Tensor:
        """Tapped target states [N, F] as features [N, H] fp32."""

    @abstractmethod
    def enter(self, tokens: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens [N] and features [N, H]: the residual stream [N, H] fp32 and the input of the projections."""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Draft vocabulary logits [N, Vd] of the layer's output."""

    def _tables(self, memory: _Memory, steps: int) -> list[tuple[Tensor, Tensor]]:
        """Rotary tables of the drafting steps of a round, made at once."""
        rope = self._rope_for(memory.cache.capacity)
        return rope.ahead(memory.cached, steps, self.heads + self.kv_heads, self.kv_heads)

    def _rope_for(self, capacity: int) -> Rope:
        if self._rope is None or self._rope.cos.shape[0] < capacity:
            angle = torch.arange(capacity, device=self._inv_freq.device)[:, None].float() * self._inv_freq
            angle = torch.cat((angle, angle), -1)
            self._rope = Rope(angle.cos().to(self.dtype), angle.sin().to(self.dtype))
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
        """Run the layer over rows [B, T] of tokens and features [B·T, ·].

        With `last`, only row last[b] of each sequence is carried beyond keys and values. Returns [B·T or B, H] fp32.
        """
        batch, rows = tokens.shape
        residual, pairs, query = self._project(tokens.reshape(-1), features, table)
        cache.write(0, pairs, plan)
        if last is not None:
            if rows > 1:
                kept = torch.tensor([b * rows + row for b, row in enumerate(last)], device=tokens.device)
                query, residual = query[kept], residual[kept]
            rows = 1
            ends = [start + row for start, row in zip(plan.base, last, strict=True)]
            plan = plan_rows(ends, 1, device=cache.store.device, dtype=cache.store.dtype)
        return self._leave(residual, attend(query.unflatten(0, (batch, rows)), cache, 0, plan, self.dim**-0.5))

    def _project(self, tokens: Tensor, features: Tensor, table: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """The residual stream [N, H] fp32, keys beside values [N, 2·Hkv, D], and queries [N, Hq, D], rotated."""
        residual, inputs = self.enter(tokens, features)
        qkv = Rope.rotate(self.qkv(inputs).view(len(tokens), self.heads + 2 * self.kv_heads, self.dim), table)
        return residual, qkv[:, self.heads :], qkv[:, : self.heads]

    def _leave(self, residual: Tensor, attended: Tensor) -> Tensor:
        x = residual + self.o(attended)
        gate, up = self.gate_up(self.post_norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate).mul_(up))

    def _memory(self, state: DecodeState) -> _Memory:
        memory = state.memory.get(self)
        if memory is None:
            options = dict(dtype=state.dtype, device=state.device)
            cache = KVCache(1, state.batch, self.kv_heads, state.capacity, self.dim, **options)
            hidden = torch.zeros(state.batch, self.size, device=state.device)
            logits = torch.zeros(state.batch, len(self.ids), **options)
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
        table = self._rope_for(memory.cache.capacity).at(plan, self.heads + self.kv_heads, self.kv_heads)
        hidden = self._layer(tokens, self.feature(features), memory.cache, plan, table, last)
        memory.hidden, memory.logits = hidden, self.logits(hidden)
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
        floor = self.shape.floor
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
            logits = self.logits(hidden)
        return DraftTree.from_chains(chains, state.device)

    def _tree(self, state: DecodeState, memory: _Memory, depth: int, budget: int) -> DraftTree:
        growing = [GrowingTree() for _ in state.rows]
        width, children = self.shape.width, min(self.shape.children, len(self.ids))
        logprob, index = kernels.expand_topk(memory.logits, children)
        for tree, gains, ids in zip(growing, logprob.tolist(), index.tolist(), strict=True):
            tree.add(-1, gains, [self._to_target[i] for i in ids])
        hidden = memory.hidden[:, None].expand(-1, width, -1)  # every child of the root continues the last slot
        floor = self.shape.floor
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
            logprob, index = kernels.expand_topk(self.logits(rows), children)
            gains, ids = logprob.view(state.batch, width, -1).tolist(), index.view(state.batch, width, -1).tolist()
            for tree, frontier, gain, token in zip(growing, frontiers, gains, ids, strict=True):
                for place, node in enumerate(frontier):
                    tree.expanded[node] = step * width + place
                    tree.add(node, gain[place], [self._to_target[i] for i in token[place]])
        return best(growing, min(self.shape.nodes, budget), state.device)

    def _plan(
        self, state: DecodeState, memory: _Memory, growing: list[GrowingTree], frontiers: list[list[int]], step: int
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

    def score(self, state: DecodeState, spans: list[range], depths: int = 1) -> list[Score]:
        """Rows at the positions of `spans`, self-fed for `depths` steps: a training-time test over the cached slots.

        Slot s predicts position s + 2 + k at step k, so position j at depth k + 1 is step k of slot j − 2 − k.
        """
        self.advance(state)
        memory = self._memory(state)
        assert state.features is not None
        starts = [span.start - 1 - depths for span in spans]
        counts = [len(span) + depths - 1 if span else 0 for span in spans]
        if not any(counts):
            return [Score(span, ids=self.ids) for span in spans]
        slots = [range(start, start + count) for start, count in zip(starts, counts, strict=True)]
        ends = [max(part.stop, 1) for part in slots]
        keys, values = (
            torch.cat([side[0][b, :, :end].transpose(0, 1) for b, end in enumerate(ends)])
            for side in (memory.cache.keys, memory.cache.values)
        )
        layout = Layout(ranges(ends), ranges(counts), [slot for part in slots for slot in part])
        hidden = self.feature(torch.cat([state.features[b, p.start : p.stop] for b, p in enumerate(slots) if p]))
        rope, last = self._rope_for(memory.cache.capacity), [len(row.ids) - 1 for row in state.rows]
        own_keys: list[Tensor] = []
        own_values: list[Tensor] = []
        rows = []
        for k in range(depths):
            fed = [min(slot + 1 + k, end) for part, end in zip(slots, last, strict=True) for slot in part]
            ids = [row.ids for row, part in zip(state.rows, slots, strict=True) for _ in part]
            tokens = torch.tensor([text[at] for text, at in zip(ids, fed, strict=True)], device=state.device)
            places = torch.tensor([slot + k for part in slots for slot in part], device=state.device)
            table = rope.rows(places, self.heads + self.kv_heads, self.kv_heads)
            residual, pairs, query = self._project(tokens, hidden, table)
            if k:
                own_keys.append(pairs[:, : self.kv_heads])
                own_values.append(pairs[:, self.kv_heads :])
            attended = ttt_attention(query, keys, values, own_keys, own_values, layout)
            hidden = self._leave(residual, attended.flatten(1))
            rows.append(self.logits(hidden).split(counts))
        return [
            Score(span, torch.stack([step[b][depths - 1 - k :][: len(span)] for k, step in enumerate(rows)]), self.ids)
            for b, span in enumerate(spans)
        ]
