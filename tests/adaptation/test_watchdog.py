"""Which updates are taken back."""

import pytest
import torch

from specctl.adaptation.watchdog import Acceptance, Watchdog, fell
from specctl.recipe import LearnerRecipe

GOOD, WORSE, BAD = Acceptance(600, 1000), Acceptance(520, 1000), Acceptance(100, 1000)


def test_what_counts_as_a_fall():
    assert fell(GOOD, BAD, 0.1) and fell(GOOD, WORSE, 0.1)
    assert not fell(BAD, GOOD, 0.1)
    assert not fell(GOOD, WORSE, 0.2), "13 % is tolerated"
    assert not fell(Acceptance(6, 10), Acceptance(3, 10), 0.1), "half, but ten positions say nothing"
    assert not fell(GOOD, Acceptance(0, 0), 0.1) and not fell(Acceptance(0, 0), BAD, 0.1)


def steps(quadratic, chunk, rounds, **options):
    """Rulings and weights of OGD from 8 under a watchdog; rounds: (centre, acceptance)."""
    objective, learner = quadratic([8.0], algo="ogd", **options)
    dog = Watchdog(LearnerRecipe(**options))
    found = []
    for centre, acceptance in rounds:
        ruling, outcome = dog.learn(learner, objective, chunk([centre]), acceptance)
        found.append((ruling, outcome.status, learner.play().vectors[0].item()))
    return found


def test_an_update_that_did_harm_is_taken_back(quadratic, chunk):
    """η = 5: 8 → −32 on c = 0. Acceptance falls, and 8 has the lower loss: back to 8, then on with η = 1.25."""
    found = steps(quadratic, chunk, [(0.0, GOOD), (0.0, BAD), (0.0, GOOD)], lr=5.0, backoff=0.25)
    assert found == [("keep", "updated", -32.0), ("rollback", "updated", -2.0), ("keep", "updated", 0.5)]


def test_the_good_reference_outlives_a_rollback(quadratic, chunk):
    """Compared with the bad chunk a second bad update would pass: acceptance did not fall any further."""
    found = steps(quadratic, chunk, [(0.0, GOOD), (0.0, BAD), (0.0, BAD), (0.0, BAD)], lr=20.0)
    assert [ruling for ruling, _, _ in found] == ["keep", "rollback", "rollback", "rollback"]


def test_a_stream_that_turns_is_no_fault_of_the_update(quadratic, chunk):
    """From c = 0 to c = −100: acceptance falls, but 4 is nearer to −100 than 8 was."""
    found = steps(quadratic, chunk, [(0.0, GOOD), (-100.0, BAD)])
    assert found == [("keep", "updated", 4.0), ("drift", "updated", -48.0)]


def test_a_turn_is_no_fault_of_an_update_that_went_the_other_way(quadratic, chunk):
    """From c = 0 to c = 100, η = 1/8: 7 is farther from 100 than 8 was, but of a loss that rose from 32 to 4,324 that
    is 92. Taken back, every change of the domain would cost an update and half of the rate."""
    found = steps(quadratic, chunk, [(0.0, GOOD), (100.0, BAD)], lr=0.125)
    assert [ruling for ruling, _, _ in found] == ["keep", "drift"]
    half = steps(quadratic, chunk, [(0.0, GOOD), (0.0, BAD)], lr=3.0)
    assert [ruling for ruling, _, _ in half] == ["keep", "rollback"], "in the same domain it is to blame for all of it"


def test_it_can_be_switched_off(quadratic, chunk):
    assert steps(quadratic, chunk, [(0.0, GOOD), (0.0, BAD)], lr=5.0, rollback=False)[1][0] == "keep"


def test_weights_whose_loss_overflows_are_taken_back(quadratic, chunk):
    """1e25² is beyond fp32: the loss of such weights is infinite."""
    found = steps(quadratic, chunk, [(0.0, GOOD), (0.0, BAD)], lr=1e25)
    assert [ruling for ruling, _, _ in found] == ["keep", "rollback"]


def test_weights_whose_loss_is_no_number_are_taken_back(quadratic, chunk):
    """NaN is not larger than anything: it must not pass as `not worse`."""
    objective, learner = quadratic([8.0], algo="ogd")
    dog = Watchdog(LearnerRecipe())
    dog.learn(learner, objective, chunk([0.0]), GOOD)
    assert dog.judge(BAD, lambda kept: (1.0, float("nan"))) == "rollback"
    assert dog.judge(BAD, lambda kept: (1.0, 1.0)) == "drift"


def test_ruins_are_taken_back_whatever_acceptance_says(quadratic, chunk, played):
    """A drafter that was never right cannot fall, and no rate is low enough for weights whose loss is infinite."""
    objective, learner = quadratic([8.0], algo="ogd", lr=1e25)
    dog = Watchdog(LearnerRecipe(backoff=1e-26))
    assert dog.learn(learner, objective, chunk([0.0]), BAD)[0] == "keep"
    ruling, outcome = dog.learn(learner, objective, chunk([0.0]), BAD)
    assert (ruling, outcome.status, outcome.loss) == ("rollback", "updated", 32.0)
    assert 0 < played(learner).item() < 8 and learner.rates == (pytest.approx(0.1),)
    assert dog.learn(learner, objective, chunk([0.0]), BAD)[0] == "keep"


def test_a_chunk_that_is_no_number_is_not_the_weights_fault(quadratic, chunk, played):
    """What was learnt before stays; the rate shrinks once."""
    objective, learner = quadratic([8.0], algo="ogd", lr=0.5)
    dog = Watchdog(LearnerRecipe())
    dog.learn(learner, objective, chunk([0.0]), GOOD)
    before = played(learner).item()
    for refusal in (1, 2):
        ruling, outcome = dog.learn(learner, objective, chunk([float("nan")]), GOOD)
        assert (ruling, outcome.status, played(learner).item()) == ("keep", "refused", before)
        assert learner.rates == (0.5 * 0.5**refusal,)
    assert dog.learn(learner, objective, chunk([0.0]), GOOD)[1].status == "updated"
    assert played(learner).item() < before


@pytest.mark.parametrize("lr", [5.0, 1e8, 1e30])
def test_a_rate_that_is_far_too_large_recovers(quadratic, chunk, lr):
    """Some updates are refused, some taken back, every time the rate shrinks: in the end something is learnt."""
    objective, learner = quadratic([8.0], algo="ogd", lr=lr, epochs=3)
    dog = Watchdog(LearnerRecipe(backoff=0.1))
    rulings = set()
    for _ in range(40):
        w = learner.play().vectors[0].item()
        ruling, outcome = dog.learn(learner, objective, chunk([0.0]), GOOD if abs(w) <= 8 else BAD)
        rulings |= {ruling, outcome.status}
    assert abs(learner.play().vectors[0].item()) < 1
    assert "rollback" in rulings and ("refused" in rulings or lr < 1e30)


def test_state(quadratic, chunk):
    """A run that is killed between update and ruling still takes the update back."""
    objective, learner = quadratic([8.0], algo="ogd", lr=5.0)
    options = LearnerRecipe()
    dog, other = Watchdog(options), Watchdog(options)
    assert Watchdog(options).state()["before"].numel() == 0
    dog.learn(learner, objective, chunk([0.0]), GOOD)
    other.restore(dog.state())
    assert other.learn(learner, objective, chunk([0.0]), BAD)[0] == "rollback"
    fresh = Watchdog(options)
    fresh.restore(Watchdog(options).state())
    assert fresh.judge(BAD, lambda kept: pytest.fail("nothing to compare with")) == "keep"


def test_ensembles_and_static(quadratic, chunk):
    """An ensemble goes back as a whole, weights of its members included; the static drafter is never ruled on."""
    objective, learner = quadratic([8.0], algo="ensemble", lr=5.0, combine="probs")
    dog = Watchdog(LearnerRecipe(backoff=0.01))
    dog.learn(learner, objective, chunk([0.0]), GOOD)
    before = learner.state()
    ruling, _ = dog.learn(learner, objective, chunk([0.0]), BAD)
    assert ruling == "rollback"
    assert all(abs(member.w.item()) < 8 for member in learner.members)
    assert not torch.equal(before["0.w_hat"], learner.state()["0.w_hat"])
    objective, static = quadratic([8.0], algo="static")
    dog = Watchdog(LearnerRecipe())
    assert [dog.learn(static, objective, chunk([0.0]), a)[0] for a in (GOOD, BAD)] == ["keep", "keep"]
