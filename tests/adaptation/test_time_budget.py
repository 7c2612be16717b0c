"""Learning takes its share of the decoding time, and no more."""

import pytest
import torch

from specctl.adaptation.time_budget import MAX_DOUBLINGS, TimeBudget
from specctl.adaptation.updates.watchdog import Acceptance, Watchdog
from specctl.recipe import LearnerRecipe


def test_the_budget_by_hand():
    """At 5 %, a lesson of 4 s needs 80 s of decoding; the first lesson needs twice as much."""
    account = TimeBudget(0.05)
    account.earn(1000.0)
    assert not account.can_pay  # the price of a lesson is not known yet
    account = TimeBudget(0.05)
    account.price = 4.0
    afforded = []
    for _ in range(16):
        account.earn(10.0)
        afforded.append(account.can_pay)
    assert account.balance == pytest.approx(8.0) and afforded == [False] * 15 + [True]
    account.spend(5.0)
    account.record_update(5.0, vain=False, helped=False)
    account.earn(40.0)
    assert account.balance == pytest.approx(5.0) and account.can_pay and account.may_borrow
    account.spend(5.1)
    assert not account.can_pay and not account.may_borrow


@pytest.mark.parametrize("share", [0.02, 0.3])
@pytest.mark.parametrize("vain", [False, True], ids=["useful", "in vain"])
def test_learning_never_exceeds_its_share(share, vain):
    """For any chunk times, and lessons that cost no more than expected. Lessons in vain use a small part of the
    share."""
    random = torch.Generator().manual_seed(1)
    account, decoded, learnt = TimeBudget(share), 0.0, 0.0
    account.price = 10.0
    for _ in range(3000):
        chunk, lesson = (torch.rand(2, generator=random) * 10).tolist()
        decoded += chunk
        account.earn(chunk)
        if account.can_pay:
            learnt += lesson
            account.spend(lesson)
            account.record_update(10.0, vain=vain, helped=False)
        assert learnt <= share * decoded
    assert learnt < share * decoded / 10 if vain else learnt > share * decoded - 40


def test_savings_required_after_lessons_in_vain_double_up_to_a_limit():
    account = TimeBudget(0.5)
    needed = []
    for _ in range(8):
        account.record_update(1.0, vain=True, helped=False)
        needed.append(2**account.doublings)
    assert needed[:3] == [4, 8, 16] and needed[-1] == 2**MAX_DOUBLINGS
    account.record_update(1.0, vain=False, helped=False)
    assert account.doublings == 0


def test_without_a_share_learning_is_unlimited():
    account = TimeBudget(None)
    account.spend(1e9)
    assert account.can_pay and account.may_borrow


def test_nothing_is_learned_without_time(quadratic, chunk):
    """Not even if acceptance falls, because without a previous update no update can be the cause."""
    objective, learner = quadratic([8.0], algo="ogd")
    dog = Watchdog(LearnerRecipe(algo="ogd", rest=0))
    played = learner.play()

    def status(accepted, short):
        acceptance = Acceptance.of([(accepted, 100)] * 3)
        return dog.learn(learner, objective, chunk([0.0]), acceptance, no_time=short)[1].status

    assert [status(80, True), status(20, True)] == ["rested", "rested"]
    assert torch.equal(learner.play(), played)
    assert status(20, False) == "updated"


def test_a_harmful_update_is_rolled_back_without_time_to_learn(quadratic, chunk):
    """The weights of before the update return, and nothing is learned. The bad chunk is no standard for the next
    update: compared with it, no acceptance would be a fall."""
    objective, learner = quadratic([0.0], algo="ogd", lr=0.4)
    dog = Watchdog(LearnerRecipe(algo="ogd", rest=0))
    good, bad = (Acceptance.of([(accepted, 100)] * 3) for accepted in (80, 20))
    before = learner.play()
    assert dog.learn(learner, objective, chunk([9.0]), good)[1].status == "updated"
    assert not torch.equal(learner.play(), before)
    ruling, outcome = dog.learn(learner, objective, chunk([-9.0]), bad, no_time=True)
    assert (ruling, outcome.status) == ("rollback", "rested") and torch.equal(learner.play(), before)
    assert dog.acceptance_fell(bad) and not dog.acceptance_fell(good)


def test_updates_that_help_double_the_share_and_one_in_vain_resets_it():
    account = TimeBudget(0.05)
    shares = []
    for helped in (True, True, True, False, True):
        account.record_update(1.0, vain=not helped, helped=helped)
        before = account.balance
        account.earn(100.0)
        shares.append((account.balance - before) / 100.0)
    assert shares == pytest.approx([0.1, 0.1, 0.1, 0.05, 0.1])


def test_the_lesson_after_a_helpful_update_may_be_paid_later():
    """Saving first made a head lag by four chunks after each lesson, although the lessons gained 5 %."""
    account = TimeBudget(0.05)
    account.price = 4.0
    assert not account.can_pay
    account.spend(4.0)
    account.record_update(4.0, vain=False, helped=True)
    assert not account.can_pay, "a debt is paid first"
    account.earn(40.0)
    assert account.can_pay
    account.record_update(4.0, vain=True, helped=False)
    assert not account.can_pay


@pytest.mark.parametrize("helped", [True, False])
def test_learners_in_a_group_spend_no_more_than_one(helped):
    """Otherwise each drafter of a pool would borrow a lesson, or one that helps would use all the time."""
    accounts, prices, shares = [TimeBudget(0.05) for _ in range(3)], (4.0, 1.0, 2.0), (0.6, 0.3, 0.1)
    spent, decoded = [0.0] * 3, 0.0
    for account, price in zip(accounts, prices, strict=True):
        account.group, account.price = accounts, price
    for _ in range(4000):
        decoded += 1.0
        for number, (account, price, share) in enumerate(zip(accounts, prices, shares, strict=True)):
            account.earn(share)
            if account.can_pay or (account.may_borrow and helped):
                account.spend(price)
                account.record_update(price, vain=not helped, helped=helped)
                spent[number] += price
        assert sum(spent) <= (0.1 if helped else 0.05) * decoded + max(prices)
    assert min(spent) > 0 and (not helped or sum(spent) > 0.09 * decoded)
    assert not helped or spent[0] > spent[1] > spent[2], "the drafter that plays most has most time"
