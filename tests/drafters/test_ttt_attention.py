from dataclasses import replace

import pytest
import torch

from specctl.drafters import ttt_attention
from specctl.drafters.ttt_attention import Layout, attention, reference

LAYOUTS = {
    "last rows": Layout([(0, 7), (7, 12), (12, 31)], [(0, 3), (3, 8), (8, 9)], [4, 5, 6, 0, 1, 2, 3, 4, 18]),
    "some rows": Layout([(0, 7), (7, 12), (12, 31)], [(0, 2), (2, 2), (2, 9)], [1, 6, 3, 5, 8, 9, 12, 13, 17]),
}


@pytest.mark.parametrize("heads,kv_heads", [(4, 4), (4, 2), (3, 1)])
@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("block", [2**17, 40, 1])
def test_merged_attention_equals_the_masked_one(monkeypatch, heads, kv_heads, steps, layout, block):
    """Output and all gradients: documents of several sizes, one row, all rows, no row; one block, several, cut ones."""
    monkeypatch.setattr(ttt_attention, "BLOCK", block)
    monkeypatch.setattr(ttt_attention, "KEPT", 3)  # with blocks of one score, masks are made for each use
    torch.manual_seed(0)
    layout = replace(LAYOUTS[layout])  # its blocks are made anew

    def leaf(rows, count):
        return torch.randn(rows, count, 16, requires_grad=True)

    query, key, value = leaf(9, heads), leaf(31, kv_heads), leaf(31, kv_heads)
    own_keys, own_values = [leaf(9, kv_heads) for _ in range(steps)], [leaf(9, kv_heads) for _ in range(steps)]
    leaves = [query, key, value, *own_keys, *own_values]
    weight = torch.randn(9, heads, 16)
    results = []
    for function in (attention, reference):
        out = function(query, key, value, own_keys, own_values, layout)
        results.append((out, *torch.autograd.grad((out * weight).sum(), leaves)))
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, atol=2e-5, rtol=1e-4)
