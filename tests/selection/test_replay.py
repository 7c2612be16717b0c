"""Replays against walks by hand, yardsticks that nothing may beat, and what HedgeSpec is built for."""

from dataclasses import replace as changed

import numpy as np
import pytest

from specctl.errors import CheckpointError, DataError
from specctl.lab.recorded.hindsight import Hindsight, games, round_starts, token_losses
from specctl.lab.recorded.regret import (
    bootstrap_ratio,
    late_share,
    loss_regret,
    mat_by_domain,
    mean_curve,
    stopping_regret,
    summarize,
)
from specctl.lab.recorded.replay import Resets, draft_all, oracle, replay
from specctl.lab.recorded.trace import Trace
from specctl.recipe.select import GameRecipe, PolicyRecipe
from specctl.selection.game.rules import rules_for
from specctl.selection.policies.registry import NAMES
from tests.selection.tables import specialists, table_of

GAME = GameRecipe(loss="length", depth=2, warmup_rounds=2)


def played(name, hindsight, seed=0, reset="query", session=1, **options):
    return replay(name, hindsight, PolicyRecipe(**options), GAME, Resets(reset, session), seed)


def scripted(accepted, domain="d", K=3):
    """A trace of which only what is accepted matters."""
    accepted = np.array(accepted, np.int16)
    shape = (*accepted.shape, K)
    zeros = np.zeros(shape, np.float32)
    return Trace("q", domain, accepted, np.full(accepted.shape, K, np.int16), zeros, zeros, zeros > 0, True)


BY_HAND = [[2, 0, 0, 0, 1, 0, 0], [0, 3, 0, 0, 0, 2, 0]]
"""Arm 0: rounds at 0, 3, 4, 6. Arm 1: at 0, 1, 5, the last of which would commit three of the two tokens that are left.
Both: at 0 (arm 0), 3, 4 (arm 0), 6."""


@pytest.fixture(scope="module")
def hindsight():
    return Hindsight(specialists(60, 45, seed=3, run=4))


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
def test_an_answer_may_end_at_once(name):
    """The target's first token was the end: no round to play, in a game of its own or within a session."""
    empty = scripted(np.zeros((2, 0)))
    hand = Hindsight(table_of([empty, scripted(BY_HAND), empty]))
    for reset in ("query", "session"):
        run = played(name, hand, reset=reset, session=3)
        assert run.rounds[[0, 2]].tolist() == [0, 0]
        summary = summarize([run], hand)
        assert summary.mat == pytest.approx(7 / run.rounds[1])
        assert late_share([run], hand, 2) is not None and len(stopping_regret(run.played[0], hand)) in (0, 7)
    with pytest.raises(DataError, match="no decoded tokens"):
        Hindsight(table_of([empty]))


@pytest.mark.parametrize("name", NAMES)
def test_drafts_of_one_token_and_a_pool_of_one_are_legal(name):
    table = Hindsight(specialists(3, 9, seed=0, N=1, K=1))
    assert (played(name, table, reset="stream").rounds == table.rounds[:, 0]).all()


def test_mat_by_domain():
    hand = Hindsight(table_of([scripted(BY_HAND, "b"), scripted(BY_HAND, "a"), scripted([[0] * 7] * 2, "b")]))
    assert mat_by_domain([played("fixed", hand)], hand) == {"b": pytest.approx(14 / 11), "a": pytest.approx(7 / 4)}


def test_draft_all_pays_for_every_draft_and_all_rows():
    table = table_of([scripted(BY_HAND)])
    table.step_s[:] = [0.010, 0.013, 0.015]
    assert draft_all(Hindsight(table)).seconds == pytest.approx(4 * (0.004 + 0.010 + 0.003 + 0.005))


@pytest.mark.parametrize("arm", [0, 6])
def test_a_fixed_policy_needs_the_rounds_of_its_arm(hindsight, arm):
    """Two computations of the same number: the game round by round, and the walk of all arms at once."""
    assert (played("fixed", hindsight, arm=arm).rounds == hindsight.rounds[:, arm]).all()


@pytest.mark.parametrize("name", NAMES)
def test_every_policy_decodes_every_token_and_none_beats_the_oracle(hindsight, name):
    run = played(name, hindsight)
    committed = np.concatenate([part.committed for part in run.played])
    query = np.concatenate([part.query for part in run.played])
    assert (np.bincount(query, committed) == hindsight.tokens).all()
    summary = summarize([run], hindsight)
    assert summary.oracle_share <= 1 and summary.regret >= 0
    assert sum(summary.pulls) == summary.rounds.sum() == run.rounds.sum()
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
    whole = oracle(hindsight, "stream")
    assert whole.rounds.sum() == hindsight.rounds.sum(axis=0).min()
    summary = summarize([whole], hindsight)
    assert (summary.oracle_share, summary.best_arm_ratio, summary.regret) == (1, 1, 0)


def test_games_end_where_the_domain_changes_or_the_session_is_full():
    traces = [scripted(BY_HAND, domain) for domain in "aaabba"]
    assert games(traces, "session", 2) == [[0, 1], [2], [3, 4], [5]]
    assert games(traces, "session", 9) == [[0, 1, 2], [3, 4], [5]]
    assert games(traces, "query", 9) == [[0], [1], [2], [3], [4], [5]]
    assert games(traces, "stream", 1) == [[0, 1, 2, 3, 4, 5]]


def test_sessions_are_those_of_the_recording_where_it_says():
    """Of two domains (order=shift) one game; two sessions of one domain that follow each other are two."""
    traces = [
        changed(scripted(BY_HAND, domain), session=n) for domain, n in zip("abbbcc", [0, 0, 1, 1, 2, 2], strict=True)
    ]
    assert games(traces, "session", 8) == [[0, 1], [2, 3], [4, 5]]
    assert games(traces, "session", 1) == games(traces, "query", 8)


class Spy:
    """Plays arm 1 and keeps what it is told."""

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


def test_a_replay_shows_a_bandit_the_overlap_of_the_drafts_of_complete_rounds(monkeypatch):
    spy = Spy("reward")
    monkeypatch.setattr("specctl.lab.recorded.replay.build", lambda *_: spy)
    trace = scripted(BY_HAND)
    trace.overlap[:] = np.random.default_rng(0).random(trace.overlap.shape)
    played("metasd-ucb", Hindsight(table_of([trace])))
    assert spy.told == pytest.approx([trace.overlap[1, start].sum() / 3 for start in (0, 1)]), "the end cuts that at 5"


def test_a_table_that_knows_no_overlaps_of_drafts_is_refused_to_who_is_shown_them():
    """Before version 3 they were of the text, whatever was drafted: another reward than that of live decoding."""
    trace = scripted(BY_HAND)
    old = Hindsight(table_of([changed(trace, overlap=trace.overlap[..., :0])]))
    with pytest.raises(CheckpointError, match="before version 3"):
        played("metasd-ucb", old)
    for name in ("ucbspec", "hedgespec"):
        assert played(name, old).rounds.sum() > 0
    assert replay("metasd-ucb", old, PolicyRecipe(), GameRecipe(reward="be")).rounds.sum() > 0


def test_a_replay_shows_a_learner_every_token_before_the_session_goes_on(monkeypatch):
    """Intervals leave tokens without scores when a text ends. Live decoding knows of no last text, and scores them."""
    spy = Spy("losses")
    monkeypatch.setattr("specctl.lab.recorded.replay.build", lambda *_: spy)
    table = specialists(3, 40, seed=0, N=2, K=3, bad=0.3)
    recipe = GameRecipe(
        loss="length", hybrid_rounds=0, warmup_rounds=0, batch_rounds=100, tokens_per_update=1, score_ends=True
    )
    recipe = recipe.model_copy(update={"drift": None})
    replay("hedgespec", Hindsight(table), PolicyRecipe(), recipe, Resets("stream"))
    rules = rules_for("hedgespec", recipe, 3)
    wanted = np.concatenate([token_losses(trace, rules) for trace in table.traces])
    assert np.array(spy.told) == pytest.approx(wanted)


@pytest.mark.parametrize("name", ["hedgespec", "metasd-ucb"])
def test_what_was_learnt_lasts_until_the_reset(hindsight, name):
    """Sessions of four queries of one domain: later ones profit; a stream's memory of other domains does not help."""
    share = {
        reset: summarize([played(name, hindsight, reset=reset, session=4)], hindsight).mat
        for reset in ("query", "session", "stream")
    }
    assert share["session"] > share["query"]
    assert share["session"] > share["stream"]


def test_a_change_of_domain_is_noticed_within_a_game():
    """A stream that is never reset changes its domain every 180 tokens; without the test scorings only grow apart."""
    stream = Hindsight(specialists(40, 45, seed=3, run=4, bad=0.3))
    mat = {
        drift: summarize(
            [replay("hedgespec", stream, PolicyRecipe(), GameRecipe(drift=drift), Resets("stream"))], stream
        ).mat
        for drift in (None, GAME.drift)
    }
    assert mat[GAME.drift] > mat[None] + 1


def test_hedgespec_beats_the_bandits_with_literal_constants(hindsight):
    """Seven specialists, a reset at every query, 45 tokens: the rounds of both, paired by query."""
    hedge = played("hedgespec", hindsight).rounds[None].astype(float)
    for name in ("ucbspec", "exp3spec"):
        low, _ = bootstrap_ratio(played(name, hindsight).rounds[None].astype(float), hedge)
        assert low > 1.15, name


def test_regret_curves_by_definition(hindsight):
    """Token by token, with loops."""
    rules = rules_for("hedgespec", GAME, 8)
    run = played("random", hindsight, reset="session", session=4)
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


def test_the_late_share_counts_rounds_after_so_many_tokens(hindsight):
    assert late_share([oracle(hindsight)], hindsight, 20) == 1
    assert late_share([oracle(hindsight)], hindsight, 45) is None, "no game has more tokens"
    hedge = played("hedgespec", hindsight)
    assert late_share([hedge], hindsight, 20) > summarize([hedge], hindsight).oracle_share
    hand = Hindsight(table_of([scripted(BY_HAND)]))
    assert late_share([played("fixed", hand, arm=0)], hand, 2) == pytest.approx(1 / 3), "token 2: rounds 2 of 3, 1 of 4"


def test_bootstrap_intervals():
    generator = np.random.default_rng(0)
    tokens, rounds = np.full((1, 200), 50.0), generator.integers(10, 30, (1, 200)).astype(float)
    low, high = bootstrap_ratio(tokens, rounds)
    assert low < tokens.sum() / rounds.sum() < high < low * 1.2
    assert bootstrap_ratio(tokens, tokens) == (1, 1)
    low, high = bootstrap_ratio(rounds, rounds + 1)
    assert 0 < low < high < 1, "paired: a round more in every game is seen through the noise of games"


def test_bootstrap_intervals_hold_the_seeds():
    """One stream is one game: all that could have been otherwise are the draws of the policy."""
    rounds = np.array([[10.0], [20.0], [15.0]])
    low, high = bootstrap_ratio(np.full((3, 1), 30.0), rounds)
    assert low < 2 < high
    assert bootstrap_ratio(np.full((1, 1), 30.0), rounds[:1]) is None
    games = np.random.default_rng(0).integers(10, 30, 40).astype(float)
    alike, unlike = np.stack([games, games]), np.stack([games, 1.5 * games])
    (low, high), (least, most) = (bootstrap_ratio(np.full((2, 40), 50.0), one) for one in (alike, unlike))
    assert most - least > 2 * (high - low)


def test_the_best_arm_of_a_throughput_game_is_the_fastest():
    """Arm 1 needs fewer rounds, arm 0 less time: who plays for tokens a second is measured against that."""
    table = table_of([scripted(BY_HAND)])
    table.draft_s[:] = [0.0, 0.020]
    mat, speed = Hindsight(table), Hindsight(table, "throughput")
    assert (mat.best([0]), speed.best([0])) == (1, 0)
    found = summarize([oracle(speed)], speed)
    assert (found.oracle_share, found.best_arm_ratio, found.mat) == (1, 1, pytest.approx(7 / 4))
    slow = summarize([played("fixed", speed, arm=1)], speed)
    assert slow.oracle_share == pytest.approx(4 * 0.010 / (3 * 0.030)) and slow.mat > found.mat


def test_a_mean_curve_averages_those_that_are_long_enough():
    assert mean_curve([np.array([1.0, 3.0]), np.array([3.0])]).tolist() == [2, 3]
    assert mean_curve([np.eye(2), np.zeros((1, 2))]).tolist() == [[0.5, 0], [0, 1]]


def test_draft_all_has_a_summary_without_choices(hindsight):
    summary = summarize([draft_all(hindsight)], hindsight)
    assert summary.best_arm_ratio is summary.decide_us_p50 is None
    assert summary.mat >= summary.oracle_mat
