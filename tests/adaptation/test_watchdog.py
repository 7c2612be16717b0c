"""Which updates are taken back."""

import numpy as np
import pytest
import torch

from specctl.adaptation.updates.watchdog import Acceptance, Watchdog, fell, normal_equivalent
from specctl.recipe import LearnerRecipe


def alike(accepted, texts=20, verified=50):
    """A chunk of texts with as many accepted in each."""
    return Acceptance.of([(accepted, verified)] * texts)


GOOD, WORSE, BAD = alike(30), alike(26), alike(5)
NOTHING = Acceptance.of([(0, 0)])


def test_what_counts_as_a_fall():
    assert fell(GOOD, BAD, 0.1) and fell(GOOD, WORSE, 0.1)
    assert not fell(BAD, GOOD, 0.1)
    assert not fell(GOOD, WORSE, 0.2), "13 % is tolerated"
    assert not fell(alike(3, 2, 5), alike(1, 2, 5), 0.1), "ten positions say nothing, however alike their texts are"
    assert not fell(alike(50, 1), alike(0, 1), 0.1), "neither does one text"
    assert not fell(GOOD, NOTHING, 0.1) and not fell(NOTHING, BAD, 0.1)


def test_the_error_of_a_rate_by_hand():
    """Texts of 10 of 10 and 2 of 30: r = 0.3, residuals 7 and −7, so 2 · (49 + 49) / 40²."""
    one = Acceptance.of([(10, 10), (2, 30), (0, 0)])
    assert one.rate == 0.3 and one.variance == pytest.approx(2 * 98 / 1600)
    # P(T > 3.319) of 38 degrees of freedom is P(Z > 3.09) = 0.001, and so is P(T > 7.173) of 4.
    assert normal_equivalent(3.319, 38) == pytest.approx(3.09, abs=0.01) and normal_equivalent(
        7.173, 4
    ) == pytest.approx(3.09, abs=0.05)


@pytest.mark.parametrize("texts", [5, 20])
@pytest.mark.parametrize("means", [(0.55, 0.55), (0.35, 0.75)], ids=["one domain", "two domains mixed"])
def test_chance_is_hardly_ever_suspected(means, texts):
    """Chunks of one kind, decoded with the same weights: 8 to 80 positions a text, each text with a rate of its own,
    which makes the variance 3 to 10 times that of independent tokens, as in real streams. Of 4,000 updates 7 to 20 are
    suspected; a rate of one in 250 would give more than 28 with a probability of 0.2 %. (Two proportions: some 400.)
    """
    random = np.random.default_rng(0)
    verified = random.integers(8, 80, (8000, texts))
    mean = random.choice(means, (8000, texts))
    accepted = random.binomial(verified, random.beta(12 * mean, 12 * (1 - mean)))
    chunks = [Acceptance.of(pairs) for pairs in np.stack((accepted, verified), -1).tolist()]
    suspected = sum(fell(before, after, 0.0) for before, after in zip(chunks[::2], chunks[1::2], strict=True))
    assert 1 <= suspected <= 28


def test_a_fall_is_seen_among_texts_that_differ():
    """From 0.6 to 0.3 in 20 texts each, whose rates scatter by 0.15."""
    random = np.random.default_rng(0)

    def chunk(mean):
        return Acceptance.of([(a, 40) for a in random.binomial(40, random.beta(6 * mean, 6 * (1 - mean), 20))])

    assert sum(fell(chunk(0.6), chunk(0.3), 0.1) for _ in range(100)) > 90


def steps(quadratic, chunk, rounds, **options):
    """Rulings and weights of OGD from 8 under a watchdog; rounds: (centre, acceptance)."""
    objective, learner = quadratic([8.0], algo="ogd", **options)
    dog = Watchdog(LearnerRecipe(**options))
    found = []
    for centre, acceptance in rounds:
        ruling, outcome = dog.learn(learner, objective, chunk([centre]), acceptance)
        found.append((ruling, outcome.status, learner.play().item()))
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
        w = learner.play().item()
        ruling, outcome = dog.learn(learner, objective, chunk([0.0]), GOOD if abs(w) <= 8 else BAD)
        rulings |= {ruling, outcome.status}
    assert abs(learner.play().item()) < 1
    assert "rollback" in rulings and ("refused" in rulings or lr < 1e30)


def test_state(quadratic, chunk):
    """A run that is killed between update and ruling still takes the update back."""
    objective, learner = quadratic([8.0], algo="ogd", lr=5.0)
    options = LearnerRecipe()
    dog, other = Watchdog(options), Watchdog(options)
    assert Watchdog(options).state()["texts"].numel() == 0
    dog.learn(learner, objective, chunk([0.0]), GOOD)
    other.restore(dog.state())
    assert other.learn(learner, objective, chunk([0.0]), BAD)[0] == "rollback"
    fresh = Watchdog(options)
    fresh.restore(Watchdog(options).state())
    assert fresh.judge(BAD, lambda kept: pytest.fail("nothing to compare with")) == "keep"


def test_ensembles_and_static(quadratic, chunk):
    """An ensemble goes back as a whole, weights of its members included; the static drafter is never ruled on."""
    objective, learner = quadratic([8.0], algo="ensemble", lr=5.0)
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
