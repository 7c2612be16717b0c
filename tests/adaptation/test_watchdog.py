"""The watchdog decides which updates are rolled back."""

import numpy as np
import pytest
import torch

from specctl.adaptation.updates.watchdog import Acceptance, Watchdog, fell, normal_equivalent
from specctl.recipe import LearnerRecipe


def alike(accepted, texts=20, verified=50):
    """Return a chunk with the same number of accepted tokens in each text."""
    return Acceptance.of([(accepted, verified)] * texts)


GOOD, WORSE, BAD = alike(30), alike(26), alike(5)
NOTHING = Acceptance.of([(0, 0)])


def test_what_counts_as_a_fall_in_acceptance():
    assert fell(GOOD, BAD, 0.1) and fell(GOOD, WORSE, 0.1)
    assert not fell(BAD, GOOD, 0.1)
    assert not fell(GOOD, WORSE, 0.2), "13 % is tolerated"
    assert not fell(alike(3, 2, 5), alike(1, 2, 5), 0.1), "ten positions say nothing, however alike their texts are"
    assert not fell(alike(50, 1), alike(0, 1), 0.1), "neither does one text"
    assert not fell(GOOD, NOTHING, 0.1) and not fell(NOTHING, BAD, 0.1)


def test_the_variance_of_a_rate_by_hand():
    """Texts with 10 of 10 and 2 of 30: r = 0.3, residuals 7 and −7, so 2 · (49 + 49) / 40²."""
    one = Acceptance.of([(10, 10), (2, 30), (0, 0)])
    assert one.rate == 0.3 and one.variance == pytest.approx(2 * 98 / 1600)
    # P(T > 3.319) with 38 degrees of freedom is P(Z > 3.09) = 0.001, and so is P(T > 7.173) with 4
    assert normal_equivalent(3.319, 38) == pytest.approx(3.09, abs=0.01) and normal_equivalent(
        7.173, 4
    ) == pytest.approx(3.09, abs=0.05)


@pytest.mark.parametrize("texts", [5, 20])
@pytest.mark.parametrize("means", [(0.55, 0.55), (0.35, 0.75)], ids=["one domain", "two domains mixed"])
def test_chance_is_rarely_suspected(means, texts):
    """Chunks of one kind, decoded with the same weights, with 8 to 80 positions and a different rate per text.

    The variance is 3 to 10 times higher than with independent tokens, as in real streams. The watchdog suspects 7 to 20
    of 4,000 updates; at a rate of one in 250, more than 28 has a probability of 0.2 %. A test of two proportions would
    suspect 400.
    """
    random = np.random.default_rng(0)
    verified = random.integers(8, 80, (8000, texts))
    mean = random.choice(means, (8000, texts))
    accepted = random.binomial(verified, random.beta(12 * mean, 12 * (1 - mean)))
    chunks = [Acceptance.of(pairs) for pairs in np.stack((accepted, verified), -1).tolist()]
    suspected = sum(fell(before, after, 0.0) for before, after in zip(chunks[::2], chunks[1::2], strict=True))
    assert 1 <= suspected <= 28


def test_a_fall_is_detected_among_varied_texts():
    """From 0.6 to 0.3, with 20 texts each and rates that scatter by 0.15."""
    random = np.random.default_rng(0)

    def chunk(mean):
        return Acceptance.of([(a, 40) for a in random.binomial(40, random.beta(6 * mean, 6 * (1 - mean), 20))])

    assert sum(fell(chunk(0.6), chunk(0.3), 0.1) for _ in range(100)) > 90


def steps(quadratic, chunk, rounds, **options):
    """Return rulings and weights of OGD from 8 under a watchdog, for rounds of (center, acceptance)."""
    objective, learner = quadratic([8.0], algo="ogd", **options)
    dog = Watchdog(LearnerRecipe(**options))
    found = []
    for centre, acceptance in rounds:
        ruling, outcome = dog.learn(learner, objective, chunk([centre]), acceptance)
        found.append((ruling, outcome.status, learner.play().item()))
    return found


def test_a_harmful_update_is_rolled_back(quadratic, chunk):
    """η = 5 leads from 8 to −32 for c = 0. Acceptance falls and 8 has the lower loss, so it returns to 8 with η =
    1.25."""
    found = steps(quadratic, chunk, [(0.0, GOOD), (0.0, BAD), (0.0, GOOD)], lr=5.0, backoff=0.25)
    assert found == [("keep", "updated", -32.0), ("rollback", "updated", -2.0), ("keep", "updated", 0.5)]


def test_the_reference_acceptance_survives_a_rollback(quadratic, chunk):
    """Compared with the bad chunk, a second bad update would pass."""
    found = steps(quadratic, chunk, [(0.0, GOOD), (0.0, BAD), (0.0, BAD), (0.0, BAD)], lr=20.0)
    assert [ruling for ruling, _, _ in found] == ["keep", "rollback", "rollback", "rollback"]


def test_a_domain_change_is_not_blamed_on_the_update(quadratic, chunk):
    """From c = 0 to c = −100 acceptance falls, but 4 is closer to −100 than 8."""
    found = steps(quadratic, chunk, [(0.0, GOOD), (-100.0, BAD)])
    assert found == [("keep", "updated", 4.0), ("drift", "updated", -48.0)]


def test_a_domain_change_in_the_other_direction_is_not_blamed_on_the_update(quadratic, chunk):
    """From c = 0 to c = 100 at η = 1/8, the update accounts for 92 of a loss that rose from 32 to 4,324.

    A rollback would cost an update and half of the rate at every domain change.
    """
    found = steps(quadratic, chunk, [(0.0, GOOD), (100.0, BAD)], lr=0.125)
    assert [ruling for ruling, _, _ in found] == ["keep", "drift"]
    half = steps(quadratic, chunk, [(0.0, GOOD), (0.0, BAD)], lr=3.0)
    assert [ruling for ruling, _, _ in half] == ["keep", "rollback"], "in the same domain it is to blame for all of it"


def test_rollback_can_be_disabled(quadratic, chunk):
    assert steps(quadratic, chunk, [(0.0, GOOD), (0.0, BAD)], lr=5.0, rollback=False)[1][0] == "keep"


def test_weights_with_an_infinite_loss_are_rolled_back(quadratic, chunk):
    """1e25² overflows fp32."""
    found = steps(quadratic, chunk, [(0.0, GOOD), (0.0, BAD)], lr=1e25)
    assert [ruling for ruling, _, _ in found] == ["keep", "rollback"]


def test_weights_with_a_nan_loss_are_rolled_back(quadratic, chunk):
    """NaN compares as not larger, and must not pass as "not worse"."""
    objective, learner = quadratic([8.0], algo="ogd")
    dog = Watchdog(LearnerRecipe())
    dog.learn(learner, objective, chunk([0.0]), GOOD)
    assert dog.judge(BAD, lambda kept: (1.0, float("nan"))) == "rollback"
    assert dog.judge(BAD, lambda kept: (1.0, 1.0)) == "drift"


def test_ruined_weights_are_rolled_back_at_any_acceptance(quadratic, chunk, played):
    """A drafter that was never right cannot fall any further."""
    objective, learner = quadratic([8.0], algo="ogd", lr=1e25)
    dog = Watchdog(LearnerRecipe(backoff=1e-26))
    assert dog.learn(learner, objective, chunk([0.0]), BAD)[0] == "keep"
    ruling, outcome = dog.learn(learner, objective, chunk([0.0]), BAD)
    assert (ruling, outcome.status, outcome.loss) == ("rollback", "updated", 32.0)
    assert 0 < played(learner).item() < 8 and learner.rates == (pytest.approx(0.1),)
    assert dog.learn(learner, objective, chunk([0.0]), BAD)[0] == "keep"


def test_a_chunk_with_nan_keeps_the_weights(quadratic, chunk, played):
    """The rate shrinks at each such chunk, and learning continues afterwards."""
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
def test_a_rate_that_is_far_too_large_shrinks_until_learning_works(quadratic, chunk, lr):
    objective, learner = quadratic([8.0], algo="ogd", lr=lr, epochs=3)
    dog = Watchdog(LearnerRecipe(backoff=0.1))
    rulings = set()
    for _ in range(40):
        w = learner.play().item()
        ruling, outcome = dog.learn(learner, objective, chunk([0.0]), GOOD if abs(w) <= 8 else BAD)
        rulings |= {ruling, outcome.status}
    assert abs(learner.play().item()) < 1
    assert "rollback" in rulings and ("refused" in rulings or lr < 1e30)


def test_a_restored_watchdog_can_still_roll_back(quadratic, chunk):
    """For a run killed between an update and its ruling."""
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


def test_ensembles_are_rolled_back_as_a_whole_and_static_drafters_never(quadratic, chunk):
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
