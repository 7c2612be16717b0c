"""Hybrid drafts: a tree with candidates of two drafters, a gate that decides when to run the head, measured costs."""

import json
import math
import re
import signal
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses import FakeTensorMode

from specctl.decoding.protocols import Drafter
from specctl.decoding.records import Score, topology
from specctl.decoding.sampling import GREEDY, Sampling
from specctl.decoding.target import load_target
from specctl.drafters import names, pool
from specctl.drafters.hybrid import costs
from specctl.drafters.hybrid.candidates import Calibration, Candidates
from specctl.drafters.hybrid.costs import ROWS, Costs
from specctl.drafters.hybrid.drafter import Hybrid
from specctl.drafters.hybrid.gate import (
    GAIN,
    HEAD,
    HEAD_CALIBRATION,
    LONGEST_PATIENCE,
    PATIENCE,
    SAMPLED,
    SAMPLED_GAIN,
    SAMPLED_PATIENCE,
    STORE_CALIBRATION,
    TEXT,
    TEXT_CALIBRATION,
    Gate,
    GateStatistics,
    Pending,
    quality_of,
)
from specctl.drafters.hybrid.weighed import Size, TextProposal, best_size
from specctl.drafters.text.lookup import Lookup
from specctl.drafters.tree import ProposedTree
from specctl.errors import CheckpointError, Interrupted, UsageError
from specctl.progress import interrupts
from specctl.recipe import DraftingRecipe
from tests.measuring.streams import write_head
from tests.toys.decoding import decode

EVEN = [1.0] * 8  # calibration ratios of 1: probabilities are taken at face value
CHEAP = Costs(tuple(1 + 0.001 * rows for rows in ROWS), first=0.001, level=0.001)
DEAR = Costs(CHEAP.rounds, first=1.0, level=0.33)  # a little more than a head gains where no text drafter drafts


def merged(*proposals):
    """Merge proposals into one candidate tree; the index of a proposal is its drafter."""
    candidates = Candidates()
    for who, proposal in enumerate(proposals):
        candidates.add(ProposedTree(*proposal), who, Calibration(EVEN))
    return candidates


class TestCandidates:
    def test_a_node_proposed_twice_is_kept_once_with_the_larger_probability(self):
        candidates = merged(([5, 6], [-1, 0], [0.5, 0.5]), ([5, 7, 8], [-1, -1, 0], [0.8, 0.1, 0.5]))
        assert candidates.tokens == [5, 6, 7, 8]
        assert candidates.parents == [-1, 0, -1, 0]
        assert candidates.joint == pytest.approx([0.8, 0.25, 0.1, 0.4])  # 8 follows the likelier 5

    def test_parents_are_ranked_before_their_children(self):
        candidates = merged(([1, 2, 3], [-1, 0, 1], [1.0, 1.0, 1.0]), ([4], [-1], [0.98]))
        assert candidates.ranked() == [0, 1, 3, 2] or candidates.ranked() == [0, 3, 1, 2]
        order = candidates.ranked()
        assert all(parent < 0 or order.index(parent) < order.index(node) for node, parent in enumerate([-1, 0, 1, -1]))

    def test_cut_renumbers_the_parents(self):
        candidates = merged(([1, 2, 3, 4], [-1, 0, -1, 2], [0.5, 0.5, 0.4, 0.9]))
        assert candidates.cut([0, 2, 3]) == ([1, 3, 4], [-1, -1, 1])

    def test_the_longest_path_has_the_most_expected_tokens(self):
        candidates = merged(([1, 2, 3, 4, 5], [-1, -1, 1, 2, 3], [0.6, 0.4, 0.9, 0.9, 0.9]))
        assert [candidates.tokens[node] for node in candidates.longest()] == [2, 3, 4, 5]  # 0.4 · (1 + 0.9 + …) > 0.6
        assert Candidates().longest() == []

    def test_outcomes_tell_which_claims_came_true(self):
        candidates = merged(([1, 2], [-1, 0], [0.5, 0.25]), ([1, 3, 9], [-1, 0, 1], [0.75, 0.3, 0.2]))
        settled = [((claim.drafter, claim.probability), true) for claim, true in candidates.outcomes([1, 3, 4])]
        assert settled == [((0, 0.5), True), ((1, 0.75), True), ((0, 0.25), False), ((1, 0.3), True), ((1, 0.2), False)]
        assert candidates.accepted_claims([1, 3, 4], 0) == 1 and candidates.accepted_claims([1, 3, 4], 1) == 2


def test_a_nan_probability_counts_as_zero():
    """A head that produced NaN used to fail its text, but only in a hybrid."""
    trust = Calibration(EVEN)
    trust.learn(float("nan"), True)
    assert trust(float("nan")) == 0.0 and trust(0.5) == Calibration(EVEN)(0.5)


class TestTrust:
    def test_calibration_equals_a_computation_by_hand(self):
        trust = Calibration([2.0] + [1.0] * 7)
        assert trust(0.1) == pytest.approx(0.2) and trust(0.5) == 0.5
        for came_true in (True, False, False):
            trust.learn(0.5, came_true)
        assert trust(0.5) == pytest.approx(0.5 * (4 + 1) / (4 + 1.5))
        assert trust(0.1) == pytest.approx(0.2)  # another eighth of [0, 1]

    def test_a_calibrated_probability_stays_below_one(self):
        assert Calibration([9.0] * 8)(1.0) < 1

    def test_priors_have_one_ratio_per_eighth(self):
        assert {len(ratios) for ratios in (TEXT_CALIBRATION, STORE_CALIBRATION, HEAD_CALIBRATION)} == {8}


def text_of(*ids, passes=1):
    return SimpleNamespace(ids=[*ids], target_passes=passes)


class TestGate:
    def pending(self, *proposals, levels=0, kind=0, length=3):
        return Pending(length, 0, merged(*proposals), kind, levels)

    def test_a_head_is_credited_with_tokens_beyond_the_text_drafter(self):
        gate = Gate()
        gate.pending = self.pending(([5], [-1], [0.5]), ([5, 6, 7], [-1, 0, 1], [0.5] * 3), levels=3)
        gate.settle(text_of(1, 2, 3, 5, 6, 7, 8))
        quality = (2 + 2) / (2 + GAIN[0])  # two tokens more than the text drafter, after a prior worth two rounds
        assert gate.gain(0) == pytest.approx((2 * GAIN[0] * quality + 2) / 3)
        assert gate.gain(3) == pytest.approx(GAIN[3] * quality)

    def test_a_round_without_the_head_does_not_change_its_gain(self):
        gate = Gate()
        gate.pending = self.pending(([5], [-1], [0.5]))
        gate.settle(text_of(1, 2, 3, 9))
        assert [gate.gain(kind) for kind in range(len(GAIN))] == list(GAIN) and gate.levels == Gate().levels

    def test_rounds_drafted_by_others_update_only_the_calibration(self):
        gate = Gate()
        gate.pending = self.pending(([5], [-1], [0.5]), ([5, 6], [-1, 0], [0.5] * 2), levels=2)
        gate.settle(text_of(1, 2, 3, 5, 9, 9, 9, passes=3))
        assert gate.gain(0) == GAIN[0]
        assert gate.trust[TEXT](0.5) > Gate().trust[TEXT](0.5)

    def test_trials_become_rarer(self):
        past = GateStatistics()
        rounds = []
        for number in range(1000):
            if past.overdue(2):
                past.tried(2, pays=False)
                rounds.append(number)
        gaps = [after - before for before, after in zip([-1, *rounds], rounds, strict=False)]
        assert gaps[:3] == [PATIENCE + 1, 2 * PATIENCE + 1, 4 * PATIENCE + 1]
        assert set(gaps[5:]) == {LONGEST_PATIENCE + 1}
        past.tried(2, pays=True)
        assert past.patience[2] == PATIENCE

    def test_a_text_starts_with_the_gain_of_earlier_texts(self):
        past = GateStatistics()
        for _ in range(20):
            gate = Gate(past=past)
            gate.pending = self.pending(([5], [-1], [0.5]), ([5], [-1], [0.5]), levels=1, kind=1)
            gate.settle(text_of(1, 2, 3, 5, 8))  # the text drafter proposed the same token, so the head gains nothing
        fresh = Gate(past=past)
        assert fresh.gain(1) < 0.2 and fresh.gain(0) < 0.2
        fresh.pending = self.pending(([5], [-1], [0.5]), ([5, 6, 7], [-1, 0, 1], [0.5] * 3), levels=3, kind=1)
        fresh.settle(text_of(1, 2, 3, 5, 6, 7, 8))
        assert fresh.gain(1) > 0.6, "the gain adapts to a text where the head helps"

    @pytest.mark.parametrize(
        ("mat", "quality"),
        [
            ({"held-out sql": 5.1}, 1.0),
            ({"held-out sql": 2.0, "held-out math": 3.0}, 0.5),
            ({"held-out sql": 1.0}, 0.1),
            ({}, 1.0),
            (None, 1.0),
            ({"held-out sql": "2.0"}, 1.0),
            ({"held-out sql": float("nan")}, 1.0),
            ({"held-out sql": -1}, 1.0),
        ],
    )
    def test_the_prior_gain_of_a_head_is_that_of_its_card(self, mat, quality):
        assert quality_of(mat) == pytest.approx(quality)

    def test_a_weak_head_starts_with_less_gain_and_waits_longer(self):
        weak, worst = Gate(quality=0.5), Gate(temperature=1.0, quality=0.1)
        assert [weak.gain(kind) for kind in range(len(GAIN))] == pytest.approx([gain / 2 for gain in GAIN])
        assert weak.past.patience == [2 * PATIENCE] * len(GAIN)
        assert worst.gain(0) == pytest.approx(0.1 * SAMPLED_GAIN * GAIN[0])
        assert worst.past.patience == [LONGEST_PATIENCE] * len(GAIN)
        stream = GateStatistics()
        assert Gate(past=stream, quality=0.5).gain(0) == GAIN[0], "a stream of texts knows the head better"


class TestSampledTexts:
    def test_a_greedy_text_starts_with_the_greedy_priors(self):
        gate = Gate(STORE_CALIBRATION)
        for trust, ratios in zip(gate.trust, (STORE_CALIBRATION, HEAD_CALIBRATION), strict=True):
            assert trust.true == [Calibration.BEFORE * ratio for ratio in ratios]
        assert gate.gain.prior == GAIN and gate.past.patience == [PATIENCE] * len(GAIN)

    def test_a_sampled_text_starts_with_lower_trust_and_gain(self):
        half, hot, hotter = (Gate(temperature=temperature) for temperature in (0.5, 1.0, 1.5))
        for who, ratios in ((TEXT, TEXT_CALIBRATION), (HEAD, HEAD_CALIBRATION)):
            for ratio, eighth in zip(ratios, range(8), strict=True):
                claim = (eighth + 0.5) / 8
                assert hot.trust[who](claim) == hotter.trust[who](claim) == pytest.approx(SAMPLED * claim)
                between = ratio + (SAMPLED - ratio) / 4
                assert half.trust[who](claim) == pytest.approx(min(between * claim, 0.99))
        assert hot.gain(0) == pytest.approx(SAMPLED_GAIN * GAIN[0])
        assert hot.gain(0) < half.gain(0) < Gate().gain(0)
        assert hot.past.patience[0] == SAMPLED_PATIENCE > half.past.patience[0] > PATIENCE
        hot.past.tried(0, pays=True)
        assert hot.past.patience[0] == SAMPLED_PATIENCE

    def test_statistics_of_a_stream_are_scaled_to_greedy_texts(self):
        """Otherwise a greedy text after sampled ones would expect too little of the head."""
        past = GateStatistics()
        gate = Gate(past=past, temperature=1.0)
        gate.pending = Pending(3, 0, merged(([9], [-1], [0.5]), ([5, 6], [-1, 0], [0.5] * 2)), 0, 2)
        gate.settle(text_of(1, 2, 3, 5, 8))
        assert past.gain.added[0] == pytest.approx(1 / SAMPLED_GAIN) and gate.gain.added[0] == 1
        assert past.patience == [PATIENCE] * len(GAIN)

    def test_each_text_of_a_batch_starts_with_priors_for_its_temperature(self, target, prompts):
        """Four texts run in two slots, so a text also follows one with another temperature."""
        seen = {}

        def watch(state, draft, verdict):
            for row, gate in zip(state.rows, state.memory[drafter].rows, strict=True):
                if row.index >= 0:
                    seen.setdefault(row.index, set()).add((gate.share, id(gate)))

        drafter = Hybrid(Claims(), Lookup(), CHEAP)
        sampling = [Sampling(temperature, 0, 1.0) for temperature in (0.0, 1.0, 1.0, 0.0)]
        options = {"sampling": sampling, "max_new_tokens": [9, 20, 30, 30], "seeds": [0, 1, 2, 3], "slots": 2}
        decode(target, [prompts[0]] * 4, drafter=drafter, on_round=watch, **options)
        expected = [1.0, SAMPLED_GAIN, SAMPLED_GAIN, 1.0]
        assert [[share for share, _ in seen[text]] for text in range(4)] == [[share] for share in expected]

    def test_a_useless_head_is_tried_less_often_in_a_sampled_text(self, target, prompts):
        asked = []
        for sampling in (GREEDY, Sampling(1.0, 0, 1.0)):
            head = Claims()
            drafter = Hybrid(head, Lookup(), Costs(CHEAP.rounds, first=0.2, level=0.1))
            options = {"sampling": sampling, "max_new_tokens": 60, "seeds": [0]}
            decode(target, prompts[1:2], drafter=drafter, **options)
            asked.append(head.asked)
        assert asked[1] < asked[0]


class Claims(Drafter):
    """A fake head that always proposes token 7 with probability 0.95, and counts its calls."""

    def __init__(self):
        self.asked = 0

    def propose_candidates(self, state, budget, pays):
        self.asked += 1
        depth, joint = 1, [math.log(0.95)] * state.batch
        while depth < min(5, budget) and pays(joint):
            depth += 1
            joint = [value + math.log(0.95) for value in joint]
        return [
            ProposedTree([7] * (n := min(depth, row.draft_room)), list(range(-1, n - 1)), [0.95] * n)
            for row in state.rows
        ]


def rounds_of(target, drafter, prompts, new=60):
    return decode(target, prompts, sampling=GREEDY, max_new_tokens=new, seeds=[0] * len(prompts), drafter=drafter)


class TestHybrid:
    def test_a_head_that_is_always_wrong_is_rarely_run(self, target, prompts):
        head = Claims()
        level = Costs(CHEAP.rounds, first=0.2, level=0.1)
        (decoded,) = rounds_of(target, Hybrid(head, Lookup(), level), prompts[1:2])
        assert 0 < head.asked < decoded.target_passes / 2

    def test_a_head_that_costs_more_than_it_gains_is_only_tried(self, target, prompts):
        head = Claims()
        (decoded,) = rounds_of(target, Hybrid(head, Lookup(), DEAR), prompts[1:2])
        assert head.asked <= 5 < decoded.target_passes

    def test_a_head_without_hope_is_not_tried(self, target, prompts):
        head = Claims()
        rounds_of(target, Hybrid(head, Lookup(), Costs(CHEAP.rounds, first=50.0, level=50.0)), prompts[1:2])
        assert head.asked == 0

    @pytest.mark.parametrize(
        ("lag", "room", "asked"), [(0, 9, True), (100, 9, False), (100, 64, False), (100, 256, True)]
    )
    def test_the_head_is_charged_for_the_tokens_that_it_has_to_read(self, lag, room, asked):
        """It gains 1.2 tokens for 0.8 rounds, and reads 100 tokens in one round. A text with room for 64 tokens repays
        half of it in a round, one with room for 256 an eighth."""
        head, known = Claims(), Costs(CHEAP.rounds, first=0.5, level=0.1, read=0.01)
        head.lag = lambda state: [lag]
        state = SimpleNamespace(live=[0], batch=1, rows=[SimpleNamespace(draft_room=room)])
        gates, alone = [Gate(quality=0.8)], Size([], 0, 1.0, 1.0)
        assert Hybrid(head, Lookup(), known)._asks(state, TextProposal(gates, [], known, alone), [0]) == asked

    def test_costly_rows_are_not_verified(self, target, prompts):
        dear = Costs(tuple(float(rows) for rows in ROWS), first=50.0, level=50.0)
        free = rounds_of(target, Hybrid(Claims(), Lookup(), CHEAP), prompts)
        few = rounds_of(target, Hybrid(Claims(), Lookup(), dear), prompts)
        assert [one.output_ids for one in few] == [one.output_ids for one in free]
        assert sum(one.drafted for one in few) < sum(one.drafted for one in free) / 2

    def test_a_hybrid_sizes_the_tree_of_a_batch_by_cost(self, target, prompts):
        """The engine would grant eight texts two nodes each; where rows are cheap, more nodes pay."""
        sizes = []
        rounds_of_batch = decode(
            target,
            [prompts[1]] * 8,
            sampling=GREEDY,
            max_new_tokens=40,
            seeds=[0] * 8,
            drafter=Hybrid(Claims(), Lookup(), CHEAP),
            on_round=lambda state, draft, verdict: sizes.append(draft.size),
        )
        assert len(rounds_of_batch) == 8 and max(sizes) > 4

    def test_one_text_of_many_does_not_try_the_head_alone(self, target, prompts):
        """If each of eight texts tried the head from time to time, it would run in nearly every round."""
        ends = [20, 60, 60, 60, 60, 60, 60, 60]
        alone, together = Claims(), Claims()
        rounds_of(target, Hybrid(alone, Lookup(), DEAR), prompts[1:2])
        texts = rounds_of(target, Hybrid(together, Lookup(), DEAR), [prompts[1]] * 8, ends)
        assert together.asked <= alone.asked + 2 < max(one.target_passes for one in texts)
        state = SimpleNamespace(live=[0, 1, 2], batch=3, rows=[SimpleNamespace(draft_room=9)] * 3)
        dear = Costs(CHEAP.rounds, first=3.0, level=0.7)
        hybrid, alone = Hybrid(Claims(), Lookup(), dear, GateStatistics()), Size([], 0, 3.0, 3.0)
        gates = [Gate(past=hybrid.past) for _ in range(3)]
        hybrid.past.unasked = [99, 0, 0, 0, 0]
        assert not hybrid._asks(state, TextProposal(gates, [], dear, alone), [0, 1, 1])
        assert hybrid._asks(state, TextProposal(gates, [], dear, alone), [0, 0, 1])
        assert hybrid.past.unasked[0] == 0, "the wait restarts after every trial"

    def test_nodes_are_verified_while_tokens_per_cost_increase(self):
        """By hand: each row costs 0.1. One node of probability 0.5 gives a rate of 1.5 / 1.1.

        A second node of 0.2 raises the rate to 1.7 / 1.2; one of 0.1 lowers it to 1.6 / 1.2.
        """
        costs = Costs(tuple(1 + 0.1 * (rows - 1) for rows in ROWS), first=1.0, level=1.0)
        state = SimpleNamespace(live=[0], batch=1, exact_rows=0)
        for second, width in ((0.2, 2), (0.1, 1)):
            draft = merged(([5, 6], [-1, 0], [0.5, second / 0.5]))
            size = best_size(state, [draft], 62, costs)
            assert (size.width, len(size.nodes[0])) == (width, width)
            assert size.rate == pytest.approx((1.5 + second) / 1.2 if width == 2 else 1.5 / 1.1)
        assert best_size(state, [Candidates()], 62, costs).nodes == [[]]
        # If the cost of drafting is already spent, the same node is worth its row.
        assert best_size(state, [draft], 62, costs, spent=1.0).width == 2

    def test_drafts_are_limited_by_the_room_of_each_text(self, target, prompts):
        rooms = []

        class Watched(Hybrid):
            def propose(self, state, budget):
                draft = super().propose(state, budget)
                depths = [max(topology(parents)[0], default=0) for parents in draft.parents.tolist()]
                rooms.extend(row.draft_room for row in state.rows)
                assert draft.size <= budget
                assert all(depth <= row.draft_room for depth, row in zip(depths, state.rows, strict=True))
                return draft

        limits = [1, 2, 9]
        drafter = Watched(Claims(), Lookup(), CHEAP)
        texts = decode(target, prompts, sampling=GREEDY, max_new_tokens=limits, seeds=[0] * 3, drafter=drafter)
        assert min(rooms) == 0 and max(rooms) > 5
        assert all(len(one.output_ids) <= limit for one, limit in zip(texts, limits, strict=True))

    def test_scores_contain_the_children_of_both_drafters(self, target):
        span = range(4, 6)
        logits = torch.zeros(2, 2, 6)
        logits[..., 3], logits[..., 1] = 2, 1
        head = SimpleNamespace(
            taps=(), score=lambda *_: [Score(span, logits, torch.arange(0, 60, 10), children=(2, 2, 2))]
        )
        text = SimpleNamespace(score=lambda *_: [Score(span, tokens=torch.tensor([[[7], [-1]]]), children=(1,) * 5)])
        (score,) = Hybrid(head, text, CHEAP).score(SimpleNamespace(device="cpu"), [span], 2)
        assert score.tokens.tolist() == [[[30, 10, 7], [30, 10, -1]]] * 2
        assert score.logits is None and score.children == (3,) * 5

    def test_scores_of_texts_without_new_tokens_are_on_the_target_s_device(self):
        """In a batch on a GPU, such a text made the scores fail, and the hybrid counted as one without a proposal. The
        meta device stands for the GPU."""
        with FakeTensorMode():
            tokens = torch.zeros(1, 2, 3, dtype=torch.long, device="meta")
            found = [Score(range(0)), Score(range(5, 7), tokens=tokens)]
            read = [Score(range(0), tokens=tokens[:, :0]), Score(range(5, 7), tokens=tokens)]
            head, text = SimpleNamespace(taps=(), score=lambda *_: found), SimpleNamespace(score=lambda *_: read)
            state = SimpleNamespace(device=tokens.device)
            scores = Hybrid(head, text, CHEAP).score(state, [range(0), range(5, 7)], 1)
        assert [score.tokens.shape for score in scores] == [(1, 0, 3), (1, 2, 6)]


SPOILED = {
    "a pipe": None,
    "deep": lambda good: "[" * 100_000,
    "half": lambda good: "{",
    "a list": lambda good: "[]",
    "text": lambda good: "1234567",
    "of another version": lambda good: good | {"rounds": good["rounds"][1:]},
    "another's keys": lambda good: good | {"more": 1},
    "a key missing": lambda good: {name: value for name, value in good.items() if name != "slot"},
    "long numbers": lambda good: good | {"rounds": [10**400] * len(ROWS)},
    "not a number": lambda good: good | {"first": float("nan")},
    "infinite": lambda good: good | {"level": float("inf")},
    "negative": lambda good: good | {"text": -1.0},
    "free": lambda good: good | {"rounds": [0] * len(ROWS)},
    "cheaper with more": lambda good: good | {"rounds": good["rounds"][::-1]},
    "numbers as text": lambda good: good | {"rounds": "1234567"},
    "truth": lambda good: good | {"rounds": [True] * len(ROWS)},
}


class TestStream:
    def test_a_head_without_gain_is_rarely_run_in_later_texts(self, tiny_directory):
        tiny = load_target(tiny_directory("qwen3"), device="cpu", dtype="fp32")
        level, asked = Costs(CHEAP.rounds, first=0.5, level=0.3), {}
        for stream in (True, False):
            head = Claims()
            drafter = Hybrid(head, Lookup(), level, GateStatistics() if stream else None)
            for number in range(8):
                if number == 4:
                    head.asked = 0
                rounds_of(tiny, drafter, [[5 + number, 9, 11]], new=30)
            asked[stream] = head.asked
        assert 2 * asked[True] <= asked[False] and asked[True] <= 4, "of about 120 rounds"

    def test_the_statistics_of_a_stream_survive_saving_and_restoring(self):
        past, again = GateStatistics(), GateStatistics()
        past.overdue(1)
        past.tried(2, pays=False)
        past.gain.learn(1, 4)
        again.restore(json.loads(json.dumps(past.state())))
        assert again.state() == past.state() != GateStatistics().state()
        assert again.gain(1) == past.gain(1) != GateStatistics().gain(1)
        before = past.state()
        past.overdue(1)
        assert before == again.state()


class TestCosts:
    @pytest.fixture(autouse=True)
    def idle(self, monkeypatch):
        """Costs that were measured beside busy processes are not saved."""
        monkeypatch.setattr(costs.threads.OtherProcesses, "busy", lambda self: 0.0)

    def test_round_costs_are_interpolated_and_extrapolated(self):
        known = Costs((1.0, 1.5, 1.6, 1.8, 2.2, 3.0, 6.1), first=0.2, level=0.1)
        assert [known.round(rows) for rows in (1, 2, 3, 8, 12)] == pytest.approx([1, 1.5, 1.55, 1.8, 2.0])
        assert known.round(94) == pytest.approx(6.1 + 3.1)  # extrapolated with the last slope
        assert [known.drafting(levels) for levels in (0, 1, 3)] == pytest.approx([0, 0.2, 0.4])

    def test_batch_costs_grow_with_the_number_of_texts_and_rows(self):
        known = Costs((1.0, 1.5, 1.6, 1.8, 2.2, 3.0, 6.1), 0.2, 0.1, 0.25, 0.05, 0.02, 0.01)
        assert known.round(1, 8) == pytest.approx(1.8 + 7 * (0.25 + 0.05))
        assert known.round(2, 4) == pytest.approx(1.8 + 3 * (0.25 + 2 * 0.05))
        assert known.further_rows(1, 1, 4) == pytest.approx(known.round(2, 4) - known.round(1, 4))
        assert known.drafting(3, 4) == pytest.approx(0.2 + 3 * 0.02 + 2 * (0.1 + 3 * 0.01))
        assert known.drafting(0, 4) == 0

    def test_costs_grow_with_text_length_per_text_and_per_row(self):
        known = Costs((1.0, 1.5, 1.6, 1.8, 2.2, 3.0, 6.1), 0.2, 0.1, 0.25, slot=0.001, row_slot=0.0002, context=256)
        assert known.at(256) == known
        longer = known.at(456)
        assert longer.round(1) == pytest.approx(1.2) and longer.round(8) == pytest.approx(1.8 + 0.2 + 7 * 0.04)
        # Each of four texts is read once, and once more by each of its rows.
        assert longer.round(2, 4) == pytest.approx(1.8 + 0.2 + 7 * 0.04 + 3 * (0.25 + 0.2))
        assert longer.further_rows(2, 3, 1) == pytest.approx(known.further_rows(2, 3, 1) + 3 * 0.04)
        assert known.at(56).round(8) == pytest.approx(1.8 - 0.2 - 7 * 0.04)
        assert known.at(0).text == 0 and longer.drafting(3) == known.drafting(3)

    def test_more_rows_are_never_cheaper(self):
        ratios = {f"{rows} rows": 1.0 for rows in ROWS} | {"4 rows": 1.3, "1 levels": 0.2, "5 levels": 0.1}
        ratios |= {"1 rows of 8": 0.9, "4 rows of 8": 0.8, "1 levels of 8": 0.1, "5 levels of 8": 0.1}
        ratios |= {"1 rows far": 0.9, "16 rows far": 0.8}
        made = costs.from_ratios(ratios)
        assert list(made.rounds) == sorted(made.rounds) and made.level == 0
        assert made.text == made.text_row == made.text_first == made.text_level == made.slot == made.row_slot == 0

    def test_costs_are_recovered_from_their_timings(self):
        """The timings come from known costs, including batches and long texts."""
        true = Costs((1.0, 1.1, 1.2, 1.4, 1.8, 2.6, 4.2), 0.2, 0.1, 0.25, 0.05, 0.02, 0.01, 3e-4, 4e-5, 128)
        ratios = {f"{rows} rows": true.round(rows) for rows in ROWS}
        ratios |= {f"{levels} levels": true.drafting(levels) for levels in (1, costs.LEVELS)}
        ratios |= {f"{rows} rows of 8": true.round(rows, 8) for rows in costs.ROWS_EACH}
        ratios |= {f"{levels} levels of 8": true.drafting(levels, 8) for levels in (1, costs.LEVELS)}
        ratios |= {f"{rows} rows far": true.at(512).round(rows) for rows in costs.FAR_ROWS}
        found = costs.from_ratios(ratios, 128, 512)
        assert found.rounds == true.rounds
        assert [getattr(found, name) for name in costs.SINGLE] == pytest.approx(
            [getattr(true, name) for name in costs.SINGLE]
        )

    def test_reading_is_measured(self, target, monkeypatch):
        """A head that reads a token in 0.001 rounds."""
        head = Claims()
        head.lag = lambda state: [len(row.ids) for row in state.rows] if head.forgot else [0] * state.batch
        head.invalidate = lambda state: setattr(head, "forgot", True)
        head.forgot = False

        def seconds(target, head, state, levels):
            taken = 0.2 + 0.1 * (levels - 1) + 0.001 * sum(head.lag(state))
            head.forgot = False
            return taken

        monkeypatch.setattr(costs, "_grow_seconds", seconds)
        monkeypatch.setattr(costs, "_seconds", lambda target, function: 1.0)
        found = costs.measure(target, head)
        assert (found.first, found.level, found.read) == pytest.approx((0.2, 0.1, 0.001))

    def test_a_hybrid_and_its_text_drafter_have_the_same_costs_of_rounds(self, target, tmp_path, monkeypatch):
        """Measured separately, noise made a head that is never asked cost 4 % of a store's speed."""
        write_head(tmp_path / "head", target, "eagle3", 0)
        alone, both = CHEAP, Costs(tuple(2.0 * rows for rows in ROWS), 0.2, 0.1, 0.5, text_first=0.3, read=0.01)
        monkeypatch.setattr(pool, "costs_of", lambda target, head, name: alone if head is None else both)
        text, hybrid = (
            pool.load_drafter(name, target, DraftingRecipe()) for name in ("lookup", f"{tmp_path}/head+lookup")
        )
        assert text.costs == alone
        assert hybrid.costs == Costs(CHEAP.rounds, 0.2, 0.1, text_first=0.3, read=0.01)

    def test_costs_without_a_head_of_an_earlier_version_are_used(self, target, tmp_path, monkeypatch):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setattr(costs, "measure", lambda *_: CHEAP)
        costs.costs_of(target, None, "no head")
        kept = tmp_path / "specctl" / "costs.json"
        (key, known) = json.loads(kept.read_text()).popitem()
        del known["read"]
        kept.write_text(json.dumps({key: known}))
        monkeypatch.setattr(costs, "measure", lambda *_: pytest.fail("measured again"))
        assert costs.costs_of(target, None, "no head") == CHEAP

    def test_costs_are_measured_once_and_cached(self, target, tmp_path, monkeypatch):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setattr(costs, "REPEATS", 1)
        first = costs.costs_of(target, Claims(), "claims")
        assert first.round(1) == 1
        kept = tmp_path / "specctl" / "costs.json"
        assert len(json.loads(kept.read_text())) == 1
        monkeypatch.setattr(costs, "measure", lambda *_: pytest.fail("measured again"))
        assert costs.costs_of(target, Claims(), "claims") == first
        kept.write_text("{")
        monkeypatch.setattr(costs, "measure", lambda *_: CHEAP)
        assert costs.costs_of(target, Claims(), "claims") == CHEAP  # a damaged cache file is measured again

    @pytest.mark.parametrize("spoiled", SPOILED)
    def test_an_invalid_cost_cache_is_measured_again(self, target, tmp_path, monkeypatch, capsys, pipe, spoiled):
        """One line names the ignored file, and valid costs replace it."""
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setattr(costs, "measure", lambda *_: CHEAP)
        costs.costs_of(target, Claims(), "claims")
        kept = tmp_path / "specctl" / "costs.json"
        (key, good) = json.loads(kept.read_text()).popitem()
        if SPOILED[spoiled] is None:
            kept.unlink()
            pipe(kept)
        else:
            made = SPOILED[spoiled](good)
            kept.write_text(made if isinstance(made, str) else json.dumps({key: made}))
        capsys.readouterr()
        assert costs.costs_of(target, Claims(), "claims") == CHEAP
        said = capsys.readouterr().err.splitlines()
        assert sum("ignoring" in line and str(kept) in line for line in said) == 1 and len(said) == 3
        assert json.loads(kept.read_text())[key] == good

    def test_measuring_fits_a_short_context(self, target, monkeypatch):
        """The text restarts before a measured draft would exceed the context length."""
        monkeypatch.setattr(target, "context_length", 100)
        longest = []
        real = costs.verify

        def watched(target, state, draft):
            longest.append(len(state.rows[0].ids) + draft.size)
            return real(target, state, draft)

        monkeypatch.setattr(costs, "verify", watched)
        monkeypatch.setattr(costs, "REPEATS", 3)
        assert costs.measure(target, Claims()).round(1) == 1
        assert max(longest) <= 100

    def test_measuring_does_not_allocate_a_long_context(self, target, monkeypatch):
        """Eight caches with the full context of a large target would not fit into memory."""
        monkeypatch.setattr(target, "context_length", 2**20)
        slots = []
        real = costs.verify

        def watched(target, state, draft):
            slots.append(state.capacity)
            return real(target, state, draft)

        monkeypatch.setattr(costs, "verify", watched)
        monkeypatch.setattr(costs, "REPEATS", 1)
        costs.measure(target, Claims())
        assert max(slots) < 2 * (costs.FAR + costs.ROOM)

    def test_measuring_reads_no_prompts(self, target, monkeypatch):
        """Reading its 3,328 tokens took minutes with a large target on a CPU."""
        longest = []
        real = target.model.forward

        def watched(tokens, *args):
            longest.append(tokens.shape[1])
            return real(tokens, *args)

        monkeypatch.setattr(target.model, "forward", watched)
        monkeypatch.setattr(costs, "REPEATS", 1)
        costs.measure(target, Claims())
        assert max(longest) == max(ROWS)

    def test_a_slow_target_is_measured_once(self, target, monkeypatch):
        """No repeat is added, or left out as a warm-up, when the time is over."""
        timed = []
        real = costs._seconds
        monkeypatch.setattr(costs, "_seconds", lambda *call: timed.append(1) or real(*call))
        monkeypatch.setattr(costs, "ENOUGH_S", -1.0)
        assert costs.measure(target, None).round(1) == 1
        once = len(ROWS) + len(costs.ROWS_EACH) + len(costs.FAR_ROWS)
        assert len(timed) == once

    def test_costs_of_a_busy_machine_are_measured_again(self, target, tmp_path, monkeypatch, capsys):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setattr(costs, "measure", lambda *_: CHEAP)
        monkeypatch.setattr(costs.threads, "cores", lambda: 2)  # of which the tests' target uses one
        for busy, saved in ((1.6, False), (1.4, True)):
            monkeypatch.setattr(costs.threads.OtherProcesses, "busy", lambda self, busy=busy: busy)
            assert costs.costs_of(target, Claims(), "claims") == CHEAP
            said = capsys.readouterr().err
            assert ("measures them again, because other processes kept 1.6 of 2 cores busy" in said) == (not saved)
            assert (tmp_path / "specctl" / "costs.json").exists() == saved
            costs._unsaved.clear()  # as in a new process

    def test_a_process_measures_costs_once_even_if_they_are_not_saved(self, target, tmp_path, monkeypatch, capsys):
        """`select` measured the costs of plain rounds again for every text drafter of its pool."""
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setattr(costs, "measure", lambda *_: CHEAP)
        monkeypatch.setattr(costs, "_disturbed", lambda *_: "the machine is busy")
        assert [costs.costs_of(target, Claims(), "claims") for _ in range(3)] == [CHEAP] * 3
        assert capsys.readouterr().err.count("measuring what rounds cost") == 1

    def test_a_signal_ends_measuring_within_a_round(self, target, monkeypatch):
        """It was answered only after all repetitions, which took 17 seconds on a busy core."""
        rounds = []
        real = costs.verify

        def signalled(target, state, draft):
            interrupts.handle(signal.SIGTERM)
            rounds.append(draft.size)
            return real(target, state, draft)

        monkeypatch.setattr(costs, "verify", signalled)
        try:
            with pytest.raises(Interrupted):
                costs.measure(target, Claims())
        finally:
            interrupts.reset()
        assert len(rounds) == 1

    def test_an_unwritable_cost_cache_is_reported(self, target, tmp_path, monkeypatch, capsys):
        (tmp_path / "specctl").write_text("a file is in the way")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setattr(costs, "measure", lambda *_: CHEAP)
        assert costs.costs_of(target, Claims(), "claims") == CHEAP
        said = capsys.readouterr().err
        assert "measures them again, because" in said and "saved in" not in said


class TestNames:
    def test_a_directory_wins_over_a_hybrid(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "sql+lookup").mkdir()
        assert names.parts_of("sql+lookup") == ["sql+lookup"]
        assert names.parts_of("other+lookup") == ["other", "lookup"]
        assert names.parts_of("lookup") == ["lookup"]

    def test_a_plus_inside_a_path_does_not_split_it(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "stores" / "sql+math").mkdir(parents=True)
        assert names.parts_of("drafters/a+stores/sql+math") == ["drafters/a", "stores/sql+math"]
        assert names.name_of("drafters/a+stores/sql+math") == "a+sql+math"

    @pytest.mark.parametrize("name", ["drafters/sql+math-eagle3", "drafters/gone+nowhere"])
    def test_an_error_names_all_of_a_directory_that_is_gone(self, name, target, tmp_path, monkeypatch):
        """It used to name `drafters/sql`."""
        monkeypatch.chdir(tmp_path)
        with pytest.raises(CheckpointError, match=f"no drafter directory {re.escape(name)}"):
            pool.load_drafter(name, target, DraftingRecipe())

    @pytest.mark.parametrize("name", ["+lookup", "sql-eagle3+", "+"])
    def test_an_empty_part_of_a_hybrid_name_is_refused(self, name, target):
        with pytest.raises(CheckpointError, match=f"no drafter {re.escape(repr(name))}"):
            pool.load_drafter(name, target, DraftingRecipe())

    def test_labels_are_unique_for_equal_directory_names(self):
        paths = ["x/a", "y/a", "x/a+lookup"]
        assert names.labels(paths) == {"x/a": "x/a", "y/a": "y/a", "x/a+lookup": "a+lookup"}

    @pytest.mark.parametrize("name", ["lookup+lookup", "lookup+suffix", "suffix+none"])
    def test_two_drafters_without_training_are_refused(self, name, target):
        with pytest.raises(UsageError, match="is not a trained drafter"):
            pool.load_drafter(name, target, DraftingRecipe())

    def test_text_and_head_index_the_gate_trust(self):
        assert (TEXT, HEAD) == (0, 1)  # indices into Gate.trust
