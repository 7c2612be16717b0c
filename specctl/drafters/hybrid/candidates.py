"""Merge the candidates of two drafters into one tree, with probabilities on one scale."""

from collections.abc import Sequence
from typing import NamedTuple

from specctl.drafters.tree import ProposedTree

SURE = 0.99  # upper limit of trusted probabilities, so that a child is less probable than its parent


class Claim(NamedTuple):
    """Probability that a drafter (given by its index) claims for a token after the preceding ones."""

    drafter: int
    probability: float


class Calibration:
    """Calibration of a drafter's claimed probabilities in a text, by eighths of the probability.

    A claim p becomes p · (s·r + came true) ÷ (s + Σ claimed), over the claims of its eighth. The prior is
    equivalent to claims with the sum s that came true r times as often as claimed.
    """

    BEFORE = 4.0  # s

    def __init__(self, ratios: Sequence[float]):
        """`ratios`: r of each eighth."""
        self.true = [self.BEFORE * ratio for ratio in ratios]
        self.claimed = [self.BEFORE] * len(ratios)

    def __call__(self, probability: float) -> float:
        """Calibrated probability of a claim."""
        if not probability > 0:  # nor NaN
            return 0.0
        part = self._part(probability)
        return min(probability * self.true[part] / self.claimed[part], SURE)

    def learn(self, probability: float, came_true: bool) -> None:
        """Record the outcome of a claim."""
        if probability > 0:
            part = self._part(probability)
            self.true[part] += came_true
            self.claimed[part] += probability

    def _part(self, probability: float) -> int:
        return min(int(probability * len(self.true)), len(self.true) - 1)


class Candidates:
    """Tree of candidate tokens after a text.

    A token that several drafters claim is one node, with the larger probability.

    Attributes:
        tokens: token of every node, parents first.
        parents: parent of every node; −1 = the end of the text.
        joint: estimated probability that the target accepts a node and all its ancestors.
        claims: claims for every node.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.joint: list[float] = []
        self.claims: list[list[Claim]] = []
        self._children: list[dict[int, int]] = [{}]  # token → child node, for the end of the text and for every node

    def add(self, proposal: ProposedTree, who: int, trust: Calibration) -> None:
        """Merge the proposal of drafter `who` into the tree."""
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
        """Return all nodes, the likeliest first, parents before their children."""
        return sorted(range(len(self.tokens)), key=lambda node: -self.joint[node])

    def longest(self) -> list[int]:
        """Return the path with the most expected tokens."""
        ahead = list(self.joint)  # expected tokens on the best path from each node on
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
        """Return (tokens, parents) of the nodes `kept`, in their order; parents must come before their children."""
        place = {node: i for i, node in enumerate(kept)} | {-1: -1}
        return [self.tokens[node] for node in kept], [place[self.parents[node]] for node in kept]

    def outcomes(self, tokens: Sequence[int]) -> list[tuple[Claim, bool]]:
        """Return the claims that the committed `tokens` have settled, and whether each came true."""
        settled, node = [], -1
        for token in tokens:
            children = self._children[node + 1]
            settled += [(claim, token == other) for other, child in children.items() for claim in self.claims[child]]
            if token not in children:
                break
            node = children[token]
        return settled

    def accepted_claims(self, tokens: Sequence[int], who: int) -> int:
        """Count the committed tokens, up to the first miss, that drafter `who` claimed."""
        count, node = 0, -1
        for token in tokens:
            node = self._children[node + 1].get(token, -1)
            if node < 0 or all(claim.drafter != who for claim in self.claims[node]):
                break
            count += 1
        return count
