import math

import pytest

from specctl.training.schedule import Schedule


def schedule(shape="cosine", seconds=math.inf):
    return Schedule(steps=100, steps_per_epoch=10, seconds=seconds, peak=1.0, floor=0.1, warmup=0.1, shape=shape)


@pytest.mark.parametrize("shape,half", [("cosine", 0.55), ("linear", 0.55), ("constant", 1.0)])
def test_warm_up_peak_and_end(shape, half):
    s = schedule(shape)
    assert s.rate(5, 0) == pytest.approx(0.5)
    assert s.rate(10, 0) == pytest.approx(1.0)
    assert s.rate(55, 0) == pytest.approx(half)
    assert s.rate(100, 0) == pytest.approx(1.0 if shape == "constant" else 0.1)
    assert s.ended(100, 0) and not s.ended(99, 0)


def test_a_time_limit_finishes_the_schedule_early():
    s = schedule(seconds=60.0)
    assert s.rate(20, 60.0) == pytest.approx(0.1)
    assert s.ended(20, 60.0)
