"""The test for a change: what it notices, how soon, and how rarely without one."""

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


def test_an_arm_that_gets_worse_is_noticed_within_a_few_rounds():
    """Mean 3 to 0.6, two σ. `since` dates the change: a bad run before it is taken for its beginning now and then."""
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
    """h = 4, k = ½: 336 rounds on average where z is normal and its law is known (Montgomery's tables); estimated means
    and the tails of counts cost some. The mean of 200 runs, here 190, has a standard error of 15."""
    generator = np.random.default_rng(1)
    lengths = [rounds_until(Drift(1, 4.0), 0, generator.binomial(6, 0.5, 1000).tolist()) or 1000 for _ in range(200)]
    assert np.mean(lengths) > 100


def test_suspects_do_not_move_the_mean_until_they_are_trusted():
    """A mean that follows the change would hide one of a single standard deviation for good."""
    drift = Drift(1, 100.0)
    rounds_until(drift, 0, [2, 4] * 10)
    for count in range(1, 31):
        drift.record(0, 2, vectors=1)
        assert drift.since == count
    assert pytest.approx(30 * ((3 - 2) / (20 / 19) ** 0.5 - 0.5)) == drift.S
    rounds_until(drift, 0, [9] * 10)
    assert drift.S == drift.since == 0
    rounds_until(drift, 0, [3] * 5)
    assert drift.S == 0, "what had been suspected is part of the mean now"


def test_an_arm_that_takes_over_from_a_suspect_is_tested_like_any_other():
    """Its first rounds are its promise, whatever was suspected of the arm before it."""
    drift = Drift(2, 9.0)
    rounds_until(drift, 0, [3, 4] * 10)
    drift.record(0, 1, vectors=1)
    assert drift.S > 0
    assert rounds_until(drift, 1, [4] * LEAST) is None
    assert rounds_until(drift, 1, [0] * 3) is not None


def test_better_is_no_alarm_and_neither_is_another_arm():
    drift = Drift(2, 4.0)
    assert rounds_until(drift, 0, [1] * 30 + [5] * 30) is None and drift.S == 0
    assert rounds_until(drift, 1, [0] * LEAST) is None, "it has promised nothing yet"
    assert rounds_until(drift, 0, [0] * 30) is not None


def test_an_arm_that_never_varies_has_a_floor():
    drift = Drift(1, 4.0)
    rounds_until(drift, 0, [3] * 20)
    assert not drift.record(0, 2, vectors=3)
    assert pytest.approx(1 / FLOOR - 0.5) == drift.S and drift.since == 3


def test_the_end_of_a_text_says_nothing_but_counts():
    drift = Drift(1, 9.0)
    rounds_until(drift, 0, [3, 4] * 10)
    drift.record(0, 1, vectors=2)
    before = drift.S
    drift.record(0, None, vectors=5)
    assert drift.S == before > 0 and drift.since == 7
