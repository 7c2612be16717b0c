"""Triton finds exact cuts in each of its ways, and the maximum over many programs."""

import os

import pytest
import torch

from specctl.kernels import reference

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="run by test_triton")
FILTERS = [
    (1.0, 0, 0.9),
    (0.7, 50, 1.0),
    (0.0, 3, 0.5),
    (1.5, 0, 0.999),
    (0.3, 10**6, 0.8),
    (1.0, 7, 1e-9),
    (1.0, 1, 1.0),
]
SMALL = [(1, torch.bfloat16), (7, torch.float32), (257, torch.float16)]
LARGE = [(5000, torch.bfloat16), (32003, torch.float32), (50257, torch.bfloat16)]


@pytest.fixture
def rows():
    from specctl.kernels.triton_backend import rows

    return rows


def filters():
    """Return temperature, top-k and top-p per row."""
    return tuple(torch.tensor(column) for column in zip(*FILTERS, strict=True))


def exact_cut(x, temperature, top_k, top_p):
    """Return the cuts [R] of fp32 scores, with masses in fp64."""
    greedy = temperature <= 0
    scores = (x.float() * torch.where(greedy, 1.0, 1.0 / temperature)[:, None]).double()
    return reference.row_params(scores, torch.where(greedy, 0.0, 1.0).double(), top_k, top_p.double()).cut.float()


@pytest.mark.parametrize(
    ("vocabulary", "dtype", "room"),
    [
        *((vocabulary, dtype, (16, 16384)[place % 2]) for place, (vocabulary, dtype) in enumerate(SMALL)),
        (5000, torch.bfloat16, 16384),  # several tiles
        *(pytest.param(*sizes, room, marks=pytest.mark.slow) for sizes in LARGE for room in (16, 16384)),
    ],
)
def test_cuts_are_exact(rows, monkeypatch, vocabulary, dtype, room):
    """Rounded values give ties at every cut, and flat rows have more candidates than there is room."""
    monkeypatch.setattr(rows, "MAX_CANDIDATES", room)
    generator = torch.Generator().manual_seed(vocabulary)
    for scale in (0.0, 3.0):
        x = (scale * torch.randn(len(FILTERS), vocabulary, generator=generator)).to(dtype)
        x[:, ::3] = x[:, ::3].round()
        ours, spec = rows.row_params(x, *filters()), reference.row_params(x, *filters())
        assert torch.equal(ours.cut, exact_cut(x, *filters()))
        same = (ours.cut == spec.cut) & (spec.greedy < 0)  # fp32 sums may end one token earlier or later
        torch.testing.assert_close(ours.lse[same], spec.lse[same], rtol=1e-6, atol=2e-6)
        torch.testing.assert_close(ours.block_mass[same], spec.block_mass[same], rtol=1e-4, atol=1e-6)


def test_cuts_are_exact_for_every_k(rows):
    """Both below and above the number of block maxima, from which the pivot is chosen."""
    x = torch.randn(1, 700, generator=torch.Generator().manual_seed(0)).bfloat16()
    for k in (1, 3, 4, 257, 700, 701):
        cut = rows.row_params(x, torch.ones(1), torch.tensor([k]), torch.ones(1)).cut
        assert cut == x.float().sort(descending=True).values[0, min(k, 700) - 1]


def test_a_tail_missing_from_the_sample_is_found(rows):
    """3,000 tokens with 2e-4 of the top probability are not sampled, so the first pivot is too high."""
    vocabulary = 50257
    x = torch.full((1, vocabulary), -30.0)
    step = vocabulary * 16 // rows.SAMPLE // 16 * 16
    hidden = torch.arange(vocabulary)[torch.arange(vocabulary) % step >= 16][:3000]
    x[0, hidden] = -8.5
    x[0, 0] = 0.0
    for top_p, cut in ((0.9, -8.5), (0.5, 0.0)):
        nucleus = torch.ones(1), torch.zeros(1, dtype=torch.int64), torch.tensor([top_p])
        assert exact_cut(x, *nucleus) == cut
        assert rows.row_params(x, *nucleus).cut == cut


def test_cuts_do_not_depend_on_the_order_of_candidates(rows, monkeypatch):
    """Bit for bit: programs take places as they come, and sums are integers."""
    x, some = torch.randn(4, 3000, generator=torch.Generator().manual_seed(1)), [column[:4] for column in filters()]
    at_once = rows.row_params(x, *some)
    backwards = rows.row_params(x.flip(-1), *some)
    monkeypatch.setattr(rows, "PROGRAMS", 1)
    one_by_one = rows.row_params(x, *some)
    for name in rows.Rows._fields:
        assert torch.equal(getattr(at_once, name), getattr(one_by_one, name)), name
    assert torch.equal(at_once.cut, backwards.cut)


@pytest.mark.parametrize("vocabulary", [1, 7, 4096, 4097, 50257])
def test_argmax_gives_the_lowest_id_of_equal_maxima(rows, vocabulary):
    """In one tile and in several; rows of NaN, −inf and +inf."""
    x = torch.randn(6, vocabulary, generator=torch.Generator().manual_seed(2)).round()
    x[0], x[1] = torch.nan, -torch.inf
    x[2, vocabulary // 2] = x[2, -1] = torch.inf
    x[3, 0], x[3, -1], x[4] = torch.nan, 100.0, 5.0
    assert torch.equal(rows.argmax(x), reference.argmax(x))
    assert torch.equal(rows.argmax(x.bfloat16()[:, None]), reference.argmax(x.bfloat16()[:, None]))
