"""Attention over cached slots agrees with SDPA: trees, chains, windows, texts of any length, all head groupings."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from specctl.kernels import PAGE, Ancestry, gather_pages, slots_of

from .conftest import INTERPRETED

pytestmark = pytest.mark.usefixtures("products_of_bf16")
CLOSE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def random_bits(batch, reach, generator):
    """Return ancestor bits [B, reach] of random trees: each row continues an earlier row or the text."""
    bits = torch.zeros(batch, reach, dtype=torch.int64)
    for b, row in itertools.product(range(batch), range(reach)):
        parent = int(torch.randint(-1, row, (), generator=generator)) if row else -1
        bits[b, row] = (bits[b, parent] if parent >= 0 else 0) | (1 << row if row < 63 else -(1 << 63))
    return bits


def case(base, rows, groups=4, kv=2, dim=64, dtype=torch.float32, reach=None, tree=True, window=None, seed=0):
    """Return q, a layer's cache, ancestry and span.

    q is a view into one tensor with keys and values, as from a layer's projection. Slots that must not be read are NaN.
    """
    generator = torch.Generator().manual_seed(seed)
    batch, reach = len(base), reach or rows
    q = torch.randn(batch, rows, (groups + 2) * kv, dim, generator=generator).to(dtype)[:, :, : groups * kv]
    store = torch.randn(batch, max(base) + reach + 5, 2 * kv, dim, generator=generator).to(dtype)
    for b, start in enumerate(base):
        store[b, start + reach :] = torch.nan
    bits = random_bits(batch, reach, generator)[:, reach - rows :] if tree else None
    at = torch.tensor(base)
    first = None
    if window is not None:
        first = at[:, None] + torch.arange(rows) % 3 - window + 1
    return q, store, Ancestry(at, reach, bits, first), max(base) + reach


def in_pages(store, seed=0):
    """Return the cache as a pool of pages in random order, and its page table; unused pages are NaN."""
    batch, capacity = store.shape[:2]
    width = -(-capacity // PAGE)
    order = torch.randperm(2 * batch * width, generator=torch.Generator().manual_seed(seed))
    table = order[: batch * width].view(batch, width)
    pool = torch.full((2 * batch * width * PAGE, *store.shape[2:]), torch.nan, dtype=store.dtype)
    pool[slots_of(table, torch.arange(capacity).expand(batch, -1))] = store
    return pool, table


def by_sdpa(q, store, ancestry, span, scale):
    """Attend text by text with SDPA and a mask, without the slots after the end of a text."""
    rows, heads, dim = q.shape[1:]
    out = []
    for b, start in enumerate(ancestry.base.tolist()):
        end = start + ancestry.draft_slots
        keys, values = store[b, :end].double().chunk(2, 1)
        groups = heads // keys.shape[1]
        keys, values = (x.repeat_interleave(groups, 1).transpose(0, 1) for x in (keys, values))
        mask = torch.ones(rows, end, dtype=torch.bool)
        for t, place in itertools.product(range(rows), range(ancestry.draft_slots)):
            own = ancestry.draft_slots - rows + t
            seen = place <= own if ancestry.ancestor_bits is None else int(ancestry.ancestor_bits[b, t]) >> place & 1
            mask[t, start + place] = bool(seen)
        for t in range(rows) if ancestry.first is not None else ():
            mask[t, : max(int(ancestry.first[b, t]), 0)] = False
        found = F.scaled_dot_product_attention(q[b].transpose(0, 1).double(), keys, values, attn_mask=mask, scale=scale)
        out.append(found.transpose(0, 1).reshape(rows, heads * dim))
    return torch.cat(out)


CASES = {
    "one row": dict(base=[300], rows=1),
    "one row behind nothing": dict(base=[0], rows=1, tree=False),
    "ragged": dict(base=[0, 1, 131, 64], rows=7, groups=3),
    "chain": dict(base=[5, 200], rows=7, tree=False, groups=1),
    "forty-nine": dict(base=[70, 0], rows=49, kv=1, groups=5),
    "to the last bit": dict(base=[3, 140], rows=64, kv=1, groups=8),
    "a level of a tree": dict(base=[63, 65], rows=8, reach=40, groups=2),
    "a level of one": dict(base=[190, 2], rows=1, reach=4, tree=False, groups=2),
    "window": dict(base=[300, 4, 37], rows=5, window=40, groups=2),
    "window of a chain": dict(base=[300, 4, 37], rows=3, window=16, tree=False),
    "many chain rows": dict(base=[9], rows=130, tree=False, groups=1, kv=1),
    "odd heads": dict(base=[90, 17], rows=3, dim=80),
    "wide": dict(base=[90, 170], rows=6, dim=128, groups=7, kv=1),
    "small": dict(base=[90, 17], rows=3, dim=12),
    **{f"groups {n}": dict(base=[150], rows=2, groups=n) for n in (1, 6)},
}


HALVES = {"one row": torch.bfloat16, "ragged": torch.float16, "window": torch.bfloat16, "odd heads": torch.float16}
LARGE = {"forty-nine", "to the last bit", "many chain rows"}  # small fp32 tiles are slow in the interpreter


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(
            *(name, dtype),
            marks=() if dtype == HALVES.get(name, torch.float32) and name not in LARGE else pytest.mark.slow,
        )
        for name, dtype in itertools.product(CASES, CLOSE)
    ]
    + [(name, torch.bfloat16) for name in ("forty-nine", "many chain rows")],
    ids=str,
)
def test_attention_equals_sdpa(backend, name, dtype):
    q, store, ancestry, span = case(**CASES[name], dtype=dtype)
    expected = by_sdpa(q, store, ancestry, span, 0.2)
    found = backend.attention(q, store if INTERPRETED else store.nan_to_num(), ancestry, span, 0.2)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=CLOSE[dtype], atol=CLOSE[dtype])


PAGED = {
    **{name: CASES[name] for name in ("one row", "ragged", "chain", "a level of a tree", "window", "odd heads")},
    "at the edge": dict(base=[63, 64, 65, 127], rows=3),
    "over an edge": dict(base=[60, 125], rows=9, tree=False),
    **{f"groups {n}": dict(base=[130], rows=2, groups=n, kv=1) for n in (1, 5, 8)},
}


@pytest.mark.parametrize("name", PAGED)
def test_paged_attention_follows_the_page_table(backend, name):
    """Pages are in random order; reading a wrong page would give NaN or other values."""
    dtype = torch.bfloat16 if name == "window" else torch.float32
    q, store, ancestry, span = case(**PAGED[name], dtype=dtype)
    expected = by_sdpa(q, store, ancestry, span, 0.2)
    pool, table = in_pages(store)
    if not INTERPRETED:  # plain PyTorch multiplies masked values by zero, and NaN would survive
        pool = pool.nan_to_num()
    found = backend.attention(q, pool, ancestry, span, 0.2, table)
    torch.testing.assert_close(found.double(), expected, rtol=CLOSE[dtype], atol=CLOSE[dtype])
    wrong = backend.attention(q, pool, ancestry, span, 0.2, table.flip(1))
    assert table.shape[1] == 1 or not torch.allclose(wrong.double(), expected, rtol=CLOSE[dtype], atol=CLOSE[dtype])


def test_pages_hold_every_slot_of_every_text_once():
    store = torch.randn(3, 150, 2, 4)
    pool, table = in_pages(store)
    assert torch.equal(gather_pages(pool, table, 150), store) and torch.equal(
        gather_pages(pool, table, 64), store[:, :64]
    )
    assert len(slots_of(table, torch.arange(150).expand(3, -1)).unique()) == 450, "no two texts share a slot"


def test_ancestry_row_selects_one_row():
    """For trees, chains and windows, also with rows of earlier levels."""
    for how in (dict(), dict(tree=False), dict(window=9), dict(tree=False, reach=8)):
        _, _, ancestry, span = case([20, 0, 7], 5, **how)
        allowed, index = ancestry.allowed(5, span), torch.tensor([4, 0, 2])
        assert torch.equal(ancestry.row(index, 5).allowed(1, span)[:, 0], allowed[torch.arange(3), index])
