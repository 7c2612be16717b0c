import pytest
import torch

from specctl.drafters.ttt_attention import Documents, attention, reference

DOCUMENTS = Documents([(0, 7), (7, 12), (12, 31)], [(0, 3), (3, 8), (8, 9)])


@pytest.mark.parametrize("heads,kv_heads", [(4, 4), (4, 2), (3, 1)])
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_merged_attention_equals_the_masked_one(heads, kv_heads, steps):
    """Output and all gradients, for documents of several sizes, a response of one slot, one that is all response."""
    torch.manual_seed(0)

    def leaf(rows, count):
        return torch.randn(rows, count, 16, requires_grad=True)

    query, key, value = leaf(9, heads), leaf(31, kv_heads), leaf(31, kv_heads)
    own_keys, own_values = [leaf(9, kv_heads) for _ in range(steps)], [leaf(9, kv_heads) for _ in range(steps)]
    leaves = [query, key, value, *own_keys, *own_values]
    weight = torch.randn(9, heads, 16)
    results = []
    for function in (attention, reference):
        out = function(query, key, value, own_keys, own_values, DOCUMENTS)
        results.append((out, *torch.autograd.grad((out * weight).sum(), leaves)))
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, atol=2e-5, rtol=1e-4)
