"""Attention of ragged batches, in one call or one call per sequence, compared with its formula."""

import pytest
import torch

from specctl.decoding import plan as plans
from specctl.decoding.cache import KVCache
from specctl.decoding.models.layers import attend
from specctl.decoding.plan import plan_rows

HEADS, KV, DIM, LAYER = 6, 2, 8, 1
BASE = [3, 40, 17]


def tree(rows):
    """[B, T, T] ancestors: row t continues row (t − 1) // 2, as in a binary tree; the last sequence is a chain."""
    seen = torch.eye(rows, dtype=torch.bool)
    for row in range(1, rows):
        seen[row] |= seen[(row - 1) // 2]
    return torch.stack([seen, seen, torch.ones(rows, rows, dtype=torch.bool).tril()])


@pytest.mark.parametrize("gaps", [(), (range(0), range(2, 30), range(1, 17))])
@pytest.mark.parametrize("padded", [plans.PADDED, 0])
@pytest.mark.parametrize(("rows", "shape"), [(1, "chain"), (5, "chain"), (5, "tree")])
def test_attention_equals_its_formula(monkeypatch, padded, rows, shape, gaps):
    """`padded` = 0 gives every sequence a call of its own. Slots in `gaps` are ignored."""
    monkeypatch.setattr(plans, "PADDED", padded)
    torch.manual_seed(0)
    cache = KVCache(2, 3, KV, 64, DIM, dtype=torch.float32, device="cpu")
    cache.store.normal_()
    visible = tree(rows) if shape == "tree" else torch.ones(3, rows, rows, dtype=torch.bool).tril()
    plan = plan_rows(
        BASE, rows, device="cpu", dtype=torch.float32, visible=visible if shape == "tree" else None,
        depth=torch.zeros(3, rows, dtype=torch.long) if shape == "tree" else None,
    )  # fmt: skip
    plan = plan.without_slots(gaps, torch.float32)
    q = torch.randn(3, rows, HEADS, DIM)
    found = attend(q, cache, LAYER, plan, 0.3).view(3, rows, HEADS, DIM)
    assert len(plan.blocks(HEADS // KV)) == (3 if padded == 0 else 1)
    for b, start in enumerate(BASE):
        seen = torch.cat((torch.ones(rows, start, dtype=torch.bool), visible[b]), 1)
        for gap in gaps[b : b + 1]:
            seen[:, gap.start : gap.stop] = False
        for head in range(HEADS):
            group = head // (HEADS // KV)
            keys = cache.keys[LAYER][b, group, : start + rows]
            scores = (0.3 * q[b, :, head] @ keys.T).masked_fill(~seen, -torch.inf)
            expected = scores.softmax(-1) @ cache.values[LAYER][b, group, : start + rows]
            torch.testing.assert_close(found[b, :, head], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("rows", [1, 5])
def test_a_single_sequence_never_reads_its_gap(rows):
    """A masked read would not do: a NaN in the gap would spread everywhere."""
    cache = KVCache(2, 1, KV, 64, DIM, dtype=torch.float32, device="cpu")
    cache.store.normal_()
    gap, end = range(4, 33), 40 + rows
    plan = plan_rows([40], rows, device="cpu", dtype=torch.float32)
    q = torch.randn(1, rows, HEADS, DIM)
    expected = torch.cat((cache.store[:, :, : gap.start], cache.store[:, :, gap.stop : end]), 2)
    cache.store[:, :, gap.start : gap.stop] = torch.nan
    found = attend(q, cache, LAYER, plan.without_slots([gap], torch.float32), 0.3)
    dense = KVCache(2, 1, KV, end - len(gap), DIM, dtype=torch.float32, device="cpu")
    dense.store.copy_(expected)
    plan = plan_rows([40 - len(gap)], rows, device="cpu", dtype=torch.float32)
    torch.testing.assert_close(found, attend(q, dense, LAYER, plan, 0.3), atol=1e-5, rtol=1e-5)


def test_the_view_of_one_sequence_shares_memory_with_the_cache():
    cache = KVCache(2, 3, KV, 8, DIM, dtype=torch.float32, device="cpu")
    pairs = torch.randn(4, 2 * KV, DIM)
    cache.sequence(1).write(LAYER, pairs, plan_rows([2], 4, device="cpu", dtype=torch.float32))
    assert torch.equal(cache.store[LAYER, 1, 2:6], pairs)
    assert cache.store.count_nonzero() == pairs.numel()
