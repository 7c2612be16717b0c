"""How far a learner goes on the way that a chunk leads it: as far as texts held out get better by it."""

from types import SimpleNamespace

import pytest
import torch

from specctl.adaptation.pupil import held_out

# From 8, at η = ½, a chunk with its centre at 0 leads to 4.
CASES = [
    ([0.0], 1.0, 2.0),  # better for the texts held out, so these are learnt from, too: 4 → 2
    ([6.0], 0.5, 6.0),  # 4 is as bad as 8 for them, half of the way is where they are
    ([7.0], 0.25, 7.0),
    ([10.0], 0.0, 8.0),  # the other way
]


@pytest.mark.parametrize(("held", "scale", "w"), CASES)
def test_the_way_by_hand(quadratic, played, chunk, held, scale, w):
    _, learner = quadratic([8.0], algo="ogd")
    assert learner.learn(chunk([0.0]), chunk(held)).scales == (scale,)
    assert played(learner).tolist() == [w]


def test_an_optimistic_learner_is_judged_where_it_plays(quadratic, played, chunk):
    """ŵ goes to 4 and h to 8: w would be 0. A quarter of that is ŵ = 7, h = 2, w = 6; none of it is as it was."""
    _, learner = quadratic([8.0], algo="optimistic")
    assert learner.learn(chunk([0.0]), chunk([6.0])).scales == (0.25,)
    assert played(learner).tolist() == [6.0] and learner.members[0].h.tolist() == [2.0]
    assert learner.learn(chunk([0.0]), chunk([20.0])).scales == (0.0,)
    assert played(learner).tolist() == [6.0] and learner.members[0].h.tolist() == [2.0]


def test_members_are_judged_one_by_one(quadratic, chunk):
    """η = ¼, ½, 1 lead to 6, 4 and 0: for texts at 5 the first two are better than 8, the third goes back."""
    _, learner = quadratic([8.0], algo="ensemble", lr=0.25)
    assert learner.learn(chunk([0.0]), chunk([5.0])).scales == (1.0, 1.0, 0.5)
    # The first two learn from the texts held out: 6 + ¼ (5 − 6), 4 + ½ (5 − 4).
    assert [member.w.item() for member in learner.members] == [5.75, 4.5, 4.0]


def test_the_ball_holds_for_a_part_of_the_way(quadratic, played, chunk):
    _, learner = quadratic([8.0], algo="ogd", radius=2.0)
    assert learner.learn(chunk([0.0]), chunk([7.1])).scales == (0.5,)
    assert played(learner).tolist() == [7.0]


def test_nothing_held_out_is_the_papers_rule(quadratic, played, chunk):
    _, learner = quadratic([8.0], algo="ogd")
    assert learner.learn(chunk([0.0])).scales == ()
    assert played(learner).tolist() == [4.0]


def test_texts_without_weight_forbid_nothing(quadratic, played, chunk):
    _, learner = quadratic([8.0], algo="ogd")
    assert learner.learn(chunk([0.0]), chunk([10.0], tokens=0)).scales == (1.0,)
    assert played(learner).tolist() == [4.0]


def test_a_rate_that_diverges_stays_where_it_is(quadratic, played, chunk):
    """η = 3 triples the distance with every step; nothing of it helps, and nothing is taken back later."""
    _, learner = quadratic([1.0], algo="ogd", lr=3.0, epochs=5)
    for _ in range(3):
        assert learner.learn(chunk([0.0]), chunk([0.0])).scales == (0.0,)
    assert played(learner).tolist() == [1.0]


@pytest.mark.parametrize(
    ("count", "share", "held"), [(20, 0.25, 5), (3, 0.25, 1), (2, 0.25, 0), (1, 0.5, 0), (9, 0, 0)]
)
def test_the_newest_texts_are_held_out(count, share, held):
    examples = [SimpleNamespace(index=index) for index in torch.randperm(count).tolist()]
    learnt, kept = held_out(examples, share)
    assert [example.index for example in learnt + kept] == list(range(count)) and len(kept) == held
