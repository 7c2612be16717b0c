"""Rewards and losses: live decoding and replay agree, and a failing drafter earns none."""

import time

import numpy as np
import pytest

from specctl.decoding import host_runner
from specctl.decoding.records import Label
from specctl.decoding.sampling import GREEDY
from specctl.drafters.eagle3 import drafter as eagle3
from specctl.drafters.lm.drafter import ChainShape, LMDrafter
from specctl.drafters.text.lookup import Lookup
from specctl.drafters.text.suffix import Suffix
from specctl.drafters.tree import TreeShape
from specctl.lab.recorded import recorder, replay
from specctl.lab.recorded.hindsight import Hindsight
from specctl.lab.recorded.recorder import Query
from specctl.recipe import GameRecipe, PolicyRecipe, SamplingRecipe
from specctl.selection import assembly
from specctl.selection.arms import Arm
from specctl.selection.game import game
from specctl.selection.game.clock import ArmClock, TextRate
from specctl.selection.game.rewards import Outcome, block_divergence, block_efficiency, throughput, tokens
from specctl.selection.game.rules import rules_for
from specctl.selection.policies import registry
from specctl.selection.policies.policy import Arms
from tests.lossless.drafters import own_weights
from tests.selection.test_feedback import head
from tests.toys.decoding import decode

NEW, STEP, DEPTH = 12, 1.0, 5


def test_rewards_by_hand():
    assert (tokens(1, 4), tokens(3, 4), tokens(5, 4)) == (0, 0.5, 1)
    assert block_efficiency(3, 4) == 0.75
    assert block_divergence(np.array([1.0, 0.5, 0.1, 0.2, 0.9]), 4) == pytest.approx(0.45), "MetaSD, Eq. 4: of N_max"
    assert block_divergence(np.array([1.0, 0.5]), 4, 0.3) == pytest.approx((1.5 + 2 * 0.3) / 4), "2 left out"
    assert (block_divergence(np.array([0.6]), 4), block_divergence(np.zeros(0), 4)) == (pytest.approx(0.6), 0)
    assert throughput(3, 0.02, 0.01, 5) == pytest.approx(3 / 2 / 6), "1.5 × plain of at most 6 ×"
    assert throughput(6, 0.01, 0.01, 5) == throughput(6, 0.001, 0.01, 5) == 1


@pytest.mark.parametrize("stop_below", [0.0, pytest.param(0.05, marks=pytest.mark.slow), 0.15])
def test_the_mean_block_divergence_is_alpha_at_any_draft_length(stop_below):
    """MetaSD, Lemma 6: E[BD] = α. These drafts end at an improbable token, where overlaps are low, too. Divided by the
    longest draft, an unsure arm of α = .70 had .42 and .25, less than a confident arm of .60; the mean over drafted
    positions has .53. Over 20,000 rounds 5 standard errors are 0.015."""
    draw = np.random.default_rng(0)
    K, rounds = 8, 20000
    found = {}
    for alpha, sure in ((0.7, 0.5), (0.6, 1.0)):
        spy = Set(0, 1)
        rules = rules_for("metasd-ucb", GameRecipe(reward="bd"), K)
        played = game.Game(spy, rules, Arms(1, K, 0))
        for _ in range(rounds):
            easy = draw.random(K) < sure
            overlap = np.where(easy, alpha + (1 - sure) * 0.5, alpha - sure * 0.5) if sure < 1 else np.full(K, alpha)
            own = np.cumprod(np.where(easy, 0.9, 0.2))
            drafted = 1 + int((own >= stop_below).cumprod()[:-1].sum())
            played.choose()
            played.round_finished(0, Outcome(1, 0, overlap=overlap[:drafted]))
        found[alpha] = np.mean(spy.told)
    assert found == {alpha: pytest.approx(alpha, abs=0.015) for alpha in found}


def test_the_surplus_is_relative_to_the_rate_of_the_text():
    """Relative to the stream's 2 tokens/s, arms that commit much would win in a text of 6 tokens/s. The next text
    begins with the stream's rate."""
    K, clock, spy = 8, ArmClock.of(1), Set(0, 1)
    for _ in range(2000):
        clock.record(0, 1.0, 2.0)
    played = game.Game(spy, rules_for("metasd-ucb", GameRecipe(reward="surplus"), K), Arms(1, K, 0), clock)
    for _ in range(2):
        text = TextRate()
        for _ in range(20):
            expected = 0.5 + (6 - text.rate(clock.rate)) / (2 * (K + 1))
            played.choose()
            played.round_finished(0, Outcome(6, 5, seconds=1.0))
            text.record(1.0, 6)
            assert spy.told[-1] == pytest.approx(expected)
        played.ended()
    assert spy.told[19] < 0.6 and spy.told[0] > 0.7 and spy.told[20] > 0.7


@pytest.fixture
def ticking(monkeypatch):
    """A fake clock that only drafters and the target move: a `Slow` draft takes its `seconds`, a target step takes
    STEP."""
    now = [0.0]
    for clock in ("perf_counter", "thread_time"):
        monkeypatch.setattr(time, clock, lambda: now[0])

    def verified(*asked):
        now[0] += STEP
        return verify(*asked)

    verify = host_runner.verify
    monkeypatch.setattr(host_runner, "verify", verified)
    monkeypatch.setattr(recorder, "step_seconds", lambda target, rows: [STEP] * len(rows))
    return now


def slow(drafter, seconds, now, fails=lambda ids: False):
    """`drafter` with drafts that take `seconds` of the fake clock, and that raises if `fails(ids)`."""

    class Slow(type(drafter)):
        def __init__(self):
            vars(self).update(vars(drafter))

        def propose(self, state, budget):
            now[0] += seconds
            if fails(state.rows[0].ids):
                raise RuntimeError("no such row")
            return super().propose(state, budget)

    return Slow()


def members(target):
    """Imperfect drafters of every kind of q̄."""
    return {
        "lm": LMDrafter(own_weights(target, 0.05), target, ChainShape(4, 0.0, False)),
        "worse": LMDrafter(own_weights(target, 0.3), target, ChainShape(3, 0.2, False)),
        "head": eagle3.Eagle3Drafter(head(target, 1, 3000), target, TreeShape(4, 2, 9, 3, 0.0)),
        "lookup": Lookup(3),
        "suffix": Suffix(depth=DEPTH, nodes=8, children=3),
        "failing": LMDrafter(own_weights(target, 0.0), target, ChainShape(3, 0.0, False)),
    }


def games_of(monkeypatch, module):
    """The list of games that `module` makes from now on."""
    found = []

    class Kept(game.Game):
        def __init__(self, *parts):
            super().__init__(*parts)
            found.append(self)

    monkeypatch.setattr(module, "Game", Kept)
    return found


BANDITS = [name for name in registry.NAMES if registry.learns(name) == "reward"]
LEARNERS = [name for name in registry.NAMES if registry.learns(name) == "losses"]


@pytest.mark.usefixtures("kept_rounds")
def test_rewards_and_losses_of_a_replay_equal_live_decoding(target, prompts, ticking, monkeypatch):
    """Round by round, for every policy, reward and loss, with arms that miss, fail, and cost more or less time."""
    fails = {"failing": lambda ids: len(ids) % 3 == 0}
    pool = {
        name: slow(drafter, 0.25 * n, ticking, fails.get(name, lambda ids: False))
        for n, (name, drafter) in enumerate(members(target).items())
    }
    queries = [Query(f"q{n}", "d", ids, NEW, 0) for n, ids in enumerate(prompts[:2])]
    arms = [Arm(name, drafter) for name, drafter in pool.items()]
    table = recorder.record(target, arms, queries, SamplingRecipe(), DEPTH)
    assert table.greedy
    missed = [(trace.overlap[:, :, 1:] > 0) & (trace.accepted[..., None] == 0) for trace in table.traces]
    assert sum(part.any(axis=(1, 2)).sum() for part in missed) > 4, "overlaps after rejected tokens"
    assert any((trace.drafted < 0).any() for trace in table.traces)
    hindsight = Hindsight(table, reset="stream")
    kinds = [(BANDITS[0], {"reward": reward}) for reward in ("bd", "be", "tokens", "throughput")]
    kinds += [(name, {"reward": "bd"}) for name in BANDITS[1:]]
    kinds += [(name, {"loss": "throughput"}) for name in LEARNERS]
    kinds += [("hedgespec", {"estimator": "realised", "depth": 4}), ("hedgespec", {"unit": "chunk"})]
    for name, options in kinds:
        recipe = GameRecipe(score_ends=True, **options)
        theirs, mine = (games_of(monkeypatch, module) for module in (replay, assembly))
        replay.replay(name, hindsight, PolicyRecipe(), recipe)
        controller = assembly.make_selector(
            target,
            [Arm(arm, drafter) for arm, drafter in pool.items()],
            name,
            recipe,
            lambda arms, text, name=name: registry.build(name, arms, PolicyRecipe()),
            assembly.Decoding(step=lambda: STEP, seed=0, within_query=False, on_round=lambda line: None, greedy=True),
        )
        for query in queries:
            options = dict(sampling=GREEDY, max_new_tokens=NEW, seeds=[0], taps=controller.taps)
            decode(target, [query.ids], controller=controller, labels=[Label(query.id, "d", "all")], **options)
        (one,), (other,) = mine, theirs
        assert [entry.arm for entry in one.log] == [entry.arm for entry in other.log], (name, options)
        assert [entry.committed for entry in one.log] == [entry.committed for entry in other.log]
        for live, again in zip(one.log, other.log, strict=True):
            assert live.reward == (again.reward and pytest.approx(again.reward, abs=1e-4)), (name, recipe)
        for live, again in zip(one.log[:-1], other.log[:-1], strict=True):  # live, the last text is not known
            np.testing.assert_allclose(sum_of(live), sum_of(again), atol=1e-3)


def sum_of(entry):
    """The sum of a round's losses, per arm."""
    return sum((part.sum(axis=0) for part in entry.losses), np.zeros(6))


@pytest.mark.parametrize(
    "name",
    [
        *("hedgespec", "metasd-ucb", "exp3spec"),  # full information, an index policy, and one that explores
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("ftl", "ucbspec")),
    ],
)
def test_a_drafter_that_always_raises_is_abandoned(target, prompts, name):
    """Its scores are the best: judged by these alone, full information would always play it. After ten rounds only
    policies that explore play it, and no more often than by chance."""

    class Broken(LMDrafter):
        def propose(self, state, budget):
            raise RuntimeError("no such row")

    pool = members(target)
    broken = Broken.__new__(Broken)
    vars(broken).update(vars(pool["failing"]))
    arms = [Arm("broken", broken), Arm("lm", pool["lm"]), Arm("worse", pool["worse"])]
    played = []
    controller = assembly.make_selector(
        target,
        arms,
        name,
        GameRecipe(),
        lambda arms, text: registry.build(name, arms, PolicyRecipe()),
        assembly.Decoding(step=lambda: STEP, seed=1, within_query=False, on_round=lambda line: played.append(line.arm)),
    )
    for n, ids in enumerate(prompts):
        options = dict(sampling=GREEDY, max_new_tokens=40, seeds=[0], taps=(), labels=[Label(f"q{n}", "d", "all")])
        decode(target, [ids], controller=controller, **options)
    late = played[10:]
    explores = name in ("ucbspec", "exp3spec")
    assert "broken" in played[:10] and len(late) > 8
    assert late.count("broken") <= 0.4 * len(late) * explores


class Set:
    """Plays one arm and records its rewards."""

    learns, scale = "reward", "unit"

    def __init__(self, arm, count):
        self.arm, self.count, self.told = arm, count, []

    def weights(self):
        return [1 / self.count] * self.count

    def choose(self):
        return self.arm

    def reward(self, arm, reward):
        self.told.append(reward)


def test_the_seconds_of_a_draft_are_shared_by_the_texts_of_its_arm(target, prompts, ticking):
    """Two texts share a draft of 6 s, one has a draft of 1 s, and all three share the step. If all texts shared all
    seconds equally, a slow arm could not be told from a fast one."""
    arms = [Arm("slow", slow(Lookup(3), 6.0, ticking)), Arm("fast", slow(Suffix(3, 6, 2), 1.0, ticking))]
    policies = {"a": Set(0, 2), "b": Set(1, 2), "c": Set(0, 2)}
    recipe = GameRecipe(reward="throughput")
    options = dict(step=lambda: STEP, seed=0, within_query=True)
    rounds = []
    controller = assembly.make_selector(
        target,
        arms,
        "metasd-ucb",
        recipe,
        lambda own, text: policies[text.key],
        assembly.Decoding(on_round=rounds.append, **options),
    )
    asked = dict(sampling=GREEDY, max_new_tokens=4, seeds=[0] * 3, taps=(), labels=[Label(q, "d", q) for q in policies])
    decode(target, prompts, controller=controller, **asked)
    first = {line.query: line for line in rounds[:3]}
    K = 3
    for key, seconds in {"a": 6 / 2 + STEP / 3, "b": 1 + STEP / 3, "c": 6 / 2 + STEP / 3}.items():
        assert first[key].learnt == pytest.approx(throughput(first[key].committed, seconds, STEP, K)), key


def test_the_seconds_of_catching_up_are_not_charged_to_the_arm(target, prompts, ticking):
    """Also, `forget` removes times measured during the warm-up."""

    class Behind(Lookup):
        def advance(self, state):
            ticking[0] += 100.0
            super().advance(state)

        def propose(self, state, budget):
            drafted = ticking[0]
            found = super().propose(state, budget)
            ticking[0] = drafted + 1.0  # reading within a round costs nothing here
            return found

    arms = [Arm("lookup", slow(Lookup(3), 1.0, ticking)), Arm("behind", Behind(3))]
    controller = assembly.make_selector(
        target,
        arms,
        "random",
        GameRecipe(loss="throughput"),
        lambda own, text: registry.build("random", own, PolicyRecipe()),
        assembly.Decoding(step=lambda: STEP, seed=3, within_query=True, on_round=lambda line: None),
    )
    seen = []
    new_game = controller.new_game

    def watched(label):
        game = new_game(label)
        played = game.round_finished
        game.round_finished = lambda arm, outcome: (seen.append(outcome.seconds), played(arm, outcome))[1]
        return game

    controller.new_game = watched
    decode(target, prompts[:1], sampling=GREEDY, max_new_tokens=8, seeds=[0], controller=controller, taps=())
    assert controller.tally.switches > 1 and seen == [pytest.approx(1.0 + STEP)] * len(seen)
    controller.clock.record(0, 99.0)
    controller.forget()
    assert controller.clock.costs() == [1.0, 1.0]
