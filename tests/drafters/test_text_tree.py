"""Growing draft trees: the most probable nodes, parents before children, within every limit."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specctl.drafters.text.text_tree import NextToken, TextTreeShape, first_level, grow


@dataclass
class Node:
    """A context with given followers, {token: (probability, Node)}."""

    known: dict = field(default_factory=dict)

    def followers(self, limit):
        best = sorted(self.known.items(), key=lambda item: -item[1][0])[:limit]
        return [NextToken(token, probability, behind) for token, (probability, behind) in best]


LEAF = Node()
HALVES = st.recursive(
    st.just(LEAF),
    lambda below: st.lists(below, min_size=1, max_size=3).map(
        lambda nodes: Node({token: (2.0 ** -(token + 1), node) for token, node in enumerate(nodes)})
    ),
    max_leaves=20,
)


def paths(node, depth, joint=1.0, path=()):
    if depth:
        for token, (probability, behind) in node.known.items():
            yield (*path, token), joint * probability
            yield from paths(behind, depth - 1, joint * probability, (*path, token))


def path_of(tokens, parents, node):
    path = ()
    while node >= 0:
        path, node = (tokens[node], *path), parents[node]
    return path


@given(root=HALVES, depth=st.integers(0, 4), nodes=st.integers(0, 12))
def test_a_tree_holds_the_most_probable_paths(root, depth, nodes):
    """Compare with all paths. Greedy growth finds them, because a child is never likelier than its parent."""
    tokens, parents, _ = grow([root], TextTreeShape(depth, nodes, children=3))
    assert all(parent < node for node, parent in enumerate(parents))
    every = dict(paths(root, depth))
    found = [path_of(tokens, parents, node) for node in range(len(tokens))]
    assert len(set(found)) == len(found) == min(nodes, len(every))
    assert [every[path] for path in found] == sorted(every.values(), reverse=True)[:nodes]


def test_children_are_limited_at_every_node():
    twins = Node({1: (0.5, LEAF), 2: (0.25, LEAF), 3: (0.125, LEAF)})
    root = Node({7: (0.5, twins), 8: (0.25, twins), 9: (0.125, twins)})
    tree = grow([root], TextTreeShape(depth=2, nodes=50, children=2))
    assert sorted(zip(*tree[:2], strict=True)) == [(1, 0), (1, 1), (2, 0), (2, 1), (7, -1), (8, -1)]
    assert first_level(tree) == [7, 8]
    assert grow([root], TextTreeShape(depth=9, nodes=50, children=1))[:2] == ([7, 1], [-1, 0])


def test_two_sources_are_averaged():
    """0: (0.5 + 0.25) / 2, 1: 0.5 / 2, 2: 0.25 / 2. After 0 only one source has a follower, so it is not halved."""
    one = Node({0: (0.5, Node({5: (0.9, LEAF)})), 1: (0.5, LEAF)})
    other = Node({0: (0.25, LEAF), 2: (0.25, LEAF)})
    assert grow([one, other], TextTreeShape(4, 4, 3))[:2] == ([0, 5, 1, 2], [-1, 0, -1, -1])


@pytest.mark.parametrize("places", [[], [LEAF], [LEAF, LEAF]])
def test_sources_without_followers_give_an_empty_tree(places):
    assert grow(places, TextTreeShape(4, 4, 3)) == ([], [], [])
