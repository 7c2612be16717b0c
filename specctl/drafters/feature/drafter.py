"""Drafting with a head that reads the target's features and then its own outputs (EAGLE and EAGLE-3)."""

from __future__ import annotations

from abc import abstractmethod
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from specctl import kernels
from specctl.decoding.attention import by_kernel
from specctl.decoding.device.device_batch import DeviceBatch
from specctl.decoding.models.linear import DraftLinear
from specctl.decoding.plan import BITS, Plan, plan_at
from specctl.decoding.records import ChainRows, DraftTree, Score, first_chain
from specctl.decoding.state import DecodeState
from specctl.decoding.target import Target
from specctl.drafters.feature.head import DraftHead, HeadLayer
from specctl.drafters.feature.layer import Attention, FeatureLayer, FeatureMemory, select_taps
from specctl.drafters.feature.rounds import ReaderRounds
from specctl.drafters.feature.scoring import additive, attend_all, draft_start_slots, hidden_context
from specctl.drafters.tree import DeviceTreeBuilder, TreeBuilder, TreeDrafter, TreeShape, WorthLevel
from specctl.kernels.native import NativeProduct


class FeatureDrafter(FeatureLayer, TreeDrafter):
    """Base class of drafters that feed the last layer's output to the first one. Slot i predicts token i + 2.

    After the committed slots the head's own outputs serve as features.

    Attributes:
        head: product of the draft vocabulary head (a `DraftLinear`, or its `LowRank` update).
    """

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
        # Each level returns the logits after the first chain's node, if that node was expanded.
        chains = [takewhile(tree.expanded.__contains__, first_chain(tree.parents)) for tree in growing]
        rows_of = [
            [b, *(b * width + tree.expanded[node] % width for node in chain)]
            for b, (tree, chain) in enumerate(zip(growing, chains, strict=True))
        ]
        return growing, ChainRows(asked, self.ids, rows_of)

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
        positions = torch.tensor([[cached + step] * width for cached in memory.cached], device=state.device)
        span, reach = max(base) + width, (step + 1) * width
        if by_kernel(state.device) and reach < BITS:
            own = step * width
            bits = [
                [sum(1 << tree.expanded[a] for a in tree.ancestors(n)) | 1 << own + i for i, n in enumerate(frontier)]
                for tree, frontier in zip(growing, frontiers, strict=True)
            ]
            visible = torch.tensor(bits, device=state.device)
            ancestry = kernels.Ancestry(torch.tensor(memory.cached, device=state.device), reach, visible)
            return Plan(base, positions, span, None, False, False, ancestry=ancestry)
        if width == 1 and len(set(base)) == 1:
            return Plan(base, positions, base[0] + 1, None, False, True)
        mask = torch.full((state.batch, 1, width, span), float("-inf"), dtype=state.dtype, device=state.device)
        for b, (tree, frontier) in enumerate(zip(growing, frontiers, strict=True)):
            start = memory.cached[b]
            mask[b, 0, :, :start] = 0
            for place, node in enumerate(frontier):
                seen = [start + tree.expanded[a] for a in tree.ancestors(node)] + [base[b] + place]
                mask[b, 0, place, seen] = 0
        return Plan(base, positions, span, mask, False, False)

    def on_device(self, state: DecodeState, budget: int) -> FeatureRounds | None:
        """Return the device-side rounds, or None if drafts may end early, because the host decides that."""
        return FeatureRounds(self, state, budget) if self.fixed_shape and budget > 0 else None

    def score(self, state: DecodeState, spans: list[range], depths: int = 1) -> list[Score]:
        """Score the positions of `spans`: a training-time test of `depths` steps over the cached slots.

        Slot s predicts position s + 2 + k at step k, so position j at depth k + 1 is step k of slot j − 2 − k.
        """
        kind: dict[str, Any] = {"ids": self.ids, "children": self.children(state), "inner": self.shape.width}
        asked = [span.start - 1 - depths if span else end for span, end in zip(spans, state.cached, strict=True)]
        memory = self._ready(state, asked)
        live = [b for b, span in enumerate(spans) if span]
        if not live:
            return [Score(span, **kind) for span in spans]
        assert state.features is not None
        slots, cache = draft_start_slots([spans[b] for b in live], depths), memory.cache
        at, index = torch.tensor(slots, device=state.device), torch.tensor(live, device=state.device)
        end, width = int(at.max()) + 1, at.shape[1]
        keys = [part[index, :, :end] for part in cache.keys]
        values = [part[index, :, :end] for part in cache.values]
        context = hidden_context(at, end, [cache.skipped[b] for b in live], own=True)
        # A row of a later step attends to its own rows of the steps before.
        others = ~torch.eye(width, dtype=torch.bool, device=state.device).expand(len(live), -1, -1)
        hidden = self.feature(select_taps(state.features[index[:, None], at].flatten(0, 1), state.taps, self.taps))

        def attention(mask: Tensor, own: bool) -> Attention:
            def attended(place: int, residual: Tensor, pairs: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
                if own:
                    key, value = pairs.unflatten(0, (-1, width)).transpose(1, 2).chunk(2, 1)
                    keys[place], values[place] = torch.cat((keys[place], key), 2), torch.cat((values[place], value), 2)
                return residual, attend_all(query, keys[place], values[place], mask)

            return attended

        texts, outputs = [state.rows[b].ids for b in live], []
        for k in range(depths):
            fed = [[ids[min(s + 1 + k, len(ids) - 1)] for s in part] for ids, part in zip(texts, slots, strict=True)]
            tokens = torch.tensor(fed, device=state.device).view(-1)
            places = (at + k).clamp_max(state.capacity - 1).view(-1)
            table = self._rope_for(state.capacity).rows(places, self.heads + self.kv_heads, self.kv_heads)
            far = torch.arange(end, device=state.device) <= (at + k - (self.window or state.capacity))[..., None]
            mask = additive(torch.cat((context | far, others.repeat(1, 1, k)), -1)[:, None], state.dtype)
            hidden = self._run_layers(self._project(tokens, hidden, table), table, attention(mask, own=k > 0))
            outputs.append(hidden.unflatten(0, (-1, width))[:, depths - 1 - k : width - k])
        logits = self.logits(torch.stack(outputs, 1).flatten(0, 2)).view(len(live), depths, width + 1 - depths, -1)
        found = dict(zip(live, logits, strict=True))
        return [Score(span, found[b][:, : len(span)] if span else None, **kind) for b, span in enumerate(spans)]

    def _ready(self, state: DecodeState, asked: list[int] | None = None) -> FeatureMemory:
        """Return the memory, up to the last committed token, with all slots from `asked` on filled."""
        self.advance(state)
        if asked is not None:
            self.fill_skipped(state, asked)
        return self.current(state)


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
