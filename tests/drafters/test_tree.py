"""Draft trees fit their budget, and drop unlikely nodes."""

import math

import pytest
import torch

from specctl.decoding.records import PADDING, ChainRows
from specctl.drafters.tree import TreeBuilder, TreeShape, best, default_shape

CPU = torch.device("cpu")
GPU = default_shape(torch.device("cuda"))


@pytest.mark.parametrize(
    ("budget", "width", "nodes"), [(62, 8, 48), (48, 8, 48), (31, 5, 31), (15, 2, 15), (7, 1, 7), (3, 1, 3), (1, 1, 1)]
)
def test_the_shape_is_reduced_to_the_budget(budget, width, nodes):
    """Expanding eight rows per level for a few nodes would cost a batch more than the target's pass."""
    fitting = GPU.within(budget)
    assert (fitting.width, fitting.nodes) == (width, nodes)
    assert (fitting.depth, fitting.children) == (GPU.depth, GPU.children)


def test_a_shape_within_the_budget_is_unchanged():
    asked = TreeShape(depth=6, width=8, nodes=20, children=4, stop_below=0.0)
    assert asked.within(20) is asked


def comb() -> TreeBuilder:
    """Two levels of a chain, each with a second choice: joint probabilities 0.6, 0.3, 0.12 and 0.06."""
    tree = TreeBuilder()
    tree.add(-1, [math.log(0.6), math.log(0.3)], [10, 11])
    tree.add(0, [math.log(0.2), math.log(0.1)], [20, 21])
    return tree


@pytest.mark.parametrize(
    ("keep_above", "tokens"), [(0.0, [10, 11, 20, 21]), (0.1, [10, 11, 20]), (0.5, [10]), (0.9, [10])]
)
def test_unlikely_nodes_are_dropped(keep_above, tokens):
    """On CPU every row takes time, so a small tree of likely nodes is faster than a full one.

    The likeliest node always stays, because the head has already run.
    """
    shape = TreeShape(3, 1, 14, 2, 0.0, keep_above)
    draft = best([comb()], [3], shape, CPU, ChainRows([]))
    assert draft.tokens[0].tolist() == tokens
    assert draft.parents[0].tolist() == [-1, -1, 0, 0][: len(tokens)]


def test_each_text_of_a_batch_is_cut_by_its_own_probabilities():
    """A confident text beside an unsure one."""
    sure = TreeBuilder()
    sure.add(-1, [math.log(0.9), math.log(0.05)], [10, 11])
    draft = best([comb(), sure], [3, 3], TreeShape(3, 1, 14, 2, 0.0, 0.1), CPU, ChainRows([]))
    assert draft.parents.tolist() == [[-1, -1, 0], [-1, PADDING, PADDING]]


def test_only_cpus_drop_unlikely_nodes():
    """Rows and levels cost time on CPU; rounds on a GPU have a fixed shape and verify whole trees."""
    cpu = default_shape(CPU)
    assert cpu.keep_above > 0 < cpu.stop_below and GPU.keep_above == GPU.stop_below == 0
