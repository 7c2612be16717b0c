"""How Triton attention is split into programs: memory traffic and order of summation."""

import itertools
import os
import sys

import pytest
import torch

from specctl.kernels import Ancestry

from .test_attention import case

pytestmark = [
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="run by test_triton"),
    pytest.mark.usefixtures("products_of_bf16"),
]


@pytest.fixture
def tiled():
    """Return the module of the kernels; the package has a function of the same name."""
    from specctl.kernels import triton_backend  # noqa: F401

    return sys.modules["specctl.kernels.triton_backend.attention"]


def test_fixed_order_sums_do_not_depend_on_the_position_of_a_row(tiled, monkeypatch):
    """Bitwise, because plain decoding runs a position first in its step and verification runs it anywhere.

    Negative control: without a fixed order, the slots are cut by the length of the text.
    """
    deal = tiled.tiling
    monkeypatch.setattr(tiled, "tiling", lambda *shape: deal(*shape)._replace(splits=4))
    q, store, _, _ = case([641], 5, tree=False, groups=1, kv=1, dim=16)
    store, q, place = store.nan_to_num(), q[:, :1].expand(-1, 5, -1, -1), 639
    outputs = {True: [], False: []}
    for fixed, base in itertools.product((True, False), range(place - 4, place + 1)):
        ancestry = Ancestry(torch.tensor([base]), 5, fixed_order=fixed)
        outputs[fixed].append(tiled.attention(q, store, ancestry, 644, 0.3)[place - base])
    assert all(torch.equal(one, outputs[True][0]) for one in outputs[True])
    assert not all(torch.equal(one, outputs[False][0]) for one in outputs[False])


def test_unsupported_head_sizes_raise(tiled):
    for dim, dtype in ((160, torch.float32), (64, torch.float64)):
        q, store, ancestry, span = case([9], 1, dim=dim, dtype=dtype)
        with pytest.raises(ValueError, match=f"head dimension {dim}"):
            tiled.attention(q, store, ancestry, span, 1.0)


def test_the_tiling_is_computed_once_per_step(tiled):
    """Choosing among up to 64 tilings takes the host longer than the launch."""
    q, store, ancestry, span = case([9], 1, dim=16)
    tiled.tiling.cache_clear()
    for _ in range(3):
        tiled.attention(q, store, ancestry, span, 1.0)
    assert tiled.tiling.cache_info()[:2] == (2, 1)  # hits, misses


H100, A100, HEADS = 132, 108, 8
LAYER = dict(groups=4, kv=1, dim=128, dtype=torch.bfloat16)  # of an 8B model, with one of its key heads


def traffic(tiled, monkeypatch, batch, rows, context):
    """Return the tiling, the bytes moved by the programs of one text and key head, and the minimum.

    Bytes are counted in the interpreter for the cache, partial sums and the rest; the minimum reads every key once.
    """
    from triton.runtime.interpreter import InterpreterBuilder

    how = tiled.tiling(batch, rows * LAYER["groups"], HEADS, 2, context + 512, H100)
    q, store, ancestry, _ = case([context], rows, **LAYER)
    begin, end = store.data_ptr(), store.data_ptr() + store.nbytes
    moved = {"cache": 0, "pieces": 0, "rest": 0}
    load, write = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def count(pointers, mask):
        at, size = pointers.data[mask.data], pointers.get_element_ty().primitive_bitwidth // 8
        cached = int(((at >= begin) & (at < end)).sum())
        moved["cache"] += size * cached
        moved["pieces" if size == 4 else "rest"] += size * (len(at) - cached)

    with monkeypatch.context() as patch:
        patch.setattr(tiled, "tiling", lambda *_: how)
        patch.setattr(
            InterpreterBuilder,
            "create_masked_load",
            lambda self, x, mask, *o: (count(x, mask), load(self, x, mask, *o))[1],
        )
        patch.setattr(
            InterpreterBuilder,
            "create_masked_store",
            lambda self, x, value, mask, *o: (count(x, mask), write(self, x, value, mask, *o))[1],
        )
        tiled.attention(q, store, ancestry, context + 512, 0.1)
    floor = (context + rows) * 2 * LAYER["dim"] * 2
    return how, moved, floor


@pytest.mark.parametrize("batch", [1, 64])
def test_a_plain_step_moves_little_more_than_the_cache(tiled, monkeypatch, batch):
    """For an 8B target at 4,096 tokens, at most 1.1 times the keys and values."""
    how, moved, floor = traffic(tiled, monkeypatch, batch, 1, 4096)
    assert moved["cache"] == floor
    assert sum(moved.values()) <= 1.1 * floor
    assert batch * HEADS * how.tiles * how.splits >= 0.95 * 2 * H100  # and the GPU is full


@pytest.mark.parametrize(("batch", "rows"), [(1, 8), (64, 4), (1, 49)])
def test_a_draft_reads_the_cache_from_memory_once(tiled, monkeypatch, batch, rows):
    """The tiles of a large tree read it again from the L2 cache, where partial sums also stay."""
    how, moved, floor = traffic(tiled, monkeypatch, batch, rows, 4096)
    assert moved["cache"] == how.tiles * floor
    assert how.tiles == (2 if rows == 49 else 1)
    assert batch * HEADS * moved["pieces"] / 2 <= 50e6  # the L2 cache of an H100


@pytest.mark.parametrize("processors", [H100, A100])
@pytest.mark.parametrize("span", [512, 4608, 33280])
def test_programs_fill_the_gpu(tiled, processors, span):
    """Long contexts of few texts are split into full waves. Many texts are split only as one long text needs.

    Partial sums fit into the L2 cache.
    """
    for batch, rows in itertools.product((1, 3, 8, 24, 64), (1, 8, 49, 4096)):
        how = tiled.tiling(batch, 4 * rows, HEADS, 2, span, processors)
        sums = batch * HEADS * 4 * rows
        programs = batch * HEADS * how.tiles * how.splits
        places = processors * (2 if how.rows <= 64 else 1)
        most = min(-(-span // tiled.MIN_PIECE), tiled.MAX_PIECES, max(tiled.MAX_PARTIAL_ROWS // sums, 1))
        assert how.tiles * how.rows >= 4 * rows
        assert 1 <= how.splits <= most
        if span > 512 and how.splits < most:
            assert programs / (-(-programs // places) * places) >= 0.85
        assert span / how.splits <= tiled.MAX_PIECE or how.splits == most
        if batch == 64:
            assert how.splits <= 2 * max(-(-span // tiled.MAX_PIECE), 4)
