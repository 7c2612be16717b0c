"""Parallel drafting: one pass of a head predicts all positions of a block, from which a chain or tree is chosen."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specctl import kernels
from specctl.decoding.cache import KVCache
from specctl.decoding.device.device_batch import DeviceBatch
from specctl.decoding.records import ChainRows, DraftTree, Score, first_chain
from specctl.decoding.state import DecodeState
from specctl.drafters.feature.layer import FeatureReader
from specctl.drafters.feature.rounds import ReaderRounds
from specctl.drafters.feature.scoring import draft_start_slots
from specctl.drafters.tree import DeviceTreeBuilder, TreeBuilder, TreeDrafter, TreeShape, WorthLevel


class Transitions(NamedTuple):
    """Transitions from the candidates of each level to the candidates of the next level.

    Attributes:
        candidates: [B, depth, C] draft tokens.
        gains: [B, depth, C, c] log probabilities of the likeliest next tokens after each candidate of the previous
            level (at the first level, after the root).
        places: [B, depth, C, c] indices of these next tokens among the candidates.
    """

    candidates: Tensor
    gains: Tensor
    places: Tensor


class ParallelDrafter(FeatureReader, TreeDrafter):
    """Drafter that predicts a distribution for each of the next `depths` tokens in one pass.

    Attributes:
        depths: number of tokens that one pass drafts.
        ids: [Vd] target ids of the draft vocabulary; if None, it is the target's vocabulary.
    """

    depths: int
    ids: Tensor | None
    _to_target: Sequence[int]

    @abstractmethod
    def block(self, state: DecodeState, depth: int) -> Tensor:
        """States [B, depth, H], after the final norm, of the tokens that follow every sequence's last one.

        The memory must be up to date.
        """

    @abstractmethod
    def block_at(self, sequences: DeviceBatch, hidden: Tensor, cache: KVCache, span: int) -> Tensor:
        """Compute the states of all depths [B, depths, H] on the device.

        `hidden` [B, size] is the state that the reader carries from round to round.
        """

    @abstractmethod
    def blocks_at(self, state: DecodeState, live: list[int], slots: list[list[int]], depths: int) -> Tensor:
        """Compute the states [L, W, depths, H] of blocks that begin at `slots` [L][W] of the sequences in `live`."""

    @abstractmethod
    def logits(self, states: Tensor) -> Tensor:
        """Draft vocabulary logits [..., Vd] for states [..., H]."""

    def condition_on_previous(self, logits: Tensor, states: Tensor, before: Tensor) -> Tensor:
        """Adjust the logits [..., Vd] to the preceding tokens `before` [...], for heads that condition on them."""
        return logits

    def grow(
        self, state: DecodeState, budget: int, shape: TreeShape, pays: WorthLevel
    ) -> tuple[list[TreeBuilder], ChainRows]:
        self.advance(state)
        growing = [TreeBuilder() for _ in state.rows]
        depth = min(self.levels(state, budget, shape), self.depths)
        if depth <= 0:
            return growing, ChainRows([])
        states = self.block(state, depth)
        logits = self.logits(states)
        anchors = torch.tensor([row.ids[-1] for row in state.rows], device=state.device)
        known = [part.tolist() for part in self.transitions(anchors, states, logits, shape.children)]
        ranks: list[list[int]] = [[] for _ in growing]  # for every node, its index among the candidates of its level
        for step in range(depth):
            if step and not pays([tree.joint[tree.frontier(1)[0]] for tree in growing]):
                break
            for tree, rank, candidates, gains, likeliest in zip(growing, ranks, *known, strict=True):
                for node in dict.fromkeys(tree.frontier(shape.width)) if step else [-1]:
                    before = rank[node] if node >= 0 else 0
                    chosen = likeliest[step][before]
                    rank += chosen
                    tree.add(node, gains[step][before], [self._to_target[candidates[step][i]] for i in chosen])
        chains = [[tree.tokens[node] for node in first_chain(tree.parents)] for tree in growing]
        return growing, self.rows(state, chains, states, logits)

    def on_device(self, state: DecodeState, budget: int) -> ParallelRounds | None:
        """Return the device-side rounds, or None if drafts may end early, because the host decides that."""
        return ParallelRounds(self, state, budget) if self.fixed_shape and budget > 0 else None

    def transitions(self, anchors: Tensor, states: Tensor, logits: Tensor, children: int) -> Transitions:
        """The `children` likeliest tokens of each level of a block's logits [B, depth, Vd].

        Here they do not depend on earlier tokens. Subclasses may condition on these; `anchors` [B] are the last
        committed tokens.
        """
        batch, depth, vocabulary = logits.shape
        many = min(children, vocabulary)
        logprob, index = (x.unflatten(0, (batch, depth)) for x in kernels.expand_topk(logits.flatten(0, 1), many))
        places = torch.arange(many, device=logits.device).expand(batch, depth, many, -1)
        return Transitions(index, logprob.unsqueeze(2).expand(-1, -1, many, -1), places)

    def rows(self, state: DecodeState, chains: list[list[int]], states: Tensor, logits: Tensor) -> ChainRows:
        """Draft logits from which the chains were chosen."""
        return ChainRows(logits.unbind(1), self.ids)

    def score(self, state: DecodeState, spans: list[range], depths: int = 1) -> list[Score]:
        """Score the positions of `spans` with blocks that begin at earlier positions; no depth exceeds a block.

        The block that begins at slot s predicts position s + 2 + k at step k, so position j at depth k + 1 is step k of
        the block at slot j − 2 − k.
        """
        children = self.children(state)[: self.depths]
        kind: dict[str, Any] = {"ids": self.ids, "children": children, "inner": self.shape.width}
        depths = min(depths, self.depths)
        self.advance(state)
        asked = [span.start - 1 - depths if span else end for span, end in zip(spans, state.cached, strict=True)]
        self.fill_skipped(state, asked)
        live = [b for b, span in enumerate(spans) if span]
        if not live:
            return [Score(span, **kind) for span in spans]
        slots = draft_start_slots([spans[b] for b in live], depths)
        states = self.blocks_at(state, live, slots, depths)
        rows = []
        for k in range(depths):
            part = slice(depths - 1 - k, states.shape[1] - k)
            texts = [state.rows[b].ids for b in live]
            previous = [
                [ids[min(s + 1 + k, len(ids) - 1)] for s in at[part]] for ids, at in zip(texts, slots, strict=True)
            ]
            found_at = states[:, part, k]
            rows.append(
                self.condition_on_previous(self.logits(found_at), found_at, torch.tensor(previous, device=state.device))
            )
        found = dict(zip(live, torch.stack(rows, 1), strict=True))
        return [Score(span, found[b][:, : len(span)] if span else None, **kind) for b, span in enumerate(spans)]


class ParallelRounds(ReaderRounds):
    """Device-side rounds that draft a block and choose a chain or tree of its candidates."""

    def __init__(self, drafter: ParallelDrafter, state: DecodeState, budget: int):
        shape = drafter.shape.within(budget)
        self.drafter, self.levels = drafter, min(shape.depth, drafter.depths, budget)
        self.width, self.children, self.chain = shape.width, shape.children, shape.chain
        self.nodes = self.levels if self.chain else shape.nodes
        depth = min(self.levels, self.nodes)
        # The slots of a pass follow the committed slots, or the slots that the pass reads.
        super().__init__(drafter, state, depth, max(1 + self.nodes, depth + drafter.reach))

    def propose(self, sequences: DeviceBatch, span: int) -> DraftTree:
        """Draft like `ParallelDrafter.propose`, with tensors of fixed shapes."""
        drafter, batch = self.drafter, sequences.batch
        states = drafter.block_at(sequences, self.hidden, self.cache, span)[:, : self.levels]
        known = drafter.transitions(sequences.last[:, 0], states, drafter.logits(states), self.children)
        trees, above = DeviceTreeBuilder(), None
        # For every node of the last level, its index among the candidates of that level.
        ranks = before = torch.zeros(batch, 1, dtype=torch.long, device=sequences.device)
        for step, (candidates, gains, places) in enumerate(zip(*(part.unbind(1) for part in known), strict=True)):
            if step:
                above = trees.frontier(self.width)
                before = ranks.flatten(1).gather(1, above)
            wanted = before.unsqueeze(-1).expand(-1, -1, places.shape[-1])
            ranks = places.gather(1, wanted)
            tokens = candidates.gather(1, ranks.flatten(1)).view_as(ranks)
            trees.add(above, gains.gather(1, wanted), tokens if drafter.ids is None else drafter.ids[tokens])
        return trees.best(sequences.draft_room, self.nodes, self.chain)
