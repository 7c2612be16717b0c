from dataclasses import replace

import pytest
import torch

from specctl.drafters.feature import ttt_attention
from specctl.drafters.feature.ttt_attention import Layout, attention

LAYOUTS = {
    "last rows": Layout([(0, 7), (7, 12), (12, 31)], [(0, 3), (3, 8), (8, 9)], [4, 5, 6, 0, 1, 2, 3, 4, 18]),
    "window": Layout(
        [(0, 7), (7, 12), (12, 31)], [(0, 2), (2, 2), (2, 9)], [1, 6, 3, 5, 8, 9, 12, 13, 17], window=6, ahead=2
    ),
    "some rows": Layout([(0, 7), (7, 12), (12, 31)], [(0, 2), (2, 2), (2, 9)], [1, 6, 3, 5, 8, 9, 12, 13, 17]),
}


def reference(query, key, value, pairs, layout):
    """`scaled_dot_product_attention` over [step-0 keys | own keys] with a mask, one document at a time."""
    outputs = []
    for (k0, k1), (q0, q1) in zip(layout.slots, layout.rows, strict=True):
        at = torch.tensor(layout.at[q0:q1], device=query.device)
        distance = at.unsqueeze(1) + layout.ahead - torch.arange(k1 - k0, device=query.device)
        visible = (distance >= layout.ahead) & (distance < (layout.window or k1 + layout.ahead + 1))
        own = torch.eye(q1 - q0, dtype=torch.bool, device=query.device)
        keys = torch.cat((key[k0:k1], *(own[q0:q1] for own, _ in pairs))).transpose(0, 1)
        values = torch.cat((value[k0:k1], *(own[q0:q1] for _, own in pairs))).transpose(0, 1)
        out = torch.nn.functional.scaled_dot_product_attention(
            query[q0:q1].transpose(0, 1).unsqueeze(0),
            keys.unsqueeze(0),
            values.unsqueeze(0),
            attn_mask=torch.cat((visible, *[own] * len(pairs)), -1),
            enable_gqa=query.shape[1] != key.shape[1],
        )
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs)


@pytest.mark.parametrize("heads,kv_heads", [(4, 4), (4, 2), (3, 1)])
@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("block", [2**17, 40, 1])
def test_merged_attention_equals_masked_attention(monkeypatch, heads, kv_heads, steps, layout, block):
    """Compare output and all gradients, for documents with no rows, some rows or all rows, in one or several blocks."""
    monkeypatch.setattr(ttt_attention, "BLOCK", {"cpu": block})
    monkeypatch.setattr(ttt_attention, "ROWS", min(block, 2))  # blocks smaller than a document cut it
    monkeypatch.setattr(ttt_attention, "KEPT", 3)  # with blocks of one score, masks are made for each use
    torch.manual_seed(0)
    layout = replace(LAYOUTS[layout])  # a copy, so that its blocks are made again

    def leaf(rows, count):
        return torch.randn(rows, count, 16, requires_grad=True)

    query, key, value = leaf(9, heads), leaf(31, kv_heads), leaf(31, kv_heads)
    own_keys, own_values = [leaf(9, kv_heads) for _ in range(steps)], [leaf(9, kv_heads) for _ in range(steps)]
    leaves, own = [query, key, value, *own_keys, *own_values], [*zip(own_keys, own_values, strict=True)]
    weight = torch.randn(9, heads, 16)
    results = []
    for function in (attention, reference):
        out = function(query, key, value, own, layout)
        results.append((out, *torch.autograd.grad((out * weight).sum(), leaves)))
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, atol=2e-5, rtol=1e-4)


def largest(function, length, largest_tensor):
    """Return the largest tensor that attention and its gradients allocate.

    The document has `length` slots, and the second half is the response.
    """
    layout = Layout([(0, length)], [(0, length // 2)], list(range(length // 2, length)))
    leaves = [torch.randn(rows, 1, 4, requires_grad=True) for rows in (length // 2, length, length, length // 2)]
    query, key, value, own = leaves
    with largest_tensor() as seen:
        function(query, key, value, [(own, own)], layout).sum().backward()
    return seen.elements


def test_memory_is_linear_in_the_sample(largest_tensor):
    """A [rows, slots] mask of a 32k sample would take a gigabyte; the reference is the negative control."""
    assert largest(attention, 8192, largest_tensor) <= 2.1 * largest(attention, 4096, largest_tensor)
    assert largest(reference, 8192, largest_tensor) >= 3.9 * largest(reference, 4096, largest_tensor)


def test_key_gradients_of_a_cut_document_are_summed_in_fp32(monkeypatch):
    """In bf16, the sum over a thousand rows stops growing once the share of a block is rounded away."""
    monkeypatch.setattr(ttt_attention, "BLOCK", {"cpu": 1})
    monkeypatch.setattr(ttt_attention, "ROWS", 1)
    rows = 600
    layout = Layout([(0, 1)], [(0, rows)], [0] * rows)
    query, key = torch.zeros(rows, 1, 8, dtype=torch.bfloat16), torch.zeros(1, 1, 8, dtype=torch.bfloat16)
    value = torch.zeros(1, 1, 8, dtype=torch.bfloat16, requires_grad=True)
    attention(query, key, value, [], layout).sum().backward()
    assert value.grad.float().mean() == pytest.approx(rows, rel=0.01)


def test_every_index_is_on_the_device():
    """Uses the `meta` device, which like a GPU refuses to mix with the CPU."""
    layout = Layout([(0, 7), (7, 12)], [(0, 3), (3, 8)], [4, 5, 6, 0, 1, 2, 3, 4], "meta")
    query, key, value, own = (torch.randn(n, 2, 4, device="meta", requires_grad=True) for n in (8, 12, 12, 8))
    out = attention(query, key, value, [(own, own)], layout)
    out.sum().backward()
    assert key.grad.device.type == "meta"
    (block,) = layout.blocks
    assert {t.device.type for t in (block.at, block.bias, block.row_places, block.slot_places)} == {"meta"}
