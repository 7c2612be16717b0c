"""Seconds of arms: means that forget, and a guess for who has not played."""

import pytest

from specctl.selection.game.clock import MEMORY, ArmClock


def test_who_has_not_played_is_as_cheap_as_the_cheapest():
    clock = ArmClock.of(3)
    assert clock.costs() == [1.0] * 3
    for seconds in (1.0, 3.0):
        clock.took(0, seconds)
    clock.took(2, 5.0)
    assert clock.costs() == [2.0, 2.0, 5.0]


def test_slow_first_rounds_are_forgotten():
    clock = ArmClock.of(1)
    clock.took(0, 1000.0)
    for _ in range(20 * MEMORY):
        clock.took(0, 1.0)
    assert clock.costs() == [pytest.approx(1.0, abs=1e-3)]
