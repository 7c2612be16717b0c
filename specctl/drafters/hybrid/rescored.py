"""Rescored drafts: an n-gram model of a datastore orders the candidates of heads that do not see each other's tokens.

Heads of blockwise parallel decoding (Stern et al. 2018, arXiv 1811.03115) and of Medusa predict each depth from the
same state, so neighboring tokens of a draft may not fit together. As Kim et al. 2024 (arXiv 2404.09221, n-gram
rescoring) do, the `CANDIDATES` likeliest tokens of all depths form a lattice, and the draft has the best paths of both
models.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from specctl.decoding.protocols import Drafter
from specctl.decoding.records import DraftTree, Score
from specctl.decoding.state import DecodeState
from specctl.drafters.text.text_tree import NextToken, TextIndex, TextTreeShape, grow
from specctl.drafters.tree import TreeShape

CANDIDATES = 16  # of each head, as in the paper
UNSEEN = 0.02  # probability of a token that never followed the text in the store
SEEN = 64  # most followers of a text that are read from the store
EXPONENT = 0.5  # of the n-gram model's probabilities


@runtime_checkable
class IndependentHeads(Drafter, Protocol):
    """Drafter with candidates for a depth that do not depend on the drafted tokens."""

    shape: TreeShape

    def lattice(self, state: DecodeState, count: int) -> tuple[Tensor, Tensor]:
        """The `count` likeliest tokens of every depth: log probabilities and token ids [B, depth, count]."""
        ...


class Rescored(Drafter):
    """Drafts the most probable paths of a head's lattice and the datastore `index`, as many nodes as the head's shape.

    In exact mode, and if nodes have one child, a draft is the chain of the best next tokens.
    """

    def __init__(self, head: IndependentHeads, index: TextIndex):
        self.head, self.index, self.taps = head, index, head.taps

    def propose(self, state: DecodeState, budget: int) -> DraftTree:
        self.advance(state)
        shape, children = self.head.shape, self._children(state)
        logprob, candidates = self.head.lattice(state, CANDIDATES)
        lattice = zip(logprob.exp().tolist(), candidates.tolist(), strict=True)
        trees = []
        for (odds, tokens), row in zip(lattice, state.rows, strict=True):
            limits = TextTreeShape(min(shape.depth, row.draft_room), min(shape.nodes, budget), children)
            tree = grow([LatticePosition(self.index, odds, tokens, row.ids)], limits)
            trees.append((tree.tokens, tree.parents))
        return DraftTree.from_trees(trees, state.device)

    def _children(self, state: DecodeState) -> int:
        return 1 if state.exact_rows else self.head.shape.children

    def advance(self, state: DecodeState) -> None:
        self.head.advance(state)

    def lag(self, state: DecodeState) -> list[int]:
        """Number of tokens that the head has to read."""
        return self.head.lag(state)

    def invalidate(self, state: DecodeState) -> None:
        self.head.invalidate(state)

    def score(self, state: DecodeState, spans: list[range], depths: int = 1) -> list[Score]:
        """Best next tokens before each position, at every depth."""
        children, scores = self._children(state), []
        for score, row in zip(self.head.score(state, spans, depths), state.rows, strict=True):
            if score.logits is None:
                scores.append(score)
                continue
            logprob, index = score.logits.float().log_softmax(-1).topk(CANDIDATES)
            odds, tokens = logprob.exp().tolist(), (index if score.ids is None else score.ids[index]).tolist()
            best = [
                [
                    [
                        found.token
                        for found in LatticePosition(self.index, [p], [t], row.ids[:position]).followers(children)
                    ]
                    for p, t, position in zip(*depth, score.positions, strict=True)
                ]
                for depth in zip(odds, tokens, strict=True)
            ]
            shape = (len(best), len(score.positions), children)
            proposed = torch.tensor(best, dtype=torch.long, device=state.device).view(shape)
            scores.append(Score(score.positions, tokens=proposed, children=(children,) * self.head.shape.depth))
        return scores


@dataclass(frozen=True)
class LatticePosition:
    """Place in a lattice, after the text `ids`: `odds` and `tokens` have the candidates of the depths to come."""

    index: TextIndex
    odds: list[list[float]]
    tokens: list[list[int]]
    ids: list[int]

    def followers(self, limit: int) -> list[NextToken]:
        """The `limit` best candidates of the next depth. They share the probability that its head gives to all."""
        if not self.tokens:
            return []
        seen = {found.token: found.probability for found in self.index.find(self.ids, 1).followers(SEEN)}
        pairs = zip(self.odds[0], self.tokens[0], strict=True)
        scored = [(odds * max(seen.get(token, 0.0), UNSEEN) ** EXPONENT, token) for odds, token in pairs]
        scale = sum(self.odds[0]) / max(sum(score for score, _ in scored), 1e-30)
        best = sorted(scored, key=lambda one: -one[0])[:limit]
        return [NextToken(token, score * scale, self._after(token)) for score, token in best]

    def _after(self, token: int) -> LatticePosition:
        return LatticePosition(self.index, self.odds[1:], self.tokens[1:], [*self.ids, token])
