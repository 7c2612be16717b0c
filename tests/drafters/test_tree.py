"""The shape of a tree where there is not room for all of it, and what is left out of it."""

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
def test_a_batch_expands_no_more_than_it_verifies(budget, width, nodes):
    """Eight rows of the head on each level, to keep a handful of nodes, would cost a batch more than the target."""
    fitting = GPU.within(budget)
    assert (fitting.width, fitting.nodes) == (width, nodes)
    assert (fitting.depth, fitting.children) == (GPU.depth, GPU.children)


def test_a_shape_that_fits_is_what_was_asked_for():
    asked = TreeShape(depth=6, width=8, nodes=20, children=4, stop_below=0.0)
    assert asked.within(20) is asked


def comb() -> TreeBuilder:
    """Two levels of a chain with a runner-up each: joint probabilities 0.6, 0.3, 0.12 and 0.06."""
    tree = TreeBuilder()
    tree.add(-1, [math.log(0.6), math.log(0.3)], [10, 11])
    tree.add(0, [math.log(0.2), math.log(0.1)], [20, 21])
    return tree


@pytest.mark.parametrize(
    ("keep_above", "tokens"), [(0.0, [10, 11, 20, 21]), (0.1, [10, 11, 20]), (0.5, [10]), (0.9, [10])]
)
def test_what_is_hardly_ever_accepted_takes_no_row(keep_above, tokens):
    """In fp32 a CPU pays for every row: a tree that is always full is slower than one of likely nodes. The likeliest
    one stays: the head has been paid for."""
    shape = TreeShape(3, 1, 14, 2, 0.0, keep_above)
    draft = best([comb()], [3], shape, CPU, ChainRows([]))
    assert draft.tokens[0].tolist() == tokens
    assert draft.parents[0].tolist() == [-1, -1, 0, 0][: len(tokens)]


def test_texts_of_a_batch_are_cut_each_by_its_own_probabilities():
    """A sure text next to an unsure one: rows of the first must not follow the second's cut."""
    sure = TreeBuilder()
    sure.add(-1, [math.log(0.9), math.log(0.05)], [10, 11])
    draft = best([comb(), sure], [3, 3], TreeShape(3, 1, 14, 2, 0.0, 0.1), CPU, ChainRows([]))
    assert draft.parents.tolist() == [[-1, -1, 0], [-1, PADDING, PADDING]]


def test_a_cpu_leaves_out_what_is_unlikely():
    """Rows and levels cost time there; rounds on a GPU have one shape, and keep whole trees."""
    cpu = default_shape(CPU)
    assert cpu.keep_above > 0 < cpu.stop_below and GPU.keep_above == GPU.stop_below == 0
