"""Arms that draft less: the same drafters, their drafts cut to some lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specctl.errors import UsageError
from specctl.selection.arms import PLAIN
from specctl.selection.recorded.trace import Table, Trace, of_arms


def shortened(table: Table, lengths: Sequence[int]) -> Table:
    """The table of all arms at all draft lengths, `name:length`; length 0 is one arm for all, plain decoding. K is that
    of the longest draft that is left.

    Exact where a draft of at most d tokens is the beginning of a longer one: chains (lookup, `lm`, EAGLE with one child
    a node), and trees of which nothing is pruned. A tree of limited size spends the nodes it has no depth for on more
    candidates: it holds all nodes of the longer one up to depth d, and others, so that `accepted` is a lower bound.
    `hit` of candidates that were pruned is counted in both.

    Costs are estimates: of a draft in proportion to its mean depth, of a step between that of one row and of all.

    Raises UsageError where a length is negative or beyond the table's depth.
    """
    wrong = [length for length in lengths if not 0 <= length <= table.depth]
    if wrong:
        raise UsageError(f"no drafts of {wrong} tokens in a table of depth {table.depth}")
    kept = sorted({length for length in lengths if length})
    pairs = [(arm, length) for arm in range(len(table.arms)) for length in kept]
    names = [f"{table.arms[arm]}:{length}" for arm, length in pairs]
    shares = np.array([_share(table, arm, length) for arm, length in pairs])
    which = np.array([arm for arm, _ in pairs], dtype=int)
    draft_s = table.draft_s[which] * shares
    step_s = table.step_s[0] + (table.step_s[1:][which] - table.step_s[0]) * shares
    traces = [_cut(trace, pairs) for trace in table.traces]
    if 0 in lengths:
        names, draft_s, step_s = [PLAIN, *names], np.append(0.0, draft_s), np.append(table.step_s[0], step_s)
        traces = [_with_plain(trace) for trace in traces]
    reach = None
    if table.reach is not None:
        reach = np.array([0] * (0 in lengths) + [min(table.reach[arm], length) for arm, length in pairs])
    cut = Table(names, table.depth, traces, draft_s, np.append(table.step_s[0], step_s), reach, greedy=table.greedy)
    return of_arms(cut, names)


def _share(table: Table, arm: int, length: int) -> float:
    """Share of an arm's draft tokens, counted by depth, that is left of drafts cut to `length`."""
    drafted = [trace.drafted[arm].clip(min=0) for trace in table.traces]
    whole = sum(int(depths.sum()) for depths in drafted)
    return sum(int(depths.clip(max=length).sum()) for depths in drafted) / max(whole, 1)


def _cut(trace: Trace, pairs: Sequence[tuple[int, int]]) -> Trace:
    arms = [arm for arm, _ in pairs]
    lengths = np.array([length for _, length in pairs], dtype=np.int16)[:, None]

    def short(array: NDArray[Any]) -> NDArray[Any]:
        reached = np.arange(array.shape[-1]) < lengths[:, None]
        return np.where(reached, array[arms], array.dtype.type(0))

    return replace(
        trace,
        accepted=np.minimum(trace.accepted[arms], lengths),
        drafted=np.minimum(trace.drafted[arms], lengths),
        gamma=short(trace.gamma),
        overlap=short(trace.overlap),
        hit=short(trace.hit),
    )


def _with_plain(trace: Trace) -> Trace:
    """An arm before the others that drafts nothing."""

    def after_nothing(array: NDArray[Any]) -> NDArray[Any]:
        return np.concatenate((np.zeros_like(array, shape=(1, *array.shape[1:])), array))

    return replace(
        trace,
        accepted=after_nothing(trace.accepted),
        drafted=after_nothing(trace.drafted),
        gamma=after_nothing(trace.gamma),
        overlap=after_nothing(trace.overlap),
        hit=after_nothing(trace.hit),
    )
