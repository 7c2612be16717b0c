"""Log probabilities belong to the distributions that tokens are drawn from."""

import pytest
import torch

from specctl.decoding.logprobs import filtered, of_rows
from specctl.decoding.sampling import Sampling

LOGITS = torch.tensor([[1.0, 3.0, 3.0, 2.0]])


@pytest.mark.parametrize("temperature", [0.0, 1e-40])
def test_a_greedy_token_is_certain_even_beside_an_equal_one(temperature):
    """The log probability used to be log ½, and NaN at temperatures so low that division overflows."""
    found = of_rows(filtered(LOGITS, Sampling(temperature, 0, 1.0)), [1], 0)
    assert found[0].logprob == 0.0


def test_filters_exclude_tokens_after_the_temperature():
    expected = torch.log_softmax(torch.tensor([[-torch.inf, 6.0, 6.0, 4.0]]), -1)
    assert torch.allclose(filtered(LOGITS, Sampling(0.5, 3, 1.0)).log_softmax(-1), expected)
    assert torch.allclose(filtered(LOGITS, Sampling(0.5, 0, 1.0)), 2 * LOGITS)
