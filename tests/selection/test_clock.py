"""Seconds of arms: means that forget, and a guess for who has not played."""

import pytest

from specctl.selection.game.clock import LONGEST, MEMORY, ArmClock


def test_who_has_not_played_is_as_cheap_as_the_cheapest():
    clock = ArmClock.of(3)
    assert clock.costs() == [1.0] * 3
    for seconds in (2.0, 3.0):
        clock.took(0, seconds)
    clock.took(2, 5.0)
    assert clock.costs() == [2.5, 2.5, 5.0]


def test_a_round_that_was_held_up_counts_no_more_than_twice_the_mean():
    """Other processes, page faults, a collection of garbage: one such round outweighed the tokens of ten."""
    clock = ArmClock.of(1)
    for _ in range(8):
        assert clock.took(0, 1.0, 3.0) == 1.0
    assert clock.took(0, 50.0, 3.0) == LONGEST
    assert clock.costs()[0] < 1.2 and clock.seconds < 10.1


def test_a_machine_that_becomes_slower_is_noticed():
    """Cut at twice the mean, a mean follows all the same."""
    clock = ArmClock.of(1)
    for seconds in [1.0] * MEMORY + [8.0] * 20 * MEMORY:
        clock.took(0, seconds)
    assert clock.costs() == [pytest.approx(8.0, abs=1e-2)]


def test_slow_first_rounds_are_forgotten():
    clock = ArmClock.of(1)
    clock.took(0, 1000.0)
    for _ in range(20 * MEMORY):
        clock.took(0, 1.0)
    assert clock.costs() == [pytest.approx(1.0, abs=1e-3)]
