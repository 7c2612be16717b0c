"""Lengths of whole drafts estimated from scores at depth 1: which arm full information ends up with by default."""

from dataclasses import replace as changed

import numpy as np
import pytest

from specctl.lab.recorded.hindsight import Hindsight, token_losses
from specctl.lab.recorded.replay import replay, rules_on
from specctl.recipe.select import GameRecipe, PolicyRecipe
from specctl.selection.game.delay import Delay
from specctl.selection.game.length_correction import LengthCorrection
from specctl.selection.game.losses import INNER, extrapolated_depths, geometric_length, length_loss
from specctl.selection.game.rules import rules_for
from tests.selection.tables import table_of, trace_of

K, T = 8, 3000
FALLS = [0.8, 0.4, 0.2, *[0.1] * 5]  # depth 1 predicts 4.3 tokens per round, but it commits 2.2


def shares(arms, seed, name="hedgespec", greedy=False, **options):
    """Each arm's share of the rounds in one game with the default rules; `arms` are (γ of all depths or per depth,
    cost)."""
    gamma = np.array([np.broadcast_to(accepts, (T, K)) for accepts, _ in arms])
    trace = trace_of(gamma, seed)
    if greedy:  # γ comes from a softmax at temperature 1, which is unsure even where greedy decoding hits
        trace = changed(trace, gamma=np.where(trace.hit > 0, 0.7, 0.1))
    table = changed(
        table_of([trace]),
        draft_s=np.array([cost - 1 for _, cost in arms]),
        step_s=np.ones(len(arms) + 1),
        greedy=greedy,
    )
    (game,) = replay(name, Hindsight(table), PolicyRecipe(), GameRecipe(**options), seed=seed).played
    return np.bincount(game.arms, minlength=len(arms)) / len(game.arms)


HEADS = {
    "head .8": [(0.8, 2.0), (0.4, 1.05)],
    "head .75": [(0.75, 1.9), (0.5, 1.1)],
    "head .85": [(0.85, 2.0), (0.6, 1.15)],
    "head of 4.8 tokens": [(0.83, 2.0), (0.4, 1.05)],
    "cheap arm": [(0.4, 1.05), (0.5, 2.0)],
    "cheap arm that is as good": [(0.6, 1.1), (0.6, 1.9)],
    "plain decoding": [(0.0, 1.0), (0.4, 2.0)],
}
"""Pairs of arms (γ, cost); the first one has more tokens per second."""


CASES = [(kind, seed) for kind in HEADS for seed in range(3 if kind in list(HEADS)[:3] else 1)]


@pytest.mark.parametrize(("kind", "seed"), CASES)
def test_the_default_loss_plays_the_faster_arm(kind, seed):
    """With (1 + γ)/2 tokens for the seconds of a whole round the gain was at most 2/c, so the cheap arm got 99 % of the
    rounds beside every head. Also, an unplayed arm was assumed to cost as much as the first one, so that a cheap arm
    was never tried."""
    assert shares(HEADS[kind], seed)[0] >= 0.9


@pytest.mark.parametrize(("name", "least"), [("ftl", 0.9), ("adanormalhedge", 0.9), ("hedge", 0.6)])
def test_the_other_learners_get_the_same_losses(name, least):
    assert shares(HEADS["head .8"], 0, name)[0] >= least
    assert shares(HEADS["cheap arm"], 0, name)[0] >= least
    assert rules_for(name, GameRecipe(), K) == rules_for("hedgespec", GameRecipe(), K)


@pytest.mark.parametrize("unit", ["token", "chunk"])
def test_a_head_that_gets_worse_with_depth_loses(unit):
    """Its acceptance at depth 1 predicts 2.2 times plain decoding's speed; the rounds it plays show 1.1."""
    assert shares([(0.5, 1.05), (FALLS, 2.0)], 0, unit=unit)[0] > 0.8


def test_chunk_losses_use_whole_drafts():
    assert shares(HEADS["head .8"], 1, unit="chunk")[0] >= 0.9


def test_greedy_decoding_uses_hits_instead_of_gamma():
    """Products of γ, here at most 0.7, would estimate 2.2 tokens per round; the head commits 4.8."""
    head = [(0.83, 2.0), (0.5, 1.165)]
    assert shares(head, 3, greedy=True)[0] > 0.7
    assert shares(head, 3, greedy=True, estimator="product")[0] < 0.1, "it is played too rarely to be corrected"
    rules = [rules_for("hedgespec", GameRecipe(**options), K, greedy=True) for options in ({}, {"depth": None})]
    assert [one.estimator for one in rules] == ["realised", "product"], (
        "HedgeSpec's own estimator if all depths are scored"
    )
    assert rules_for("hedgespec", GameRecipe(estimator="product"), K, greedy=True).estimator == "product"


def test_lengths_are_extrapolated_from_hits_of_depth_one():
    """A run of hits counts as a run of accepted tokens, up to the arm's own depth."""
    hit = np.array([[1, 1, 0, 1], [1, 1, 0, 1]])[..., None] * INNER
    whole = extrapolated_depths(hit, np.array([3, 1]), 3)
    assert (1 - length_loss(np.pad(whole, ((0, 0), (0, 2), (0, 0))), "realised")) * 4 - 1 == pytest.approx(
        np.array([[2, 1], [1, 1], [0, 0], [1, 1]])
    )
    assert geometric_length(np.array([0.5, 0.5, 1.0]), np.array([3, 0, 2])) == pytest.approx([1.875, 1, 3])


def test_hybrid_losses_estimate_whole_drafts():
    """The first losses of a text have no delay. If they were 1 − γ, set against the seconds of a whole round, a cheap
    arm would start with an advantage."""
    rules = rules_for("hedgespec", GameRecipe(hybrid_rounds=2), K)
    gamma = np.array([[0.9, 0.7], [0.4, 0.4]])[..., None]
    told = Delay(2, rules).scored(gamma, np.zeros_like(gamma))
    lengths = [1 + sum(rate**k for k in range(1, K + 1)) for rate in (0.8, 0.4)]
    assert told == pytest.approx(np.array([[1 - length / (K + 1) for length in lengths]] * 2))


def test_regret_uses_all_depths_even_if_one_is_scored():
    """A table holds all depths. By depth 1 alone another arm could be the best in hindsight."""
    gamma = np.array([np.full((60, K), 0.8), np.full((60, K), 0.4)])
    trace = trace_of(gamma, 1)
    table = changed(table_of([trace]), draft_s=np.array([1.0, 0.05]), step_s=np.ones(3))
    one, all_depths = (
        token_losses(trace, rules_on(table, "hedgespec", GameRecipe(depth=depth))) for depth in (1, None)
    )
    assert one == pytest.approx(all_depths) and one.sum(axis=0).argmin() == 0


def test_a_correction_needs_evidence():
    """One unlucky round, or three, change nothing; fifty do. An unplayed arm gets the correction of the others."""
    realised = LengthCorrection(3)
    for accepted in (0, 1, 2):
        realised.record(0, accepted, 2.0)
    assert realised.ratios().tolist() == [1, 1, 1]
    for _ in range(50):
        realised.record(0, 1, 2.0)
    ratios = realised.ratios()
    assert ratios[0] == pytest.approx(0.5, abs=0.05) and ratios[2] == pytest.approx(0.5, abs=0.05)
    for _ in range(50):
        realised.record(1, 3, 2.0)
    assert realised.ratios()[1] > 1.3 and realised.ratios()[0] < 0.6 < realised.ratios()[2]
    losses = np.array([[1 - 3 / 9] * 3])  # two draft tokens and the bonus token, of at most eight and one
    told = realised.corrected(losses, np.array([8, 2, 0]), 8)
    assert (1 - told) * 9 == pytest.approx(1 + np.array([[2 * realised.ratios()[0], 2, 0]])), "at most its draft"
