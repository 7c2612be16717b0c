"""Draft trees from text: the most probable continuations of one or more places in a body of text."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from specctl.drafters.tree import ProposedTree


class NextToken(NamedTuple):
    """Token that may come next, its probability, and the place after it."""

    token: int
    probability: float
    next: TextPosition


class TextPosition(Protocol):
    """Place in a body of text from which a draft continues."""

    def followers(self, limit: int) -> list[NextToken]:
        """At most `limit` tokens that followed this place. Their probabilities may sum to less than 1."""
        ...


class TextIndex(Protocol):
    """Body of text other than the sequence that is being decoded."""

    def find(self, ids: list[int], depth: int) -> TextPosition:
        """Find the place that matches the end of `ids`; a draft reads at most `depth` tokens from there."""
        ...


@dataclass(frozen=True)
class TextTreeShape:
    """Limits of a draft: at most `nodes` nodes, `depth` levels and `children` per node, no node below `least`.

    `least` is a joint probability.
    """

    depth: int
    nodes: int
    children: int
    least: float = 0.0


def grow(places: Sequence[TextPosition], shape: TextTreeShape) -> ProposedTree:
    """Build the tree of the `nodes` most probable continuations.

    `places` are the current position in several bodies of text. The probability of a child is the mean over the places
    with known followers. A path is never more probable than its prefixes, so a best-first search needs no look-ahead.
    """
    tree = ProposedTree([], [], [])
    waiting: list[tuple[float, int, int, int, int, float, list[TextPosition]]] = []
    found = 0  # ties go to the node added first
    node, joint, depth = -1, 1.0, 0
    while len(tree.tokens) < shape.nodes:
        if depth < shape.depth:
            for token, probability, after in _children(places, shape.children):
                if joint * probability < shape.least:
                    continue
                found += 1
                heapq.heappush(waiting, (-joint * probability, found, token, node, depth + 1, probability, after))
        if not waiting:
            break
        negative, _, token, parent, depth, probability, places = heapq.heappop(waiting)
        node, joint = len(tree.tokens), -negative
        tree.tokens.append(token)
        tree.parents.append(parent)
        tree.probabilities.append(probability)
    return tree


def _children(places: Sequence[TextPosition], limit: int) -> list[tuple[int, float, list[TextPosition]]]:
    """The `limit` most probable next tokens, with the places after them."""
    choices = [followers for place in places if (followers := place.followers(limit))]
    if len(choices) == 1:  # as below, without sums
        best_first = sorted(choices[0], key=lambda follower: -follower.probability)
        return [(token, probability, [after]) for token, probability, after in best_first[:limit]]
    merged: dict[int, tuple[float, list[TextPosition]]] = {}
    for followers in choices:
        for token, probability, after in followers:
            before, others = merged.get(token, (0.0, []))
            merged[token] = (before + probability / len(choices), [*others, after])
    best = sorted(merged.items(), key=lambda item: -item[1][0])[:limit]
    return [(token, probability, after) for token, (probability, after) in best]


def first_level(tree: ProposedTree) -> list[int]:
    """Tokens of the root's children."""
    return [token for token, parent in zip(tree.tokens, tree.parents, strict=True) if parent == -1]
