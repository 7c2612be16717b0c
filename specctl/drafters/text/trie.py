"""Draft trees read off text: the most probable continuations of one or several places in it."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from specctl.drafters.tree import ProposedTree


class Follower(NamedTuple):
    """A token that may come next, its probability, and the place after it."""

    token: int
    probability: float
    next: Place


class Place(Protocol):
    """A place in a body of text, from which a draft reads on."""

    def followers(self, limit: int) -> list[Follower]:
        """At most `limit` tokens that stood behind this place; the rest of the probability is unknown."""
        ...


class Documents(Protocol):
    """A body of text beside the one that is being written."""

    def find(self, ids: list[int], depth: int) -> Place:
        """Where it stands as the end of `ids` does; a draft reads at most `depth` tokens on."""
        ...


@dataclass(frozen=True)
class TextTreeShape:
    """A draft: the best `nodes` continuations, at most `depth` deep, `children` of a node at most, none less probable
    than `least`."""

    depth: int
    nodes: int
    children: int
    least: float = 0.0


def grow(places: Sequence[Place], shape: TextTreeShape) -> ProposedTree:
    """The `nodes` most probable continuations.

    `places` are the current position in several bodies of text. A node's children are weighed by the mean of those
    that know any. A path is less probable than its beginnings, so taking the best node first needs no look ahead.
    """
    tree = ProposedTree([], [], [])
    waiting: list[tuple[float, int, int, int, int, float, list[Place]]] = []
    found = 0  # ties go to the node found first
    node, joint, depth = -1, 1.0, 0
    while True:
        if depth < shape.depth:
            for token, probability, behind in _children(places, shape.children):
                if joint * probability < shape.least:
                    continue
                found += 1
                heapq.heappush(waiting, (-joint * probability, found, token, node, depth + 1, probability, behind))
        if not waiting or len(tree.tokens) >= shape.nodes:
            return tree
        negative, _, token, parent, depth, probability, places = heapq.heappop(waiting)
        node, joint = len(tree.tokens), -negative
        tree.tokens.append(token)
        tree.parents.append(parent)
        tree.odds.append(probability)


def _children(places: Sequence[Place], limit: int) -> list[tuple[int, float, list[Place]]]:
    """The `limit` most probable next tokens with the places behind them."""
    told = [followers for place in places if (followers := place.followers(limit))]
    merged: dict[int, tuple[float, list[Place]]] = {}
    for followers in told:
        for token, probability, behind in followers:
            before, others = merged.get(token, (0.0, []))
            merged[token] = (before + probability / len(told), [*others, behind])
    best = sorted(merged.items(), key=lambda item: -item[1][0])[:limit]
    return [(token, probability, behind) for token, (probability, behind) in best]


def first_level(tree: ProposedTree) -> list[int]:
    """The children of the root."""
    return [token for token, parent in zip(tree.tokens, tree.parents, strict=True) if parent == -1]
