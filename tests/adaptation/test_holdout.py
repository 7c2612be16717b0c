"""Held-out texts decide how far an update goes: the whole way, half of the way, nowhere, or back to the start."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from specctl.adaptation.updates.holdout import HOME, STAY, WHOLE, best_places, split
from specctl.adaptation.updates.watchdog import Acceptance, Watchdog
from specctl.recipe import LearnerRecipe


@pytest.fixture
def held(chunk):
    """Return held-out texts with these centers."""
    return chunk


# From 8 at η = ½, a chunk with center 0 leads to 4.
CASES = [
    ([0.0], 1.0, 4.0),  # held-out texts agree with the chunk
    ([6.0], 0.5, 6.0),  # 4 is as bad as 8, and half of the way is optimal
    ([7.0], 0.0, 8.0),  # even half of the way is as bad as 8
    ([10.0], 0.0, 8.0),  # the held-out texts pull the other way
]


@pytest.mark.parametrize(("centre", "scale", "w"), CASES)
def test_the_scale_of_an_update_by_hand(quadratic, played, chunk, held, centre, scale, w):
    _, learner = quadratic([8.0], algo="ogd")
    outcome = learner.learn(chunk([0.0]), held(centre))
    assert outcome.scales == (scale,) and outcome.no_improvement == (scale == 0)
    assert played(learner).tolist() == [w]


def test_returning_to_the_start(quadratic, played, chunk, held):
    """The stream returns to its start, where the first weights are better than a step from here."""
    _, learner = quadratic([8.0], algo="optimistic")
    learner.learn(chunk([0.0]), held([0.0]))
    assert played(learner).tolist() == [0.0]
    outcome = learner.learn(chunk([6.0]), held([8.0]))
    assert outcome.scales == (None,) and not outcome.no_improvement
    assert played(learner).tolist() == [8.0] and learner.members[0].h.tolist() == [0.0]


def test_a_gain_must_be_significant(quadratic, played, chunk, held):
    """From 8 to 4, the first four texts gain 12, 10.4, 0.8 and −4.8, which is not significant at 5 %.

    Texts with similar gains are significant.
    """
    _, learner = quadratic([8.0], algo="ogd")
    assert learner.learn(chunk([0.0]), held([4.0], [4.4], [6.4], [7.6])).scales == (0.0,)
    assert learner.learn(chunk([0.0]), held([4.0], [4.2], [4.4], [3.9])).scales == (1.0,)


def test_an_optimistic_learner_is_judged_at_the_point_it_plays(quadratic, played, chunk, held):
    """A whole step leads to ŵ = 4, h = 8, w = 0; half of it to ŵ = 6, h = 4, w = 4; a refused step changes nothing."""
    _, learner = quadratic([8.0], algo="optimistic")
    assert learner.learn(chunk([0.0]), held([5.0])).scales == (0.5,)
    assert played(learner).tolist() == [4.0] and learner.members[0].h.tolist() == [4.0]
    assert learner.learn(chunk([0.0]), held([4.1])).scales == (0.0,)
    assert played(learner).tolist() == [4.0] and learner.members[0].h.tolist() == [4.0]


@pytest.mark.parametrize("options", [{"algo": "optimistic", "optimizer": "adam"}, {"algo": "momentum"}])
@pytest.mark.parametrize("first", [0.0, 6.0])
def test_a_refused_update_leaves_no_trace(quadratic, played, chunk, held, options, first):
    """Moments, hint and step count are reset with the weights; a return to the start resets the whole state."""
    _, learner = quadratic([8.0], **options)
    new = learner.members[0].state()
    learner.learn(chunk([first]), held([first]))
    before = learner.members[0].state()
    assert learner.learn(chunk([-50.0], [-50.0]), held([played(learner).item()])).scales == (STAY,)
    assert same(learner.members[0].state(), before) and not same(before, new)
    assert learner.learn(chunk([-50.0]), held([8.0])).scales == (HOME,)
    assert same(learner.members[0].state(), new)


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_partial_update_keeps_its_moments(quadratic, chunk, held):
    learners = [quadratic([8.0], algo="momentum")[1] for _ in range(2)]
    assert learners[0].learn(chunk([0.0]), held([6.0])).scales == (0.5,)
    assert learners[1].learn(chunk([0.0]), held([0.0])).scales == (WHOLE,)
    assert torch.equal(*(learner.members[0].buffers["v"] for learner in learners))


DRAWS = 400

GAINS = {
    "normal": lambda random, size: random.normal(size=size),
    "few lose much": lambda random, size: 1 - random.exponential(size=size),
    "few gain much": lambda random, size: random.exponential(size=size) - 1,
}
"""Gains of texts, of mean 0 and variance 1."""


def moved(law, texts, learners, gain=0.0, level=0.05):
    """Return the fraction of `DRAWS` decisions in which any learner moves.

    Gains are independent with mean `gain`; half of the way gains half as much.
    """
    draws = torch.from_numpy(GAINS[law](np.random.default_rng(texts), (DRAWS, 2, texts, learners)) + gain)

    def any_moves(way, home):
        def losses(*places):
            return torch.stack([-(home if place is HOME else place * way) for place in places])

        chosen = best_places(losses, level)
        return any(place != STAY for place in chosen)

    return sum(any_moves(way, home) for way, home in draws) / DRAWS


@pytest.mark.parametrize("learners", [1, 3])
@pytest.mark.parametrize("texts", [5, 10])
@pytest.mark.parametrize("law", GAINS)
def test_updates_without_effect_move_as_rarely_as_the_level_says(law, texts, learners):
    """With Bonferroni over places only and a plain t-test, 9 % of ensembles moved for normal gains, and 15 and 40 %
    where few texts lose much.

    The bound is four standard errors above the level: a correct rule fails one of the twelve cases with a probability
    below 0.04 %.
    """
    assert moved(law, texts, learners) < 0.05 + 4 * math.sqrt(0.05 * 0.95 / DRAWS)


@pytest.mark.parametrize(("texts", "gain", "least"), [(10, 1.5, 0.8), (5, 4.0, 0.7), (5, 20.0, 0.99)])
def test_a_clear_gain_is_taken(texts, gain, least):
    """`gain` is in standard deviations of one text."""
    assert moved("normal", texts, 1, gain) > least


def test_a_lower_level_is_respected():
    assert moved("few lose much", 5, 3, level=0.01) < 0.01 + 4 * math.sqrt(0.01 * 0.99 / DRAWS)


def test_members_are_judged_separately(quadratic, chunk, held):
    """η = ¼, ½, 1 lead to 6, 4 and 0; with center 5, half of the way is best for the third only."""
    _, learner = quadratic([8.0], algo="ensemble", lr=0.25)
    assert learner.learn(chunk([0.0]), held([5.0])).scales == (1.0, 1.0, 0.5)
    assert [member.w.item() for member in learner.members] == [6.0, 4.0, 4.0]


def test_a_partial_update_stays_in_the_ball(quadratic, played, chunk, held):
    _, learner = quadratic([8.0], algo="ogd", radius=2.0)
    assert learner.learn(chunk([0.0]), held([7.1])).scales == (0.5,)
    assert played(learner).tolist() == [7.0]


def test_without_held_out_texts_the_update_is_taken(quadratic, played, chunk):
    _, learner = quadratic([8.0], algo="ogd")
    outcome = learner.learn(chunk([0.0]))
    assert outcome.scales == () and not outcome.no_improvement
    assert played(learner).tolist() == [4.0]


def test_held_out_texts_without_tokens_are_ignored(quadratic, played, chunk, held):
    _, learner = quadratic([8.0], algo="ogd")
    assert learner.learn(chunk([0.0]), held([10.0], tokens=0)).scales == (1.0,)
    assert played(learner).tolist() == [4.0]


def test_a_diverging_rate_stays_at_its_start(quadratic, played, chunk, held):
    """η = 3 triples the distance with every step."""
    _, learner = quadratic([1.0], algo="ogd", lr=3.0, epochs=5)
    for _ in range(3):
        assert learner.learn(chunk([0.0]), held([0.0])).scales == (0.0,)
    assert played(learner).tolist() == [1.0]


def test_learning_rests_after_updates_in_vain(quadratic, chunk, held):
    """For one chunk, then three. It resumes when acceptance falls or an update helps."""
    objective, learner = quadratic([8.0], algo="ogd")
    dog = Watchdog(LearnerRecipe(algo="ogd", rest=3))

    def statuses(count, centre, accepted=80):
        found = []
        for _ in range(count):
            acceptance = Acceptance.of([(accepted, 100)] * 3)
            found.append(dog.learn(learner, objective, chunk([0.0]), acceptance, held(centre))[1].status)
        return " ".join(found)

    assert statuses(7, [9.0]) == "updated rested updated rested rested rested updated"
    assert statuses(1, [9.0], accepted=75) == "rested", "no more than chance"
    other = Watchdog(LearnerRecipe(algo="ogd", rest=3))
    other.restore(dog.state())
    assert statuses(1, [9.0], accepted=20) == "updated", "the stream has turned"
    assert statuses(1, [9.0], accepted=20) == "rested"
    dog = other
    assert statuses(3, [0.0], accepted=80) == "rested rested updated"
    assert statuses(2, [0.0], accepted=80) == "updated updated", "something came of it"


def test_a_chunk_without_drafts_does_not_hide_a_fall(quadratic, chunk, held):
    """With draft_length=auto a chunk may have no drafts; a fall after such a chunk used to go unnoticed."""
    objective, learner = quadratic([8.0], algo="ogd")
    dog = Watchdog(LearnerRecipe(algo="ogd", rest=7))
    dog.restore(dog.state() | {"rest": torch.tensor([2, 0])})  # two updates in vain

    def status(acceptance):
        return dog.learn(learner, objective, chunk([0.0]), acceptance, held([9.0]))[1].status

    high, low = (Acceptance.of([(accepted, 100)] * 3) for accepted in (80, 20))
    assert [status(one) for one in (high, Acceptance(), high, low)] == ["updated", "rested", "rested", "updated"]


@pytest.mark.parametrize(
    ("count", "share", "held"), [(20, 0.25, 5), (3, 0.25, 1), (2, 0.25, 0), (1, 0.5, 0), (9, 0, 0)]
)
def test_the_newest_texts_are_held_out(count, share, held):
    examples = [SimpleNamespace(index=index) for index in torch.randperm(count).tolist()]
    learnt, kept = split(examples, share)
    assert [example.index for example in learnt + kept] == list(range(count)) and len(kept) == held
