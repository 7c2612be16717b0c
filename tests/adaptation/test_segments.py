"""The order of the segments of a stream: every prompt once, mixed as requested."""

import numpy as np
import pytest

from specctl.adaptation.stream import interleave


@pytest.mark.parametrize("kind", ["abrupt", "mix", "drift"])
@pytest.mark.parametrize("counts", [[7], [5, 1, 9], [40, 40, 40], [1, 1], [300, 2, 50]])
def test_every_segment_occurs_as_often_as_requested(kind, counts):
    """This holds for very different sizes too, where rounding could lose prompts."""
    assert np.bincount(interleave(counts, kind, 3)).tolist() == counts


def test_abrupt_segments_follow_one_another():
    assert interleave([2, 3], "abrupt", 0).tolist() == [0, 0, 1, 1, 1]


@pytest.mark.parametrize("kind", ["mix", "drift"])
def test_the_seed_determines_the_order(kind):
    first = interleave([50, 50], kind, 1).tolist()
    assert first == interleave([50, 50], kind, 1).tolist() != interleave([50, 50], kind, 2).tolist()


def test_a_mix_is_uniform_over_the_stream():
    """Windows of 500 out of 1500 equal thirds: 80 is 9 standard deviations of the hypergeometric distribution."""
    for part in np.split(interleave([500] * 3, "mix", 0), 3):
        assert np.abs(np.bincount(part, minlength=3) - 500 / 3).max() < 80


def test_a_drift_is_linear_between_the_middles_of_segments():
    """Stratified sampling deviates by at most two per window. Catches a late start, and mixing only near the change."""
    drawn = interleave([1000, 1000], "drift", 0)
    share = (drawn == 1).reshape(20, 100).mean(1)
    expected = np.clip(
        (np.arange(20) + 0.5) / 10 - 0.5, 0, 1
    )  # 0 until the middle of the first, 1 from the middle of the second
    assert np.abs(share - expected).max() <= 0.04


def test_a_short_segment_between_long_ones_reaches_full_share():
    """It has the middle for itself, and reaches into its neighbors by at most half its size."""
    drawn = interleave([200, 40, 200], "drift", 0)
    middle = np.flatnonzero(drawn == 1)
    assert middle.min() >= 178 and middle.max() <= 261
    assert (drawn[215:225] == 1).mean() > 0.7
