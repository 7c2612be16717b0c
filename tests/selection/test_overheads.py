"""The costs of reading and scoring for idle drafters, by hand."""

import dataclasses

import numpy as np
import pytest

from specctl.decoding.sampling import Sampling
from specctl.drafters.text.lookup import Lookup
from specctl.lab.recorded.hindsight import Hindsight
from specctl.lab.recorded.overhead_timing import line, overheads
from specctl.lab.recorded.replay import draft_all, oracle, replay
from specctl.lab.recorded.trace import Overheads, of_arms
from specctl.recipe.select import GameRecipe, PolicyRecipe
from specctl.selection.arms import Arm
from tests.selection.tables import specialists

GREEDY = Sampling(0.0, 0, 1.0)
KNOWN = Overheads(
    read=np.array([[1.0, 0.1], [2.0, 0.0]]),
    score=np.array([[[10.0, 1.0], [30.0, 3.0]], [[5.0, 0.0], [5.0, 0.0]]]),
    reach=np.array([5, 1]),
)


def test_reading_and_scoring_seconds_by_hand():
    assert KNOWN.reading(np.array([10, 0])).tolist() == [2.0, 0.0]
    assert KNOWN.scoring(4, depth=1) == pytest.approx(14 + 5)
    assert KNOWN.scoring(4, depth=3) == pytest.approx(20 + 2 * 4 + 5), "interpolated between depths 1 and 5"
    assert KNOWN.scoring(4, depth=99) == KNOWN.scoring(4, depth=5) == pytest.approx(42 + 5)
    assert KNOWN.of_arms([1, 0]).scoring(4, 3) == KNOWN.scoring(4, 3)


def test_overheads_of_a_text_by_hand():
    """Rounds at 0 (arm 0), 3 (arm 0), 5 (arm 1) and 6 (arm 0); after the second round all five tokens are scored."""
    own, scoring = KNOWN.of_text(20, [0, 0, 1, 0], [3, 2, 1, 4], [0, 5, 0, 0], depth=1)
    # Arm 0 reads the prompt and later the token of arm 1. Arm 1 has read everything in the scoring before it plays.
    assert own == pytest.approx((1 + 2.0) + (1 + 0.1))
    # At the scoring arm 0 has not read the two tokens of its last round, and arm 1 neither prompt nor answer.
    assert scoring == pytest.approx((1 + 0.2) + 2 + KNOWN.scoring(5, 1))
    assert KNOWN.of_text(20, [1], [9], [0], depth=1) == (2.0, 0.0)


def test_replays_pay_for_scoring():
    """Full information scores all arms; a bandit reads when it switches; a fixed arm reads only the prompt."""
    table = specialists(6, 40, seed=0, N=3, K=4)
    traces = [dataclasses.replace(trace, prompt=50) for trace in table.traces]
    known = Overheads(np.tile([0.001, 0.0001], (3, 1)), np.tile([0.01, 0.0], (3, 2, 1)), np.full(3, 4))
    free, dear = Hindsight(table), Hindsight(dataclasses.replace(table, traces=traces, overheads=known))
    for name in ("hedgespec", "metasd-ucb", "fixed"):
        one, other = (replay(name, yardstick, PolicyRecipe(), GameRecipe()) for yardstick in (free, dear))
        assert (one.rounds == other.rounds).all() and (one.seconds < other.seconds).all()
        scorings = sum(int((part.scored > 0).sum()) for part in other.played)
        assert (
            (other.scoring_s.sum() > scorings * 0.03) if name == "hedgespec" else other.scoring_s.sum() == scorings == 0
        )
    for alone in (oracle, draft_all):
        arms = 1 if alone is oracle else 3
        assert (alone(dear).seconds - alone(free).seconds).tolist() == pytest.approx([arms * 0.006] * 6)
    assert of_arms(dear.table, ["arm2"]).overheads.reach.tolist() == [4]


def test_a_line_is_fitted_through_medians():
    assert line([(4, 3.0), (4, 3.0), (4, 99.0), (24, 13.0)]) == pytest.approx((1.0, 0.5)), "medians ignore the outlier"
    assert line([(4, 3.0), (24, 1.0)]) == (2.0, 0.0), "the slope is never negative"
    assert line([(4, 3.0)]) == (3.0, 0.0)


def test_overheads_are_timed_even_for_a_failing_arm(target):
    """The result is None if no text is long enough."""

    class Broken(Lookup):
        def advance(self, state):
            raise RuntimeError("no such row")

    arms = [Arm("lookup", Lookup(4)), Arm("broken", Broken(4))]
    found = overheads(target, arms, [4, 4], [([5] * 20, 40, 0)], GREEDY)
    assert found.read.shape == (2, 2) and found.score.shape == (2, 2, 2)
    assert found.scoring(9, 4) > 0
    assert overheads(target, arms, [4, 4], [([5] * 20, 2, 0)], GREEDY) is None
