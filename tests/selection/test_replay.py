"""Replays compared with examples by hand, and with upper bounds that no policy may exceed."""

import signal
from dataclasses import replace as changed

import numpy as np
import pytest

from specctl.errors import DataError, Interrupted
from specctl.lab.recorded.hindsight import Hindsight, arm_rewards, games, round_starts, token_losses
from specctl.lab.recorded.regret import (
    bootstrap_ratio,
    by_domain,
    late_share,
    loss_regret,
    mean_curve,
    row,
    stopping_regret,
)
from specctl.lab.recorded.replay import draft_all, oracle, replay
from specctl.lab.recorded.trace import Trace, with_plain
from specctl.progress import interrupts
from specctl.recipe.select import GameRecipe, PolicyRecipe
from specctl.selection.game.rules import rules_for
from specctl.selection.policies.registry import NAMES
from tests.selection.tables import specialists, table_of, trace_of

GAME = GameRecipe(loss="length", depth=2, warmup_rounds=2)


def played(name, hindsight, seed=0, **options):
    return replay(name, hindsight, PolicyRecipe(**options), GAME, seed)


def with_reset(hindsight, reset, session=1):
    return Hindsight(hindsight.table, reset=reset, session=session)


def summarize(run, hindsight, kind="policy"):
    return row(run.name, kind, [run], hindsight)


def scripted(accepted, domain="d", K=3):
    """A trace in which only the accepted lengths matter."""
    accepted = np.array(accepted, np.int16)
    shape = (*accepted.shape, K)
    zeros = np.zeros(shape, np.float32)
    return Trace("q", domain, accepted, np.full(accepted.shape, K, np.int16), zeros, zeros, zeros > 0, True)


BY_HAND = [[2, 0, 0, 0, 1, 0, 0], [0, 3, 0, 0, 0, 2, 0]]
"""Accepted lengths. Arm 0 has rounds at 0, 3, 4, 6. Arm 1 has rounds at 0, 1, 5, and the end cuts its last one.
Draft-all has rounds at 0 (arm 0), 3, 4 (arm 0), 6."""


@pytest.fixture(scope="module")
def hindsight():
    return Hindsight(specialists(60, 45, seed=3, run=4))


def test_a_signal_ends_a_replay(hindsight):
    """SIGTERM was only remembered, and `specctl replay` ended with exit code 0."""
    interrupts.handle(signal.SIGTERM)
    try:
        with pytest.raises(Interrupted):
            played("fixed", hindsight)
    finally:
        interrupts.reset()


def test_rounds_of_an_arm_alone_by_hand():
    assert round_starts(np.array(BY_HAND, np.int16)).astype(int).tolist() == [
        [1, 0, 0, 1, 1, 0, 1],
        [1, 1, 0, 0, 0, 1, 0],
    ]
    table = table_of([scripted(BY_HAND)])
    hand = Hindsight(table)
    assert hand.rounds.tolist() == [[4, 3]] and hand.draft_all_rounds.tolist() == [4]
    alone = [played("fixed", hand, arm=arm) for arm in range(2)]
    assert [replay.rounds.tolist() for replay in alone] == [[4], [3]]
    assert [replay.played[0].committed.tolist() for replay in alone] == [[3, 1, 2, 1], [1, 4, 2]]
    assert alone[1].seconds == pytest.approx(3 * 0.012)


@pytest.mark.parametrize("name", ["hedgespec", "metasd-ucb", "fixed"])
def test_an_answer_without_decoded_tokens_has_no_rounds(name):
    """The first token of the target ended the answer. It may be a game of its own or a part of a session."""
    empty = scripted(np.zeros((2, 0)))
    hand = Hindsight(table_of([empty, scripted(BY_HAND), empty]))
    for reset in ("query", "session"):
        hand = with_reset(hand, reset, 3)
        run = played(name, hand)
        assert run.rounds[[0, 2]].tolist() == [0, 0]
        summary = summarize(run, hand)
        assert summary.mat == pytest.approx(7 / run.rounds[1])
        assert late_share([run], hand, 2) is not None and len(stopping_regret(run.played[0], hand)) in (0, 7)
    with pytest.raises(DataError, match="no decoded tokens"):
        Hindsight(table_of([empty]))


@pytest.mark.parametrize("name", NAMES)
def test_every_policy_replays_a_pool_of_one_arm_with_drafts_of_one_token(name):
    table = Hindsight(specialists(3, 9, seed=0, N=1, K=1), reset="stream")
    assert (played(name, table).rounds == table.rounds[:, 0]).all()


def test_tokens_per_round_and_speed_are_given_by_domain():
    hand = Hindsight(table_of([scripted(BY_HAND, "b"), scripted(BY_HAND, "a"), scripted([[0] * 7] * 2, "b")]))
    alone = played("fixed", hand)
    (b, a), plain_s = by_domain("first", [alone], hand), float(hand.table.step_s[0])
    assert (b.drafter, b.domain, b.mat) == ("first", "b", pytest.approx(14 / 11))
    assert (a.domain, a.mat) == ("a", pytest.approx(7 / 4))
    assert b.speedup == pytest.approx(14 * plain_s / alone.seconds[[0, 2]].sum())
    assert a.speedup == pytest.approx(7 * plain_s / alone.seconds[1])


def test_draft_all_pays_for_all_drafts_and_rows():
    table = table_of([scripted(BY_HAND)])
    table.step_s[:] = [0.010, 0.013, 0.015]
    assert draft_all(Hindsight(table)).seconds == pytest.approx(4 * (0.004 + 0.010 + 0.003 + 0.005))


@pytest.mark.parametrize("arm", [0, 6])
def test_fixed_has_as_many_rounds_as_its_arm_in_hindsight(hindsight, arm):
    """Two computations of one number: the game round by round, and the vectorized count for all arms."""
    assert (played("fixed", hindsight, arm=arm).rounds == hindsight.rounds[:, arm]).all()


@pytest.mark.parametrize("name", NAMES)
def test_every_policy_decodes_all_tokens_and_does_not_beat_the_oracle(hindsight, name):
    run = played(name, hindsight)
    committed = np.concatenate([part.committed for part in run.played])
    query = np.concatenate([part.query for part in run.played])
    assert (np.bincount(query, committed) == hindsight.tokens).all()
    summary = summarize(run, hindsight)
    assert summary.share_of_best <= 1 and summary.regret >= 0
    assert sum(summary.pulls.values()) == summary.rounds == run.rounds.sum()
    assert summary.mat == pytest.approx(hindsight.tokens.sum() / run.rounds.sum())


@pytest.mark.parametrize("name", ["hedgespec", "metasd-ucb", "exp3spec"])
def test_a_replay_depends_on_its_seed_alone(hindsight, name):
    one, same, other = (played(name, hindsight, seed=seed) for seed in (1, 1, 2))
    assert (one.rounds == same.rounds).all()
    if name != "metasd-ucb":
        assert (one.rounds != other.rounds).any()


def test_the_oracle_plays_the_best_arm_of_each_game(hindsight):
    best = oracle(hindsight)
    assert (best.rounds == hindsight.rounds.min(axis=1)).all()
    stream = with_reset(hindsight, "stream")
    assert oracle(stream).rounds.sum() == hindsight.rounds.sum(axis=0).min()
    summary = summarize(oracle(stream), stream)
    assert (summary.share_of_best, summary.best_arm_ratio, summary.regret) == (1, 1, 0)


def test_games_end_with_a_recorded_session_or_when_it_is_long():
    """With order=shift a session can have two domains, and two consecutive sessions can have the same domain."""
    sessions = zip("abbbcc", [0, 0, 0, 1, 1, 2], strict=True)
    traces = [changed(scripted(BY_HAND, domain), session=number) for domain, number in sessions]
    assert games(traces, "session", 2) == [[0, 1], [2], [3, 4], [5]]
    assert games(traces, "session", 9) == [[0, 1, 2], [3, 4], [5]]
    assert games(traces, "query", 9) == games(traces, "session", 1) == [[0], [1], [2], [3], [4], [5]]
    assert games(traces, "stream", 1) == [[0, 1, 2, 3, 4, 5]]


class Spy:
    """Plays arm 1 and records rewards and losses."""

    scale = "unit"

    def __init__(self, learns):
        self.learns = learns
        self.told = []

    def weights(self):
        return [0.0, 1.0]

    def choose(self):
        return 1

    def reward(self, arm, reward):
        self.told.append(reward)

    def losses(self, losses):
        self.told.append(losses)


def test_a_replayed_bandit_gets_the_block_divergence_of_complete_rounds(monkeypatch):
    spy = Spy("reward")
    monkeypatch.setattr("specctl.lab.recorded.replay.build", lambda *_: spy)
    trace = scripted(BY_HAND)
    trace.overlap[:] = np.random.default_rng(0).random(trace.overlap.shape)
    played("metasd-ucb", Hindsight(table_of([trace])))
    assert spy.told == pytest.approx([trace.overlap[1, start].sum() / 3 for start in (0, 1)]), (
        "the end cuts the round at 5"
    )


def test_a_replay_scores_the_last_tokens_of_a_text_before_the_next(monkeypatch):
    """When a text ends, some tokens have no scores yet. Live decoding scores them, because any text may be the last."""
    spy = Spy("losses")
    monkeypatch.setattr("specctl.lab.recorded.replay.build", lambda *_: spy)
    table = specialists(3, 40, seed=0, N=2, K=3, bad=0.3)
    recipe = GameRecipe(
        loss="length", hybrid_rounds=0, warmup_rounds=0, batch_rounds=100, tokens_per_update=1, score_ends=True
    )
    recipe = recipe.model_copy(update={"drift": None})
    replay("hedgespec", Hindsight(table, reset="stream"), PolicyRecipe(), recipe)
    rules = rules_for("hedgespec", recipe, 3)
    wanted = np.concatenate([token_losses(trace, rules) for trace in table.traces])
    assert np.array(spy.told) == pytest.approx(wanted)


@pytest.mark.parametrize("name", ["hedgespec", "metasd-ucb"])
def test_policies_learn_within_sessions_of_one_domain(hindsight, name):
    """With sessions of four queries of one domain later queries profit. Never resetting does not help, because domains
    change."""
    hands = {reset: with_reset(hindsight, reset, 4) for reset in ("query", "session", "stream")}
    share = {reset: summarize(played(name, hand), hand).mat for reset, hand in hands.items()}
    assert share["session"] > share["query"]
    assert share["session"] > share["stream"]


def test_the_drift_test_helps_when_the_domain_changes():
    """The stream is never reset and changes its domain every 180 tokens. Without the drift test the scoring intervals
    only grow."""
    stream = Hindsight(specialists(40, 45, seed=3, run=4, bad=0.3), reset="stream")
    mat = {
        drift: summarize(replay("hedgespec", stream, PolicyRecipe(), GameRecipe(drift=drift)), stream).mat
        for drift in (None, GAME.drift)
    }
    assert mat[GAME.drift] > mat[None] + 1


def test_hedgespec_beats_the_bandits_with_literal_constants(hindsight):
    """Seven specialists, a reset at every query of 45 tokens; rounds are compared query by query."""
    hedge = played("hedgespec", hindsight).rounds[None].astype(float)
    for name in ("ucbspec", "exp3spec"):
        low, _ = bootstrap_ratio(played(name, hindsight).rounds[None].astype(float), hedge)
        assert low > 1.15, name


def test_regret_curves_by_definition(hindsight):
    """Computed token by token, with loops."""
    rules = rules_for("hedgespec", GAME, 8)
    run = played("random", with_reset(hindsight, "session", 4))
    part = run.played[1]
    owners = [arm for arm, count in zip(part.arms, part.committed, strict=True) for _ in range(count)]
    losses = np.concatenate([hindsight.losses(index, rules) for index in part.queries])
    own = 0.0
    regret = []
    for t, arm in enumerate(owners):
        own += losses[t, arm]
        regret.append(own - losses[: t + 1].sum(axis=0).min())
    assert loss_regret(part, hindsight, rules) == pytest.approx(regret)

    rounds, best_rounds, stopping = 0, 0, []
    begins = np.concatenate([hindsight.begins[index][part.best] for index in part.queries])
    starts = set(np.cumsum([0, *part.committed])[:-1].tolist())
    for t in range(len(owners)):
        rounds += t in starts
        best_rounds += bool(begins[t])
        stopping.append(rounds - best_rounds)
    assert stopping_regret(part, hindsight).tolist() == stopping
    assert stopping[-1] == run.rounds[part.queries].sum() - hindsight.rounds[part.queries, part.best].sum()


def test_the_late_share_counts_rounds_after_the_given_token(hindsight):
    assert late_share([oracle(hindsight)], hindsight, 20) == 1
    assert late_share([oracle(hindsight)], hindsight, 45) is None, "no game has more tokens"
    hedge = played("hedgespec", hindsight)
    assert late_share([hedge], hindsight, 20) > summarize(hedge, hindsight).share_of_best
    hand = Hindsight(table_of([scripted(BY_HAND)]))
    assert late_share([played("fixed", hand, arm=0)], hand, 2) == pytest.approx(1 / 3), "1 round of arm 1, 3 of arm 0"


def test_bootstrap_intervals_are_paired_by_game():
    generator = np.random.default_rng(0)
    tokens, rounds = np.full((1, 200), 50.0), generator.integers(10, 30, (1, 200)).astype(float)
    low, high = bootstrap_ratio(tokens, rounds)
    assert low < tokens.sum() / rounds.sum() < high < low * 1.2
    assert bootstrap_ratio(tokens, tokens) == (1, 1)
    low, high = bootstrap_ratio(rounds, rounds + 1)
    assert 0 < low < high < 1, "pairing removes the variance between games"


def test_bootstrap_resamples_seeds_too():
    """A single stream is one game, so the seeds of the policy are the only source of variance."""
    rounds = np.array([[10.0], [20.0], [15.0]])
    low, high = bootstrap_ratio(np.full((3, 1), 30.0), rounds)
    assert low < 2 < high
    assert bootstrap_ratio(np.full((1, 1), 30.0), rounds[:1]) is None
    games = np.random.default_rng(0).integers(10, 30, 40).astype(float)
    alike, unlike = np.stack([games, games]), np.stack([games, 1.5 * games])
    (low, high), (least, most) = (bootstrap_ratio(np.full((2, 40), 50.0), one) for one in (alike, unlike))
    assert most - least > 2 * (high - low)


def test_the_throughput_oracle_plays_the_fastest_arm():
    """Arm 1 needs fewer rounds and arm 0 less time. Policies that play for tokens per second are compared with arm
    0."""
    table = table_of([scripted(BY_HAND)])
    table.draft_s[:] = [0.0, 0.020]
    mat, speed = Hindsight(table), Hindsight(table, "throughput")
    assert (mat.best([0]), speed.best([0])) == (1, 0)
    found = summarize(oracle(speed), speed)
    assert (found.share_of_best, found.best_arm_ratio, found.mat) == (1, 1, pytest.approx(7 / 4))
    slow = summarize(played("fixed", speed, arm=1), speed)
    assert slow.share_of_best == pytest.approx(4 * 0.010 / (3 * 0.030)) and slow.mat > found.mat


def test_a_mean_curve_averages_only_the_curves_that_reach_each_point():
    assert mean_curve([np.array([1.0, 3.0]), np.array([3.0])]).tolist() == [2, 3]
    assert mean_curve([np.eye(2), np.zeros((1, 2))]).tolist() == [[0.5, 0], [0, 1]]


def test_the_row_of_draft_all_has_no_choices(hindsight):
    summary = summarize(draft_all(hindsight), hindsight, "baseline")
    assert summary.best_arm_ratio is summary.decide_us_p50 is None
    assert summary.mat >= summarize(oracle(hindsight), hindsight).mat


def test_rewards_of_arms_by_hand():
    """Rounds that the end of the text cuts short are left out. A position without a draft counts as a first one."""
    trace = scripted(BY_HAND)
    trace.overlap[0, 0] = 0.75, 0.5, 0.25
    trace.overlap[0, 3] = 0.25, 0, 0
    made = {(row.arm, row.reward): row for row in arm_rewards(Hindsight(with_plain(table_of([trace]))))}
    assert {arm for arm, _ in made} == {"arm0", "arm1"}
    be, bd, other = made["arm0", "be"], made["arm0", "bd"], made["arm1", "be"]
    assert (be.n, be.mean, be.std, be.zeros) == (4, pytest.approx(1 / 4), pytest.approx(np.std([2, 0, 1, 0]) / 3), 0.5)
    assert (bd.n, bd.mean, bd.zeros) == (4, pytest.approx((1.5 + 0.75 + 0.5 + 0.5) / 3 / 4), 0)  # first positions: 1/4
    assert (other.n, other.mean, other.zeros) == (2, 0.5, 0.5)


def test_block_divergence_has_the_lower_variance():
    """MetaSD, Theorem 1 and Lemma 6: E[BD] = α, and its variance is lower than that of BE, for complete drafts."""
    alpha, K = 0.7, 4
    made = {row.reward: row for row in arm_rewards(Hindsight(table_of([trace_of(np.full((1, 4000, K), alpha))])))}
    assert made["bd"].mean == pytest.approx(alpha, abs=1e-3) and made["bd"].std < 0.01
    assert made["be"].mean == pytest.approx(sum(alpha**k for k in range(1, K + 1)) / K, abs=0.01)
    assert made["be"].zeros == pytest.approx(1 - alpha, abs=0.02) and made["bd"].zeros == 0
