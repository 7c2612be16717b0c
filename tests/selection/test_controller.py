"""The `Selector` with real drafters: games, scores and sequences together."""

import itertools

import numpy as np
import pytest

from specctl.decoding.prompt_features import PromptClusters
from specctl.decoding.records import Label
from specctl.decoding.sampling import GREEDY
from specctl.drafters.lm.drafter import ChainShape, LMDrafter
from specctl.drafters.text.lookup import Lookup
from specctl.drafters.text.suffix import Suffix
from specctl.recipe import GameRecipe, PolicyRecipe
from specctl.selection import controller as controller_module
from specctl.selection.arms import Arm, plain_arm, taps_of
from specctl.selection.assembly import Decoding, make_selector
from specctl.selection.controller import LAST, ActiveText, Durations, PolicyInputs, Selector, Tally
from specctl.selection.feedback import Scorer
from specctl.selection.game.clock import ArmClock
from specctl.selection.game.game import Game
from specctl.selection.game.rules import ScoringSchedule, rules_for
from specctl.selection.policies import registry
from specctl.selection.policies.policy import Arms
from tests.lossless.drafters import own_weights
from tests.toys.decoding import decode


@pytest.fixture(scope="module")
def target(builtin_target):
    """The whole built-in target, which ends its texts by itself and has ten layers."""
    return builtin_target


DEPTH, NEW = 3, 24
GAME = GameRecipe(
    loss="length", depth=DEPTH, batch_growth=1.0, hybrid_rounds=1, warmup_rounds=2, batch_rounds=3, tokens_per_update=2
)


@pytest.fixture(scope="module")
def pool(target):
    return {
        "good": LMDrafter(own_weights(target, 0.0), target, ChainShape(DEPTH, 0.0, False)),
        "lookup": Lookup(DEPTH),
        "suffix": Suffix(depth=DEPTH, nodes=6, children=2),
    }


def selector(target, pool, algo, game=GAME, ends=False, log=None, seed=0, **options):
    arms = Arms(len(pool), DEPTH, seed)
    policy = registry.build(algo, arms, PolicyRecipe(**options))
    rules = rules_for(algo, game, DEPTH)
    bd = policy.learns == "reward" and rules.reward == "bd"
    scorer = Scorer(target, list(pool.values()), DEPTH) if policy.learns == "losses" else None

    def new_game(text):
        return Game(registry.build(algo, arms, PolicyRecipe(**options)), rules, arms)

    guarded = [Arm(name, drafter) for name, drafter in pool.items()]
    on_round = None if log is None else log.append
    return Selector(guarded, new_game, ArmClock.of(len(pool)), PolicyInputs(scorer, bd, ends), on_round)


def played(target, controller, prompts, keys):
    return decode(
        target,
        prompts,
        sampling=GREEDY,
        max_new_tokens=NEW,
        seeds=[0] * len(prompts),
        controller=controller,
        taps=controller.taps,
        labels=[Label(f"q{n}", "sql", key) for n, key in enumerate(keys)],
    )


def test_hedge_finds_the_good_drafter(target, pool, prompts):
    log = []
    controller = selector(target, pool, "hedgespec", log=log)
    found = [played(target, controller, [prompt], ["same"])[0] for prompt in prompts]
    assert controller.tally.pulls[0] == max(controller.tally.pulls.values())
    assert log[-1].weights[0] > 0.5
    assert sum(line.committed for line in log) == sum(one.decoded_tokens for one in found)
    assert sum(line.accepted for line in log) == sum(one.accepted for one in found)


def test_scoring_follows_the_schedule_of_the_game(target, pool, prompts):
    """Warm-up rounds are scored at once, then every third round. Without `ends` the last tokens of a text stay
    unscored."""
    log = []
    controller = selector(target, pool, "hedgespec", log=log)
    played(target, controller, prompts[1:2], ["a"])
    scored = [line.scored for line in log]
    assert scored[0] == log[0].committed and scored[1] == log[1].committed
    assert scored[2:4] == [0, 0]
    if len(log) > 4:
        assert scored[4] == sum(line.committed for line in log[2:5])


def test_with_ends_every_token_is_scored(target, pool, prompts):
    log = []
    controller = selector(target, pool, "hedgespec", ends=True, log=log)
    found = [played(target, controller, [prompt], ["session"])[0] for prompt in prompts]
    assert controller.tally.scored == sum(one.decoded_tokens for one in found) == sum(line.scored for line in log)


def test_the_last_round_of_a_text_counts_in_the_schedule(target, pool, prompts):
    """A replay counts it, too. Otherwise a scoring that was due in that round would be repeated in the first round of
    the next text."""
    log = []
    game = GAME.model_copy(update={"warmup_rounds": 1, "drift": None})
    controller = selector(target, pool, "hedgespec", game, ends=True, log=log)
    for prompt in prompts:
        played(target, controller, [prompt], ["session"])
    schedule, due = ScoringSchedule(rules_for("hedgespec", game, DEPTH)), []
    for _ in log:
        schedule.rounds += 1
        due.append(schedule.due())
    ends = [following.round == 1 for following in log[1:]] + [True]
    assert any(end and asked for end, asked in zip(ends[:-1], due, strict=False)), (
        "the test needs a scoring due in a last round"
    )
    assert [line.scored > 0 for line in log] == [end or asked for end, asked in zip(ends, due, strict=True)]


def test_a_new_key_starts_a_new_game(target, pool, prompts):
    log = []
    controller = selector(target, pool, "hedgespec", log=log)
    played(target, controller, prompts[:1], ["one"])
    first = list(log)
    log.clear()
    played(target, controller, prompts[:1], ["two"])
    assert log[0].weights == first[0].weights == [pytest.approx(1 / 3, abs=1e-4)] * 3
    assert [line.arm for line in log] == [line.arm for line in first]


def test_each_sequence_of_a_batch_has_its_own_game(target, pool, prompts):
    """If rewards were credited to the arm of another sequence, the logged rounds would not add up."""
    log = []
    controller = selector(target, pool, "random", log=log)
    found = played(target, controller, prompts, ["a", "b", "c"])
    for n, one in enumerate(found):
        mine = [line for line in log if line.query == f"q{n}"]
        assert len(mine) == one.target_passes
        assert sum(line.committed for line in mine) == one.decoded_tokens
        assert [line.round for line in mine] == list(range(1, len(mine) + 1))
    plain = decode(target, prompts, sampling=GREEDY, max_new_tokens=NEW, seeds=[0] * 3)
    assert [one.output_ids for one in found] == [one.output_ids for one in plain]


def test_speedups_are_reported_only_with_a_timed_plain_round(target, pool, prompts):
    """A ratio to an estimated plain step would certify nothing."""
    told = []
    controller = selector(target, pool, "random")
    controller.on_text = told.append
    played(target, controller, prompts[:2], ["a", "b"])
    assert told == []
    controller.arms[2] = plain_arm()
    played(target, controller, prompts[:1], ["c"])
    assert len(told) == (controller.clock.n[2] > 0)
    controller.clock.n[2], controller.clock.mean[2] = 4, 0.5
    played(target, controller, prompts[:1], ["d"])
    assert told[-1] > 0
    text = ActiveText(Label("q"), controller.new_game(None), 0, seconds=6.0, tokens=4)
    assert controller.relative_seconds(text) == 3.0


@pytest.mark.parametrize("algo", ["cgp-ucb", "hedgespec"])
def test_the_seconds_of_a_text_include_reading_its_prompt_and_scoring(target, prompts, algo, monkeypatch):
    """Reading the prompt was left out, so the certified speed was too high. Scoring was timed with other processes'
    work, and rounds without it."""
    ticks, told = itertools.count(0, 1000), []
    monkeypatch.setattr(controller_module, "work_clock", lambda device: lambda: next(ticks))
    chooser = make_selector(
        target,
        [plain_arm(), Arm("lookup", Lookup(DEPTH))],
        algo,
        GameRecipe(),
        lambda arms, label: registry.build(algo, arms, PolicyRecipe()),
        Decoding(step=lambda: 0.01, seed=0, on_round=None),
    )
    chooser.on_text = told.append
    (text,) = played(target, chooser, prompts[:1], [None])
    seconds = told[0] * text.decoded_tokens * chooser.clock.mean[0]
    assert seconds // 1000 == (chooser.tally.score_s.count if algo == "hedgespec" else 1)


def test_two_concurrent_texts_of_one_game_are_refused(target, pool, prompts):
    with pytest.raises(ValueError, match="one after the other"):
        played(target, selector(target, pool, "random"), prompts[:2], ["k", "k"])


def test_block_divergence_is_computed_for_the_played_arm(target, pool, prompts):
    """The drafter with the target's own weights has overlap 1 at every drafted position, at any draft length."""
    log = []
    controller = selector(target, pool, "metasd-ucb", log=log)
    played(target, controller, prompts[1:2], ["a"])
    own = [line for line in log if line.arm == "good" and line.learnt is not None]
    assert own and all(line.learnt == pytest.approx(1 if line.drafted else 1 - 1 / DEPTH, abs=1e-3) for line in own)


def test_unusable_scores_do_not_stop_learning(target, pool, prompts):
    """A drafter without finite scores gets the largest loss; the others are still told apart."""
    log = []
    controller = selector(target, {**pool, "broken": Lookup(DEPTH)}, "hedgespec", log=log, ends=True)
    scoring = controller.scorer.score

    def poisoned(state, counts):
        found = scoring(state, counts)
        for one in found:
            one.gamma[3] = np.nan
        return found

    controller.scorer.score = poisoned
    for prompt in prompts:
        played(target, controller, [prompt], ["same"])
    assert controller.tally.dropped > 0
    assert log[-1].weights[0] > 0.5 and log[-1].weights[3] < 0.1


@pytest.mark.parametrize("texts", [1, 12])
def test_losses_count_only_the_nodes_an_arm_may_draft(target, pool, prompts, texts):
    """Two arms of one drafter have equal scores, but one of them may draft a single node. Twelve sequences share the
    rows of a CPU, which leaves one node to either arm. K is the longest draft of any arm."""
    log = []
    arms = [Arm("one", pool["good"], 1), Arm("whole", pool["good"])]
    options = dict(step=lambda: 1.0, seed=0, within_query=True, on_round=log.append)

    def new_policy(own, text):
        return registry.build("hedgespec", own, PolicyRecipe())

    recipe = GameRecipe(loss="length", depth=None, hybrid_rounds=0, warmup_rounds=2)
    controller = make_selector(target, arms, "hedgespec", recipe, new_policy, Decoding(**options))
    played(target, controller, (prompts * 4)[:texts], [f"{n}" for n in range(texts)])
    ended = [line.learnt for line in log if line.learnt][:-texts]
    cut = [one > whole + 0.1 for one, whole in ended]
    assert len(cut) > 1 and (any(cut) if texts == 1 else not any(cut))
    cut = make_selector(target, arms[:1], "ucbspec", GameRecipe(), new_policy, Decoding(**options))
    label = Label("q")
    assert (controller.new_game(label).rules.depth, cut.new_game(label).rules.depth) == (DEPTH, 1)


def test_hybrids_do_not_use_the_training_clusters_of_their_heads(target, pool):
    told = PromptClusters.of([(np.ones(4), 0.1)])
    alone = Arm("head", pool["good"], trained_on=told), Arm("lookup", pool["lookup"])
    beside = Arm("head", Suffix(), scored=pool["good"], trained_on=told), alone[1]
    options = dict(step=lambda: 1.0, seed=0, within_query=True, on_round=None)
    for arms, known in ((alone, True), (beside, False)):
        memory = make_selector(target, arms, "cgp-ucb", GameRecipe(), lambda *_: None, Decoding(**options)).memory
        assert (memory.belief(np.ones(4)) is not None) == known


class Unscorable(Lookup):
    def score(self, state, spans, depths=1):
        raise RuntimeError("no such row")


def test_a_drafter_that_cannot_be_scored_gets_no_weight(target, pool, prompts, capsys):
    """It drafts, but its quality is unknown. The run continues and learns about the other drafters."""
    log = []
    controller = selector(target, {**pool, "broken": Unscorable(DEPTH)}, "hedgespec", log=log, ends=True)
    found = [played(target, controller, [prompt], ["same"])[0] for prompt in prompts]
    plain = decode(target, prompts, sampling=GREEDY, max_new_tokens=NEW, seeds=[0] * len(prompts))
    assert [one.output_ids for one in found] == [one.output_ids for one in plain]
    assert controller.failures == controller.tally.score_s.count > 1
    assert capsys.readouterr().err.count("no such row") == 1
    assert log[-1].weights[0] > 0.5 and log[-1].weights[3] < 0.1
    controller.forget()
    assert controller.failures == 0


def test_taps_are_the_sorted_union_of_all_drafters():
    class Tapped(Lookup):
        def __init__(self, taps):
            super().__init__()
            self.taps = taps

    drafters = [Tapped((5, 2)), Lookup(), Tapped((7, 2))]
    assert taps_of([Arm("", drafter) for drafter in drafters]) == (2, 5, 7)


def test_a_stream_without_end_keeps_few_durations():
    """The tally had a list with a number for every round: a server that chose for weeks never freed them."""
    tally = Tally()
    kinds = (tally.decide_us, tally.score_s, tally.switch_s)
    for durations in kinds:
        assert durations.mean is None and durations.median is None
        for round in range(3 * LAST):
            durations.add(float(round))
        assert (durations.count, durations.total) == (3 * LAST, sum(range(3 * LAST)))
        assert durations.mean == (3 * LAST - 1) / 2 and durations.median == 2.5 * LAST - 0.5
        assert len(durations.last) == LAST
    assert [value for value in vars(tally).values() if isinstance(value, Durations)] == [*kinds]
    assert not any(isinstance(value, list) for value in vars(tally).values())
