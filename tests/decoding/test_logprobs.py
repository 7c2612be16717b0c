"""Log probabilities belong to the distributions that tokens are drawn from."""

import math

import pytest
import torch

from specctl.decoding.logprobs import PromptLogprobs, filtered, of_rows
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


def test_min_p_excludes_tokens_after_the_temperature():
    """At temperature ½ the token of logit 2 has exp(−2) of the likeliest one's probability."""
    for min_p, kept in ((0.13, 3), (0.14, 2)):
        assert filtered(LOGITS, Sampling(0.5, 0, 1.0, min_p=min_p)).isfinite().sum() == kept


@pytest.mark.parametrize("taps", [(), (1, 2)])
def test_a_prompt_has_the_same_log_probabilities_in_parts(shallow, taps):
    """The tokens that were read are a text for the prefix cache, as a prefill makes it."""
    prompt = shallow.tokenizer.encode("SELECT name FROM pets WHERE age > 3 ORDER BY name;")
    whole, parts = (PromptLogprobs(shallow, prompt, 2, taps) for _ in range(2))
    whole.read(whole.unread)
    while parts.read_ahead(4):
        pass
    parts.read(parts.unread)
    cache = shallow.new_cache(1, len(prompt) - 1)
    _, hidden, tapped = shallow.prefill([prompt[:-1]], cache, taps)
    rows = shallow.model.logits(hidden[0]).float().log_softmax(-1)
    for found in (whole.found, parts.found):
        assert [one.token for one in found] == prompt and math.isnan(found[0].logprob)
        for row, one in zip(rows, found[1:], strict=True):
            assert one.logprob == pytest.approx(row[one.token].item(), abs=1e-4)
            assert [token for token, _ in one.top] == row.topk(2).indices.tolist()
    text = parts.cached()
    assert text.ids == prompt[:-1] and torch.allclose(text.rows, cache.first_rows(0, len(text.ids)), atol=1e-4)
    assert (text.tapped is None) == (tapped is None)
    assert tapped is None or torch.allclose(text.tapped, tapped[0], atol=1e-3)


def test_a_prompt_of_one_token_is_not_read(shallow):
    one = PromptLogprobs(shallow, [7], 0, ())
    assert one.unread == 0 and not one.read_ahead(4) and one.cached() is None
