"""Candidates for a draft that come from two drafters, in one tree and on one scale."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from specctl.drafters.tree import ProposedTree

SURE = 0.99  # no claim is trusted further: a child is less probable than its parent


class Claim(NamedTuple):
    """The probability that a drafter (by its place) gives a token behind those before it."""

    drafter: int
    probability: float


class Trust:
    """How much a drafter's claims are worth in a text: how many came true, by eighths of the probability claimed.

    A claim p becomes p · (s·r + came true) ÷ (s + Σ claimed), over the claims of its eighth. Before there were any, s
    stands for claims of which r times as many came true as was claimed.
    """

    BEFORE = 2.0  # s

    def __init__(self, ratios: Sequence[float]):
        """`ratios`: r of each eighth."""
        self.true = [self.BEFORE * ratio for ratio in ratios]
        self.claimed = [self.BEFORE] * len(ratios)

    def __call__(self, probability: float) -> float:
        """The probability that a claim is worth."""
        part = min(int(probability * len(self.true)), len(self.true) - 1)
        return min(probability * self.true[part] / self.claimed[part], SURE)

    def learn(self, probability: float, came_true: bool) -> None:
        """Book the outcome of a claim."""
        part = min(int(probability * len(self.true)), len(self.true) - 1)
        self.true[part] += came_true
        self.claimed[part] += probability


class Candidates:
    """A tree of tokens behind a text. What several drafters claim is there once, with the larger probability.

    Attributes:
        tokens: of every node, parents first.
        parents: of every node; −1 = the end of the text.
        joint: estimated probability that the target accepts a node and all before it.
        claims: who has claimed a node.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.joint: list[float] = []
        self.claims: list[list[Claim]] = []
        self._children: list[dict[int, int]] = [{}]  # token → node, of the end of the text and of every node

    def add(self, proposal: ProposedTree, who: int, trust: Trust) -> None:
        """Merge what a drafter proposes."""
        places: list[int] = []
        for token, parent, probability in zip(*proposal, strict=True):
            above = places[parent] if parent >= 0 else -1
            places.append(self._node(above, token, Claim(who, probability), trust(probability)))

    def _node(self, parent: int, token: int, claim: Claim, probability: float) -> int:
        joint = probability * (self.joint[parent] if parent >= 0 else 1.0)
        node = self._children[parent + 1].get(token)
        if node is None:
            node = self._children[parent + 1][token] = len(self.tokens)
            self.tokens.append(token)
            self.parents.append(parent)
            self.joint.append(0.0)
            self.claims.append([])
            self._children.append({})
        self.joint[node] = max(self.joint[node], joint)
        self.claims[node].append(claim)
        return node

    def ranked(self) -> list[int]:
        """All nodes, the likeliest first, parents before their children."""
        return sorted(range(len(self.tokens)), key=lambda node: -self.joint[node])

    def longest(self) -> list[int]:
        """The path of the most expected tokens."""
        ahead = list(self.joint)  # of the best path from a node on
        best = [-1] * (len(ahead) + 1)
        for node in reversed(range(len(ahead))):
            if best[node + 1] >= 0:
                ahead[node] += ahead[best[node + 1]]
            above = self.parents[node] + 1
            if best[above] < 0 or ahead[node] > ahead[best[above]]:
                best[above] = node
        path, node = [], best[0]
        while node >= 0:
            path.append(node)
            node = best[node + 1]
        return path

    def cut(self, kept: Sequence[int]) -> tuple[list[int], list[int]]:
        """(tokens, parents) of some nodes, in their order; each stands behind its parent."""
        place = {node: i for i, node in enumerate(kept)} | {-1: -1}
        return [self.tokens[node] for node in kept], [place[self.parents[node]] for node in kept]

    def outcomes(self, tokens: Sequence[int]) -> list[tuple[Claim, bool]]:
        """The claims that the tokens which were committed have settled, and whether they came true."""
        settled, node = [], -1
        for token in tokens:
            children = self._children[node + 1]
            settled += [(claim, token == other) for other, child in children.items() for claim in self.claims[child]]
            if token not in children:
                break
            node = children[token]
        return settled

    def foreseen(self, tokens: Sequence[int], who: int) -> int:
        """How many of the tokens that were committed a drafter had by itself."""
        count, node = 0, -1
        for token in tokens:
            node = self._children[node + 1].get(token, -1)
            if node < 0 or all(claim.drafter != who for claim in self.claims[node]):
                break
            count += 1
        return count
