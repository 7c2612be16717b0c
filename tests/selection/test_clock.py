"""Seconds of arms: means that forget, and a guess for who has not played."""

from statistics import fmean

import numpy as np
import pytest

from specctl.selection.game.clock import LONGEST, MEMORY, TEXT, ArmClock, TextRate


def test_who_has_not_played_is_as_cheap_as_the_cheapest():
    clock = ArmClock.of(3)
    assert clock.costs() == [1.0] * 3
    for seconds in (2.0, 3.0):
        clock.record(0, seconds)
    clock.record(2, 5.0)
    assert clock.costs() == [2.5, 2.5, 5.0]


def test_a_round_that_was_held_up_counts_no_more_than_twice_the_usual():
    """Other processes, page faults, a collection of garbage: one such round outweighed the tokens of ten."""
    clock = ArmClock.of(1)
    for _ in range(8):
        assert clock.record(0, 1.0, 3.0) == 1.0
    assert clock.record(0, 50.0, 3.0) == LONGEST
    assert clock.costs()[0] < 1.2 and clock.seconds < 10.1


@pytest.mark.parametrize("held_up", [0, 1, 2, 30])
def test_a_hiccup_does_not_ruin_an_arm(held_up):
    """100 times the usual, in any round, the very first included: the second round already tells."""
    clock = ArmClock.of(1)
    for number in range(40):
        clock.record(0, 100.0 if number == held_up else 1.0, 3.0)
        if number > max(held_up, 1):
            assert clock.costs()[0] < 1.5 and clock.rate > 2, number
    assert clock.costs()[0] < 1.05


@pytest.mark.parametrize(("share", "times"), [(0.2, 4.0), (0.1, 6.0), (0.5, 2.0), (0.0, 1.0)])
def test_rounds_that_are_dear_now_and_then_count(share, times):
    """Cut at twice the mean, an arm with 20 % of rounds 4 times as long looked 17 % too cheap, with 10 % of 6 times
    25 %. Means over 40 arms' clocks of 300 rounds: the standard error is 1 % at most."""
    draw = np.random.default_rng(0)
    clock = ArmClock.of(40)
    means = []
    for number in range(300):
        for arm in range(40):
            clock.record(arm, times if draw.random() < share else 1.0)
        if number >= 100:
            means.append(fmean(clock.costs()))
    assert fmean(means) == pytest.approx(1 + share * (times - 1), rel=0.03)


def test_a_text_has_a_rate_of_its_own():
    """By its rounds, drawn towards the stream's."""
    text = TextRate()
    assert text.rate(2.0) == 2.0
    for _ in range(TEXT):
        text.record(2.0, 6.0)
    assert text.rate(2.0) == pytest.approx(2.5)
    text.begin()
    assert text.rate(2.0) == 2.0


def test_a_machine_that_becomes_slower_is_noticed():
    """Cut at twice the usual, a mean follows all the same."""
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
