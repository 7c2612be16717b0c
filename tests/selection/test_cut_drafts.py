"""Tables of shorter drafts: the numbers that remain, and the costs. `test_recorder` compares them with live
decoding."""

from dataclasses import replace

import numpy as np
import pytest

from specctl.errors import UsageError
from specctl.lab.recorded.trace import Overheads, Table, of_arms, shortened, with_plain
from specctl.selection.arms import PLAIN
from tests.selection.conftest import ARMS, DEPTH


@pytest.fixture
def table(made_up):
    draft_s, step_s = np.array([0.4, 0.04, 0.0]), np.array([1.0, 1.4, 1.2, 1.0])
    traces = [made_up(place).trace for place in range(5)]
    return Table(ARMS, DEPTH, traces, draft_s, step_s, np.full(3, DEPTH))


def test_every_arm_is_shortened_to_every_length(table):
    found = shortened(table, [3, 0, 1])
    assert found.arms == [PLAIN, "sql:1", "sql:3", "lookup:1", "lookup:3", "suffix:1", "suffix:3"]
    for cut, whole in zip(found.traces, table.traces, strict=True):
        assert not cut.accepted[0].any() and not cut.drafted[0].any() and not cut.gamma[0].any()
        assert np.array_equal(cut.accepted[2], whole.accepted[0].clip(max=3))
        assert np.array_equal(cut.drafted[3], whole.drafted[1].clip(max=1))
        for name in ("gamma", "overlap", "hit"):
            ours, theirs = getattr(cut, name), getattr(whole, name)
            assert ours.dtype == theirs.dtype
            assert np.array_equal(ours[6], theirs[2, :, :3]) and not ours[3, :, 1:].any()


@pytest.mark.parametrize(("lengths", "K"), [([0, 1], 1), ([1, 3], 2), ([0], 1)])
def test_k_becomes_the_longest_remaining_draft(table, lengths, K):
    """Rewards are fractions of K, and live decoding takes K from the arms that play. No arm of this table drafts more
    than two tokens."""
    found = shortened(replace(table, reach=np.array([2, 1, 2])), lengths)
    assert found.depth == K and {trace.gamma.shape[2] for trace in found.traces} == {K}


def test_shortening_to_the_full_depth_changes_only_the_names(table):
    found = shortened(table, [DEPTH])
    assert found.arms == [f"{name}:{DEPTH}" for name in ARMS]
    assert np.allclose(found.draft_s, table.draft_s) and np.allclose(found.step_s, table.step_s)
    for cut, whole in zip(found.traces, table.traces, strict=True):
        assert all(np.array_equal(x, y) for x, y in zip(vars(cut).values(), vars(whole).values(), strict=True))


def test_costs_are_interpolated_by_the_mean_depth(table):
    """Between the costs of plain decoding and of the whole draft. An arm that never drafts keeps finite costs."""
    found = shortened(table, [0, 2])
    drafted = np.concatenate([trace.drafted[0] for trace in table.traces])
    share = drafted.clip(max=2).sum() / drafted.sum()
    assert found.draft_s == pytest.approx([0, 0.4 * share, found.draft_s[2], 0])
    assert found.step_s[:3] == pytest.approx([1, 1, 1 + 0.4 * share])
    still = [np.zeros_like(trace.drafted) for trace in table.traces]
    traces = [type(trace)(**vars(trace) | {"drafted": none}) for trace, none in zip(table.traces, still, strict=True)]
    nothing = shortened(replace(table, traces=traces), [2])
    assert np.isfinite(nothing.draft_s).all()


@pytest.mark.parametrize("length", [-1, DEPTH + 1])
def test_lengths_outside_the_table_are_refused(table, length):
    with pytest.raises(UsageError, match="depth 4"):
        shortened(table, [1, length])


def test_with_plain_adds_an_arm_that_costs_one_step(table):
    """Its rounds draft nothing, and it neither reads nor scores."""
    known = Overheads(np.ones((3, 2)), np.ones((3, 2, 2)), np.array([4, 3, 4]))
    whole = replace(table, overheads=known, reach=known.reach)
    found = with_plain(whole)
    assert found.arms == [PLAIN, *ARMS] and of_arms(found, ARMS).arms == ARMS
    assert found.draft_s.tolist() == [0, 0.4, 0.04, 0] and found.step_s.tolist() == [1, 1, 1.4, 1.2, 1]
    assert found.reach.tolist() == [0, 4, 3, 4]
    assert found.overheads.reading(np.full(4, 9)).tolist() == [0, 10, 10, 10]
    assert found.overheads.scoring(2, 1) == known.scoring(2, 1)
    for joined, before in zip(found.traces, table.traces, strict=True):
        assert not joined.accepted[0].any() and not joined.gamma[0].any()
        assert np.array_equal(joined.hit[1:], before.hit)
