"""Device rounds under a selector: the texts equal the host's, and every round is observed once, possibly late. Runs
without a GPU, with the drafters of tests/decoding/test_device_round.py."""

import itertools
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch

from specctl.decoding.controllers import PLAIN, PerSequence
from specctl.decoding.device import graphs
from specctl.decoding.device import rounds as device_round
from specctl.decoding.records import Label
from specctl.decoding.sampling import GREEDY
from specctl.drafters.text.lookup import Lookup
from specctl.recipe import GameRecipe, PolicyRecipe
from specctl.selection.arms import Arm
from specctl.selection.assembly import Decoding, make_batch_selector, make_selector
from specctl.selection.batched import BatchSelector
from specctl.selection.controller import Selector
from specctl.selection.feedback import Scorer, table
from specctl.selection.game.game import Game
from specctl.selection.policies import registry
from specctl.selection.policies.contextual import ContextualUcb
from tests.decoding.test_device_round import (  # noqa: F401 - fixtures are asked for by name
    EACH,
    MIXED,
    PROMPTS,
    NoHost,
    decode,
    drafters,
    graphs_on,
    loaded,
    on_device,
    tiny,
)
from tests.toys.decoding import engine_for

POOL = [*EACH, "eagle3 chain", "eagle"]
BANDITS = ["cgp-ucb", "ucbspec", "exp3spec", "metasd-ucb", "metasd-sh", "random"]


@pytest.fixture
def pool(drafters):  # noqa: F811
    """Arms by name. Rewards are accepted tokens, so that results do not depend on a clock."""
    return lambda names: [Arm(name, drafters(name) or PLAIN) for name in names]


def selector(target, arms, algo, log=None, reward="be", together=False, **options):
    log = [] if log is None else log
    how = dict(step=lambda: 0.01, seed=0, on_round=log.append)
    new_policy = lambda own, text: registry.build(algo, own, PolicyRecipe(**options))  # noqa: E731
    if together:
        return make_batch_selector(arms, algo, GameRecipe(reward=reward), new_policy, Decoding(**how))
    return make_selector(target, arms, algo, GameRecipe(reward=reward), new_policy, Decoding(within_query=True, **how))


def played(target, controller, count=5, **more):
    labels = [Label(f"q{n}") for n in range(count)]
    options = dict(sampling=MIXED) | ({} if "engine" in more else {"controller": controller, "slots": 2}) | more
    return decode(target, PROMPTS[:count], labels=labels, **options)


def lines(log):
    """Log lines sorted by text and round, without measured times."""
    return sorted((replace(line, decide_us=0.0) for line in log), key=lambda line: (line.query, line.round))


@pytest.mark.parametrize(
    ("name", "sampling", "slots"),
    [
        *((name, MIXED, 2) for name in ("plain", "medusa tree", "peagle tree", "suffix", "lm")),
        ("eagle3 tree", GREEDY, 1),
    ],
)
def test_a_fixed_arm_has_the_hosts_texts_counts_and_log(tiny, pool, on_device, name, sampling, slots):  # noqa: F811
    """The idle arms have read nothing."""
    host, device = [], []
    names = [name, *(other for other in ("plain", "eagle3 tree") if other != name)]
    how = dict(sampling=sampling, slots=slots)
    expected = played(tiny, selector(tiny, pool(names), "fixed", host, arm=0), **how)
    on_device()
    assert played(tiny, selector(tiny, pool(names), "fixed", device, arm=0), **how) == expected
    assert lines(device) == lines(host) and len(host) == sum(one.target_passes for one in expected)


@pytest.mark.parametrize(
    ("algo", "together", "slots"),
    [
        *((algo, False, 1) for algo in BANDITS),
        *((algo, True, 2) for algo in BANDITS if algo != "cgp-ucb"),
        ("ucbspec", False, 2),
        ("ucbspec", True, 1),
    ],
)
def test_switching_arms_on_the_device_keeps_the_text(tiny, pool, on_device, algo, slots, together):  # noqa: F811
    """Arms of every kind take turns, so each continues tokens that other arms committed. Every round counts as one
    pull; rounds chosen after the end of a text do not count."""
    texts = [one.output_ids for one in decode(tiny, sampling=MIXED)]
    log = []
    controller = selector(tiny, pool(POOL), algo, log, together=together)
    on_device()
    found = played(tiny, controller, slots=slots)
    assert [one.output_ids for one in found] == texts
    assert len(log) == sum(controller.tally.pulls.values()) and controller.tally.switches > 0
    assert sum(line.committed for line in log) == sum(one.decoded_tokens for one in found)
    assert sum(line.accepted for line in log) == sum(one.accepted for one in found)
    if together:
        assert sum(game.rounds for game in controller.games.values()) == len(log) and not controller._chosen
    else:
        assert Counter(line.query for line in log) == Counter({f"q{one.index}": one.target_passes for one in found})


class Curious(ContextualUcb):
    """Records choices and rewards, and plays a given script of arms."""

    script: ClassVar[list[int]] = []

    def __init__(self, arms, options):
        super().__init__(arms, options)
        self.story = []

    def choose(self):
        arm = self.script[sum(word == "chose" for word, *_ in self.story) % len(self.script)]
        self.story.append(("chose", arm))
        return arm

    def reward(self, arm, reward):
        self.story.append(("heard", arm, reward))
        super().reward(arm, reward)


@pytest.fixture
def stories(tiny, pool, monkeypatch):  # noqa: F811
    """`stories(script, **options)`: run a policy with this script; per text its choices and rewards, in order."""

    def run(script, names=("plain", "eagle3 tree", "lm"), **more):
        log, policies = [], {}
        monkeypatch.setattr(Curious, "script", list(script))
        controller = selector(tiny, pool(names), "cgp-ucb", log)
        new_game = controller.new_game

        def watched(label):
            game = new_game(label)
            game.policy = policies[label.query] = Curious(game.arms, PolicyRecipe())
            return game

        controller.new_game, controller.memory = watched, None
        found = played(tiny, controller, **more)
        return controller, found, log, {query: policy.story for query, policy in policies.items()}

    return run


@pytest.mark.parametrize("script", [[0], [1], [0, 0, 1, 1, 1, 2]])
@pytest.mark.parametrize("slots", [1, 3])
def test_rewards_arrive_once_and_in_the_order_of_choices(stories, on_device, script, slots):  # noqa: F811
    """One round late, except for an arm's first round. Rounds after the end of a text give no reward."""
    host_controller, host, host_log, _ = stories(script, slots=slots)
    on_device()
    controller, found, log, told = stories(script, slots=slots)
    assert found == host and lines(log) == lines(host_log)
    assert controller.tally.pulls == host_controller.tally.pulls
    assert sum(controller.tally.pulls.values()) == sum(one.target_passes for one in found)
    late = void = 0
    for one in found:
        story = told.get(f"q{one.index}", [])
        chosen = [arm for word, arm, *_ in story if word == "chose"]
        heard = [arm for word, arm, *_ in story if word == "heard"]
        cut = one.target_passes - len(heard)  # a round cut off at the end gives no reward
        assert cut in (0, 1) and heard == chosen[: len(heard)]
        void += len(chosen) - one.target_passes
        rewards = [line.learnt for line in log if line.query == f"q{one.index}" and line.learnt is not None]
        assert rewards == [reward for word, *rest in story if word == "heard" for reward in rest[1:]]
        for before, after in itertools.pairwise(story):
            late += before[0] == after[0] == "chose"
        seen = set()
        for place, (word, arm, *_) in enumerate(story):
            if word == "heard":
                seen.add(arm)
            elif arm not in seen and place + 1 < len(story):
                assert story[place + 1][0] == "heard", "the selector waits for the first round of an arm"
    assert late and void
    assert not controller.plays


@pytest.mark.usefixtures("kept_rounds")
def test_a_session_observes_all_rounds_of_a_text_before_the_next(tiny, pool, on_device):  # noqa: F811
    """A late round of the previous text must not be credited to the next text of the same game."""
    on_device()
    log = []
    controller = selector(tiny, pool(("plain", "eagle3 chain")), "ucbspec", log)
    labels = [Label(f"q{n}", key="session") for n in range(5)]
    how = dict(controller=controller, taps=controller.taps, labels=labels, sampling=MIXED, slots=1)
    found = decode(tiny, PROMPTS, **how)
    (game,) = controller.games.values()
    assert game.rounds == len(game.log) == len(log) == sum(one.target_passes for one in found)
    assert [entry.committed for entry in game.log] == [line.committed for line in log]


def test_the_host_runs_rounds_with_different_arms(tiny, pool, on_device, stories, monkeypatch):  # noqa: F811
    """Rounds return to the device when all sequences of the batch have the same arm."""
    kinds = []
    advance = device_round.DeviceRounds.play

    def watched(self, drafter):
        ran = advance(self, drafter)
        kinds.append((isinstance(drafter, PerSequence), ran))
        return ran

    monkeypatch.setattr(device_round.DeviceRounds, "play", watched)
    on_device()
    texts = [one.output_ids for one in decode(tiny, sampling=MIXED)]
    kinds.clear()
    controller = selector(tiny, pool(("plain", "eagle3 tree")), "random")
    found = played(tiny, controller, slots=2)
    assert [one.output_ids for one in found] == texts
    assert {(True, False), (False, True)} <= set(kinds)
    assert (True, True) not in kinds
    assert found[-1].rounds > found[-1].ahead > 0


class HostLookup(Lookup):
    """A drafter without device rounds."""

    fixed_shape = False

    def on_device(self, state, budget):
        return None


def test_the_host_runs_only_the_arm_without_device_rounds(tiny, pool, on_device):  # noqa: F811
    """The other arms continue on the device after tokens committed by host rounds."""
    on_device()
    log = []
    arms = [*pool(("eagle3 tree", "lm")), Arm("lookup", HostLookup(3))]
    controller = selector(tiny, arms, "random", log)
    found = played(tiny, controller, slots=1)
    assert [one.output_ids for one in found] == [one.output_ids for one in decode(tiny, sampling=MIXED)]
    hosted = sum(line.arm == "lookup" for line in log)
    assert found[-1].rounds - found[-1].ahead == hosted > 0 and found[-1].ahead > 0


def test_arms_of_one_drafter_share_its_memory(tiny, drafters, on_device):  # noqa: F811
    """Each arm drafts another number of nodes, on keys and values that another arm wrote."""
    on_device()
    head = drafters("eagle3 tree")
    arms = [Arm("all", head), Arm("×4", head, 4), Arm("×1", head, 1)]
    log = []
    found = played(tiny, selector(tiny, arms, "random", log), slots=1)
    assert [one.output_ids for one in found] == [one.output_ids for one in decode(tiny, sampling=MIXED)]
    assert max(line.drafted for line in log if line.arm == "×1") == 1
    alone = played(tiny, selector(tiny, arms[1:2], "fixed", arm=0), slots=1)
    assert sum(one.accepted for one in alone) > 0


@pytest.mark.parametrize(("sampling", "together"), [(MIXED, False), (GREEDY, True)], ids=["text", "batch"])
def test_a_round_of_every_kind_of_arm_can_be_captured(tiny, pool, monkeypatch, sampling, together):  # noqa: F811
    """A device round needs no host synchronization, after an arm of another kind. The arms alone are tested in
    tests/decoding/test_device_round.py."""
    arms = pool(("plain", "eagle3 tree", "dflash with a Markov head", "suffix", "lm"))
    controller = selector(tiny, arms, "ucbspec", together=together)
    taps = tuple(range(tiny.num_layers + 1))
    rounds = loaded(tiny, None, sampling, monkeypatch, controller=controller, taps=taps, slots=1 + together)
    for arm in arms:
        with torch.inference_mode():
            rounds._hand_back()
            assert rounds.load(arm)
        with torch.inference_mode(), NoHost(monkeypatch):
            rounds.round(rounds.state.capacity)
    assert len(rounds.tracks) == len(arms)


def test_each_arm_is_captured_once_for_all_texts(tiny, pool, graphs_on, monkeypatch):  # noqa: F811
    """Each arm gets its graph after a few rounds, even if other arms run in between."""
    monkeypatch.setattr(graphs, "WARM_UP", 1)
    monkeypatch.setenv("SPECCTL_GRAPHS", "0")
    texts = [one.output_ids for one in decode(tiny, sampling=MIXED, max_new_tokens=16)]
    monkeypatch.delenv("SPECCTL_GRAPHS")
    captured = graphs_on()
    controller = selector(tiny, pool(("eagle3 chain", "eagle3 tree", "plain")), "metasd-sh", period=2)
    engine = engine_for(tiny, controller=controller, slots=1)
    for _ in range(2):
        before = len(captured)
        found = played(tiny, controller, engine=engine, max_new_tokens=16)
        assert [one.output_ids for one in found] == texts
    assert before == 3 == len(captured)


def test_a_failed_capture_of_one_arm_keeps_the_graphs_of_the_others(tiny, pool, graphs_on, monkeypatch):  # noqa: F811
    texts = [one.output_ids for one in decode(tiny, sampling=MIXED)]
    monkeypatch.setattr(graphs, "WARM_UP", 1)
    graphs_on(lambda run: (replayed.append(run.func.__self__), run()))
    replayed, capture = [], graphs.capture

    def picky(run, side, pool):
        if run.func.__self__.active_drafter.name == "lm":
            raise RuntimeError("out of memory")
        return capture(run, side, pool)

    monkeypatch.setattr(graphs, "capture", picky)
    log = []
    controller = selector(tiny, pool(("lm", "eagle3 tree")), "random", log)
    with pytest.warns(UserWarning, match="without CUDA graphs: out of memory") as noticed:
        found = played(tiny, controller, slots=1)
    assert [one.output_ids for one in found] == texts
    assert len(noticed) == 1 and len(log) == sum(one.target_passes for one in found)
    assert {rounds.active_drafter.name for rounds in replayed} == {"eagle3 tree"} and 0 < found[-1].ahead < found[
        -1
    ].rounds


def test_block_divergence_and_scores_without_hidden_states_run_on_the_host(tiny, pool, monkeypatch):  # noqa: F811
    """Block divergence needs the draft. Scores need the target's hidden states, which are kept only on request."""
    monkeypatch.setenv("SPECCTL_GRAPHS", "eager")
    for algo, keeps in (("metasd-ucb", False), ("metasd-ucb", True), ("hedgespec", False)):
        controller = selector(tiny, pool(("plain", "eagle3 chain")), algo, reward="bd")
        assert controller.accepts_late_counts == (algo == "hedgespec")
        assert played(tiny, controller, slots=1, keeps_hidden=keeps)[-1].ahead == 0


@pytest.mark.parametrize(("algo", "slots"), [("hedgespec", 1), ("hedgespec", 2), ("normalhedge", 2)])
def test_every_token_of_device_rounds_is_scored_once(tiny, pool, on_device, monkeypatch, algo, slots):  # noqa: F811
    """Scores do not depend on the rounds that committed the tokens: they equal a table of the whole text, last tokens
    included."""
    arms = pool(("plain", "eagle3 tree", "medusa tree", "lm"))
    log, feedback = [], {}
    new_policy = lambda own, text: registry.build(algo, own, PolicyRecipe())  # noqa: E731
    rules = GameRecipe(loss="length", depth=2, score_ends=True, warmup_rounds=2, batch_rounds=3, batch_growth=1.0)
    how = dict(step=lambda: 0.01, seed=0, on_round=log.append)
    controller = make_selector(tiny, arms, algo, rules, new_policy, Decoding(within_query=False, **how))
    score, scorer = Scorer.score, controller.scorer

    def noted(self, state, counts):
        ends = [len(row.ids) for row in state.rows]
        assert not any(count > end for count, end in zip(counts, ends, strict=True))
        found = score(self, state, counts)
        for row, part in zip(state.rows, found, strict=True):
            feedback.setdefault(row.index, []).append(part)
        return found

    monkeypatch.setattr(Scorer, "score", noted)
    texts = [one.output_ids for one in decode(tiny, sampling=MIXED)]
    on_device()
    found = played(tiny, controller, slots=slots, keeps_hidden=True)
    assert [one.output_ids for one in found] == texts and found[-1].ahead > 0
    tokens = sum(one.decoded_tokens for one in found)
    assert sum(line.scored for line in log) == tokens == controller.tally.scored
    assert len(log) == sum(one.target_passes for one in found) == sum(controller.tally.pulls.values())
    assert any(line.learnt for line in log) and controller.failures == 0
    for own in ([line for line in log if line.query == f"q{one.index}"] for one in found if slots == 1):
        gaps = [[line.scored for line in own[place : place + 5]] for place in range(len(own) - 4)]
        assert all(map(any, gaps)), "every third round is scored, at most one round late"
    monkeypatch.undo()
    for one in found:
        if one.decoded_tokens:
            alone, law = Scorer(tiny, scorer.drafters, scorer.depth), MIXED[one.index]
            whole = table(alone, one.prompt_ids, one.output_ids, law, seed=one.index + 1)
            for name in ("gamma", "hit"):
                parts = np.concatenate([getattr(part, name) for part in feedback[one.index]], 1)
                np.testing.assert_allclose(parts, getattr(whole, name), atol=1e-5)


@pytest.mark.parametrize("together", [False, True], ids=["text", "batch"])
@pytest.mark.parametrize("mode", ["eager", "graphs"])
def test_the_seconds_of_a_round_exclude_captures_and_choices(tiny, pool, graphs_on, monkeypatch, mode, together):  # noqa: F811
    """Two sequences of a batch share the second of a round."""
    now = [0.0]

    def passing(seconds, function):
        def slow(*args):
            now[0] += seconds
            return function(*args)

        return slow

    monkeypatch.setattr(graphs, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(graphs, "WARM_UP", 1)
    monkeypatch.setattr(device_round.DeviceRounds, "round", passing(1, device_round.DeviceRounds.round))
    for kind in (Selector, BatchSelector):
        monkeypatch.setattr(kind, "choose", passing(10, kind.choose))
    if mode == "eager":
        monkeypatch.setenv("SPECCTL_GRAPHS", "eager")
    else:
        graphs_on()
        monkeypatch.setattr(graphs, "capture", passing(100, graphs.capture))
    seen, told = [], Game.round_finished
    monkeypatch.setattr(Game, "round_finished", lambda *args: (seen.append(args[2].seconds), told(*args))[1])
    arms = pool(("eagle3 chain", "plain"))
    controller = selector(tiny, arms, "random", together=True) if together else selector(tiny, arms, "fixed", arm=0)
    found = played(tiny, controller)
    assert found[-1].ahead == found[-1].rounds and len(seen) > 10
    assert set(seen) == ({1.0} if together else {1.0, 0.5})
    assert mode == "eager" or now[0] > 100
