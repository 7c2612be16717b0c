"""After every verdict the target's cache and the stored features equal a fresh prefill of the committed text.

Catches rows of rejected nodes that remain, a wrong compaction of the path, features of the wrong node, tree masks and
positions that let a node see its siblings, and mixed-up sequences of a batch.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specctl.decoding.cache import KVCache
from specctl.decoding.sampling import Sampling
from specctl.decoding.target import load_target
from tests.lossless.drafters import bushes, ragged
from tests.toys.decoding import decode

TAPS = (0, 1, 3)
PROMPTS = [[5, 9, 300, 12, 7, 7, 41], [88, 4], [17, 230, 17, 230, 17]]
SAMPLING = Sampling(1.0, 0, 1.0)
NEW = 10


@pytest.fixture(scope="module", params=["qwen3", "gpt2", "gemma2"])
def tiny(request, tiny_directory):
    return load_target(tiny_directory(request.param), device="cpu", dtype="fp32")


@pytest.fixture(scope="module")
def texts(tiny):
    plain = decode(tiny, PROMPTS, sampling=SAMPLING, max_new_tokens=NEW, seeds=[1, 2, 3])
    return [one.prompt_ids + one.output_ids for one in plain]


def assert_fresh(target, state):
    """Compare every row of `state` with a separate prefill."""
    for b, length in enumerate(state.cached):
        cache = target.model.new_cache(1, state.capacity)
        _, _, tapped = target.prefill([state.rows[b].ids[:length]], cache, TAPS)
        torch.testing.assert_close(state.cache.first_rows(b, length), cache.store[:, 0, :length], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(state.features[b, :length], tapped[0, :length], rtol=1e-4, atol=1e-4)


def run(target, drafter, exact=False):
    return decode(
        target,
        PROMPTS,
        sampling=SAMPLING,
        max_new_tokens=[NEW, NEW // 2, NEW],
        seeds=[1, 2, 3],
        drafter=drafter,
        exact=exact,
        on_round=lambda state, draft, verdict: assert_fresh(target, state),
    )


@settings(max_examples=5, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**16), kind=st.sampled_from([ragged, bushes]), right=st.sampled_from([0.3, 0.7, 1.0]))
def test_cache_and_features_equal_a_fresh_prefill(tiny, texts, seed, kind, right):
    run(tiny, kind(texts, seed, tiny.vocab_size, right=right, taps=TAPS))


@pytest.mark.parametrize("kind", [ragged, bushes])
def test_cache_and_features_equal_a_fresh_prefill_in_exact_mode(tiny, texts, kind):
    options = {} if kind is ragged else {"nodes": 7}
    run(tiny, kind(texts, 0, tiny.vocab_size, taps=TAPS, **options), exact=True)


def test_negative_control_no_compaction(tiny, texts, monkeypatch):
    """Without compaction, the cache keeps the rows of a tree in drafted order."""
    monkeypatch.setattr(KVCache, "compact", lambda *args: None)
    with pytest.raises(AssertionError):
        for seed in range(4):
            run(tiny, bushes(texts, seed, tiny.vocab_size, taps=TAPS))
