"""Features of prompts, and clusters of similar prompts."""

import numpy as np
import pytest
import torch

from specctl.decoding.prompt_features import FEATURES, PromptClusters, cluster_of, features_at, features_of
from specctl.decoding.records import Request
from specctl.decoding.sampling import GREEDY
from tests.toys.decoding import engine_for


def test_features_of_nan_states_are_finite():
    assert np.isfinite(features_of(torch.full((3, 4), torch.nan))).all()


def test_long_states_are_projected_and_keep_their_distances():
    generator = np.random.default_rng(0)
    long = [torch.from_numpy(generator.normal(size=(5, 4096))) for _ in range(4)]
    short = [features_of(states) for states in long]
    assert all(len(x) == FEATURES for x in short) and len(features_of(torch.ones(5, 12))) == 12
    for a in range(1, 4):
        whole = np.linalg.norm(long[a].mean(0) - long[0].mean(0))
        assert np.linalg.norm(short[a] - short[0]) == pytest.approx(whole, rel=0.25)


def test_a_cluster_is_the_mean_of_the_features_seen_in_decoding(target):
    """`select` computes them from a decoding state."""
    taps, prompts = (2, 5), [list(range(5, 30)), list(range(90, 100))]
    seen = []
    for prompt in prompts:
        engine = engine_for(target, taps=taps)
        engine.add(Request(prompt, GREEDY, 2))
        engine.step()
        seen.append(features_of(engine.state.features[0, : len(prompt)]))
    mean, error = cluster_of(features_at(target, prompts, taps))
    assert np.allclose(mean, (seen[0] + seen[1]) / 2, atol=1e-4)
    assert error == pytest.approx(np.linalg.norm(seen[0] - seen[1]) / 2 / 2**0.5, rel=1e-4)


def test_a_prompt_longer_than_the_context_is_truncated(target):
    mean, _ = cluster_of(features_at(target, [[7] * (target.context_length + 5)], (2,)))
    assert np.isfinite(mean).all()


def test_clusters_convert_to_pairs():
    kinds = PromptClusters.of([([1.0, 2.0], 0.5), ([3.0, 4.0], 0.25)])
    assert kinds.pairs == [([1.0, 2.0], 0.5), ([3.0, 4.0], 0.25)]
    assert PromptClusters.of([]).pairs == [] and len(PromptClusters.none().means) == 0
