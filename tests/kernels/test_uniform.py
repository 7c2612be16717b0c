"""Random numbers: the published generator, one value per (seed, position, stream), equal in every backend."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specctl.kernels import reference

WORD = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # kat_vectors of Random123: philox4x32, 10 rounds
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([WORD] * 4, [WORD] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_known_answers(counter, key, expected):
    words = reference.philox(tuple(torch.tensor(word) for word in counter), tuple(torch.tensor(word) for word in key))
    assert [int(word) for word in words] == expected


@given(
    seeds=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=3),
    start=st.one_of(st.integers(0, 600), st.integers(2**32 - 5, 2**32 + 5), st.integers(0, 2**62)),
    length=st.integers(0, 9),
    stream=st.integers(0, 70),
)
@settings(max_examples=60, deadline=None)
def test_backends_agree_bit_for_bit(backend, seeds, start, length, stream):
    seed = torch.tensor(seeds)
    position = (start + torch.arange(length)).expand(len(seeds), length)
    expected = reference.uniform(seed, position, stream)
    assert expected.dtype == torch.float32
    assert torch.equal(backend.uniform(seed, position, stream), expected)


def test_conversion_to_float_equals_tritons(backend):
    # tl.rand(0, 0): the word 0x6627E8D5 as int32 times fp32(4.6566127342e-10).
    first = backend.uniform(torch.tensor([0]), torch.tensor([[0]]), 0)
    scale = torch.tensor(4.6566127342e-10, dtype=torch.float32)
    assert first.item() == (torch.tensor(0x6627E8D5, dtype=torch.float32) * scale).item()
    assert (torch.tensor(2.0**31, dtype=torch.float32) * scale).item() < 1.0  # the largest folded word stays below one


def test_value_depends_on_seed_position_and_stream_only(backend):
    seed = torch.tensor([3, 4])
    position = torch.tensor([[5, 2**32 + 5, 300], [5, 6, 5]])
    together = backend.uniform(seed, position, 1)
    for row in range(2):
        for column in range(3):
            alone = backend.uniform(seed[row : row + 1], position[row : row + 1, column : column + 1], 1)
            assert alone.item() == together[row, column].item()
    assert together[1, 0] == together[1, 2]  # two tree nodes at one position share their uniform
    assert together[0].unique().numel() == 3  # the high word of the position counts
    assert not torch.equal(together, backend.uniform(seed, position, 2))
    assert not torch.equal(together, backend.uniform(seed + 2**32, position, 1))  # the high word of the seed counts


def test_values_are_uniform_and_uncorrelated():
    """64 bins over 2**18 values of four streams. P(chi2_63 > 140) < 1e-7; the seed is fixed."""
    seed = torch.tensor([11, 12])
    position = torch.arange(2**15).expand(2, -1)
    values = torch.stack([reference.uniform(seed, position, stream) for stream in range(4)]).flatten()
    assert values.min() >= 0 and values.max() < 1
    observed = torch.histc(values, bins=64, min=0, max=1)
    expected = len(values) / 64
    assert ((observed - expected) ** 2 / expected).sum() < 140
    # neighboring positions and streams: |correlation| < 6 standard errors (false alarm 2e-9 each)
    table = values.view(4, 2, -1).double() - 0.5
    bound = 6 / (2 * 4 * 2**15) ** 0.5
    assert (table[:, :, 1:] * table[:, :, :-1]).mean().abs() * 12 < bound
    assert (table[0] * table[1]).mean().abs() * 12 < 6 / 2**8
