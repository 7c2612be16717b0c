"""Arms that draft less: the same drafters with drafts cut to given lengths."""

from collections.abc import Sequence
from dataclasses import astuple, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specctl.decoding.prompt_features import PromptClusters
from specctl.errors import UsageError
from specctl.lab.recorded.trace import Overheads, Table, Trace, of_arms
from specctl.selection.arms import PLAIN


def shortened(table: Table, lengths: Sequence[int]) -> Table:
    """The table of all arms at all draft lengths, `name:length`; length 0 is one arm for all, plain decoding. K is the
    longest draft that is left.

    Exact if a draft of at most d tokens is the beginning of a longer one: for chains (lookup, `lm`, EAGLE with one
    child per node), and for trees that are not pruned. A shorter tree of limited size has more candidates per depth. It
    holds all nodes of the longer tree up to depth d, and others, so that `accepted` is a lower bound. `hit` counts
    pruned candidates in both trees.

    Costs are estimates: the seconds of a draft are proportional to its mean depth, and a step lies between the step of
    one row and the step of all rows.

    Raises UsageError if a length is negative or beyond the table's depth.
    """
    wrong = [length for length in lengths if not 0 <= length <= table.depth]
    if wrong:
        raise UsageError(f"a table of depth {table.depth} has no drafts of {wrong} tokens")
    kept = sorted({length for length in lengths if length})
    pairs = [(arm, length) for arm in range(len(table.arms)) for length in kept]
    names = [f"{table.arms[arm]}:{length}" for arm, length in pairs]
    shares = np.array([_share(table, arm, length) for arm, length in pairs])
    which = np.array([arm for arm, _ in pairs], dtype=int)
    draft_s = table.draft_s[which] * shares
    step_s = table.step_s[0] + (table.step_s[1:][which] - table.step_s[0]) * shares
    traces = [_cut(trace, pairs) for trace in table.traces]
    reach = np.array([min(table.reach[arm], length) for arm, length in pairs], dtype=int)
    cut = Table(names, table.depth, traces, draft_s, np.append(table.step_s[0], step_s), reach, greedy=table.greedy)
    cut = with_plain(cut) if 0 in lengths else cut
    return of_arms(cut, cut.arms)


def with_plain(table: Table) -> Table:
    """The table with plain decoding as its first arm."""
    overheads = table.overheads and Overheads(*map(_after_nothing, astuple(table.overheads)))
    return replace(
        table,
        arms=[PLAIN, *table.arms],
        traces=[_with_plain(trace) for trace in table.traces],
        draft_s=np.append(0.0, table.draft_s),
        step_s=np.append(table.step_s[0], table.step_s),
        reach=np.append(0, table.reach),
        overheads=overheads,
        trained_on=[PromptClusters.none(), *table.trained_on] if table.trained_on else (),
    )


def _share(table: Table, arm: int, length: int) -> float:
    """Share of an arm's draft tokens, counted by depth, that is left if drafts are cut to `length`."""
    drafted = [trace.drafted[arm].clip(min=0) for trace in table.traces]
    whole = sum(int(depths.sum()) for depths in drafted)
    return sum(int(depths.clip(max=length).sum()) for depths in drafted) / max(whole, 1)


def _cut(trace: Trace, pairs: Sequence[tuple[int, int]]) -> Trace:
    """The rounds of a trace with one arm per pair (arm of the trace, length to which its drafts are cut)."""
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
    """The trace with a first arm that drafts nothing."""
    parts = ("accepted", "drafted", "gamma", "overlap", "hit")
    arrays: dict[str, Any] = {name: _after_nothing(getattr(trace, name)) for name in parts}
    return replace(trace, **arrays)


def _after_nothing(array: NDArray[Any]) -> NDArray[Any]:
    """The array with a row of zeros before the others."""
    return np.concatenate((np.zeros_like(array, shape=(1, *array.shape[1:])), array))
