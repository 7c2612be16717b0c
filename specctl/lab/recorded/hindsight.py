"""Hindsight: the rounds that every arm alone would have played on a recorded table, as yardsticks of a replay."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from specctl.errors import DataError
from specctl.lab.recorded.trace import Table, Trace
from specctl.measuring.policy_rows import ArmReward
from specctl.recipe.select import Yardstick
from specctl.selection.arms import PLAIN
from specctl.selection.game.losses import beyond_the_end, length_loss, per_second, usable
from specctl.selection.game.rewards import block_divergence, block_efficiency
from specctl.selection.game.rules import Rules
from specctl.selection.policies.policy import Array

Ints = NDArray[np.int64]
Reset = Literal["query", "session", "stream"]


@dataclass(frozen=True)
class PlayedGame:
    """One game, from reset to reset.

    Attributes:
        queries: indices of its traces.
        best: the arm that alone would have needed the fewest rounds (or seconds, see `Hindsight`) for all traces.
        arms, committed, query: [R] of each round: the arm, the tokens, the trace.
        decide_us: [R] microseconds of choosing and learning.
        scored: [R] tokens that were scored after the round.
        dropped: number of vectors and rewards that were not finite.
    """

    queries: list[int]
    best: int
    arms: Ints
    committed: Ints
    query: Ints
    decide_us: Array
    scored: Ints
    dropped: int


def round_starts(accepted: NDArray[np.int16]) -> NDArray[np.bool_]:
    """[N, T] whether a round of arm i begins at token t if it plays alone; a round commits accepted + 1 tokens."""
    N, T = accepted.shape
    begins = np.zeros((N, T), bool)
    arms, at = np.arange(N), np.zeros(N, int)
    while (going := at < T).any():
        arms, at = arms[going], at[going]
        begins[arms, at] = True
        at = at + accepted[arms, at] + 1
    return begins


def games(traces: list[Trace], reset: Reset, length: int) -> list[list[int]]:
    """Indices of the traces between two resets. A session is one of the recording, with at most `length` traces."""
    if reset == "stream":
        return [list(range(len(traces)))]
    parts: list[list[int]] = []
    for index, trace in enumerate(traces):
        goes_on = parts and trace.session == traces[index - 1].session and len(parts[-1]) < length
        if reset == "session" and goes_on:
            parts[-1].append(index)
        else:
            parts.append([index])
    return parts


def token_losses(trace: Trace, rules: Rules) -> Array:
    """[T, N] losses of every arm at every token, in the token-level game without hybrid loss; 0 for dropped tokens.
    Throughput losses are of whole drafts, since the table knows all depths."""
    if rules.loss == "acceptance":
        losses = 1 - trace.gamma[:, :, 0].T.astype(float)
    else:
        values = trace.gamma if rules.estimator == "product" else trace.hit
        losses = length_loss(beyond_the_end(values[:, :, : rules.horizon].astype(float)), rules.estimator)
    losses, known = usable(losses)
    if rules.loss == "throughput":
        assert rules.step is not None
        losses = per_second(losses, rules.costs, rules.step)
    losses[trace.drafted.T < 0] = 1  # the arm raised
    losses[~known] = 0
    return losses


class Hindsight:
    """A table, and the rounds that every arm alone would need for it; made once, for the replays of all policies.

    Attributes:
        games: indices of the traces of each game, from one reset of a policy to the next.
        tokens: [Q] of each trace.
        begins: per trace [N, T], see `round_starts`.
        rounds: [Q, N] of each arm alone.
        cost: [N] seconds per round of each arm.
        single_arm_cost: [Q, N] measure of each arm alone, the lower the better: its rounds (by mat), or its seconds.
    """

    def __init__(self, table: Table, by: Yardstick = "mat", reset: Reset = "query", session: int = 1):
        """
        Args:
            by: the measure that decides which arm of a game is best.
            reset: when a policy starts anew. A session has at most `session` traces.

        Raises:
            DataError: the table has no tokens.
        """
        if not any(trace.tokens for trace in table.traces):
            raise DataError("the table has no decoded tokens to replay")
        self.table, self.reset = table, reset
        self.games = games(table.traces, reset, session)
        self.tokens: Ints = np.array([trace.tokens for trace in table.traces])
        self.begins = [round_starts(trace.accepted) for trace in table.traces]
        self.rounds: Ints = np.array([begins.sum(axis=1) for begins in self.begins])
        self.cost: Array = table.draft_s + table.step_s[1:]
        self.by = by
        self.single_arm_cost: Array = (
            self.rounds.astype(float) if by == "mat" else self.rounds * self.cost + self.reading
        )
        self._losses: dict[tuple[str, str, int], list[Array]] = {}

    @cached_property
    def draft_all_rounds(self) -> Ints:
        """[Q] rounds if every arm drafts and the longest accepted draft is taken (draft-all)."""
        longest = [trace.accepted.max(axis=0, keepdims=True) for trace in self.table.traces]
        return np.array([round_starts(accepted).sum() for accepted in longest])

    @property
    def draft_all_cost(self) -> float:
        """Seconds of a round of draft-all: all proposals, and one step with the rows of all drafts."""
        one_row, rows = self.table.step_s[0], self.table.step_s[1:]
        return float(self.table.draft_s.sum() + one_row + (rows - one_row).sum())

    @cached_property
    def reading(self) -> Array:
        """[Q, N] seconds in which each arm reads the prompt; 0 if the table does not say."""
        arms, known = len(self.table.arms), self.table.overheads
        if known is None:
            return np.zeros((len(self.tokens), arms))
        return np.array([known.reading(np.full(arms, trace.prompt)) for trace in self.table.traces])

    def overheads(self, played: Iterable[PlayedGame], depth: int) -> tuple[Array, Array]:
        """[Q] seconds of catching up, and of scoring `depth` draft depths, in these games; 0 if not in the table."""
        reading, scoring = np.zeros(len(self.tokens)), np.zeros(len(self.tokens))
        known = self.table.overheads
        if known is None:
            return reading, scoring
        for part in played:
            for query in part.queries:
                mine = part.query == query
                arms, committed, scored = (values[mine].tolist() for values in (part.arms, part.committed, part.scored))
                prompt = self.table.traces[query].prompt
                reading[query], scoring[query] = known.of_text(prompt, arms, committed, scored, depth)
        return reading, scoring

    def best(self, queries: list[int]) -> int:
        """The arm that needs the fewest rounds, or seconds, for these traces together; the lowest id in a tie."""
        return int(self.single_arm_cost[queries].sum(axis=0).argmin())

    def losses(self, query: int, rules: Rules) -> Array:
        """[T, N] `token_losses` of a trace."""
        key = (rules.loss, rules.estimator, rules.horizon)
        if key not in self._losses:
            self._losses[key] = [token_losses(trace, rules) for trace in self.table.traces]
        return self._losses[key][query]


def arm_rewards(hindsight: Hindsight) -> list[ArmReward]:
    """BE and BD of the rounds that each arm plays when it is alone, without rounds that the end of a text cut short.

    The mean overlap that stands for positions without a draft is the mean of all rounds here. In a game it is the
    mean of the rounds before.
    """
    table, rows = hindsight.table, []
    K = table.depth
    for arm, name in enumerate(table.arms):
        if name == PLAIN:
            continue
        be: list[float] = []
        overlaps = []
        for trace, begins in zip(table.traces, hindsight.begins, strict=True):
            for at in np.flatnonzero(begins[arm]):
                accepted = int(trace.accepted[arm, at])
                if at + accepted < trace.tokens:
                    be.append(block_efficiency(accepted, K))
                    overlaps.append(np.trim_zeros(trace.overlap[arm, at].astype(float), "b"))
        first = float(np.mean([overlap[0] if len(overlap) else 0.0 for overlap in overlaps] or [0.0]))
        rows += _statistics(name, "be", be)
        rows += _statistics(name, "bd", [block_divergence(overlap, K, first) for overlap in overlaps])
    return rows


def _statistics(arm: str, reward: Literal["be", "bd"], values: list[float]) -> list[ArmReward]:
    """One row; none if the arm has no complete round."""
    if not values:
        return []
    zeros = values.count(0.0) / len(values)
    return [ArmReward(arm, len(values), float(np.mean(values)), float(np.std(values)), reward, zeros)]
