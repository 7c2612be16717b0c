"""Drafting with a one-layer head that lives on the target's features: what eagle and eagle3 share."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from specctl import kernels
from specctl.decoding.cache import Plan, plan_rows
from specctl.decoding.draft import DraftTree, Score
from specctl.decoding.state import DecodeState
from specctl.decoding.target import Target
from specctl.drafters.feature_device import FeatureRounds
from specctl.drafters.feature_layer import FeatureLayer, Memory
from specctl.drafters.head import DraftHead, HeadLayer
from specctl.drafters.tree import GrowingTree, Shape, best
from specctl.drafters.ttt_attention import Layout, ranges
from specctl.drafters.ttt_attention import attention as ttt_attention


class FeatureDrafter(FeatureLayer):
    """Slot i of its layer predicts token i + 2; behind the committed slots its own outputs serve as features."""

    def __init__(self, head: DraftHead, layer: HeadLayer, target: Target, shape: Shape):
        super().__init__(head, layer, target)
        self.shape, self.taps = shape, head.config.taps
        self.embedding = target.model.embedding
        self.ids = head.draft_ids.to(self.device)
        self._to_target = self.ids.tolist()

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Draft vocabulary logits [N, Vd] of the layer's output."""

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

    def _chain(self, state: DecodeState, memory: Memory, depth: int) -> DraftTree:
        hidden, logits = memory.hidden, self.logits(memory.hidden)
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
        chains = [chain[: row.room] for chain, row in zip(chains, state.rows, strict=True)]
        return DraftTree.from_chains(chains, state.device)

    def _tree(self, state: DecodeState, memory: Memory, depth: int, budget: int) -> DraftTree:
        growing = [GrowingTree() for _ in state.rows]
        width, children = self.shape.width, min(self.shape.children, len(self.ids))
        logprob, index = kernels.expand_topk(self.logits(memory.hidden), children)
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
        return best(growing, [row.room for row in state.rows], min(self.shape.nodes, budget), state.device)

    def _plan(
        self, state: DecodeState, memory: Memory, growing: list[GrowingTree], frontiers: list[list[int]], step: int
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

    def on_device(self, state: DecodeState, budget: int) -> FeatureRounds | None:
        """None where drafts end early: that is decided by the host."""
        return FeatureRounds(self, state, budget) if self.shape.stop_below <= 0 and budget > 0 else None

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
        layout = Layout(ranges(ends), ranges(counts), [slot for part in slots for slot in part], state.device)
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
