"""The change detector: which changes it detects, how soon, and how rarely it raises a false alarm."""

import numpy as np
import pytest

from specctl.selection.game.drift import FLOOR, LEAST, Drift, cusum


def test_cusum_by_hand():
    S = 0.0
    found = []
    for z in (1.0, -3.0, 2.0, 1.5, 0.0):
        S = cusum(S, z, 0.5)
        found.append(S)
    assert found == [0.5, 0.0, 1.5, 2.5, 2.0]


def rounds_until(drift, arm, accepted, limit=10_000):
    """Rounds until an alarm, or None."""
    for count, one in zip(range(1, limit + 1), accepted, strict=False):
        if drift.record(arm, one, vectors=1):
            return count
    return None


def test_a_drop_of_two_sigma_is_detected_within_twelve_rounds():
    """The mean falls from 3 to 0.6. `since` dates the change; sometimes a bad run just before it is dated as its
    beginning."""
    generator = np.random.default_rng(0)
    late = []
    for _ in range(50):
        drift = Drift(2, 4.0)
        if rounds_until(drift, 1, generator.binomial(6, 0.5, 25).tolist()) is None:
            count = rounds_until(drift, 1, generator.binomial(6, 0.1, 100).tolist())
            assert count <= 12
            late.append(drift.since - count)
    assert len(late) > 30 and np.median(np.abs(late)) <= 3


def test_without_a_change_alarms_are_rare():
    """h = 4, k = ½: 336 rounds on average for standard normal z (Montgomery's tables). Estimated means and the skew of
    counts shorten this. The mean of 200 runs, here 190, has a standard error of 15."""
    generator = np.random.default_rng(1)
    lengths = [rounds_until(Drift(1, 4.0), 0, generator.binomial(6, 0.5, 1000).tolist()) or 1000 for _ in range(200)]
    assert np.mean(lengths) > 100


def test_suspicious_rounds_do_not_move_the_mean():
    """A mean that follows the change would hide a change of one standard deviation forever."""
    drift = Drift(1, 100.0)
    rounds_until(drift, 0, [2, 4] * 10)
    for count in range(1, 31):
        drift.record(0, 2, vectors=1)
        assert drift.since == count
    assert pytest.approx(30 * ((3 - 2) / (20 / 19) ** 0.5 - 0.5)) == drift.S
    rounds_until(drift, 0, [9] * 10)
    assert drift.S == drift.since == 0
    rounds_until(drift, 0, [3] * 5)
    assert drift.S == 0, "the suspicion is over, and its rounds are part of the mean"


def test_a_suspicion_does_not_carry_over_to_another_arm():
    """The first rounds of the new arm set its own mean."""
    drift = Drift(2, 9.0)
    rounds_until(drift, 0, [3, 4] * 10)
    drift.record(0, 1, vectors=1)
    assert drift.S > 0
    assert rounds_until(drift, 1, [4] * LEAST) is None
    assert rounds_until(drift, 1, [0] * 3) is not None


def test_improvement_and_a_new_arm_raise_no_alarm():
    drift = Drift(2, 4.0)
    assert rounds_until(drift, 0, [1] * 30 + [5] * 30) is None and drift.S == 0
    assert rounds_until(drift, 1, [0] * LEAST) is None, "the arm has no mean yet"
    assert rounds_until(drift, 0, [0] * 30) is not None


def test_the_deviation_of_a_constant_arm_has_a_floor():
    drift = Drift(1, 4.0)
    rounds_until(drift, 0, [3] * 20)
    assert not drift.record(0, 2, vectors=3)
    assert pytest.approx(1 / FLOOR - 0.5) == drift.S and drift.since == 3


def test_the_last_round_of_a_text_only_counts_its_vectors():
    drift = Drift(1, 9.0)
    rounds_until(drift, 0, [3, 4] * 10)
    drift.record(0, 1, vectors=2)
    before = drift.S
    drift.record(0, None, vectors=5)
    assert drift.S == before > 0 and drift.since == 7
