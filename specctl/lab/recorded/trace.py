"""Recorded drafts of a whole pool at every position of an answer: enough to replay any policy on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specctl.decoding.prompt_features import PromptClusters
from specctl.errors import CheckpointError, UsageError
from specctl.selection.arms import PLAIN
from specctl.selection.policies.policy import Array


@dataclass(frozen=True)
class Trace:
    """One answer of T decoded tokens (the token of the prefill pass excluded), N arms, drafts of up to K tokens.

    A draft that is made when t of the T tokens are committed predicts tokens t, t + 1, …; its first token has depth 1.

    Attributes:
        query, domain: the prompt's id and domain. Traces of a stream keep its order.
        session: number of the session in the recorded stream.
        prompt: number of its tokens.
        accepted: [N, T] draft tokens that are accepted if arm i drafts when t tokens are committed; a round then
            commits one more, at most T − t.
        drafted: [N, T] depth of that draft; −1 if the arm raised.
        gamma: [N, T, K] probability that arm i's proposal for token t at draft depth k is accepted (in the draft that
            was made when t − k + 1 tokens were committed); 0 if there is no such draft.
        overlap: [N, T, K] 1 − TV(p̄, q̄) at the k-th position of the draft that arm i makes when t tokens are
            committed, along that draft and not the text, unfiltered at temperature 1 (BD); 0 after its end.
        hit: [N, T, K] whether token t is among the arm's proposals there: 0, `LEAF` (a draft ends there), `INNER`.
        ended: whether the answer ended with an end-of-sequence token; otherwise it ended at its limit.
        context: [D] features of the prompt (`prompt_features.features_of`); None if unknown.
    """

    query: str
    domain: str
    accepted: NDArray[np.int16]
    drafted: NDArray[np.int16]
    gamma: NDArray[np.float32]
    overlap: NDArray[np.float32]
    hit: NDArray[np.uint8]
    ended: bool
    session: int = 0
    prompt: int = 0
    context: NDArray[np.float64] | None = None

    @property
    def tokens(self) -> int:
        return self.accepted.shape[1]


@dataclass(frozen=True)
class Table:
    """The traces of a stream, and their costs.

    Attributes:
        arms: their names, N.
        depth: K.
        draft_s: [N] mean seconds of one proposal.
        step_s: [N + 1] seconds of a target step with one row, and with the rows of each arm's mean draft.
        reach: [N] tokens of the longest draft that each arm can make.
        overheads: seconds of catching up and scoring; None if all texts were too short to time them.
        trained_on: the kinds of prompts that each arm was trained on; () if unknown.
        greedy: whether the answers were decoded at temperature 0.
        digest: of the file that the table was read from.
    """

    arms: list[str]
    depth: int
    traces: list[Trace]
    draft_s: NDArray[np.float64]
    step_s: NDArray[np.float64]
    reach: NDArray[np.int64]
    overheads: Overheads | None = None
    trained_on: Sequence[PromptClusters] = ()
    greedy: bool = False
    digest: str | None = None


def of_arms(table: Table, names: Sequence[str]) -> Table:
    """The table of these arms, in this order. Its depth is the longest draft that one of them can make, as in live
    decoding.

    Raises CheckpointError if the table lacks an arm.
    """
    missing = [name for name in names if name not in table.arms]
    if missing:
        raise CheckpointError(
            f"the table has no arm {missing[0]}, only {', '.join(table.arms)}",
            hint=f"record a table of a pool that contains {missing[0]}, or leave it out (arms.names)",
        )
    arms = [table.arms.index(name) for name in names]
    reach = table.reach[arms]
    depth = max(1, int(reach.max(initial=0)))

    def part(trace: Trace) -> Trace:
        deep = {name: getattr(trace, name)[arms, :, :depth] for name in ("gamma", "overlap", "hit")}
        return replace(trace, accepted=trace.accepted[arms], drafted=trace.drafted[arms], **deep)

    return replace(
        table,
        arms=list(names),
        depth=depth,
        traces=[part(trace) for trace in table.traces],
        draft_s=table.draft_s[arms],
        step_s=table.step_s[[0, *(1 + arm for arm in arms)]],
        reach=reach,
        overheads=table.overheads and table.overheads.of_arms(arms),
        trained_on=[table.trained_on[arm] for arm in arms] if table.trained_on else (),
    )


@dataclass(frozen=True)
class Overheads:
    """Seconds of N drafters on the machine of a recording, as lines in the number of tokens n: a + b·n.

    Attributes:
        read: [N, 2] a and b of reading n tokens, also of a prompt.
        score: [N, 2, 2] a and b of scoring n tokens that were read, at draft depth 1 and at the drafter's `reach`;
            depths in between are interpolated. Each drafter is timed alone, although adapters of one base would share a
            pass.
        reach: [N] tokens of the longest draft.
    """

    read: Array
    score: Array
    reach: NDArray[np.int64]

    def of_arms(self, arms: Sequence[int]) -> Overheads:
        """The overheads of some of the drafters, by index."""
        chosen = list(arms)
        return Overheads(self.read[chosen], self.score[chosen], self.reach[chosen])

    def reading(self, tokens: NDArray[np.int64]) -> Array:
        """[N] seconds in which each drafter reads its number of `tokens` [N]; 0 without tokens."""
        return np.where(tokens > 0, self.read[:, 0] + self.read[:, 1] * tokens, 0.0)

    def scoring(self, tokens: int, depth: int) -> float:
        """Seconds in which all drafters score this number of tokens at draft depths 1 … `depth`."""
        part = (np.minimum(depth, self.reach) - 1) / np.maximum(self.reach - 1, 1)
        line = self.score[:, 0] + (self.score[:, 1] - self.score[:, 0]) * part[:, None]
        return float((line[:, 0] + line[:, 1] * tokens).sum())

    def of_text(
        self, prompt: int, arms: Sequence[int], committed: Sequence[int], scored: Sequence[int], depth: int
    ) -> tuple[float, float]:
        """Seconds of catching up before rounds, and of scoring after rounds, in one text.

        A drafter reads nothing until it is played or scored. Then it reads all tokens it has missed, at first the
        prompt. The reading of an arm that also played the round before is part of its drafts.

        Args:
            prompt: number of its tokens.
            arms, committed, scored: [R] of each round: its arm, its tokens, and the tokens scored after the round.
            depth: number of draft depths that are scored.
        """
        read = np.full(len(self.reach), -prompt)  # tokens of the answer that each drafter has read
        read_s = score_s = 0.0
        stands = known = 0  # committed tokens of the answer; scored ones
        before = None
        for arm, more, count in zip(arms, committed, scored, strict=True):
            if arm != before:
                read_s += float(self.reading(stands - read)[arm])
            read[arm] = max(read[arm], stands)
            stands, before = stands + more, arm
            if count:
                known += count
                score_s += float(self.reading(np.maximum(known - read, 0)).sum()) + self.scoring(count, depth)
                read = np.maximum(read, known)
        return read_s, score_s


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
