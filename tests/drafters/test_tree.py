"""The shape of a tree where there is not room for all of it."""

import pytest
import torch

from specctl.drafters.tree import TreeShape, default_shape

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
