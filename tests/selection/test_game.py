"""The game: which rewards and losses reach the policy, in which order, when, and that none is lost."""

import json
from math import nan

import numpy as np
import pytest

from specctl.recipe.select import GameRecipe, PolicyRecipe
from specctl.selection.game import Game
from specctl.selection.hindsight import token_losses
from specctl.selection.losses import length_loss
from specctl.selection.policy import Arms
from specctl.selection.registry import build
from specctl.selection.rules import rules_for
from tests.selection.tables import trace_of

N, K, T = 3, 4, 30
ARMS = Arms(N, K, 0)
PLAIN = {"hybrid_rounds": 0, "warmup_rounds": 0, "batch_rounds": 1, "tokens_per_update": 1}


class Spy:
    """Keeps what it is told, and plays the arms in turn."""

    def __init__(self, learns, scale="unit"):
        self.learns, self.scale = learns, scale
        self.told = []
        self.rounds = 0

    def weights(self):
        return [1 / N] * N

    def choose(self):
        self.rounds += 1
        return self.rounds % N

    def reward(self, arm, reward):
        self.told.append((arm, reward))

    def losses(self, losses):
        self.told.append(losses)

    def forget(self):
        self.told.append("forgot")


def spied(learns="losses", scale="unit", costs=(), **options):
    spy = Spy(learns, scale)
    return Game(
        spy,
        rules_for(
            "hedgespec",
            GameRecipe(**{"depth": None, "batch_growth": 1.0, "score_ends": True, "drift": None, **options}),
            K,
            costs,
        ),
        ARMS,
    ), spy


def trace(seed=0, tokens=T):
    return trace_of(np.random.default_rng(seed).random((N, tokens, K)), seed)


def walk(game, trace, rounds):
    """Rounds that commit so many tokens each; the last one ends the text."""
    at = scored = 0
    for index, committed in enumerate(rounds):
        arm = game.choose()
        last = index == len(rounds) - 1
        game.played(arm, committed, committed - (not last), K, not last, np.ones(K), 1.0)
        at += committed
        count = game.due()
        if count:
            assert scored + count == at, "all committed tokens, the oldest first"
            game.scored(trace.gamma[:, scored:at], trace.hit[:, scored:at])
            scored = at
    return scored


@pytest.mark.parametrize("estimator", ["product", "realised"])
@pytest.mark.parametrize("rounds", [[1] * T, [5] * 6, [3, 1, 5, 2, 4, 5, 1, 1, 5, 3], [T]])
def test_vectors_arrive_in_order_however_the_text_is_cut_into_rounds(estimator, rounds):
    """Each once, with the window across the rounds' borders, and with nothing accepted beyond the end."""
    game, spy = spied(estimator=estimator, **PLAIN)
    text = trace()
    walk(game, text, rounds)
    game.ended()
    assert np.array(spy.told) == pytest.approx(token_losses(text, game.rules))


def test_the_next_text_of_a_game_starts_from_its_own_tokens():
    """Zeros beyond the end of a text, or its last tokens, would leak into the windows of the next."""
    game, spy = spied(**PLAIN)
    texts = [trace(seed) for seed in (0, 1)]
    for text in texts:
        walk(game, text, [5] * 6)
        game.ended()
    assert np.array(spy.told) == pytest.approx(np.concatenate([token_losses(text, game.rules) for text in texts]))


def test_a_vector_waits_for_the_tokens_of_its_draft_and_no_longer():
    game, spy = spied(**PLAIN)
    text = trace()
    counts = []
    for t in range(8):
        game.choose()
        game.played(0, 1, 0, K, True)
        game.scored(text.gamma[:, t : t + 1], text.hit[:, t : t + 1])
        counts.append(len(spy.told))
    assert counts == [0, 0, 0, 1, 2, 3, 4, 5], "token 0 is known with token K - 1"


def test_hybrid_vectors_come_at_once_then_the_others_wait():
    game, spy = spied(**PLAIN | {"hybrid_rounds": 3})
    text = trace()
    walk(game, text, [2])
    assert len(spy.told) == 2
    assert np.array(spy.told) == pytest.approx(1 - text.gamma[:, :2, 0].T)
    game.choose()
    game.played(0, 5, 4, K, True)
    game.scored(text.gamma[:, 2:7], text.hit[:, 2:7])
    wanted = token_losses(text, game.rules)
    assert np.array(spy.told[2:]) == pytest.approx(np.array([1 - text.gamma[:, 2, 0], wanted[3]])), (
        "3 hybrid, 3..6 known"
    )


def test_the_loss_of_acceptance_has_no_delay():
    game, spy = spied(**PLAIN, loss="acceptance")
    text = trace()
    walk(game, text, [5, 2])
    assert np.array(spy.told) == pytest.approx(1 - text.gamma[:, :7, 0].T)


def test_scoring_is_due_every_round_of_the_warm_up_then_once_a_batch():
    game, _ = spied(hybrid_rounds=0, warmup_rounds=2, batch_rounds=3)
    text = trace()
    asked = []
    scored = 0
    for _ in range(9):
        game.choose()
        game.played(0, 2, 1, K, True)
        asked.append(game.due())
        game.scored(text.gamma[:, scored : scored + asked[-1]], text.hit[:, scored : scored + asked[-1]])
        scored += asked[-1]
    assert asked == [2, 2, 0, 0, 6, 0, 0, 6, 0]
    assert game.unscored == 2
    assert spied("reward")[0].due() == 0, "bandits need no scores"


def test_updates_are_means_of_vectors_and_none_is_dropped():
    """After the warm-up of two rounds: groups of four, whatever the batches are, and the rest when the text ends."""
    game, spy = spied(hybrid_rounds=0, warmup_rounds=2, batch_rounds=1, tokens_per_update=4)
    text = trace()
    walk(game, text, [3] * 10)
    game.ended()
    wanted = token_losses(text, game.rules)
    alone, rest = wanted[:3], wanted[3:]  # two rounds: six tokens, of which K − 1 wait
    groups = [rest[i : i + 4].mean(axis=0) for i in range(0, len(rest), 4)]
    assert np.array(spy.told) == pytest.approx(np.array([*alone, *groups]))
    assert np.concatenate([part for entry in game.log for part in entry.losses]) == pytest.approx(wanted)


def test_the_log_counts_regret_against_the_best_arm_so_far():
    game, _ = spied(**PLAIN)
    text = trace()
    rounds = [3, 5, 2, 5, 5, 5, 5]
    walk(game, text, rounds)
    game.ended()
    losses = token_losses(text, game.rules)
    owners = np.repeat([entry.arm for entry in game.log], rounds)
    own = losses[np.arange(T), owners].sum()
    assert game.log[-1].regret == pytest.approx(own - losses.sum(axis=0).min())
    assert game.log[0].regret == 0 and all(entry.decide_us > 0 for entry in game.log)


def test_chunks_give_one_vector_a_round_that_sees_no_further_than_it():
    game, spy = spied(**PLAIN | {"hybrid_rounds": 1}, unit="chunk")
    text = trace()
    rounds = [2, 3, 1, 5, 4]
    walk(game, text, rounds)
    game.ended()
    wanted = [1 - text.gamma[:, 0, 0].astype(float)]
    start = 2
    for committed in rounds[1:]:
        censored = np.zeros((N, K, K))
        seen = min(committed, K)
        censored[:, :seen] = text.gamma[:, start : start + seen]
        wanted.append(length_loss(censored)[0])
        start += committed
    assert np.array(spy.told) == pytest.approx(np.array(wanted))


def test_values_that_are_not_finite_cost_their_arm_that_vector():
    """Token 10's γ at depth 2 is part of the draft from token 9 alone; token 20's at depth 1 of its own. Where all arms
    are broken nothing was shown."""
    game, spy = spied(**PLAIN)
    text = trace()
    text.gamma[1, 10, 1] = nan
    text.gamma[0, 20, 0] = np.inf
    text.gamma[:, 25, 0] = nan
    walk(game, text, [5] * 6)
    game.ended()
    wanted = token_losses(trace(), game.rules)
    wanted[9, 1] = wanted[20, 0] = 1
    assert game.dropped == 3
    assert np.array(spy.told) == pytest.approx(np.delete(wanted, 25, axis=0))
    wanted[25] = 0
    assert token_losses(text, game.rules) == pytest.approx(wanted)


def test_acceptance_that_is_rounded_past_one_costs_nothing():
    game, spy = spied()
    text = trace()
    text.gamma[:] = np.nextafter(np.float32(1), np.float32(2))
    walk(game, text, [5, 5])
    assert np.array(spy.told).min() == 0


def told(game, **round_of):
    values = {"committed": 3, "accepted": 2, "drafted": 4, "complete": True, "overlap": None, "seconds": None}
    game.played(game.choose(), **values | round_of)
    return game.policy.told


def test_rewards_have_the_scale_of_the_policy():
    """MetaSD's rewards are in [0, 1]; BanditSpec's are tokens in [1, K + 1], other rewards rescaled to that."""
    assert told(spied("reward", reward="tokens")[0]) == [(1, pytest.approx(0.5))]
    assert told(spied("reward", "tokens", reward="tokens")[0]) == [(1, pytest.approx(3))]
    assert told(spied("reward", "tokens", reward="be")[0], accepted=1) == [(1, pytest.approx(2))]
    assert told(spied("reward", reward="bd")[0], overlap=np.array([1.0, 0.5])) == [(1, pytest.approx(1.5 / K))]


def test_throughput_is_scaled_by_what_is_possible_or_was_seen():
    game, spy = spied("reward", costs=(0.1, 0.2, 0.4), reward="throughput")
    told(game, committed=5)  # the spy plays 1, 2, 0
    told(game, committed=5)
    told(game, committed=5)
    assert [reward for _, reward in spy.told] == pytest.approx([0.5, 0.25, 1.0])
    game, spy = spied("reward", reward="throughput")
    for seconds in (2.0, 1.0, 4.0):
        told(game, seconds=seconds)
    assert [reward for _, reward in spy.told] == pytest.approx([1.0, 1.0, 0.25])
    told(game, seconds=0.0)
    assert game.dropped == 1 and len(spy.told) == 3


def test_a_round_that_the_end_cut_is_not_shown_to_a_bandit():
    game, spy = spied("reward", reward="tokens")
    assert told(game, complete=False) == []
    assert told(game, overlap=np.array([nan])) == [(2, pytest.approx(0.5))], "the overlap is not part of this reward"
    assert len(game.log) == 2 and game.log[0].reward is None and spy.rounds == 2


def test_what_a_reward_needs_must_be_given():
    with pytest.raises(ValueError, match="overlap"):
        told(spied("reward", reward="bd")[0])
    with pytest.raises(ValueError, match="seconds"):
        told(spied("reward", reward="throughput")[0])
    with pytest.raises(ValueError, match="committed"):
        spied()[0].scored(np.zeros((N, 1, K)), np.zeros((N, 1, K)))


@pytest.mark.parametrize("unit", ["token", "chunk"])
@pytest.mark.parametrize("name", ["hedgespec", "metasd-exp3"])
def test_a_game_continues_bit_for_bit(name, unit):
    """With vectors waiting for tokens, tokens waiting for scores, and vectors waiting to become an update."""

    def fresh(seed):
        arms = Arms(N, K, seed)
        recipe = GameRecipe(
            depth=None, batch_growth=1.0, unit=unit, warmup_rounds=1, batch_rounds=3, tokens_per_update=4
        )
        return Game(build(name, arms, PolicyRecipe()), rules_for(name, recipe, K), arms)

    def rounds(game, text, at, count):
        arms = []
        for _ in range(count):
            arms.append(game.choose())
            game.played(arms[-1], 3, 2, K, True, np.full(K, 0.1 * arms[-1]), 1.0)
            at += 3
            count = game.due()
            if count:
                game.scored(text.gamma[:, at - count : at], text.hit[:, at - count : at])
        return arms

    text = trace(tokens=200)
    game = fresh(0)
    rounds(game, text, 0, 9)
    other = fresh(1)
    other.restore(json.loads(json.dumps(game.state())))
    assert rounds(game, text, 27, 20) == rounds(other, text, 27, 20)
    game.ended()
    other.ended()
    assert game.weights() == other.weights()
    assert game.state() == other.state()


def test_normalhedge_plays_without_hedgespecs_savings():
    """The ablation would be the same row twice if both had the same rules."""
    recipe = GameRecipe(depth=None, batch_growth=1.0)
    assert rules_for("normalhedge", recipe, K).batch_rounds == 1
    assert rules_for("ftl", recipe, K) == rules_for("hedgespec", recipe, K)
    assert (rules_for("metasd-ucb", recipe, K).reward, rules_for("ucbspec", recipe, K).reward) == ("bd", "tokens")


def test_scorings_grow_apart():
    """Rounds 1 and 2 of the warm-up, then after 2, 4 and 8 more: a constant distance would go on paying for nothing."""
    game, _ = spied(warmup_rounds=2, batch_rounds=2, batch_growth=2.0)
    asked = []
    for number in range(1, 20):
        game.choose()
        game.played(0, committed=1, accepted=0, drafted=0, complete=True)
        if count := game.due():
            asked.append(number)
            game.scored(np.zeros((N, count, K)), np.zeros((N, count, K)))
    assert asked == [1, 2, 4, 8, 16]


@pytest.mark.parametrize("unknown", [[], [70, 90], [105]], ids=["all known", "old ones unknown", "a new one unknown"])
def test_a_change_is_forgotten_up_to_where_it_began(unknown):
    """Twenty rounds of four accepted tokens, then none: an alarm after a few. The learner forgets, and of the tokens
    that no scoring has reached it is told of those since the change only; scoring starts again from short intervals."""
    game, spy = spied(
        hybrid_rounds=0, warmup_rounds=1, batch_rounds=4, batch_growth=2.0, tokens_per_update=1, drift=4.0
    )
    text = trace(tokens=150)
    text.gamma[:, unknown, 0] = nan
    at = scored = 0
    asked = []
    for number in range(1, 41):
        game.choose()
        accepted = 4 if number <= 20 else 0
        game.played(0, accepted + 1, accepted, K, True)
        at += accepted + 1
        if count := game.due():
            asked.append(number)
            game.scored(text.gamma[:, at - count : at], text.hit[:, at - count : at])
            scored = at
    alarm = 20 + 1  # σ is its floor of half a token: one round is 8 σ
    assert asked == [1, 5, 13, alarm, alarm + 4, alarm + 12]
    forgot = next(n for n, one in enumerate(spy.told) if isinstance(one, str))
    assert forgot == 13 * 5 - (K - 1), "tokens up to round 13, but for those that wait"
    wanted = token_losses(text, game.rules)
    told = [t for t in range(100, scored - (K - 1)) if t not in unknown]
    assert np.array(spy.told[forgot + 1 :]) == pytest.approx(wanted[told]), "token 100 began round 21"
    counted = np.concatenate([part for entry in game.log for part in entry.losses])
    assert len(counted) == scored - (K - 1) - len(unknown), "regret is counted over all"


def test_the_loss_of_throughput_is_by_declared_or_measured_seconds():
    """Rounds of arms 1, 2, 0 take 2, 4 and 1 seconds; before arm 0 was measured it is as cheap as the cheapest."""
    text = trace()
    wanted = token_losses(text, rules_for("hedgespec", GameRecipe(depth=None), K))
    declared, spy = spied(**PLAIN, loss="throughput", costs=(1.0, 2.0, 4.0))
    walk(declared, text, [5] * 6)
    declared.ended()
    relative = np.array([1, 1 / 2, 1 / 4])
    assert np.array(spy.told) == pytest.approx(1 - (1 - wanted) * relative)
    assert token_losses(text, declared.rules) == pytest.approx(np.array(spy.told))
    measured, spy = spied(**PLAIN, loss="throughput")
    for at, seconds in ((0, 2.0), (5, 4.0), (10, 1.0)):
        measured.played(measured.choose(), 5, 4, K, True, seconds=seconds)
        measured.scored(text.gamma[:, at : at + 5], text.hit[:, at : at + 5])
    first, second, third = [1, 1, 1], [1, 1, 1 / 2], relative
    rates = np.array([first] * 2 + [second] * 5 + [third] * 5)  # K - 1 vectors wait for the next round's tokens
    assert np.array(spy.told) == pytest.approx(1 - (1 - wanted[:12]) * rates)
