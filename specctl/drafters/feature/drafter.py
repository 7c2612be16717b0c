"""Drafting with a head that reads the target's features and then its own outputs (EAGLE and EAGLE-3)."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specctl import kernels
from specctl.decoding.device.device_batch import DeviceBatch
from specctl.decoding.models.linear import DraftLinear
from specctl.decoding.plan import Plan, plan_at, plan_rows
from specctl.decoding.records import ChainRows, DraftTree, Score
from specctl.decoding.state import DecodeState
from specctl.decoding.target import Target
from specctl.drafters.device_trees import DeviceTreeBuilder
from specctl.drafters.feature.head import DraftHead, HeadLayer
from specctl.drafters.feature.layer import Attention, FeatureLayer, FeatureMemory, draft_start_slots, select_taps
from specctl.drafters.feature.rounds import ReaderRounds
from specctl.drafters.tree import TreeBuilder, TreeDrafter, TreeShape, WorthLevel, chain_rows
from specctl.kernels.native import NativeProduct


class FeatureDrafter(FeatureLayer, TreeDrafter):
    """Base class of drafters that feed the last layer's output to the first one. Slot i predicts token i + 2.

    After the committed slots the head's own outputs serve as features.

    Attributes:
        head: product of the draft vocabulary head (a `DraftLinear`, or its `LowRank` update).
        stride: rows between the token tables of two heads, if tables are stacked (`feature.stacked`).
    """

    stride = 0
    head: Any

    def __init__(self, head: DraftHead, layer: HeadLayer, target: Target, shape: TreeShape):
        super().__init__(head, layer, target)
        self.shape = shape
        self.embedding = target.model.embedding
        self.ids = head.draft_ids.to(self.device)
        self._to_target = self.ids.tolist()

    @property
    def reach(self) -> int:
        """Cache slots for a broad tree, which keeps the rows of all its levels while it grows."""
        return (self.shape.depth - 1) * self.shape.width

    @abstractmethod
    def to_head(self, hidden: Tensor) -> Tensor:
        """Map the last layer's output [N, H] to the input of the vocabulary head."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Draft vocabulary logits [N, Vd] for the last layer's output."""
        return self.head(self.to_head(hidden))

    def candidates(self, hidden: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Logits [N, Vd] for the head's output, their `count` largest log probabilities [N, count] and the indices."""
        product = self.head.int8 if isinstance(self.head, DraftLinear) else None
        if isinstance(product, NativeProduct):
            return product.candidates(self.to_head(hidden), count)
        logits = self.logits(hidden)
        return logits, *kernels.expand_topk(logits, count)

    def grow(
        self, state: DecodeState, budget: int, shape: TreeShape, pays: WorthLevel
    ) -> tuple[list[TreeBuilder], ChainRows]:
        memory = self._ready(state)
        growing = [TreeBuilder() for _ in state.rows]
        depth = self.levels(state, budget, shape)
        if depth <= 0:
            return growing, ChainRows([])
        width, children = shape.width, min(shape.children, len(self.ids))
        logits, logprob, index = self.candidates(memory.hidden, children)
        asked = [logits]
        for tree, gains, ids in zip(growing, logprob.tolist(), index.tolist(), strict=True):
            tree.add(-1, gains, [self._to_target[i] for i in ids])
        hidden = memory.hidden[:, None].expand(-1, width, -1)  # all children of the root continue from the last slot
        tables = self._tables(memory, depth, width if state.batch > 1 else 1)
        for step in range(depth - 1):
            frontiers = [tree.frontier(width) for tree in growing]
            if not pays([tree.joint[frontier[0]] for tree, frontier in zip(growing, frontiers, strict=True)]):
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
            rows = self._layer(tokens, hidden.reshape(state.batch * width, -1), memory.cache, plan, tables[step])
            hidden = rows.view(state.batch, width, -1)
            logits, logprob, index = self.candidates(rows, children)
            asked.append(logits)
            gains, ids = logprob.view(state.batch, width, -1).tolist(), index.view(state.batch, width, -1).tolist()
            for tree, frontier, gain, token in zip(growing, frontiers, gains, ids, strict=True):
                for place, node in enumerate(frontier):
                    tree.expanded[node] = step * width + place
                    tree.add(node, gain[place], [self._to_target[i] for i in token[place]])
        return growing, chain_rows(growing, asked, self.ids)

    def _plan(
        self,
        state: DecodeState,
        memory: FeatureMemory,
        growing: list[TreeBuilder],
        frontiers: list[list[int]],
        step: int,
    ) -> Plan:
        """Plan of one tree level: its rows follow the committed slots and the rows of earlier steps.

        Each row attends to the committed slots, its ancestors' rows and itself.
        """
        width = len(frontiers[0])
        base = [cached + step * width for cached in memory.cached]
        if width == 1:  # all earlier rows are ancestors
            return plan_rows(base, 1, device=state.device, dtype=state.dtype)
        visible = torch.zeros(state.batch, width, (step + 1) * width, dtype=torch.bool)
        for seen, tree, frontier in zip(visible, growing, frontiers, strict=True):
            for place, node in enumerate(frontier):
                seen[place, [*(tree.expanded[above] for above in tree.ancestors(node)), step * width + place]] = True
        cached = torch.tensor(memory.cached, device=state.device)
        plan = plan_at(cached, visible.to(state.device), step, span=max(base) + width, dtype=state.dtype)
        return replace(plan, base=base, slots=None)

    def on_device(self, state: DecodeState, budget: int) -> FeatureRounds | None:
        """Return the device-side rounds, or None if drafts may end early, because the host decides that."""
        return FeatureRounds(self, state, budget) if self.fixed_shape and budget > 0 else None

    def score(self, state: DecodeState, spans: list[range], depths: int = 1) -> list[Score]:
        """Score the positions of `spans`: a training-time test of `depths` steps over the cached slots.

        Slot s predicts position s + 2 + k at step k, so position j at depth k + 1 is step k of slot j − 2 − k.
        """
        return self.score_as([self], state, spans, depths)[0]

    def score_as(
        self, heads: list[FeatureDrafter], state: DecodeState, spans: list[range], depths: int
    ) -> list[list[Score]]:
        """Score with N `heads` in one forward of N·R rows, head after head (see `feature.stacked`)."""
        kinds: list[dict[str, Any]] = [
            {"ids": head.ids, "children": head.children(state), "inner": head.shape.width} for head in heads
        ]
        asked = [span.start - 1 - depths if span else end for span, end in zip(spans, state.cached, strict=True)]
        memories = [head._ready(state, asked) for head in heads]
        live = [b for b, span in enumerate(spans) if span]
        if not live:
            return [[Score(span, **kind) for span in spans] for kind in kinds]
        assert state.features is not None
        slots = draft_start_slots([spans[b] for b in live], depths)
        at, index = torch.tensor(slots, device=state.device), torch.tensor(live, device=state.device)
        many, end, width = len(heads), int(at.max()) + 1, at.shape[1]
        features = select_taps(state.features[index[:, None], at].flatten(0, 1), state.taps, self.taps)
        hidden = self.feature(features.repeat(many, 1))
        cached = [memory.cache for memory in memories]
        keys, values = (
            [[torch.cat([part[place][index, :, :end] for part in parts])] for place in range(self.layers)]
            for parts in ([cache.keys for cache in cached], [cache.values for cache in cached])
        )
        mask = _mask(at, end, depths, state.dtype).repeat(many, 1, 1, 1)
        for row, skipped in enumerate(cache.skipped[b] for cache in cached for b in live):
            mask[row, ..., skipped.start : min(skipped.stop, end)] = float("-inf")

        def attention(near: Tensor, own: bool) -> Attention:
            def attended(place: int, residual: Tensor, pairs: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
                if own:
                    added = pairs.unflatten(0, (-1, width)).transpose(1, 2)
                    keys[place].append(added[:, : self.kv_heads])
                    values[place].append(added[:, self.kv_heads :])
                return residual, self._attend(query, keys[place], values[place], near)

            return attended

        vocabularies = torch.arange(many, device=state.device)[:, None] * self.stride
        texts = [state.rows[b].ids for b in live]
        capacity, outputs = state.capacity, []
        for k in range(depths):
            fed = [[ids[min(s + 1 + k, len(ids) - 1)] for s in part] for ids, part in zip(texts, slots, strict=True)]
            tokens = (torch.tensor(fed, device=state.device).view(-1) + vocabularies).view(-1)
            places = (at + k).clamp_max(capacity - 1).view(-1).repeat(many)
            table = self._rope_for(capacity).rows(places, self.heads + self.kv_heads, self.kv_heads)
            near = mask if self.window is None else _near(mask, (at + k).repeat(many, 1), end, self.window)
            hidden = self._through(self._project(tokens, hidden, table), table, attention(near, own=k > 0))
            outputs.append(hidden.unflatten(0, (-1, width))[:, depths - 1 - k : width - k])
        logits = self.logits(torch.stack(outputs, 1).flatten(0, 2)).view(
            many, len(live), depths, width + 1 - depths, -1
        )
        found = []
        for kind, rows in zip(kinds, logits, strict=True):
            of = dict(zip(live, rows, strict=True))
            parts = [of.get(b, rows[0])[:, : len(span)] for b, span in enumerate(spans)]
            found.append([Score(s, part, **kind) for s, part in zip(spans, parts, strict=True)])
        return found

    def _ready(self, state: DecodeState, asked: list[int] | None = None) -> FeatureMemory:
        """Return the memory, up to the last committed token, with all slots from `asked` on filled."""
        self.advance(state)
        if asked is not None:
            self.fill_skipped(state, asked)
        return self.current(state)

    def _attend(self, query: Tensor, keys: list[Tensor], values: list[Tensor], mask: Tensor) -> Tensor:
        """Attend from queries [B·R, Hq, D] to the cached slots and the rows of later steps. Returns [B·R, Hq·D]."""
        batch, rows = mask.shape[0], mask.shape[2]
        groups = self.heads // self.kv_heads
        folded = query.view(batch, rows, self.kv_heads, groups, self.dim).permute(0, 2, 3, 1, 4).flatten(2, 3)
        key, value = torch.cat(keys, 2), torch.cat(values, 2)
        seen = mask[..., : key.shape[2]].repeat(1, 1, groups, 1)
        out = F.scaled_dot_product_attention(folded, key, value, attn_mask=seen, scale=self.dim**-0.5)
        return out.unflatten(2, (groups, rows)).permute(0, 3, 1, 2, 4).reshape(batch * rows, -1)


def _mask(at: Tensor, span: int, depths: int, dtype: torch.dtype) -> Tensor:
    """Mask [B, 1, R, span + (depths − 1)·R] for rows at slots `at` [B, R].

    A row attends to the slots up to its own, and among the rows of later steps only to its own.
    """
    batch, rows = at.shape
    hidden = torch.arange(span, device=at.device) > at[..., None]
    others = ~torch.eye(rows, dtype=torch.bool, device=at.device).repeat(1, depths - 1).expand(batch, -1, -1)
    mask = torch.cat((hidden, others), -1)[:, None]
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))


def _near(mask: Tensor, positions: Tensor, span: int, window: int) -> Tensor:
    """Restrict `mask` [B, 1, R, ·]: rows at `positions` [B, R] see at most `window` of the cached positions."""
    far = torch.arange(span, device=mask.device) <= (positions - window)[..., None]
    return mask.masked_fill(F.pad(far, (0, mask.shape[-1] - span))[:, None], float("-inf"))


class FeatureRounds(ReaderRounds):
    """Device-side rounds of a `FeatureDrafter`.

    Each level expands `width` nodes into `children` candidates; the draft keeps the `nodes` best ones.
    """

    def __init__(self, drafter: FeatureDrafter, state: DecodeState, budget: int):
        shape = drafter.shape.within(budget)
        self.drafter, self.levels, self.width = drafter, min(shape.depth, budget), shape.width
        self.children, self.chain = min(shape.children, len(drafter.ids)), shape.chain
        self.nodes = self.levels if self.chain else shape.nodes
        reach = max(1 + self.nodes, (self.levels - 1) * self.width)
        super().__init__(drafter, state, min(self.levels, self.nodes), reach)

    def propose(self, sequences: DeviceBatch, span: int) -> DraftTree:
        """Draft like `FeatureDrafter.propose`, with tensors of fixed shapes."""
        batch, width, children = sequences.batch, self.width, self.children
        trees = DeviceTreeBuilder()
        gains, index = kernels.expand_topk(self.drafter.logits(self.hidden), children)
        trees.add(None, gains.unsqueeze(1), self.drafter.ids[index].unsqueeze(1))
        hidden = self.hidden[:, None].expand(-1, width, -1)  # all children of the root continue from the last slot
        seen = torch.ones(batch, width, 0, dtype=torch.bool, device=sequences.device)
        own = torch.eye(width, dtype=torch.bool, device=seen.device).expand(batch, -1, -1)
        for step in range(self.levels - 1):
            best = trees.frontier(width)
            best = torch.cat((best, best[:, -1:].expand(-1, width - best.shape[1])), 1)
            if step:
                source = (best // children).unsqueeze(-1)  # row of its parent in the previous step
                hidden = hidden.gather(1, source.expand(-1, -1, hidden.shape[-1]))
                seen = seen.gather(1, source.expand(-1, -1, seen.shape[-1]))
            seen = torch.cat((seen, own), -1)
            plan = plan_at(sequences.length - 1, seen, step, span=span, dtype=sequences.dtype)
            rows = self.drafter.rows_at(trees.tokens[-1].gather(1, best), hidden.flatten(0, 1), self.cache, plan)
            hidden = rows.view(batch, width, -1)
            gains, index = kernels.expand_topk(self.drafter.logits(rows), children)
            trees.add(best, gains.view(batch, width, -1), self.drafter.ids[index].view(batch, width, -1))
        return trees.best(sequences.draft_room, self.nodes, self.chain)
