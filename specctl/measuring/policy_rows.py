"""Results of the contenders of `select` on a stream: rows for the table, curves for the pictures.

Sessions are the unit: what was learnt is carried from one of their prompts to the next, so prompts are no independent
samples; intervals are bootstraps over sessions, at 95 %, with all repeats of a session together. The yardstick of a
policy is the best arm of each of its games, from reset to reset, here as in a replay.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean, median

import numpy as np

from specctl.decoding import metrics
from specctl.decoding.metrics import Interval
from specctl.decoding.records import Decoded
from specctl.measuring import measured
from specctl.measuring.measured import Measured
from specctl.selection.controller import Tally
from specctl.selection.recorded.hindsight import Yardstick

LONG_ENOUGH = 256  # tokens of a game after which a policy should have found its best arm


@dataclass(frozen=True, kw_only=True)
class PolicyRow:
    """One contender on the whole stream.

    `share_of_best` is its mat ÷ the mat of playing each game's best arm in hindsight, `share_of_best_256` that of the
    games with so many tokens, `share_after_256` that of what comes after so many; `regret` counts the target passes
    beyond those arms', `best_arm_ratio` the share of rounds that played them. Where tokens a second are what is played
    for, they take the place of mat (`GameRecipe.yardstick`). These need every arm by itself (baseline `fixed`).

    None where something was not measured; so is the regret where proposals are sampled, as the arms' texts differ then,
    and where passes are not what is played for.
    """

    algo: str
    kind: str  # policy, arm, rival or baseline
    mat: float | None
    mat_interval: Interval | None
    tokens_per_s: float | None
    speedup: float | None  # over plain decoding
    speedup_interval: Interval | None
    over_best_arm: float | None  # tokens_per_s ÷ that of the arm that is the fastest on the whole stream
    over_best_arm_interval: Interval | None
    share_of_best: float | None
    share_of_best_interval: Interval | None
    share_of_best_256: float | None
    share_after_256: float | None = None  # of replays only
    regret: int | None
    best_arm_ratio: float | None
    rounds: int
    pulls: dict[str, int]
    switches: int | None = None
    caught_up: int | None = None  # tokens that arms had to read when they were switched to
    switch_ms: float | None = None  # that it took them, each time, on average
    decide_us_p50: float | None
    scorings: int | None  # rounds behind which idle arms were scored
    score_ms_p50: float | None = None
    score_share: float | None  # of the decode phase
    failures: int = 0  # times that a drafter raised: such rounds are decoded plainly, such scores are those of silence
    dropped: int
    unusable: str | None = None  # why × plain says nothing (`metrics.unusable`)


@dataclass(frozen=True)
class ArmReward:
    """Tokens that rounds of an arm have committed, over the rounds in which the policies played it."""

    arm: str
    n: int
    mean: float
    std: float


class Stream:
    """Answers of all contenders to one stream.

    Args:
        answers: contender → its answers, the same prompts in the same order.
        sessions, games: the session of each answer, and what names the game of a policy that answers it.
        arms: the contenders that are arms by themselves; empty where they were not measured.
        plain: the contender that is plain decoding, or None.
        by: what makes an arm the best one of a game; seconds are measured, so the best arm is in part the luckiest.
        same_text: all answer a prompt with the same text, rounding aside: passes can be counted against each other.
    """

    def __init__(
        self,
        answers: Mapping[str, Sequence[Decoded]],
        sessions: Sequence[int],
        games: Sequence[str],
        arms: Sequence[str],
        plain: str | None,
        same_text: bool,
        by: Yardstick = "mat",
    ):
        self.answers, self.sessions, self.games, self.arms, self.plain = answers, sessions, games, arms, plain
        self.by = by
        self._measure = metrics.mat if by == "mat" else metrics.tokens_per_s
        self.best = self._best()
        self.judged = bool(self.best) and same_text and by == "mat"  # whether there is a regret
        fastest = [(metrics.tokens_per_s(answers[arm]) or 0.0, arm) for arm in arms]
        self.fastest = max(fastest)[1] if fastest else None

    def _best(self) -> dict[str, str]:
        """Game → the arm with the fewest passes, or seconds, a token."""
        if not self.arms:
            return {}
        return {
            game: max(self.arms, key=lambda arm: self._measure(self._of(arm, game)) or 0.0)
            for game in dict.fromkeys(self.games)
        }

    def _of(self, name: str, game: str) -> list[Decoded]:
        return [answer for answer, mine in zip(self.answers[name], self.games, strict=True) if mine == game]

    @cached_property
    def oracle(self) -> list[Decoded]:
        """Every game answered by its best arm."""
        return [self.answers[self.best[game]][place] for place, game in enumerate(self.games)] if self.best else []

    def share_of_best(self, name: str, least: int = 0) -> Measured:
        """Mat, or tokens a second, ÷ the oracle's, over the games with `least` tokens."""
        if not self.best:
            return Measured()
        tokens: Counter[str] = Counter()
        for game, answer in zip(self.games, self.answers[name], strict=True):
            tokens[game] += answer.decoded_tokens
        places = [place for place, game in enumerate(self.games) if tokens[game] >= least]
        sessions = [self.sessions[place] for place in places]
        mine, best = ([answers[place] for place in places] for answers in (self.answers[name], self.oracle))
        value, yardstick = self._measure(mine), self._measure(best)
        if value is None or not yardstick:
            return Measured()
        ours, theirs = (
            metrics.ratio_of_sums(
                sessions, [answer.decoded_tokens for answer in part], [self._paid(answer) for answer in part]
            )
            for part in (mine, best)
        )
        interval = metrics.bootstrap(lambda counts: ours(counts) / theirs(counts), len(set(sessions)))
        return Measured(value / yardstick, interval)

    def _paid(self, answer: Decoded) -> float:
        return answer.target_passes if self.by == "mat" else answer.decode_s

    def regret(self, name: str) -> list[float]:
        """Target passes beyond the oracle's, cumulated over the prompts, where it is `judged`."""
        excess = [
            answer.target_passes - best.target_passes
            for answer, best in zip(self.answers[name], self.oracle, strict=True)
        ]
        return np.cumsum(excess).astype(float).tolist()

    @property
    def oracle_mat(self) -> float | None:
        return metrics.mat(self.oracle)

    def row(
        self,
        name: str,
        kind: str,
        *,
        tally: Tally | None,
        arms: Sequence[str],
        best_arm_ratio: float | None,
        failures: int,
    ) -> PolicyRow:
        mine = self.answers[name]
        fastest = self.answers[self.fastest] if self.fastest else None
        plain = self.answers[self.plain] if self.plain else None
        mat, speedup = measured.mat(self.sessions, mine), measured.speedup(self.sessions, mine, plain)
        return PolicyRow(
            algo=name,
            kind=kind,
            tokens_per_s=metrics.tokens_per_s(mine),
            share_of_best_256=self.share_of_best(name, LONG_ENOUGH).value,
            regret=int(self.regret(name)[-1]) if self.judged else None,
            best_arm_ratio=best_arm_ratio,
            rounds=sum(answer.target_passes for answer in mine),
            pulls={arms[arm]: count for arm, count in sorted(tally.pulls.items())} if tally else {},
            switches=tally.switches if tally else None,
            caught_up=tally.caught_up if tally else None,
            switch_ms=1000 * fmean(tally.switch_s) if tally and tally.switch_s else None,
            decide_us_p50=median(tally.decide_us) if tally and tally.decide_us else None,
            scorings=len(tally.score_s) if tally else None,
            score_ms_p50=1000 * median(tally.score_s) if tally and tally.score_s else None,
            score_share=sum(tally.score_s) / sum(answer.decode_s for answer in mine)
            if tally and tally.score_s
            else None,
            failures=failures,
            dropped=tally.dropped if tally else 0,
            unusable=measured.unusable(speedup, mat),
            **measured.columns(
                mat=mat,
                speedup=speedup,
                over_best_arm=measured.speedup(self.sessions, mine, fastest),
                share_of_best=self.share_of_best(name),
            ),
        )
