"""The shape of static trees, and that each node gets its token and its parent."""

from types import SimpleNamespace

import pytest
import torch

from specctl.drafters.depth.static_tree import StaticTree, Trees, best_paths
from specctl.drafters.tree import TreeShape

CPU = torch.device("cpu")
VOCAB = 7


def test_the_nodes_are_the_paths_most_often_accepted():
    """By hand: 0.6, 0.36, 0.3, 0.216, 0.18 twice, 0.1296, 0.108 three times, 0.09."""
    paths = best_paths(TreeShape(depth=4, width=9, nodes=6, children=2, stop_below=0.0), (0.6, 0.3))
    assert paths[:4] == [(0,), (0, 0), (1,), (0, 0, 0)]
    assert set(paths[4:]) == {(0, 1), (1, 0)}


def test_width_children_and_depth_bound_the_tree():
    paths = best_paths(TreeShape(depth=3, width=1, nodes=50, children=3, stop_below=0.0), (0.5, 0.2, 0.1, 0.1))
    assert sorted(paths) == sorted([(0,) * d + (rank,) for d in range(3) for rank in range(3)])


def test_a_parent_comes_before_its_children():
    """This holds for ties too, because any prefix of the list must be a tree."""
    paths = best_paths(TreeShape(depth=5, width=3, nodes=30, children=2, stop_below=0.0), (1.0, 1.0))
    assert all(len(path) == 1 or path[:-1] in paths[:place] for place, path in enumerate(paths))


def next_tokens(tokens):
    """Return the token of each rank after the path `tokens`: (sum of the path + rank) modulo the vocabulary."""
    return [(sum(tokens) + rank) % VOCAB for rank in range(VOCAB)]


def rows(depth, paths):
    """Return logits [B, m, V] that give each rank r of `next_tokens` the value −r."""
    logits = torch.empty(*paths.shape[:2], VOCAB)
    for b, nodes in enumerate(paths.tolist()):
        for m, path in enumerate(nodes):
            assert len(path) == depth + 1
            logits[b, m, next_tokens(path)] = -torch.arange(VOCAB).float()
    return logits


PATHS = [(0,), (2,), (0, 1), (2, 0), (2, 3), (2, 3, 1)]


def test_tokens_are_filled_in_along_their_paths():
    tree = StaticTree(PATHS, CPU)
    draft, claimed = tree.grow(torch.tensor([3, 5]), rows, None, None)
    assert tree.paths == PATHS
    behind = rows(0, torch.tensor([[[3]]])).log_softmax(-1).amax().item()  # every row is the same up to a shift
    assert claimed[0].tolist() == pytest.approx([behind - path[-1] for path in PATHS])
    assert draft.parents.tolist() == [[-1, -1, 0, 1, 1, 4]] * 2 and not draft.chain
    for root, tokens in zip((3, 5), draft.tokens.tolist(), strict=True):
        known = {(): [root]}
        for path, token in zip(PATHS, tokens, strict=True):
            before = known[path[:-1]]
            assert token == next_tokens(before)[path[-1]]
            known[path] = [*before, token]


def test_candidates_that_do_not_depend_on_the_path():
    """Medusa gives one row per level, [B, 1, V], for all parents."""
    draft, _ = StaticTree(PATHS, CPU).grow(
        torch.tensor([3]), lambda depth, paths: rows(0, paths[:, :1, :1]), None, None
    )
    assert draft.tokens.tolist() == [[next_tokens([3])[path[-1]] for path in PATHS]]


def test_draft_ids_map_to_target_ids():
    ids = 10 * torch.arange(VOCAB)
    tree = StaticTree([(0,), (0, 0)], CPU)
    draft, _ = tree.grow(torch.tensor([3]), lambda depth, paths: rows(0, paths[:, :, -1:] // 10), ids, None)
    assert draft.tokens.tolist() == [[0, 0]] and draft.chain


def test_unlikely_levels_are_dropped():
    """Only nodes with children count: (0,) is likelier than (2,), but has no children."""
    tree = StaticTree([(0,), (2,), (2, 0), (2, 0, 0)], CPU)
    logprob = rows(0, torch.tensor([[[3]]])).log_softmax(-1).max() - 2
    for floor, size in ((logprob - 0.1, 3), (logprob + 0.1, 2)):
        draft, _ = tree.grow(torch.tensor([3]), rows, None, lambda joint, floor=floor: max(joint) >= floor)
        assert draft.size == size


@pytest.mark.parametrize(
    "room,budget,exact,sizes",
    [(9, 62, 0, (3, 4)), (1, 62, 0, (1, 2)), (9, 2, 0, (2, 2)), (9, 7, 8, (3, 3)), (9, 2, 8, (2, 2))],
)
def test_trees_fit_the_room_and_the_budget(room, budget, exact, sizes):
    """`sizes` is (levels, nodes). Exact mode takes chains only, and finished rows do not count."""
    trees = Trees(TreeShape(depth=3, width=1, nodes=4, children=2, stop_below=0.0), (0.6, 0.3), CPU)
    state = SimpleNamespace(rows=[SimpleNamespace(draft_room=room), SimpleNamespace(draft_room=0)], exact_rows=exact)
    tree = trees.tree_for(state, budget)
    assert (len(tree.levels), len(tree.paths)) == sizes
    assert tree.chain == (sizes[0] == sizes[1])


def test_no_room_gives_no_tree():
    trees = Trees(TreeShape(3, 1, 4, 2, 0.0), (0.6, 0.3), CPU)
    assert trees.tree_for(SimpleNamespace(rows=[SimpleNamespace(draft_room=0)], exact_rows=0), 62) is None
