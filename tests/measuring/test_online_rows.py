"""Rows of `online`'s table and their intervals, computed from known numbers."""

from dataclasses import replace

import pytest

from specctl.decoding.records import Decoded
from specctl.measuring.contenders import VANILLA
from specctl.measuring.drafter_rows import drafter_row
from specctl.measuring.online_rows import OnlineResults
from specctl.measuring.policy_rows import Grouping, StreamAnswers
from specctl.measuring.records import Record
from specctl.recipe import OnlineRecipe

TOKENS = [20, 35, 30, 60, 45, 80]
"""Tokens of the learner's chunks. A chunk takes 20 passes and 2 seconds. The static drafter makes 25 tokens."""


def record(drafter, seed, chunk, tokens):
    decoded = Decoded([], [0] * (tokens + 1), "length", 20, 0, 0, 0, [], [], 0.0, 2.0)
    return Record(f"p{chunk}", "sql", drafter, seed, 0.0, decoded, session=chunk)


class Cost:
    """The part of a chunk's row that these tests need: the costs of learning."""

    def __init__(self, seed, chunk, seconds=1.0):
        self.algo, self.seed, self.chunk, self.learn_s, self.swap_s = "ogd", seed, chunk, seconds, 0.5
        self.store_s = 0.25
        self.ruling, self.status, self.dropped = "keep", "updated", 0


def row(seeds, tokens=TOKENS):
    answered = [(seed, chunk) for seed in seeds for chunk in range(len(tokens))]
    records = [record("ogd", seed, chunk, tokens[chunk]) for seed, chunk in answered]
    records += [record("static", seed, chunk, 25) for seed, chunk in answered]
    records += [record("lookup", seed, chunk, 50) for seed, chunk in answered]
    recipe = OnlineRecipe(algo=["ogd"], seeds=list(seeds), baselines=["static", "lookup"])
    return OnlineResults(recipe, records, [Cost(*at) for at in answered]).row("ogd")


def test_ratios_by_hand():
    found = row([0, 1])
    assert found.mat == sum(TOKENS) / (6 * 20) and found.mat_last == 4.0
    assert found.mat_over_static == pytest.approx(sum(TOKENS) / 150)
    assert found.over_static == found.mat_over_static, "as many seconds"
    assert found.over_static_with_training == pytest.approx(found.over_static * 2 / 3.5)
    assert found.over_lookup_with_training == pytest.approx(found.over_static_with_training / 2)
    assert found.learn_s == 2 * 6 * 1.5 and found.learn_share == pytest.approx(1.5 / 3.5)


def test_equal_repeats_do_not_narrow_an_interval():
    """Greedy answers to a file in its order are the same for every seed. Three seeds tell no more about other prompts
    than one seed."""
    once, thrice = row([0]), row([0, 1, 2])
    for name in ("mat", "mat_over_static", "over_static", "over_static_with_training"):
        low, high = getattr(once, f"{name}_interval")
        assert low < getattr(once, name) < high
        assert getattr(thrice, f"{name}_interval") == pytest.approx((low, high)), name


def test_one_chunk_has_no_interval():
    assert row([0, 1, 2], TOKENS[:1]).mat_interval is None


@pytest.mark.parametrize(("plain_s", "reason"), [(40.0, "above its mat"), (4.0, None)])
def test_rows_of_every_table_mark_an_impossible_speed(plain_s, reason):
    """20 passes in 2 seconds make 40 tokens, so mat is 2. Plain decoding of 40 tokens takes at most twice as long."""
    drafted = record("ogd", 0, 0, 40)
    plain = record(VANILLA, 0, 0, 40)
    plain = replace(plain, decoded=replace(plain.decoded, target_passes=40, decode_s=plain_s))
    own, base = [drafted.decoded], [plain.decoded]
    recipe = OnlineRecipe(algo=["ogd"], baselines=["vanilla"])
    stream = StreamAnswers({"ogd": own, VANILLA: base}, Grouping([0], ["g"]), [], VANILLA, same_text=True)
    found = [
        OnlineResults(recipe, [drafted, plain], [Cost(0, 0)]).row("ogd"),
        drafter_row("ogd", "sql", [drafted, plain]),
        stream.row("ogd", "policy", tally=None, arms=[], best_arm_ratio=None, failures=0),
    ]
    assert [(row.speedup, row.unusable) for row in found] == [(plain_s / 2, reason)] * 3
