"""Recorded drafts of a whole pool at every position of an answer: enough to replay any policy on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from specctl.decoding.prompt_features import PromptClusters
from specctl.errors import CheckpointError
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
