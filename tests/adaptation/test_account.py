"""Learning takes its share of the time of decoding, and no more."""

import pytest
import torch

from specctl.adaptation.account import Account
from specctl.adaptation.updates.watchdog import Acceptance, Watchdog
from specctl.recipe import LearnerRecipe


def test_the_share_by_hand():
    """A lesson of 4 s is paid for by 80 s of decoding at 5 %."""
    account = Account(0.05)
    account.earn(10.0)
    assert not account.short  # what a lesson takes is not known yet
    account.spend(4.0)
    shorts = []
    for _ in range(16):
        account.earn(10.0)
        shorts.append(account.short)
    assert account.balance == pytest.approx(4.5) and shorts == [True] * 14 + [False] * 2


@pytest.mark.parametrize("share", [0.02, 0.3])
def test_it_holds_in_the_long_run(share):
    """Whatever lessons and chunks take, learning takes the share of decoding, give or take a lesson."""
    random = torch.Generator().manual_seed(1)
    account, decoded, learnt = Account(share), 0.0, 0.0
    for _ in range(2000):
        chunk, lesson = (torch.rand(2, generator=random) * 10).tolist()
        decoded += chunk
        account.earn(chunk)
        if not account.short:
            learnt += lesson
            account.spend(lesson)
    assert share * decoded - 20 < learnt <= share * decoded + 10


def test_without_a_share_there_is_no_limit():
    account = Account(None)
    account.spend(1e9)
    account.earn(1.0)
    assert not account.short


def test_short_of_time_only_a_fall_is_learnt_from(quadratic, chunk):
    """While acceptance holds nothing is learnt, not even judged; where it falls, at once."""
    objective, learner = quadratic([8.0], algo="ogd")
    dog = Watchdog(LearnerRecipe(algo="ogd", rest=0))

    def status(accepted, short):
        acceptance = Acceptance.of([(accepted, 100)] * 3)
        return dog.learn(learner, objective, chunk([0.0]), acceptance, short=short)[1].status

    assert [status(80, False), status(80, True), status(79, True)] == ["updated", "rested", "rested"]
    assert status(20, True) == "updated"
    assert status(20, True) == "rested"
