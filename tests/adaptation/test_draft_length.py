"""Draft lengths chosen by acceptance and cost."""

import itertools
import time

import pytest

from specctl.adaptation.draft_length import AutoLength, best_length, tokens_per_cost
from specctl.decoding.sampling import GREEDY
from specctl.drafters.lm.drafter import ChainShape, LMDrafter
from tests.lossless.drafters import own_weights
from tests.toys.decoding import decode


@pytest.mark.parametrize(("a", "k"), [(0.0, 3), (0.6, 0), (0.6, 4), (0.9, 7), (1.0, 5)])
def test_tokens_per_cost_equals_an_enumeration(a, k):
    """Each draft token is accepted with probability a, the first rejection ends the round, and the target adds a
    token."""
    expected = 0.0
    for outcome in itertools.product((True, False), repeat=k):
        probability = 1.0
        for accepted in outcome:
            probability *= a if accepted else 1 - a
        expected += probability * (1 + next((i for i, hit in enumerate(outcome) if not hit), k))
    assert tokens_per_cost(a, k, 0.0) == pytest.approx(expected)
    assert tokens_per_cost(a, k, 0.5) == pytest.approx(expected / (0.5 * k + 1))


def test_the_best_length_by_hand():
    assert best_length(0.9, 0.0, 7) == 7, "drafts for nothing"
    assert best_length(0.9, 2.0, 7) == 0, "a draft token costs two steps"
    assert best_length(0.0, 0.0, 7) == 0, "of equally good ones the shortest"
    assert best_length(1.0, 0.1, 7) == 7
    # For a = 0.5, α = 0.2: 1.5 / 1.2 = 1.25 at k = 1, 1.75 / 1.4 = 1.25 at k = 2, 1.875 / 1.6 at k = 3.
    assert best_length(0.5, 0.2, 7) == 1


@pytest.fixture
def drafter(target):
    """A drafter with the target's own weights: every draft token is accepted."""
    return LMDrafter(own_weights(target, 0.0), target, ChainShape(6, 0.0, False))


@pytest.mark.parametrize(("alpha", "used"), [(0.0, {6}), (5.0, {0, 1, 6})])
def test_auto_length_drafts_as_deep_as_pays_and_is_lossless(target, prompts, drafter, alpha, used):
    """If drafting is too costly, it is only retried from time to time, because a learning drafter may improve."""
    length = AutoLength(drafter, alpha)
    options = {"sampling": GREEDY, "max_new_tokens": 40, "seeds": [0] * len(prompts)}
    plain = decode(target, prompts, **options)
    found = [decode(target, [p], **{**options, "seeds": [0]}, controller=length, taps=())[0] for p in prompts]
    assert [one.output_ids for one in found] == [one.output_ids for one in plain]
    assert set(length.rounds) == used
    assert length.pop_mean_length() is not None and length.pop_mean_length() is None


def test_a_pause_of_the_process_is_no_cost_of_drafting(target, prompts, drafter, monkeypatch):
    """A process that was stopped for ten minutes while it drafted did not draft again for hundreds of rounds."""
    real, paused = time.perf_counter, [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: real() + paused[0])
    propose = drafter.propose

    def pausing(state, budget):
        paused[0] += 600
        return propose(state, budget)

    drafter.propose = pausing
    length = AutoLength(drafter)
    decode(target, prompts[:1], sampling=GREEDY, max_new_tokens=40, seeds=[0], controller=length, taps=())
    assert paused[0] and length.draft_s + length.step_s < 600


def test_auto_length_measures_its_costs(target, prompts, drafter):
    """For a drafter as large as the target, a draft token costs about one step."""
    length = AutoLength(drafter)
    decode(target, prompts[:1], sampling=GREEDY, max_new_tokens=40, seeds=[0], controller=length, taps=())
    assert length.alpha > 0 and length.draft_tokens > length.steps
    other = AutoLength(drafter)
    other.restore(length.state())
    assert other.alpha == length.alpha and other.accepted == length.accepted
