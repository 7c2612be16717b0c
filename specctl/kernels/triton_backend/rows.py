"""Random numbers, the scalars of a row, and sampling.

Many programs share the first pass over a row, which computes maxima and sums of its blocks. With top-k or top-p, a
second pass reads only blocks that reach a pivot, which lies below the cut. It gathers the logits above the pivot as
candidates, so the search for the cut runs on few logits. The masses in this search are integers: neither the order of
the candidates nor the batch changes a bit of the result.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..rows import BLOCK, GREEDY_BELOW, Rows, to_working_precision
from .device import BLOCKS, load_logits, pointers, precision, probability, row_major, search, tile_of

MAX_CANDIDATES = 16384  # candidates per row; if there are more, the row itself is searched
SAMPLE = 2048  # logits per row from which the mass of a tail is estimated
PROGRAMS = 1056  # of a pass over few rows: eight per multiprocessor of a large GPU
UNIT = tl.constexpr(2.0**43)  # units per mass of 1, the largest of a token: the sum over 2**20 tokens has 63 bits
ALWAYS_CANDIDATE = tl.constexpr(-8.0)  # scores this close to the maximum are always candidates
GREEDY_LIMIT = tl.constexpr(GREEDY_BELOW)
HALVINGS = tl.constexpr(6)
SHIFTS = {torch.float64: 0, torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}  # bits that only fp32 has


@triton.jit(do_not_specialize=["length", "size", "stream"])
def _uniform_kernel(seed, position, out, length, size, stream, LANES: tl.constexpr):
    at = tl.program_id(0) * LANES + tl.arange(0, LANES)
    mask = at < size
    key = tl.load(seed + at // length, mask=mask, other=0)
    where = tl.load(position + at, mask=mask, other=0)
    low, high = (where & 0xFFFFFFFF).to(tl.uint32), ((where >> 32) & 0xFFFFFFFF).to(tl.uint32)
    word, _, _, _ = tl.philox(key, low, high, low * 0 + stream, low * 0)
    tl.store(out + at, tl.uint_to_uniform_float(word), mask=mask)


def uniform(seed: Tensor, position: Tensor, stream: int) -> Tensor:
    position = position.contiguous()
    out = torch.empty(position.shape, dtype=torch.float32, device=position.device)
    size, lanes = position.numel(), 128
    _uniform_kernel[(triton.cdiv(size, lanes),)](seed, position, out, max(1, position.shape[1]), size, stream, lanes)
    return out


@triton.jit(do_not_specialize=["TILES"])
def _argmax_kernel(x, stride, top, first, V, TILES, TILE: tl.constexpr, ACC: tl.constexpr):
    """Maximum of every tile and its lowest id. Grid: rows × tiles; one pass, all other work is small."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    ids = tile * TILE + tl.arange(0, TILE)
    value = load_logits(x + row * stride, ids, ids < V, ACC)
    highest = tl.max(value, 0)
    tl.store(top + row * TILES + tile, highest)
    tl.store(first + row * TILES + tile, tl.min(tl.where((value == highest) & (ids < V), ids, V), 0).to(tl.int64))


@triton.jit(do_not_specialize=["TILES"])
def _first_kernel(top, first, out, TILES, LANES: tl.constexpr):
    """The lowest id among the tiles that hold the maximum. Grid: rows."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, LANES)
    value = tl.load(top + row * TILES + tile, mask=tile < TILES, other=float("-inf"))
    lowest = tl.argmax(value, 0)  # of equal tiles the first, which has the lowest ids
    tl.store(out + row, tl.load(first + row * TILES + lowest))


def argmax(logits: Tensor) -> Tensor:
    rows = row_major(logits.reshape(-1, logits.shape[-1]))
    count, vocabulary = rows.shape
    tile, acc = tile_of(vocabulary), precision(rows)
    tiles = triton.cdiv(vocabulary, tile)
    top = torch.empty(count, tiles, dtype=to_working_precision(rows[:0]).dtype, device=rows.device)
    first = torch.empty(count, tiles, dtype=torch.int64, device=rows.device)
    _argmax_kernel[(count, tiles)](rows, rows.stride(0), top, first, vocabulary, tiles, tile, acc)
    if tiles == 1:
        return first.view(logits.shape[:-1])
    out = torch.empty(count, dtype=torch.int64, device=rows.device)
    _first_kernel[(count,)](top, first, out, tiles, triton.next_power_of_2(tiles), num_warps=1)
    return out.view(logits.shape[:-1])


@triton.jit
def _flip(bits):
    """Map a float's bits to an integer in the order of the floats. The function is its own inverse."""
    BITS: tl.constexpr = bits.dtype.primitive_bitwidth
    return bits ^ ((bits >> (BITS - 1)) & ((1 << (BITS - 1)) - 1))


@triton.jit
def _key(value, SHIFT: tl.constexpr):
    """Integers in the order of the floats, without the SHIFT lowest bits, which the logits' dtype lacks."""
    return _flip(value.to(tl.int64 if value.dtype == tl.float64 else tl.int32, bitcast=True)) >> SHIFT


@triton.jit
def _value(key, SHIFT: tl.constexpr):
    """The float of a key."""
    bits = _flip((key << SHIFT) | tl.where(key < 0, (1 << SHIFT) - 1, 0).to(key.dtype))
    return bits.to(tl.float64 if key.dtype == tl.int64 else tl.float32, bitcast=True)


@triton.jit
def _count_or_mass_from(
    source, n, end, least, scale, base, cut, COUNT: tl.constexpr, SHIFT: tl.constexpr,
    TILE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Count the keys from `least` on among `n` logits, or sum the mass of all logits with a score of at least `cut`.

    Masses are relative to exp(base), in units of 1 / UNIT. They are integers, so their sum is the same in any order.
    """
    lane = tl.arange(0, TILE)
    total = tl.zeros((TILE,), tl.int64)
    for start in range(0, n, TILE):
        value = load_logits(source, start + lane, start + lane < end, ACC)
        above = (_key(value, SHIFT) >= least) & (start + lane < n)
        if COUNT:
            total += above.to(tl.int64)
        else:
            score = value * scale
            weight = tl.exp(tl.minimum(score - base, 0.0)) * UNIT
            total += tl.where(above & (score >= cut), weight, 0.0).to(tl.int64)
    return tl.sum(total, 0)


@triton.jit
def _highest_key(
    source, n, end, low, high, needed, scale, base, cut, COUNT: tl.constexpr, SHIFT: tl.constexpr,
    TILE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Highest key in low … high with a count or mass of at least `needed` from this key on; `low` if there is none.

    Interval halving takes log2(high − low) passes over `source`, at most the number of bits of the logits' dtype.
    """
    while low < high:
        middle = (low | high) - ((low ^ high) >> 1)  # their mean, rounded up, without overflow
        enough = _count_or_mass_from(source, n, end, middle, scale, base, cut, COUNT, SHIFT, TILE, ACC) >= needed
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    return low


@triton.jit(do_not_specialize=["NB"])
def _blocks_kernel(
    x, stride, inv_temp, peak, total, best, taken, V, NB, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, ACC: tl.constexpr
):
    """Maximum, its lowest id, and Σ exp(score − maximum's score) of every run of BLOCK ids.

    Grid: rows × groups of BLOCKS runs; one pass. It also zeroes the counters of the next kernel.
    """
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    ids = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    value = load_logits(x + row * stride, ids, ids < V, ACC)
    scale = tl.load(inv_temp + row)
    top = tl.max(value, 1)
    base = tl.where(top == float("-inf"), 0.0, top * scale)
    at, mask = row * NB + block, block < NB
    tl.store(peak + at, top, mask=mask)
    tl.store(total + at, tl.sum(tl.exp(value * scale - base[:, None]), 1), mask=mask)
    tl.store(best + at, block * BLOCK + tl.argmax(value, 1), mask=mask)
    if tl.program_id(1) == 0:
        tl.store(taken + row, 0)


@triton.jit
def _statistics(peak, total, scale, row, NB, LANES: tl.constexpr):
    """Maxima of a row's blocks, the score of the highest, and Σ exp(score − highest) of each block."""
    block = tl.arange(0, LANES)
    top = tl.load(peak + row * NB + block, mask=block < NB, other=float("-inf"))
    highest = tl.max(top, 0) * scale
    base = tl.where(highest == float("-inf"), 0.0, highest)
    sums = tl.load(total + row * NB + block, mask=block < NB, other=0.0) * tl.exp(top * scale - base)
    return top, highest, sums


@triton.jit(do_not_specialize=["NB"])
def _gather_kernel(
    x, stride, inv_temp, temperature, top_k, top_p, peak, total, taken, pivot, candidates, V, NB, STEP,
    ROOM: tl.constexpr, SAMPLE: tl.constexpr, LANES: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """Gather the logits from a `pivot` on as `candidates`, in any order.

    The pivot is (almost always) at or below the cut. Top-k: the pivot is the k-th of the blocks' maxima. Top-p: the
    tail below the pivot has half of the mass 1 − top_p, as estimated from a SAMPLE of the logits; the next kernel
    notices a tail that is too large. Grid: rows × a few programs; reads the blocks with a maximum of at least the
    pivot.
    """
    row = tl.program_id(0).to(tl.int64)
    k, p = tl.minimum(tl.load(top_k + row), V), tl.load(top_p + row)
    if ((k > 0) | (p < 1)) & (tl.load(temperature + row) >= GREEDY_LIMIT):
        scale = tl.load(inv_temp + row)
        top, highest, sums = _statistics(peak, total, scale, row, NB, LANES)
        x += row * stride
        if k > 0:
            least = tl.full((), float("-inf"), ACC)
            if k <= NB:
                low, high = _key(least, 0), _key(tl.max(top, 0), 0)
                there = _key(top, 0)
                while low < high:
                    middle = (low | high) - ((low ^ high) >> 1)
                    enough = tl.sum((there >= middle).to(tl.int32), 0) >= k
                    low = tl.where(enough, middle, low)
                    high = tl.where(enough, high, middle - 1)
                least = _value(low, 0)
        else:
            lane = tl.arange(0, SAMPLE)
            ids = lane // 16 * STEP + lane % 16
            score = load_logits(x, ids, ids < V, ACC) * scale - highest
            weight = tl.exp(score) * (V / tl.minimum(V, SAMPLE))
            tail = 0.5 * (1 - p).to(ACC) * tl.sum(sums, 0)
            low = tl.log(tail / V)  # even all V tokens below this score have at most the tail's mass
            high = tl.maximum(low, ALWAYS_CANDIDATE)
            for _ in range(HALVINGS):
                middle = 0.5 * (low + high)
                fine = tl.sum(tl.where(score < middle, weight, 0.0), 0) <= tail
                low = tl.where(fine, middle, low)
                high = tl.where(fine, high, middle)
            least = (low + highest) / scale
        group = tl.program_id(1)
        if group == 0:
            tl.store(pivot + row, least)
        while group * BLOCKS < NB:
            block = group * BLOCKS + tl.arange(0, BLOCKS)
            reach = tl.load(peak + row * NB + block, mask=block < NB, other=float("-inf")) * scale >= least * scale
            reach = reach & (block < NB)
            ids = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
            value = load_logits(x, ids, reach[:, None] & (ids < V), ACC)
            hit = (value * scale >= least * scale) & reach[:, None] & (ids < V)
            count = tl.sum(hit.to(tl.int32), 1)
            start = tl.atomic_add(taken + row + block * 0, count, mask=count > 0, sem="relaxed")
            at = start[:, None] + tl.cumsum(hit.to(tl.int32), 1) - 1
            tl.store(candidates + row * ROOM + at, value.to(candidates.dtype.element_ty), mask=hit & (at < ROOM))
            group += tl.num_programs(1)


@triton.jit(do_not_specialize=["NB"])
def _rows_kernel(
    x, stride, inv_temp, temperature, top_k, top_p, peak, total, best, taken, pivot, candidates,
    cut, lse, greedy, mass, V, NB, ROOM: tl.constexpr, TILE: tl.constexpr, LANES: tl.constexpr,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr, SHIFT: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Compute the fields of a row; with a filter, first the exact cut among the candidates.

    If there are too many or too few candidates, the row itself is searched: one pass per bit of a key, from the cache.
    Grid: rows; reads candidates, and the blocks with a maximum of at least the cut.
    """
    row = tl.program_id(0).to(tl.int64)
    scale = tl.load(inv_temp + row)
    top, highest, sums = _statistics(peak, total, scale, row, NB, LANES)
    is_greedy = tl.load(temperature + row) < GREEDY_LIMIT
    token = tl.load(best + row * NB + tl.argmax(top, 0)).to(tl.int64)
    tl.store(greedy + row, tl.where(is_greedy, token, -1))
    finite = (highest > float("-inf")) & (highest < float("inf"))
    k, p = tl.minimum(tl.load(top_k + row), V), tl.load(top_p + row)
    least = tl.full((), float("-inf"), ACC)
    lane = tl.arange(0, LANES)
    if ((k > 0) | (p < 1)) & (is_greedy == 0) & finite:
        n = tl.load(taken + row)
        end = tl.cdiv(n, 16) * 16  # end of the candidates' memory, for loads of 16 bytes
        low = _key(tl.load(pivot + row), SHIFT)
        high = _key(tl.max(top, 0), SHIFT)
        needed = (p.to(tl.float64) * tl.sum(sums.to(tl.float64), 0) * UNIT).to(tl.int64)
        source, whole_row = candidates + row * ROOM, x + row * stride
        few = n <= ROOM
        if few & (k == 0):
            few = _count_or_mass_from(source, n, end, low, scale, highest, least, False, SHIFT, TILE, ACC) >= needed
        source = tl.where(few, source, whole_row)
        n, end = tl.where(few, n, V), tl.where(few, end, V)
        bottom = _key(least, SHIFT)
        low = tl.where(few, low, bottom)
        if k > 0:
            low = _highest_key(source, n, end, low, high, k, scale, highest, least, True, SHIFT, TILE, ACC)
            least = _value(low, SHIFT) * scale
        if p < 1:
            if k > 0:
                whole = _count_or_mass_from(source, n, end, bottom, scale, highest, least, False, SHIFT, TILE, ACC)
                needed = (p.to(tl.float64) * whole.to(tl.float64)).to(tl.int64)
            needed = tl.maximum(needed, 1)
            low = _highest_key(source, n, end, low, high, needed, scale, highest, least, False, SHIFT, TILE, ACC)
            least = _value(low, SHIFT) * scale

        group = 0
        while group * BLOCKS < NB:
            block = group * BLOCKS + tl.arange(0, BLOCKS)
            reach = tl.load(peak + row * NB + block, mask=block < NB, other=float("-inf")) * scale >= least
            ids = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
            score = load_logits(x + row * stride, ids, reach[:, None] & (ids < V), ACC) * scale
            kept = tl.sum(tl.where(score >= least, tl.exp(score - highest), 0.0), 1)
            tl.store(mass + row * NB + block, kept, mask=block < NB)
            group += 1
        tl.debug_barrier()  # stores of other threads are read next
        sums = tl.load(mass + row * NB + lane, mask=lane < NB, other=0.0)
    whole = tl.sum(sums, 0)
    tl.store(mass + row * NB + lane, sums / whole, mask=lane < NB)
    tl.store(cut + row, tl.where(is_greedy, highest, least))
    tl.store(lse + row, tl.where(is_greedy | (finite == 0), highest, highest + tl.log(whole)))


def row_params(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Rows:
    """Like the reference, but the logits keep their dtype. Always three launches: filters change only the time."""
    logits = row_major(logits)
    count, vocabulary = logits.shape
    assert vocabulary <= 2**20, "the probability masses of a larger vocabulary would overflow"
    blocks, acc = triton.cdiv(vocabulary, BLOCK), precision(logits)
    inv_temp = torch.where(temperature < GREEDY_BELOW, 1.0, 1.0 / temperature).to(
        to_working_precision(logits[:0]).dtype
    )
    pivot, cut, lse, greedy = *(torch.empty_like(inv_temp) for _ in range(3)), torch.empty_like(top_k)
    peak, total, mass = (inv_temp.new_empty(count, blocks) for _ in range(3))
    best, taken = (top_k.new_empty(count, size, dtype=torch.int32) for size in (blocks, 1))
    candidates = logits.new_empty(count, MAX_CANDIDATES)
    several, lanes = min(BLOCKS, triton.next_power_of_2(blocks)), triton.next_power_of_2(blocks)
    groups, few = triton.cdiv(blocks, several), min(8, several)
    x, statistics = (logits, logits.stride(0), inv_temp), (peak, total)
    _blocks_kernel[(count, groups)](*x, *statistics, best, taken, vocabulary, blocks, several, BLOCK, acc)
    filters = temperature, top_k, top_p
    step = max(16, vocabulary * 16 // SAMPLE // 16 * 16)
    programs = min(triton.cdiv(blocks, few), max(1, PROGRAMS // max(count, 1)))
    _gather_kernel[(count, programs)](
        *x, *filters, *statistics, taken, pivot, candidates, vocabulary, blocks, step,
        MAX_CANDIDATES, SAMPLE, lanes, few, BLOCK, acc, num_warps=8,
    )  # fmt: skip
    _rows_kernel[(count,)](
        *x, *filters, *statistics, best, taken, pivot, candidates, cut, lse, greedy, mass, vocabulary, blocks,
        MAX_CANDIDATES, tile_of(vocabulary), lanes, several, BLOCK, SHIFTS[logits.dtype], acc, num_warps=16,
    )  # fmt: skip
    return Rows(logits, inv_temp, cut, lse, greedy, mass)


@triton.jit(do_not_specialize=["NB"])
def _sample_kernel(
    x, stride, inv_temp, cut, lse, greedy, mass, u, out,
    V, NB, LANES: tl.constexpr, BLOCK: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(greedy + row)
    if token < 0:
        lane = tl.arange(0, LANES)
        sums = tl.load(mass + row * NB + lane, mask=lane < NB, other=0.0)
        block, rest = search(sums, tl.load(u + row).to(ACC) * tl.sum(sums, 0), LANES)
        ids = block * BLOCK + tl.arange(0, BLOCK)
        scalars = (tl.load(inv_temp + row), tl.load(cut + row), tl.load(lse + row))
        weight = probability(load_logits(x + row * stride, ids, ids < V, ACC), ids, *scalars, token)
        index, _ = search(weight, rest, BLOCK)
        token = (block * BLOCK + index).to(tl.int64)
    tl.store(out + row, token)


def sample_rows(rows: Rows, u: Tensor) -> Tensor:
    vocabulary, blocks = rows.logits.shape[1], rows.block_mass.shape[1]
    out = torch.empty_like(rows.greedy)
    sizes = vocabulary, blocks, triton.next_power_of_2(blocks), BLOCK, precision(rows.logits)
    _sample_kernel[(len(out),)](*pointers(rows), rows.block_mass.contiguous(), u.contiguous(), out, *sizes)
    return out
