"""Seconds per arm: exponentially weighted means, and an estimate for arms without measurements."""

from statistics import fmean

import numpy as np
import pytest

from specctl.selection.game.clock import LONGEST, MEMORY, TEXT, ArmClock, TextRate


def test_an_unplayed_arm_is_assumed_as_cheap_as_the_cheapest():
    clock = ArmClock.of(3)
    assert clock.costs() == [1.0] * 3
    for seconds in (2.0, 3.0):
        clock.record(0, seconds)
    clock.record(2, 5.0)
    assert clock.costs() == [2.5, 2.5, 5.0]


def test_a_delayed_round_counts_at_most_twice_the_usual_time():
    """Other processes, page faults or garbage collection can delay a round. Uncut, one such round outweighed the tokens
    of ten."""
    clock = ArmClock.of(1)
    for _ in range(8):
        assert clock.record(0, 1.0, 3.0) == 1.0
    assert clock.record(0, 50.0, 3.0) == LONGEST
    assert clock.costs()[0] < 1.2 and clock.seconds < 10.1


@pytest.mark.parametrize("held_up", [0, 1, 2, 30])
def test_one_very_slow_round_does_not_ruin_an_arm(held_up):
    """A round of 100 times the usual time, at any position. If it is the first one, the second round already corrects
    the mean."""
    clock = ArmClock.of(1)
    for number in range(40):
        clock.record(0, 100.0 if number == held_up else 1.0, 3.0)
        if number > max(held_up, 1):
            assert clock.costs()[0] < 1.5 and clock.rate > 2, number
    assert clock.costs()[0] < 1.05


@pytest.mark.parametrize(("share", "times"), [(0.2, 4.0), (0.1, 6.0), (0.5, 2.0), (0.0, 1.0)])
def test_regularly_slow_rounds_count_in_full(share, times):
    """With times cut at twice the mean, an arm with 20 % of its rounds 4 times as long looked 17 % too cheap, and one
    with 10 % of its rounds 6 times as long 25 %. Means over the clocks of 40 arms and 300 rounds; the standard error is
    at most 1 %."""
    draw = np.random.default_rng(0)
    clock = ArmClock.of(40)
    means = []
    for number in range(300):
        for arm in range(40):
            clock.record(arm, times if draw.random() < share else 1.0)
        if number >= 100:
            means.append(fmean(clock.costs()))
    assert fmean(means) == pytest.approx(1 + share * (times - 1), rel=0.03)


def test_the_rate_of_a_text_is_shrunk_to_the_rate_of_the_stream():
    """The weight of the text's own rate grows with its rounds."""
    text = TextRate()
    assert text.rate(2.0) == 2.0
    for _ in range(TEXT):
        text.record(2.0, 6.0)
    assert text.rate(2.0) == pytest.approx(2.5)
    text.begin()
    assert text.rate(2.0) == 2.0


def test_a_machine_that_becomes_slower_is_noticed():
    """The mean follows although each time is cut at twice the usual."""
    clock = ArmClock.of(1)
    for seconds in [1.0] * MEMORY + [8.0] * 20 * MEMORY:
        clock.record(0, seconds)
    assert clock.costs() == [pytest.approx(8.0, abs=1e-2)]


def test_slow_first_rounds_are_forgotten():
    clock = ArmClock.of(1)
    clock.record(0, 1000.0)
    for _ in range(20 * MEMORY):
        clock.record(0, 1.0)
    assert clock.costs() == [pytest.approx(1.0, abs=1e-3)]
