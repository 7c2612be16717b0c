"""Automatic depth: the number of steps that are drafted ahead."""

import pytest

from specctl.adaptation.draft_length import TRIAL_EVERY
from specctl.lab.reasoning.lookahead import TRIED, AutoDepth
from specctl.lab.reasoning.options import LookaheadRecipe


def play(depth, rounds, kept, step_s):
    """Depths of `rounds` rounds. The target's step takes a second, each drafted step adds `step_s`, and up to `kept`
    drafted steps are accepted."""
    found = []
    for _ in range(rounds):
        k = depth.next()
        accepted = min(k, kept)
        depth.observe(k, accepted, accepted + (accepted < k), 1.0 + k * step_s)
        found.append(k)
    return found


@pytest.mark.parametrize(
    ("kept", "step_s", "usual", "tried"), [(4, 0.1, 4, 0), (0, 0.1, 0, 1), (4, 3.0, 0, 1), (4, 0.0, 4, 0)]
)
def test_it_drafts_at_full_depth_or_not_at_all(kept, step_s, usual, tried):
    """Full depth if drafted steps are right and cheap, none if they are wrong or expensive. The alternative is tried
    now and then."""
    depth = AutoDepth(4)
    depths = play(depth, 160, kept, step_s)
    assert depths[:TRIED] == [1, 0] * (TRIED // 2)
    assert depth.alpha == pytest.approx(step_s, abs=1e-9)
    assert set(depths[TRIAL_EVERY:]) == {usual, tried} and depths[TRIAL_EVERY:].count(tried) == 160 // TRIAL_EVERY - 1


def test_it_drafts_again_when_the_draft_lm_improves():
    depth = AutoDepth(4)
    assert play(depth, 50, 0, 0.3)[-2:] == [0, 0]
    assert 4 in play(depth, 1000, 4, 0.3)
    depth.forget()
    assert play(depth, 2, 0, 0.3) == [1, 0] and depth.rounds == 2


def test_sequential_verification_needs_a_fixed_depth():
    assert LookaheadRecipe(depth="auto").longest == 4 and LookaheadRecipe(depth=2).longest == 2
    with pytest.raises(ValueError, match="needs a fixed depth"):
        LookaheadRecipe(depth="auto", parallel=False)
