"""Filtered rows agree with `transformers`, handle degenerate distributions, and are sampled by inverse CDF."""

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from specctl.kernels import nan_count, probabilities


def rows_of(backend, x, temperature=1.0, top_k=0, top_p=1.0):
    fill = torch.ones(len(x), dtype=torch.float64)
    return backend.row_params(x, fill * temperature, (fill * top_k).long(), fill * top_p)


FILTERS = [
    *((1.0, 0, 1.0), (0.6, 0, 1.0), (1.0, 3, 1.0), (1.0, 0, 0.9), (0.7, 50, 0.95), (1.5, 4, 0.3), (1.0, 9999, 0.999))
]


@pytest.mark.parametrize(
    ("vocabulary", "temperature", "top_k", "top_p"),
    [*((size, *filters) for size in (5, 1000) for filters in FILTERS[:: 1 if size == 5 else 3]), (5000, 0.7, 50, 0.95)],
)
def test_filters_equal_those_of_transformers(backend, vocabulary, temperature, top_k, top_p):
    # fp64, because in fp32 the order of summation decides about a token of p = 1e-6 at the edge of a nucleus
    x = torch.randn(3, vocabulary, generator=torch.Generator().manual_seed(vocabulary), dtype=torch.float64) * 3
    expected = TemperatureLogitsWarper(temperature)(None, x)
    if top_k:
        expected = TopKLogitsWarper(top_k)(None, expected)
    if top_p < 1:
        expected = TopPLogitsWarper(top_p)(None, expected)
    p = probabilities(rows_of(backend, x, temperature, top_k, top_p))
    assert torch.equal(p > 0, expected.softmax(-1) > 0)
    torch.testing.assert_close(p, expected.softmax(-1), rtol=1e-12, atol=1e-15)


def test_ties_at_a_cut_are_all_kept(backend):
    x = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0]])
    for kept in ({"top_k": 2}, {"top_p": 0.6}):
        p = probabilities(rows_of(backend, x, **kept))
        assert (p > 0).tolist() == [[True, True, True, True, False]]


def test_greedy_is_the_lowest_id_of_the_maximum(backend):
    x = torch.tensor([[0.0, 5.0, 5.0, torch.nan], [-torch.inf, -torch.inf, 3.0, 3.0]])
    rows = rows_of(backend, x.bfloat16(), temperature=0.0, top_k=2, top_p=0.5)
    assert backend.sample_rows(rows, torch.tensor([0.99, 0.99])).tolist() == [1, 2]
    assert probabilities(rows).tolist() == [[0, 1, 0, 0], [0, 0, 1, 0]]
    assert rows.valid.all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("temperature", [1e-45, 1e-38, 1e-9])
def test_temperatures_that_overflow_are_greedy(backend, temperature, dtype):
    """Infinite logits are not a distribution: every draw used to be the same token."""
    x = torch.tensor([[-3.0, 80.0, 79.0, 80.0], [1e4, 5.0, -1e4, 0.0]], dtype=dtype)
    for kept in ({}, {"top_k": 2}, {"top_p": 0.5}):
        cold, greedy = (rows_of(backend, x, value, **kept) for value in (temperature, 0.0))
        pairs = zip(cold, greedy, strict=True)
        assert all(torch.equal(ours.nan_to_num(), other.nan_to_num()) for ours, other in pairs) and cold.valid.all()
        least = rows_of(backend, x, 1e-4, **kept)
        assert least.valid.all() and (least.greedy < 0).all()
        expected = torch.tensor([[0, 0.5, 0, 0.5], [1.0, 0, 0, 0]]).to(probabilities(least))
        torch.testing.assert_close(probabilities(least), expected, rtol=0, atol=0.01)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_invalid_rows_are_flagged_not_raised(backend, temperature):
    nothing, nan, ok = [-torch.inf] * 3, [torch.nan] * 3, [0.0, torch.nan, -torch.inf]
    x = torch.tensor([nothing, nan, [0.0, torch.inf, 0.0], ok])
    for kept in ({}, {"top_k": 2}, {"top_p": 0.5}):
        rows = rows_of(backend, x, temperature, **kept)
        assert rows.valid.tolist() == [False, False, False, True]
        token = backend.sample_rows(rows, torch.full((4,), 0.7))
        assert ((token >= 0) & (token < 3)).all() and token[3] == 0
    assert nan_count(x).tolist() == [0, 3, 0, 1]


@pytest.mark.parametrize("vocabulary", [6, 256, 600])
def test_the_inverse_cdf_gives_each_token_its_interval(backend, vocabulary):
    """In fp64, with u just inside both ends of every interval, over several blocks."""
    x = torch.randn(1, vocabulary, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 2
    x[0, vocabulary // 3 :: 2] = -torch.inf
    p = x.softmax(-1)[0]
    token = p.nonzero()[:, 0]
    token = token[:: max(len(token) // 64, 1)]  # the interpreter is too slow for a program per token
    upper = p.cumsum(-1)[token]
    lower = upper - p[token]
    rows = rows_of(backend, x).take(torch.zeros_like(token))
    margin = 1e-12
    assert torch.equal(backend.sample_rows(rows, lower + margin), token)
    assert torch.equal(backend.sample_rows(rows, upper - margin), token)


@pytest.mark.parametrize("vocabulary", [3, 1000])
def test_rounding_past_the_end_gives_the_last_kept_token(backend, vocabulary):
    x = torch.randn(4, vocabulary, generator=torch.Generator().manual_seed(2))
    x[:, 2:] = -torch.inf
    rows = rows_of(backend, x)
    assert backend.sample_rows(rows, torch.tensor([1.0, 1.0 - 2.0**-24, 2.0, 0.0])).tolist() == [1, 1, 1, 0]
    full = rows_of(backend, torch.zeros(1, vocabulary))  # its last block is incomplete
    assert backend.sample_rows(full, torch.tensor([2.0])).tolist() == [vocabulary - 1]


def test_mixed_rows_equal_rows_of_one_kind(backend):
    """One call with greedy, sampled and filtered rows, as in batches of `distill`."""
    x = torch.randn(3, 300, generator=torch.Generator().manual_seed(3))
    each = [(0.0, 0, 1.0), (0.7, 0, 1.0), (1.3, 7, 0.8)]
    temperature, top_k, top_p = (torch.tensor(column) for column in zip(*each, strict=True))
    mixed = backend.row_params(x, temperature, top_k, top_p)
    for i, one in enumerate(each):
        torch.testing.assert_close(probabilities(mixed)[i], probabilities(rows_of(backend, x[i : i + 1], *one))[0])
    reverse = torch.tensor([2, 0])
    assert torch.equal(probabilities(mixed.take(reverse)), probabilities(mixed)[reverse])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_argmax_takes_the_lowest_id_and_ignores_nan(backend, dtype):
    nan, inf = float("nan"), float("inf")
    rows = [[1.0, 3.0, 3.0, 2.0], [nan, 1.0, 5.0, nan], [-inf, -inf, nan, -inf], [0.0, 0.0, 0.0, 0.0]]
    logits = torch.tensor(rows, dtype=dtype)
    assert backend.argmax(logits).tolist() == [1, 2, 0, 0]
    assert backend.argmax(logits.view(2, 2, 4)).tolist() == [[1, 2], [0, 0]]
