"""The order of a stream's segments: every prompt once, and the mixture as promised."""

import numpy as np
import pytest

from specctl.adaptation.segments import interleave


@pytest.mark.parametrize("kind", ["abrupt", "mix", "drift"])
@pytest.mark.parametrize("counts", [[7], [5, 1, 9], [40, 40, 40], [1, 1], [300, 2, 50]])
def test_every_segment_comes_as_often_as_asked(kind, counts):
    """Also where sizes differ much: a drift that rounds shares would lose some."""
    assert np.bincount(interleave(counts, kind, 3)).tolist() == counts


def test_abrupt_is_one_after_the_other():
    assert interleave([2, 3], "abrupt", 0).tolist() == [0, 0, 1, 1, 1]


@pytest.mark.parametrize("kind", ["mix", "drift"])
def test_the_seed_decides(kind):
    first = interleave([50, 50], kind, 1).tolist()
    assert first == interleave([50, 50], kind, 1).tolist() != interleave([50, 50], kind, 2).tolist()


def test_a_mix_is_the_same_mixture_everywhere():
    """Windows of 500 out of 1500 equal thirds: 9 standard deviations of the hypergeometric law are 80."""
    for part in np.split(interleave([500] * 3, "mix", 0), 3):
        assert np.abs(np.bincount(part, minlength=3) - 500 / 3).max() < 80


def test_a_drift_is_linear_from_one_middle_to_the_next():
    """The expected share of the second segment at every tenth; drawn stratified, it is off by two a window at most.
    Catches a drift that only shuffles around the change, and one that starts late."""
    drawn = interleave([1000, 1000], "drift", 0)
    share = (drawn == 1).reshape(20, 100).mean(1)
    expected = np.clip(
        (np.arange(20) + 0.5) / 10 - 0.5, 0, 1
    )  # 0 up to the middle of the first, 1 from that of the other
    assert np.abs(share - expected).max() <= 0.04


def test_a_short_segment_between_long_ones_still_peaks():
    """It is alone in its middle and reaches no farther into its neighbours than half its size."""
    drawn = interleave([200, 40, 200], "drift", 0)
    middle = np.flatnonzero(drawn == 1)
    assert middle.min() >= 178 and middle.max() <= 261
    assert (drawn[215:225] == 1).mean() > 0.7
