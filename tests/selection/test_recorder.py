"""Replaying a recorded table equals live decoding for every family: the same rounds, drafts and acceptances."""

import copy
import dataclasses
import itertools
import signal

import numpy as np
import pytest
import torch

from specctl.decoding.controllers import NoDraft
from specctl.decoding.sampling import GREEDY, Sampling
from specctl.drafters.eagle3 import drafter as eagle3
from specctl.drafters.eagle3.head import Eagle3Head
from specctl.drafters.lm.drafter import ChainShape, LMDrafter
from specctl.drafters.retrieval.datastore import Datastore
from specctl.drafters.text.lookup import Lookup
from specctl.drafters.text.suffix import Suffix
from specctl.drafters.tree import TreeShape
from specctl.errors import Interrupted, UsageError
from specctl.lab.recorded import recorder as recording
from specctl.lab.recorded.recorder import Drafted, Query
from specctl.lab.recorded.table_file import read_table
from specctl.lab.recorded.trace import PLAIN, shortened
from specctl.progress import interrupts
from specctl.recipe import DrafterRecipe, SamplingRecipe
from specctl.selection.arms import Arm
from tests.lossless.drafters import Rotate, own_weights
from tests.lossless.test_equality import random_eagle, random_heads
from tests.toys.decoding import decode


@pytest.fixture(scope="module")
def target(builtin_target):
    """The whole built-in target, which ends its texts by itself and has ten layers."""
    return builtin_target


HOT = Sampling(1.0, 0, 1.0)
DEPTH = 6
ROOMS = (14, 11)  # the first answer ends by itself


def record(target, pool, queries, sampling, depth, **file):
    arms = [Arm(name, drafter) for name, drafter in pool.items()]
    recipe = SamplingRecipe(temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p)
    return recording.record(target, arms, queries, recipe, depth, recording.TableFile(**file))


@pytest.fixture(autouse=True)
def few_repeats(monkeypatch):
    """These tests do not check the duration of steps."""
    monkeypatch.setattr("specctl.selection.assembly.REPEATS", 1)


@pytest.fixture(scope="module")
def queries(target, prompts):
    return [Query(f"q{i}", "sql", ids, room, 7 + i) for i, (ids, room) in enumerate(zip(prompts, ROOMS, strict=False))]


@pytest.fixture(scope="module")
def pool(target, prompts):
    """Drafters that are sometimes right, and read different layers."""
    torch.manual_seed(1)
    head = Eagle3Head(eagle3.FAMILY.architecture(DrafterRecipe(vocab_size=2000), target), torch.arange(2000))
    head.initialise(target)
    plain = decode(target, prompts, sampling=GREEDY, max_new_tokens=20, seeds=[0] * 3)
    return {
        "eagle3 chain": eagle3.Eagle3Drafter(head, target, TreeShape(5, 1, 5, 1, 0.0)),
        "eagle3 tree": eagle3.Eagle3Drafter(head, target, TreeShape(4, 2, 9, 3, 0.0)),
        "eagle": random_eagle(target, TreeShape(4, 2, 8, 2, 0.0)),
        "hydra": random_heads("hydra", target, width=3, nodes=20, children=3),
        "medusa": random_heads("medusa", target),
        "lm": LMDrafter(own_weights(target, 0.1), target, ChainShape(DEPTH, 0.1, False)),
        "lookup": Lookup(5),
        "suffix": Suffix(DEPTH, 8, 3),
        "retrieval": Suffix(DEPTH, 8, 3, corpus=Datastore.of(one.output_ids[3:] for one in plain)),
        "none": NoDraft(),
    }


@pytest.fixture(scope="module")
def table(target, pool, queries):
    """The table of greedy answers."""
    return record(target, pool, queries, GREEDY, DEPTH)


def live(target, query, sampling, **who):
    """Live rounds as (depth of the draft, decoded tokens after the round), and the result."""
    rounds = []

    def note(state, draft, verdict):
        rounds.append((verdict.depths[0], len(state.rows[0].output) - 1))

    options = dict(sampling=sampling, max_new_tokens=query.room, seeds=[query.seed], on_round=note)
    (found,) = decode(target, [query.ids], **options, **who)
    return rounds, found


def replay(trace, arms):
    """Rounds as in `live`, from a trace; `arms` yields the arm of each round."""
    rounds, stand = [], 0
    while stand < trace.tokens:
        arm = next(arms)
        start, stand = stand, min(stand + int(trace.accepted[arm, stand]) + 1, trace.tokens)
        rounds.append((int(trace.drafted[arm, start]), stand))
    return rounds


def assert_replay_equals_decoding(target, drafters, queries, table, sampling):
    """Check for every arm that its replayed rounds equal decoding with its drafter."""
    assert table.arms == list(drafters)
    for arm, drafter in enumerate(drafters.values()):
        for query, trace in zip(queries, table.traces, strict=True):
            rounds, found = live(target, query, sampling, drafter=drafter)
            assert replay(trace, itertools.repeat(arm)) == rounds, table.arms[arm]
            assert (trace.tokens, trace.ended) == (found.decoded_tokens, found.stop == "eos")


def test_replaying_one_arm_equals_decoding_with_it(target, pool, queries, table):
    """Catches drafts from states that live decoding never has: stale caches, another room, features of a neighboring
    position."""
    assert_replay_equals_decoding(target, pool, queries, table, GREEDY)
    accepted = sum(trace.accepted.sum(1) for trace in table.traces)
    assert (accepted > 0).sum() > 5 and accepted[-1] == 0
    assert [trace.ended for trace in table.traces] == [True, False]


def test_replaying_sampled_answers_equals_decoding_with_the_same_seed(target, pool, queries):
    """A seed gives the same text with every drafter, so its table replays that seed."""
    some = {name: pool[name] for name in ("eagle3 tree", "lm", "suffix")}
    assert_replay_equals_decoding(target, some, queries[:1], record(target, some, queries[:1], HOT, DEPTH), HOT)


def test_replaying_a_switch_every_round_equals_decoding(target, pool, queries, table):
    """Every drafter is idle for some rounds and then catches up."""
    taps = tuple(sorted({tap for drafter in pool.values() for tap in drafter.taps}))
    for query, trace in zip(queries, table.traces, strict=True):
        rounds, _ = live(target, query, GREEDY, controller=Rotate(list(pool.values())), taps=taps)
        turns = (turn % len(pool) for turn in itertools.count(1))
        assert replay(trace, turns) == rounds


def test_accepted_tokens_of_a_tree_follow_the_first_of_equal_siblings():
    """If the text ends inside the draft, only tokens before its end count."""
    tree = Drafted([5, 6, 5, 7, 8], [-1, -1, -1, 2, 0], 2, 0.0)
    assert [tree.accepted(text) for text in ([5, 8, 1], [5, 7], [6], [9], [])] == [2, 1, 1, 0, 0]


def test_shortened_chains_equal_decoding_with_shorter_drafts(target, pool, queries, table):
    """Plain decoding is the arm of length 0."""
    chains = [table.arms.index(name) for name in ("eagle3 chain", "lm", "lookup")]
    shorter = shortened(table, [0, 2])
    arms = [0, *(1 + arm for arm in chains)]
    names = [PLAIN, *(f"{table.arms[arm]}:2" for arm in chains)]
    assert [shorter.arms[arm] for arm in arms] == names
    cuts = [NoDraft(), *(cut(pool[table.arms[arm]], 2) for arm in chains)]
    for arm, drafter in zip(arms, cuts, strict=True):
        for query, trace in zip(queries, shorter.traces, strict=True):
            assert replay(trace, itertools.repeat(arm)) == live(target, query, GREEDY, drafter=drafter)[0]


def cut(drafter, length):
    twin = copy.copy(drafter)
    if isinstance(drafter, Lookup):
        twin.depth = length
    else:
        twin.shape = dataclasses.replace(drafter.shape, depth=length)
    return twin


def test_sampled_and_too_deep_drafts_are_refused(target, pool, queries):
    one = pool["lm"]
    sampled = copy.copy(one)
    sampled.shape = dataclasses.replace(one.shape, sampled=True)
    with pytest.raises(UsageError, match="samples its drafts"):
        record(target, {"lm": sampled}, queries, HOT, DEPTH)
    with pytest.raises(UsageError, match="lm drafts to depth 6"):
        record(target, {"lm": one}, queries, GREEDY, DEPTH - 1)


def test_a_recording_stopped_in_the_middle_is_resumed(target, pool, queries, tmp_path, monkeypatch):
    """SIGTERM during the second query of every attempt: only that query is asked again, and the table equals an
    uninterrupted one."""
    monkeypatch.setattr(recording, "overheads", lambda *_: None)  # would decode again after the last query
    pool, path = {"medusa": pool["medusa"], "none": pool["none"]}, tmp_path / "table.parquet"
    made_of = {"drafters": dict.fromkeys(pool, "digest")}
    whole = record(target, pool, queries, GREEDY, DEPTH)

    class Terminated(NoDraft):
        def advance(self, state):
            asked[-1].add(tuple(state.rows[0].ids[: state.rows[0].prompt_length]))
            if len(asked[-1]) == 2:
                interrupts.handle(signal.SIGTERM)

    def go(**options):
        return record(
            target, {**pool, "none": Terminated()}, queries, GREEDY, DEPTH, path=path, made_of=made_of, **options
        )

    asked, table = [], None
    while table is None:
        asked.append(set())
        try:
            table = go(resume=len(asked) > 1)
        except Interrupted:
            interrupts.reset()
    assert [len(queries) for queries in asked] == [2] * (len(queries) - 1) + [1]
    for found in (table, read_table(path, made_of), go(resume=True)):
        for one, other in zip(found.traces, whole.traces, strict=True):
            assert all(np.array_equal(x, y) for x, y in zip(vars(one).values(), vars(other).values(), strict=True))
        assert (found.draft_s > 0).all() and (found.step_s > 0).all() and len(found.step_s) == len(pool) + 1


def test_an_answer_of_one_token_is_left_out(target, pool, queries):
    short = dataclasses.replace(queries[0], room=1)
    table = record(target, {"none": pool["none"]}, [short, queries[1]], GREEDY, DEPTH)
    assert [trace.query for trace in table.traces] == ["q1"]


class Sometimes(Lookup):
    """Raises in every third `propose`, in every `score`, or in every `advance` and `propose`."""

    def __init__(self, fails):
        super().__init__(5)
        self.fails, self.calls = fails, 0

    def advance(self, state):
        if self.fails == "advance":
            raise RuntimeError("no such row")
        super().advance(state)

    def propose(self, state, budget):
        self.calls += 1
        if self.fails == "advance" or (self.fails == "propose" and self.calls % 3 == 0):
            raise RuntimeError("no such row")
        return super().propose(state, budget)

    def score(self, state, spans, depths=1):
        if self.fails == "score":
            raise RuntimeError("no such row")
        return super().score(state, spans, depths)


@pytest.mark.parametrize("fails", ["advance", "propose", "score"])
def test_failures_of_a_drafter_are_recorded_as_empty_drafts_and_scores(target, pool, queries, table, fails, capsys):
    """Failures are counted, reported once, and do not affect the other arm."""
    arms = [Arm("lookup", pool["lookup"]), Arm("broken", Sometimes(fails))]
    found = recording.record(target, arms, queries, SamplingRecipe(), DEPTH)
    lookup = table.arms.index("lookup")
    T = sum(trace.tokens for trace in found.traces)
    for trace, other in zip(found.traces, table.traces, strict=True):
        assert (trace.accepted[0] == other.accepted[lookup]).all() and (trace.gamma[0] == other.gamma[lookup]).all()
        if fails == "score":
            assert (trace.accepted[1] == trace.accepted[0]).all() and not trace.gamma[1].any()
    drafted = np.concatenate([trace.drafted[1] for trace in found.traces])
    if fails != "score":
        failed = np.arange(1, T + 1) % 3 == 0 if fails == "propose" else np.ones(T, bool)
        assert (drafted[failed] == -1).all() and (drafted[~failed] >= 0).all()
    texts = len(queries)
    counts = {"advance": T + texts, "propose": T // 3, "score": texts}  # scoring calls advance once per text
    assert [arm.failures for arm in arms] == [0, counts[fails]]
    assert capsys.readouterr().err.count("no such row") == (2 if fails == "advance" else 1)
