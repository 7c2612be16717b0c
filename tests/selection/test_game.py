"""`Game`: which rewards and losses reach the policy, in which order and when, and that none is lost."""

import gc
from dataclasses import replace
from math import nan

import numpy as np
import pytest

from specctl.lab.recorded.hindsight import token_losses
from specctl.recipe.select import GameRecipe
from specctl.selection.game.clock import ArmClock
from specctl.selection.game.game import Game, Round
from specctl.selection.game.losses import INNER
from specctl.selection.game.rewards import Outcome
from specctl.selection.game.rules import overridden_options, rules_for
from specctl.selection.policies.policy import Arms
from tests.selection.tables import trace_of

N, K, T = 3, 4, 30
ARMS = Arms(N, K, 0)
PLAIN = {"hybrid_rounds": 0, "warmup_rounds": 0, "batch_rounds": 1, "tokens_per_update": 1}


class Spy:
    """Records rewards and losses, and plays the arms in turn."""

    takes_turns = False  # it chooses without rewards

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


def spied(learns="losses", scale="unit", costs=(), step=None, **options):
    given = {"loss": "length", "depth": None, "batch_growth": 1.0, "score_ends": True, "drift": None, "settled": None}
    spy = Spy(learns, scale)
    return Game(
        spy,
        replace(rules_for("hedgespec", GameRecipe(**{**given, **options}), K), costs=costs, step=step),
        ARMS,
    ), spy


def trace(seed=0, tokens=T):
    return trace_of(np.random.default_rng(seed).random((N, tokens, K)), seed)


def walk(game, trace, rounds):
    """Play rounds that commit the given numbers of tokens; the last round ends the text."""
    at = scored = 0
    for index, committed in enumerate(rounds):
        arm = game.choose()
        last = index == len(rounds) - 1
        game.round_finished(arm, Outcome(committed, committed - (not last), not last, seconds=1.0))
        at += committed
        count = game.due()
        if count:
            assert scored + count == at, "all committed tokens, the oldest first"
            game.scored(trace.gamma[:, scored:at], trace.hit[:, scored:at])
            scored = at
    return scored


@pytest.mark.parametrize("estimator", ["product", "realised"])
@pytest.mark.parametrize("rounds", [[1] * T, [5] * 6, [3, 1, 5, 2, 4, 5, 1, 1, 5, 3], [T]])
def test_losses_do_not_depend_on_how_a_text_is_cut_into_rounds(estimator, rounds):
    """Each vector arrives once and in order. Windows reach across rounds, and nothing is accepted beyond the end."""
    game, spy = spied(estimator=estimator, **PLAIN)
    text = trace()
    walk(game, text, rounds)
    game.ended()
    assert np.array(spy.told) == pytest.approx(token_losses(text, game.rules))


def test_losses_of_a_text_do_not_depend_on_the_text_before_it():
    """Zeros beyond the end of a text, or its last tokens, could leak into the windows of the next one."""
    game, spy = spied(**PLAIN)
    texts = [trace(seed) for seed in (0, 1)]
    for text in texts:
        walk(game, text, [5] * 6)
        game.ended()
    assert np.array(spy.told) == pytest.approx(np.concatenate([token_losses(text, game.rules) for text in texts]))


def test_a_loss_arrives_when_the_last_token_of_its_draft_is_scored():
    game, spy = spied(**PLAIN)
    text = trace()
    counts = []
    for t in range(8):
        game.choose()
        game.round_finished(0, Outcome(1, 0))
        game.scored(text.gamma[:, t : t + 1], text.hit[:, t : t + 1])
        counts.append(len(spy.told))
    assert counts == [0, 0, 0, 1, 2, 3, 4, 5], "token 0 is known with token K - 1"


def test_a_realised_loss_arrives_when_all_arms_have_missed():
    """It does not arrive when only one arm has missed, and it equals the loss that would have arrived later."""
    game, spy = spied(**PLAIN, estimator="realised", settled=0.01)
    hit = np.full((N, 4, K), INNER)
    hit[0, 0], hit[1:, 1] = 0, 0  # arm 0 misses token 0, the others go on until token 1
    text = replace(trace(tokens=4), hit=hit)
    counts = []
    for t in range(3):
        game.choose()
        game.round_finished(0, Outcome(1, 0))
        game.scored(text.gamma[:, t : t + 1], text.hit[:, t : t + 1])
        counts.append(len(spy.told))
    assert counts == [0, 1, 1], "arm 0 has not missed in the draft from token 1"
    assert np.array(spy.told[0]) == pytest.approx(1 - np.array([1, *[2] * (N - 1)]) / (K + 1))


@pytest.mark.parametrize("estimator", ["product", "realised"])
def test_early_losses_are_close_to_the_complete_ones(estimator):
    game, spy = spied(**PLAIN, estimator=estimator, settled=0.05)
    text, waits = trace(tokens=200), []
    for t in range(200):
        game.choose()
        game.round_finished(0, Outcome(1, 0))
        game.scored(text.gamma[:, t : t + 1], text.hit[:, t : t + 1])
        waits.append(t + 1 - len(spy.told))
    assert np.mean(waits) < K - 1 and max(waits) <= K - 1
    game.ended()
    full = token_losses(text, game.rules)
    late = np.array(spy.told) - full
    assert np.all(late >= -1e-9) and late.max() <= (0.05 if estimator == "product" else 1e-9)


def test_losses_of_the_hybrid_rounds_have_no_delay():
    game, spy = spied(**PLAIN | {"hybrid_rounds": 3})
    text = trace()
    walk(game, text, [2])
    assert len(spy.told) == 2
    assert np.array(spy.told) == pytest.approx(1 - text.gamma[:, :2, 0].T)
    game.choose()
    game.round_finished(0, Outcome(5, 4))
    game.scored(text.gamma[:, 2:7], text.hit[:, 2:7])
    wanted = token_losses(text, game.rules)
    assert np.array(spy.told[2:]) == pytest.approx(np.array([1 - text.gamma[:, 2, 0], wanted[3]])), (
        "the third hybrid loss, then the first complete one"
    )


def test_acceptance_losses_have_no_delay():
    game, spy = spied(**PLAIN, loss="acceptance")
    text = trace()
    walk(game, text, [5, 2])
    assert np.array(spy.told) == pytest.approx(1 - text.gamma[:, :7, 0].T)


def test_scoring_is_due_in_warm_up_rounds_and_then_once_per_batch():
    game, _ = spied(hybrid_rounds=0, warmup_rounds=2, batch_rounds=3)
    text = trace()
    asked = []
    scored = 0
    for _ in range(9):
        game.choose()
        game.round_finished(0, Outcome(2, 1))
        asked.append(game.due())
        game.scored(text.gamma[:, scored : scored + asked[-1]], text.hit[:, scored : scored + asked[-1]])
        scored += asked[-1]
    assert asked == [2, 2, 0, 0, 6, 0, 0, 6, 0]
    assert game.unscored == 2
    assert spied("reward")[0].due() == 0, "bandits need no scores"


@pytest.mark.usefixtures("kept_rounds")
def test_updates_are_means_of_losses_and_none_is_dropped():
    """After two warm-up rounds the losses are grouped by four, independently of the scoring batches; the rest comes
    when the text ends."""
    game, spy = spied(hybrid_rounds=0, warmup_rounds=2, batch_rounds=1, tokens_per_update=4)
    text = trace()
    walk(game, text, [3] * 10)
    game.ended()
    wanted = token_losses(text, game.rules)
    alone, rest = wanted[:3], wanted[3:]  # two rounds: six tokens, minus the K − 1 tokens that wait
    groups = [rest[i : i + 4].mean(axis=0) for i in range(0, len(rest), 4)]
    assert np.array(spy.told) == pytest.approx(np.array([*alone, *groups]))
    assert np.concatenate([part for entry in game.log for part in entry.losses]) == pytest.approx(wanted)


@pytest.mark.usefixtures("kept_rounds")
def test_logged_regret_is_against_the_best_arm_so_far():
    game, _ = spied(**PLAIN)
    text = trace()
    rounds = [3, 5, 2, 5, 5, 5, 5]
    walk(game, text, rounds)
    game.ended()
    losses = token_losses(text, game.rules)
    owners = np.repeat([entry.arm for entry in game.log], rounds)
    own = losses[np.arange(T), owners].sum()
    assert game.log[-1].regret == pytest.approx(own - losses.sum(axis=0).min())
    game.choose()
    assert game.log[-1].regret == game.log[-2].regret != 0, "unchanged until the next scoring"
    assert game.log[0].regret == 0 and all(entry.decide_us > 0 for entry in game.log)


def test_chunks_give_one_loss_per_round_over_its_own_tokens():
    """A round of k tokens uses k in place of K (HedgeSpec, B.3). In hybrid rounds, and for the loss `acceptance`, it is
    the mean of its tokens."""
    text = trace()
    rounds = [2, 3, 1, 5, 4]
    starts = np.cumsum([0, *rounds])
    means = [1 - text.gamma[:, start : start + k, 0].mean(axis=1) for start, k in zip(starts, rounds, strict=False)]
    game, spy = spied(**PLAIN | {"hybrid_rounds": 1}, unit="chunk")
    walk(game, text, rounds)
    game.ended()
    wanted = [means[0]]
    for start, committed in zip(starts[1:], rounds[1:], strict=False):
        k = min(committed, K)
        along = text.gamma[:, start + np.arange(k), np.arange(k)].astype(float)
        wanted.append(1 - (1 + along.cumprod(axis=1).sum(axis=1)) / (k + 1))
    assert np.array(spy.told) == pytest.approx(np.array(wanted))
    game, spy = spied(**PLAIN, unit="chunk", loss="acceptance")
    walk(game, text, rounds)
    assert np.array(spy.told) == pytest.approx(np.array(means))


def test_a_fully_accepted_chunk_has_loss_zero():
    """Two tokens with K = 4: with K in place of k the loss would be 0.4, as if more tokens had been rejected."""
    game, spy = spied(**PLAIN, unit="chunk")
    text = trace_of(np.ones((N, 4, K)))
    walk(game, text, [2, 2])
    assert np.array(spy.told) == pytest.approx(np.zeros((2, N)))


def test_a_score_that_is_not_finite_makes_the_loss_one():
    """γ of token 10 at depth 2 belongs only to the draft from token 9; γ of token 20 at depth 1 to its own draft. If
    all arms are broken at a token, its loss is dropped."""
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


def test_acceptance_rounded_above_one_gives_loss_zero():
    game, spy = spied()
    text = trace()
    text.gamma[:] = np.nextafter(np.float32(1), np.float32(2))
    walk(game, text, [5, 5])
    assert np.array(spy.told).min() == 0


def told(game, **round_of):
    game.round_finished(game.choose(), Outcome(**{"committed": 3, "accepted": 2} | round_of))
    return game.policy.told


def test_rewards_have_the_scale_of_the_policy():
    """MetaSD's rewards are in [0, 1]; BanditSpec's are tokens in [1, K + 1], and other rewards are rescaled to that
    range."""
    assert told(spied("reward", reward="tokens")[0]) == [(1, pytest.approx(0.5))]
    assert told(spied("reward", "tokens", reward="tokens")[0]) == [(1, pytest.approx(3))]
    assert told(spied("reward", "tokens", reward="be")[0], accepted=1) == [(1, pytest.approx(2))]
    left_out = 2 * 1.0  # each of the two positions left out counts as the first one
    assert told(spied("reward", reward="bd")[0], overlap=np.array([1.0, 0.5])) == [
        (1, pytest.approx((1.5 + left_out) / K))
    ]


def test_throughput_reward_is_relative_to_k_plus_one_tokens_per_plain_step():
    """The unit does not depend on earlier rounds, so that arms that get faster do not all earn 1; the reward is capped
    at 1."""
    game, spy = spied("reward", step=0.08, reward="throughput")
    for seconds in (0.4, 0.2, 0.1):
        told(game, committed=2, seconds=seconds)
    assert [reward for _, reward in spy.told] == pytest.approx([2 * 0.08 / s / (K + 1) for s in (0.4, 0.2, 0.1)])
    fast, spy = spied("reward", step=1.0, reward="throughput")
    assert told(fast, committed=5, seconds=0.5) == [(1, 1.0)]


def test_a_reward_that_is_not_finite_counts_as_zero():
    """Without any reward the bandit would have to try this arm first in every round."""
    game, _ = spied("reward", reward="bd")
    assert told(game, overlap=np.array([nan])) == [(1, 0.0)] and game.dropped == 1
    game, _ = spied("reward", step=1.0, reward="throughput")
    assert told(game, seconds=0.0) == [(1, 0.0)] and game.dropped == 1


@pytest.mark.usefixtures("kept_rounds")
def test_a_round_cut_by_the_end_gives_no_reward():
    game, spy = spied("reward", reward="tokens")
    assert told(game, complete=False) == []
    assert told(game, overlap=np.array([nan])) == [(2, pytest.approx(0.5))], "the overlap is not part of this reward"
    assert len(game.log) == 2 and game.log[0].reward is None and spy.rounds == 2


def test_missing_inputs_raise():
    with pytest.raises(ValueError, match="overlap"):
        told(spied("reward", reward="bd")[0])
    with pytest.raises(ValueError, match="seconds"):
        told(spied("reward", reward="throughput")[0])
    with pytest.raises(ValueError, match="committed"):
        spied()[0].scored(np.zeros((N, 1, K)), np.zeros((N, 1, K)))


def test_normalhedge_plays_without_hedgespecs_savings():
    """With equal rules both rows of the ablation would be the same."""
    recipe = GameRecipe()
    own = rules_for("normalhedge", recipe, K)
    assert (own.depth, own.batch_rounds, own.warmup_rounds, own.drift) == (K, 1, 0, None)
    assert rules_for("ftl", recipe, K) == rules_for("hedgespec", recipe, K)
    assert (rules_for("metasd-ucb", recipe, K).reward, rules_for("ucbspec", recipe, K).reward) == ("bd", "tokens")


def test_options_override_the_rules_of_a_policy():
    """Values that differ from the default are used. Values equal to the default are not, and `overridden_options` says
    so."""
    recipe = GameRecipe(warmup_rounds=7, tokens_per_update=3, depth=3, drift=5.0)
    rules = rules_for("normalhedge", recipe, K)
    assert (rules.warmup_rounds, rules.tokens_per_update, rules.depth, rules.drift) == (7, 3, 3, None)
    (line,) = overridden_options(["hedgespec", "normalhedge", "ucbspec"], recipe)
    assert "normalhedge" in line and "game.drift=None" in line and "warmup" not in line
    assert overridden_options(["normalhedge"], GameRecipe()) == []


def test_intervals_between_scorings_grow():
    """Rounds 1 and 2 of the warm-up, then after 2, 4 and 8 more rounds."""
    game, _ = spied(warmup_rounds=2, batch_rounds=2, batch_growth=2.0)
    asked = []
    for number in range(1, 20):
        game.choose()
        game.round_finished(0, Outcome(1, 0))
        if count := game.due():
            asked.append(number)
            game.scored(np.zeros((N, count, K)), np.zeros((N, count, K)))
    assert asked == [1, 2, 4, 8, 16]


@pytest.mark.usefixtures("kept_rounds")
@pytest.mark.parametrize("unknown", [[], [70, 90], [105]], ids=["all known", "old ones unknown", "a new one unknown"])
def test_an_alarm_forgets_the_losses_from_before_the_change(unknown):
    """Twenty rounds with four accepted tokens, then rounds with none: an alarm. The learner forgets everything. It gets
    losses of unscored tokens only from the change on, and the scoring intervals start short again."""
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
        game.round_finished(0, Outcome(accepted + 1, accepted))
        at += accepted + 1
        if count := game.due():
            asked.append(number)
            game.scored(text.gamma[:, at - count : at], text.hit[:, at - count : at])
            scored = at
    alarm = 20 + 1  # σ is its floor of half a token: one round is 8 σ
    assert asked == [1, 5, 13, alarm, alarm + 4, alarm + 12]
    forgot = next(n for n, one in enumerate(spy.told) if isinstance(one, str))
    assert forgot == 13 * 5 - (K - 1), "tokens up to round 13, minus the K - 1 that wait"
    wanted = token_losses(text, game.rules)
    told = [t for t in range(100, scored - (K - 1)) if t not in unknown]
    assert np.array(spy.told[forgot + 1 :]) == pytest.approx(wanted[told]), "token 100 began round 21"
    counted = np.concatenate([part for entry in game.log for part in entry.losses])
    assert len(counted) == scored - (K - 1) - len(unknown), "regret counts all tokens"


def test_throughput_losses_use_measured_seconds():
    """Rounds of arms 1, 2 and 0 take 2, 4 and 1 seconds, plain steps one half. An unmeasured arm is assumed to be as
    cheap as the cheapest, or it might never be tried."""
    text = trace()
    wanted = token_losses(text, rules_for("hedgespec", GameRecipe(loss="length", depth=None), K))
    measured, spy = spied(**PLAIN, loss="throughput", step=0.5)
    for at, seconds in ((0, 2.0), (5, 4.0), (10, 1.0)):
        measured.round_finished(measured.choose(), Outcome(5, 4, seconds=seconds))
        measured.scored(text.gamma[:, at : at + 5], text.hit[:, at : at + 5])
    first, second, relative = [1, 1 / 4, 1], [1, 1 / 4, 1 / 8], [1 / 2, 1 / 4, 1 / 8]
    rates = np.array([first] * 2 + [second] * 7 + [relative] * 12)  # K - 1 vectors wait for the next round's tokens
    again = [at for at, one in enumerate(spy.told) if isinstance(one, str)]
    assert again == [2, 10], "losses are sent again when an arm is measured for the first time"
    fed = np.array([one for one in spy.told if not isinstance(one, str)])
    wanted_of = 1 - (1 - wanted[[0, 1, 0, 1, *range(2, 7), *range(7), *range(7, 12)]]) * rates
    assert fed == pytest.approx(wanted_of)
    rules = replace(
        rules_for("hedgespec", GameRecipe(depth=None, loss="throughput"), K), costs=(1.0, 2.0, 4.0), step=0.5
    )
    assert token_losses(text, rules) == pytest.approx(1 - (1 - wanted) * relative), "hindsight knows all costs"


def test_a_guess_ends_when_another_text_times_the_arm():
    """Texts of a batch share a clock. A text that has guessed the seconds of an arm kept the guess if another text was
    the first to play it, and went on with an arm that looked cheaper than it is."""
    text = trace()
    rules = replace(rules_for("hedgespec", GameRecipe(depth=None, drift=None, settled=None, **PLAIN), K), step=0.5)
    clock, spies = ArmClock.of(N), [Spy("losses"), Spy("losses")]
    one, other = (Game(spy, rules, ARMS, clock) for spy in spies)

    def play(game, at):
        game.round_finished(game.choose(), Outcome(5, 4, seconds=2.0))
        game.scored(text.gamma[:, at : at + 5], text.hit[:, at : at + 5])

    play(one, 0)  # arm 1
    other.choose()
    other.withdraw()
    play(other, 0)  # arm 2
    play(other, 5)  # arm 0: now the seconds of all arms are known
    play(one, 5)
    assert spies[0].told.count("forgot") == 1
    fed = spies[0].told[spies[0].told.index("forgot") + 1 :]
    lengths = token_losses(text, replace(rules, loss="length"))[: len(fed)]
    assert len(fed) == 7 and np.array(fed) == pytest.approx(1 - (1 - lengths) / 4)


def test_failures_raise_the_loss_of_an_arm():
    """Arm 1 raises in its only round and costs 1. Arm 2 raises in one of two rounds, which halves its gain."""
    game, spy = spied(**PLAIN)
    text = trace()
    for start, (arm, failed) in enumerate([(1, True), (2, False), (2, True), (0, False)]):
        game.choose()
        game.round_finished(arm, Outcome(1, 0, failed=failed))
        game.scored(text.gamma[:, start : start + 1], text.hit[:, start : start + 1])
    wanted = token_losses(text, game.rules)[0]
    assert np.array(spy.told[0]) == pytest.approx([wanted[0], 1, 1 - (1 - wanted[2]) / 2])


def test_a_failing_arm_is_scored_every_round_and_its_loss_rises():
    """Long after the warm-up an arm that drafted well for fifty rounds starts to raise in every round."""
    game, _ = spied(warmup_rounds=1, batch_rounds=100, loss="acceptance", tokens_per_update=1)
    for number in range(1, 55):
        game.choose()
        game.round_finished(0, Outcome(1, 0, failed=number > 50))
        count = game.due()
        assert bool(count) == (number == 1 or number > 50)
        game.scored(np.ones((N, count, K)), np.ones((N, count, K)))
    assert game.policy.told[-1] == pytest.approx([1 - (3 / 4) ** 4, 0, 0])


def test_a_failed_round_has_reward_zero():
    """A drafter that raises at once leaves a fast plain round; rewarded for that speed it would be played again."""
    for reward in ("tokens", "be", "bd", "throughput"):
        game, _ = spied("reward", step=1.0, reward=reward)
        assert told(game, committed=1, accepted=0, failed=True, overlap=np.zeros(0), seconds=1.0) == [(1, 0.0)]


@pytest.mark.parametrize("learns", ["reward", "losses"])
def test_a_game_without_end_keeps_no_rounds(learns):
    """A server's game used to hold every round of its life, with the losses of every token."""
    game, _ = spied(learns)
    text = trace(1, tokens=40)
    for _ in range(10):
        for at in range(0, 40, 2):
            game.choose()
            game.round_finished(0, Outcome(2, 1, overlap=np.zeros(1)))
            if count := game.due():
                game.scored(text.gamma[:, at + 2 - count : at + 2], text.hit[:, at + 2 - count : at + 2])
        game.ended()
    game.choose()
    game.withdraw()
    assert game.rounds == 200 and game.log == []
    assert sum(isinstance(one, Round) for one in gc.get_objects()) <= 1, "the last one"
