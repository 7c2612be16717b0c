"""KV caches in pages: texts equal the texts with contiguous caches, pages being written are never shared, and all pages
are returned."""

import gc
import random
import resource
from collections import OrderedDict
from pathlib import Path

import pytest
import torch

from specctl.decoding import prefill
from specctl.decoding import state as state_module
from specctl.decoding.cache import KVCache
from specctl.decoding.device import rounds as device_round
from specctl.decoding.models import lean, linear
from specctl.decoding.paged import PagedCache
from specctl.decoding.pages import SCRATCH_PAGE, PagePool, PoolLayout, budget, pages_for
from specctl.decoding.plan import plan_rows
from specctl.decoding.records import Request
from specctl.decoding.sampling import GREEDY
from specctl.decoding.verify import SHARED_ROWS
from specctl.errors import DataError, UsageError
from specctl.kernels import PAGE
from tests.decoding.test_device_round import SHAPES, NoHost, depth_heads, eagle3, loaded
from tests.toys.decoding import WORDS, engine_for, target_of_few_words

CPU = torch.device("cpu")
FORM = PoolLayout(layers=2, heads=2, dim=4, dtype=torch.float32, device=CPU)


@pytest.fixture(scope="module")
def tiny(tiny_directory):
    """A target with few possible tokens and a rare end token, so that texts grow over pages and random drafts are often
    right."""
    return target_of_few_words(tiny_directory("qwen3"), end_bias=-9.0)


@pytest.fixture
def pages(monkeypatch, tiny):
    """`pages(n)`: from this call on caches are in `n` pages; after the test all pages must be free."""
    pools = []
    init = PagePool.__init__
    monkeypatch.setattr(PagePool, "__init__", lambda self, *args: (pools.append(self), init(self, *args))[1])

    def start(count=400, attention="sdpa"):
        tiny._pool = None
        monkeypatch.setenv("SPECCTL_KV", "paged")
        monkeypatch.setenv("SPECCTL_ATTENTION", attention)
        monkeypatch.setenv("SPECCTL_KV_GIB", repr((count + 1) * tiny.model.form.page_bytes / 2**30))
        return pools

    yield start
    assert pools, "nothing was in pages"
    for pool in pools:
        assert (pool.promised, sorted([*pool._free, *pool._kept])) == (0, list(range(1, 1 + pool.size)))


MADE = {
    "plain": lambda target: None,
    "chain": lambda target: eagle3(target, SHAPES["chain"]),
    "tree": lambda target: eagle3(target, SHAPES["tree"]),
    "heads": lambda target: depth_heads(target, "medusa", SHAPES["tree"]),
}


def requests(count, seed=0, longest=150):
    rng = random.Random(seed)
    return [
        Request(
            [rng.choice(WORDS[1:]) for _ in range(rng.choice([1, 5, 60, 64, longest]))],
            GREEDY, rng.choice([1, 4, 66, 90]), rng.randrange(99),
        )
        for _ in range(count)
    ]  # fmt: skip


def texts(target, asked, watch=None, **options):
    """Texts by id, with the number of accepted tokens, when requests arrive during decoding."""
    engine, ended, coming = engine_for(target, **options), {}, list(asked)
    while engine.busy or coming:
        for _ in range(2):
            if coming:
                engine.add(coming.pop(0))
        for event in engine.step():
            if event.ended is not None:
                assert event.error is None, event.error
                ended[event.id] = event.ended.output_ids, event.ended.accepted
        if watch is not None:
            watch(engine)
    return ended


def assert_pages_are_not_shared(engine):
    cache = engine.state.cache
    used = [page for lease in cache.leases if lease is not None for page in lease.pages]
    assert len({*used}) == len(used) and SCRATCH_PAGE not in used
    for row, lease, table in zip(engine.state.rows, cache.leases, cache.table.tolist(), strict=True):
        taken = [] if lease is None else lease.pages
        assert table == taken + [SCRATCH_PAGE] * (len(table) - len(taken))
        assert (row.stop is None) == (lease is not None), "exactly the unfinished sequences have pages"
        assert lease is None or len(taken) * PAGE >= len(row.ids)


@pytest.mark.parametrize(
    ("mode", "attention"),
    [
        pytest.param("0", "sdpa", id="host-sdpa"),
        pytest.param("eager", "kernel", id="device-kernel"),
        pytest.param("0", "kernel", id="host-kernel", marks=pytest.mark.slow),
        pytest.param("eager", "sdpa", id="device-sdpa", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", MADE)
def test_texts_in_pages_equal_texts_in_contiguous_caches(tiny, pages, monkeypatch, name, mode, attention):
    """In fp32, with requests that arrive, grow over pages and end; host and device rounds."""
    monkeypatch.setattr(state_module, "GROWTH", 140)
    monkeypatch.setenv("SPECCTL_GRAPHS", mode)
    monkeypatch.setenv("SPECCTL_LAYERS", "fused" if attention == "kernel" else "plain")
    monkeypatch.setenv("SPECCTL_KV", "contiguous")
    asked, drafter = requests(7), MADE[name](tiny)
    expected = texts(tiny, asked, drafter=drafter, slots=3)
    pages(attention=attention)
    assert texts(tiny, asked, assert_pages_are_not_shared, drafter=drafter, slots=3) == expected
    assert max(len(ids) for ids, _ in expected.values()) > PAGE


@pytest.mark.parametrize("name", MADE)
def test_batch_sizes_in_pages_are_powers_of_two(tiny, pages, monkeypatch, name):
    """Graphs exist for powers of two and survive the end of single texts. Idle rows do not change texts."""
    asked = [Request([WORDS[1 + n % 6], 5 + n], GREEDY, 9 + 14 * n, n) for n in range(7)]
    drafter = MADE[name](tiny)
    monkeypatch.setenv("SPECCTL_GRAPHS", "eager")
    placed = []
    place = device_round.DeviceRounds._build_track
    monkeypatch.setattr(
        device_round.DeviceRounds,
        "_build_track",
        lambda self: (placed.append((self.state.batch, self.state.capacity)), place(self))[1],
    )

    def batches(kept):
        placed.clear()
        monkeypatch.setenv("SPECCTL_KV", kept)
        engine = engine_for(tiny, drafter=drafter, share_rows=False)
        for one in asked:
            engine.add(one)
        ended = {}
        while engine.busy:
            ended |= {event.id: event.ended for event in engine.step() if event.ended is not None}
        return {id: (text.output_ids, text.accepted) for id, text in ended.items()}, [batch for batch, _ in placed]

    expected, control = batches("contiguous")
    pages()
    found, sizes = batches("paged")
    assert found == expected
    assert sizes == sorted({*sizes}, reverse=True) and {*sizes} <= {8, 4, 2, 1}
    assert not {*control} <= {8, 4, 2, 1}


@pytest.mark.parametrize("mode", ["0", "eager"], ids=["host", "device"])
def test_idle_rows_count_in_the_row_budget(tiny, pages, monkeypatch, mode):
    """They are computed, too: five texts in eight slots get three rows each of 24, not four."""
    monkeypatch.setenv("SPECCTL_GRAPHS", mode)
    asked, step, sizes = [Request([WORDS[1], 5 + n], GREEDY, 20, n) for n in range(5)], tiny.step, set()

    def counted(tokens, *rest):
        sizes.add(tuple(tokens.shape))
        return step(tokens, *rest)

    monkeypatch.setattr(tiny, "step", counted)
    pages()
    engine = engine_for(tiny, drafter=MADE["tree"](tiny))
    for one in asked:
        engine.add(one)
    while engine.busy:
        engine.step()
    assert (8, 3) in sizes and all(slots * rows <= SHARED_ROWS["cpu"] for slots, rows in sizes)


def test_requests_wait_for_pages_in_their_order(tiny, pages):
    """The pool holds the longest text and a little more; no request is refused."""
    asked = requests(9, seed=1)
    expected = texts(tiny, asked)
    most = max(pages_for(len(one.prompt) + one.max_new_tokens + 64) for one in asked)
    pages(most + 2)
    together = []

    def watch(engine):
        assert_pages_are_not_shared(engine)
        assert engine.state.cache.pool.available >= 0
        together.append(len(engine.state.live))
        begun = [text.index for text in engine.texts.values()]
        assert not begun or not engine.waiting or max(begun) < min(engine.waiting), "first come, first served"

    assert texts(tiny, asked, watch) == expected
    assert 1 < max(together) < len(asked), "some requests wait, and several run together"


def test_only_the_request_that_never_fits_is_refused(tiny, pages):
    pages(4)
    engine = engine_for(tiny)
    engine.add(Request([5, 6], GREEDY, 20, 0))
    with pytest.raises(DataError, match="does not fit in memory"):
        engine.add(Request([5] * 100, GREEDY, 150, 0))
    ends = [event for _ in range(30) for event in engine.step() if event.ended is not None]
    assert [len(event.ended.output_ids) for event in ends] == [20]


def test_a_request_fails_if_another_engine_holds_the_pages(tiny, pages):
    """An engine that is no longer stepped would never return them."""
    pages(4)
    other, engine = engine_for(tiny), engine_for(tiny)
    other.add(Request([5] * 100, GREEDY, 80, 0))
    other.step()
    engine.add(Request([5, 6], GREEDY, 20, 0))
    (event,) = engine.step()
    assert isinstance(event.error, DataError) and "other sequences hold the memory" in str(event.error)
    del other
    gc.collect()
    engine.add(Request([5, 6], GREEDY, 20, 0))
    assert sum(len(event.tokens) for _ in range(30) for event in engine.step()) == 20


@pytest.fixture
def rows_read(monkeypatch, tiny):
    """The numbers of rows of the forward passes that read prompts."""
    read = []
    forward = tiny.model.forward

    def counted(tokens, *rest):
        if tokens.shape[1] > 8:
            read.append(tokens.shape[1])
        return forward(tokens, *rest)

    monkeypatch.setattr(tiny.model, "forward", counted)
    return read


SYSTEM = [WORDS[1 + n % 5] for n in range(150)]


@pytest.mark.parametrize("mode", ["0", "eager"], ids=["host", "device"])
def test_shared_prefixes_of_prompts_are_read_once(tiny, pages, monkeypatch, rows_read, mode):
    """While the first text is still decoded, and after it ended, also in a later call. Whole pages are shared, and the
    last token is always read."""
    monkeypatch.setenv("SPECCTL_GRAPHS", mode)
    prompts = [SYSTEM, [*SYSTEM[:130], *[9] * 40], [7] * 30, SYSTEM[:128], SYSTEM[:129], [9, *SYSTEM], SYSTEM]
    asked = [Request(prompt, GREEDY, 30, 0) for prompt in prompts]
    expected = texts(tiny, asked, slots=3)
    assert rows_read == [len(prompt) for prompt in prompts]
    rows_read.clear()
    pools = pages()
    shared, cached = [], {}

    def watch(engine):
        cached.update({row.index: row.cached for row in engine.state.rows})
        held = [page for lease in engine.state.cache.leases if lease is not None for page in lease.pages]
        shared.append(len(held) - len({*held}))
        for row, lease in zip(engine.state.rows, engine.state.cache.leases, strict=True):
            for page in [] if lease is None else lease.pages[(row.prompt_length - 1) // PAGE :]:
                assert held.count(page) == 1, "a shared page is never written"

    assert texts(tiny, asked, watch, slots=3) == expected
    assert max(shared) > 0 and len(pools) == 1
    assert sorted(rows_read) == sorted([150, 42, 30, 64, 151, 22])  # and one forward pass of a single row
    assert [cached[index] for index in range(7)] == [0, 128, 0, 64, 128, 0, 128]
    rows_read.clear()
    assert texts(tiny, asked[:1], watch) == {0: expected[0]} and rows_read == [22], "in a later call, too"


def test_prompts_with_the_same_cached_prefix_are_read_in_one_forward(tiny, pages, monkeypatch, rows_read):
    """The shorter prompts are padded, as on a GPU."""
    asked = [Request([*SYSTEM, *[9] * size], GREEDY, 30, 0) for size in (0, 20, 40)]
    expected = texts(tiny, asked[::-1])
    grouped = prefill.groups
    monkeypatch.setattr(prefill, "groups", lambda lengths, slots, _, at: grouped(lengths, slots, 1000, at))
    pages()
    engine = engine_for(tiny)
    for one in asked[::-1]:
        engine.add(one)
    rows_read.clear()
    ended = {}
    while engine.busy:
        ended |= {event.id: event.ended for event in engine.step() if event.ended is not None}
    assert rows_read == [190, 42], "one forward for the first prompt, one for the others"
    assert {id: (text.output_ids, text.accepted) for id, text in ended.items()} == expected


def test_a_reused_page_is_no_longer_a_cached_prefix(tiny, pages, rows_read):
    """Texts fill the pool and then overwrite a page of an ended text."""
    pages(6)
    engine = engine_for(tiny)

    def answer(prompt):
        engine.add(Request(prompt, GREEDY, 20, 0))
        ended = []
        while engine.busy:
            ended += [event.ended for event in engine.step() if event.ended is not None]
        return ended[0].output_ids

    first = answer(SYSTEM[:140])
    assert answer(SYSTEM[:140]) == first and rows_read == [140, 12]
    for n in range(3):
        answer([*[9] * (n + 1), *SYSTEM[:80]])
    rows_read.clear()
    assert answer(SYSTEM[:140]) == first and rows_read == [76], "its first page is still cached, its second is not"


def test_prompts_are_read_whole_for_drafters_that_read_features(tiny, pages, rows_read):
    drafter = MADE["chain"](tiny)
    asked = [Request([*SYSTEM[:-1], n], GREEDY, 20, 0) for n in range(5, 8)]  # a CPU reads equal prompts once
    expected = texts(tiny, asked, drafter=drafter)
    pages()
    assert texts(tiny, asked, drafter=drafter) == expected and rows_read == [150] * 6


def test_a_cancelled_text_returns_its_pages(tiny, pages):
    pages(4)
    engine = engine_for(tiny)
    first = engine.add(Request([5] * 100, GREEDY, 80, 0))
    engine.step()
    second = engine.add(Request([7] * 90, GREEDY, 10, 0))
    engine.step()
    assert [row.index for row in engine.state.rows] == [first]
    engine.cancel(first)
    ended = {event.id: event.ended for _ in range(20) for event in engine.step() if event.ended is not None}
    assert len(ended[second].output_ids) == 10 and ended[first].stop == "cancelled"


def test_pages_of_a_failed_text_are_cleared_of_nan(tiny, pages):
    """The next text gets these pages, and even a masked NaN would spread."""
    pools = pages(8)
    engine = engine_for(tiny)
    ids = [engine.add(Request([5] * size, GREEDY, 60, 0)) for size in (100, 7)]
    engine.step()
    cache = engine.state.cache
    cache.set_first_rows(0, torch.full_like(cache.first_rows(0, 100), torch.nan))
    pools[0].store[:, SCRATCH_PAGE * PAGE : (SCRATCH_PAGE + 1) * PAGE] = torch.nan
    ended = {event.id: event.ended for _ in range(99) for event in engine.step() if event.ended is not None}
    assert [ended[id].stop for id in ids] == ["failed", "length"]
    assert pools[0].store.isfinite().all()


def test_a_nan_in_one_prompt_does_not_fail_the_others(tiny, pages, monkeypatch):
    """The padding after the bad prompt writes NaN to the page that the padding of shorter prompts reads in the same
    forward pass, and that idle rows read later."""
    asked = [Request([7] * 220, GREEDY, 30, 0), Request([9, 40, 41] * 4, GREEDY, 30, 0)]
    expected = texts(tiny, asked)
    grouped, bad = prefill.groups, 13
    monkeypatch.setattr(prefill, "groups", lambda lengths, slots, _, at: grouped(lengths, slots, 1000, at))
    embedding = tiny.model.embedding.clone()
    embedding[bad] = torch.nan
    monkeypatch.setattr(tiny.model, "embedding", embedding)
    pools = pages()
    engine = engine_for(tiny)
    for one in (*asked, Request([bad], GREEDY, 9, 0)):
        engine.add(one)
    ended = {}
    while engine.busy:
        ended |= {event.id: event.ended for event in engine.step() if event.ended is not None}
    assert [ended[id].stop for id in range(3)] == ["length", "length", "failed"]
    assert {id: (ended[id].output_ids, ended[id].accepted) for id in range(2)} == expected
    assert pools[0].store.isfinite().all()


def test_a_paged_cache_equals_a_contiguous_one(pages):
    """Write, compact (host and device), copy, grow and select, with pages in any order."""
    pages()
    torch.manual_seed(0)
    batch, capacity = 3, 150
    pool = PagePool(FORM, 20)
    pool._free = OrderedDict.fromkeys([7, 3, 12, 1, 9, 15, 2, 11, 5, 20, 4, 6, 8, 10, 13, 14, 16, 17, 18, 19])
    paged = PagedCache(pool, batch, capacity)
    plain = KVCache(2, batch, 2, capacity, 4, dtype=torch.float32, device=CPU)
    for b, slots in ((1, 70), (0, 150), (2, 130), (1, 150)):
        if paged.leases[b] is None:
            paged.admit(b, capacity, [])
        paged.ensure(b, slots)

    def same():
        for layer in range(2):
            for ours, theirs in zip(paged.read(layer, capacity), plain.read(layer, capacity), strict=True):
                assert torch.equal(ours, theirs)
        assert torch.equal(paged.first_rows(1, 99), plain.first_rows(1, 99))

    for base, rows in (([0, 0, 0], 62), ([62, 60, 61], 9), ([120, 126, 63], 7)):
        plan = plan_rows(base, rows, device=CPU, dtype=torch.float32)
        for layer in range(2):
            pairs = torch.randn(batch * rows, 4, 4)
            paged.write(layer, pairs, plan)
            plain.write(layer, pairs, plan)
        same()
    for cache in (paged, plain):
        cache.compact(1, 60, [0, 3, 4, 6])
        cache.compact_at(torch.tensor([62, 125, 60]), torch.tensor([[2, 5], [0, 1], [1, 4]]))
    same()
    for cache in (paged, plain):
        cache.set_first_rows(2, plain.first_rows(0, 70).clone())
    same()
    larger = paged.moved_to(PagedCache(pool, batch, 400))
    assert torch.equal(larger.read(1, capacity)[0], plain.read(1, capacity)[0])
    for cache in (paged, plain):
        cache.select(torch.tensor([2, 0]))
    same_rows = paged.read(0, capacity)[1], plain.read(0, capacity)[1]
    assert torch.equal(*same_rows)


def test_select_gives_the_pages_to_the_first_of_repeated_rows(pages):
    pages()
    cache = PagedCache(pool := PagePool(FORM, 4), 1, 100)
    cache.admit(0, 100, [])
    cache.ensure(0, 100)
    cache.select(torch.tensor([0, 0, 0]))
    assert (
        cache.table.tolist() == [[1, 2], [SCRATCH_PAGE, SCRATCH_PAGE], [SCRATCH_PAGE, SCRATCH_PAGE]]
        and pool.available == 2
    )


@pytest.mark.parametrize("kept", ["paged", "contiguous"])
def test_shrinking_and_growing_move_nothing(tiny, monkeypatch, largest_tensor, kept):
    """The largest new tensor is a table. Negative control: a contiguous cache is copied."""
    monkeypatch.setenv("SPECCTL_KV", kept)
    monkeypatch.setenv("SPECCTL_KV_GIB", "0.05")
    monkeypatch.setattr(state_module, "GROWTH", 20)
    tiny._pool = None
    engine = engine_for(tiny)
    for size in (1, 70, 3, 30):
        engine.add(Request([5] * size, GREEDY, 180, 0))
    engine.step()
    state = engine.state
    for b in (0, 2):
        state.rows[b].stop = "cancelled"
    tiny.model.new_cache(1, 2000)  # makes the rotary table that the other caches use
    store, narrow = state.cache.store, state.capacity
    with torch.inference_mode(), largest_tensor() as made:
        state.shrink()
        state.reserve(180)
    assert state.batch == 2 and state.capacity > 300 > narrow
    small = made.elements <= state.batch * 2 * pages_for(state.capacity)
    assert small == (kept == "paged") == (state.cache.store.data_ptr() == store.data_ptr())


@pytest.mark.parametrize("name", MADE)
def test_a_device_round_in_pages_needs_no_host_synchronization(tiny, monkeypatch, name):
    monkeypatch.setenv("SPECCTL_KV", "paged")
    monkeypatch.setenv("SPECCTL_ATTENTION", "kernel")
    monkeypatch.setenv("SPECCTL_LAYERS", "fused")
    monkeypatch.setattr(linear, "_packed", lambda *_: None)  # as on a GPU
    rounds = loaded(tiny, MADE[name](tiny), GREEDY, monkeypatch)
    assert isinstance(rounds.sequences.cache, PagedCache)
    with torch.inference_mode(), NoHost(monkeypatch):
        rounds.round(rounds.state.capacity)


def test_a_pool_is_freed_with_its_last_engine(tiny, pages):
    pools = pages()
    first, second = engine_for(tiny), engine_for(tiny)
    assert first.state.pool is second.state.pool and len(pools) == 1
    del first, second
    pools.clear()
    gc.collect()
    assert tiny._pool() is None
    pools.append(engine_for(tiny).state.pool)


def test_pages_are_chosen_by_device_and_environment(tiny, monkeypatch):
    """On a GPU pages are used if an attention kernel runs and has passed its check with pages; elsewhere on request."""
    for name in ("SPECCTL_KV", "SPECCTL_ATTENTION", "SPECCTL_KV_GIB"):
        monkeypatch.delenv(name, raising=False)
    assert not tiny.model.pages and budget(CPU) == 2**30
    monkeypatch.setattr(lean, "serves", lambda *heads: known)
    monkeypatch.setattr(lean, "serves_pages", lambda *heads: shown)
    monkeypatch.setattr(tiny.model, "device", torch.device("cuda", 0))
    for known, shown in ((True, True), (True, False), (False, True)):
        assert tiny.model.pages == (known and shown)
    for gpu in ("cuda", "cpu"):
        monkeypatch.setattr(tiny.model, "device", torch.device(gpu))
        for kept in ("paged", "contiguous"):
            monkeypatch.setenv("SPECCTL_KV", kept)
            assert tiny.model.pages == (kept == "paged")
    monkeypatch.setenv("SPECCTL_KV", "pages")
    with pytest.raises(UsageError, match="SPECCTL_KV='pages'"):
        _ = tiny.model.pages
    for size in ("much", "-1", "nan"):
        monkeypatch.setenv("SPECCTL_KV_GIB", size)
        with pytest.raises(UsageError, match="SPECCTL_KV_GIB"):
            budget(CPU)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux")
def test_a_pool_on_a_cpu_commits_only_memory_that_is_written():
    """Zeroing the whole GiB took half a second."""

    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    form = PoolLayout(4, 2, 16, torch.bfloat16, torch.device("cpu"))
    before = resident()
    pool = PagePool(form, (1 << 30) // form.page_bytes)
    assert pool.store.nbytes >= 1 << 30 and pool.store.dtype == torch.bfloat16
    assert resident() - before < 1 << 28 and not pool.rows[3][-64:].any()


def test_a_pool_without_a_page_is_refused():
    with pytest.raises(UsageError, match="no memory for KV caches on cpu"):
        PagePool(FORM, 0)


def test_exact_mode_has_no_pages(tiny, monkeypatch):
    monkeypatch.setenv("SPECCTL_KV", "paged")
    assert engine_for(tiny, exact=True).state.pool is None
