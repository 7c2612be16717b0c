"""Result rows and curves of the contenders of `specctl select` on one stream.

The statistical unit is the session: a policy learns across the prompts of a session, so its prompts are not independent
samples. Intervals are bootstraps over sessions, at 95 %, with all repeats of a session drawn together. A game runs from
one reset of the policy to the next. A policy is compared with the best arm of each of its games, as in a replay.
"""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from statistics import fmean
from typing import Literal, NamedTuple

import numpy as np

from specctl.decoding import metrics
from specctl.decoding.metrics import Interval
from specctl.decoding.records import Decoded
from specctl.measuring import measured
from specctl.measuring.measured import Measured
from specctl.recipe.select import Yardstick
from specctl.selection.certificate import Certificates, certified
from specctl.selection.controller import Tally

LONG_GAME_TOKENS = 256  # tokens of a game after which a policy should have found the best arm


@dataclass(frozen=True, kw_only=True)
class PolicyRow:
    """Results of one contender on the whole stream.

    `share_of_best`: its mat ÷ the mat of playing each game's best arm in hindsight. `share_of_best_256` is the same
    ratio over games of at least 256 tokens, `share_after_256` over the tokens after the first 256 of a game. `regret`:
    target passes in excess of the best arms'. `best_arm_ratio`: share of rounds that played the best arm. If the
    policies play for tokens per second, throughput takes the place of mat (`GameRecipe.yardstick`). These fields need
    every arm measured by itself (baseline `fixed`).

    A field is None if it was not measured. The regret is also None if the policies play for throughput, and if
    proposals are sampled, because then the arms write different texts.
    """

    algo: str
    kind: str  # policy, arm, rival or baseline
    mat: float | None
    mat_interval: Interval | None
    tokens_per_s: float | None
    speedup: float | None  # over plain decoding
    speedup_interval: Interval | None
    over_best_arm: float | None  # tokens_per_s ÷ the value of the fastest arm on the whole stream
    over_best_arm_interval: Interval | None
    share_of_best: float | None
    share_of_best_interval: Interval | None
    share_of_best_256: float | None
    share_after_256: float | None = None  # in replays only
    speedup_at_least: float | None = None  # lower bounds of `selection.certificate`, of policies: over plain decoding
    over_best_arm_at_least: float | None = None  # over every fixed arm, and so over the best one
    slow_texts: int | None = None  # texts with more than `certificate.MOST` times the seconds of plain decoding
    regret: int | None
    best_arm_ratio: float | None
    rounds: int
    pulls: dict[str, int]
    switches: int | None = None
    caught_up: int | None = None  # tokens that newly chosen arms had to read first
    switch_ms: float | None = None  # mean time of such a catch-up
    decide_us_p50: float | None
    scorings: int | None  # times that idle arms were scored
    score_ms_p50: float | None = None
    score_share: float | None  # share of scoring in the decode seconds
    failures: int = 0  # times that a drafter raised: in a round it drafts nothing, in a scoring it counts as silent
    dropped: int  # rewards and losses that were not finite
    unusable: str | None = None  # why the speed-up cannot be used (`metrics.why_unusable`)


@dataclass(frozen=True)
class ArmReward:
    """Rewards of an arm: live of the rounds in which policies played it, in a replay of its rounds if it plays alone.

    Attributes:
        reward: tokens = tokens committed per round; be and bd = MetaSD's rewards, see `selection.game.rewards`.
        zeros: share of the rounds with reward 0. Such rounds do not tell a policy which of two arms is worse.
    """

    arm: str
    n: int
    mean: float
    std: float
    reward: Literal["tokens", "be", "bd"] = "tokens"
    zeros: float = 0.0


class Grouping(NamedTuple):
    """Session number, game key and text of each answer. Repeats answer the same text; () if no answer is a repeat."""

    sessions: Sequence[int]
    games: Sequence[str]
    texts: Sequence[Hashable] = ()


class StreamAnswers:
    """Answers of all contenders to one stream.

    Args:
        answers: contender → its answers, to the same prompts in the same order.
        grouping: sessions and games of the answers.
        arms: contenders that play one arm throughout; empty if they were not measured.
        plain: the contender that decodes plainly, or None.
        yardstick: measure that decides the best arm of a game. Throughput is a measured time, so its best arm is in
            part the luckiest one.
        same_text: all contenders write the same text for a prompt, rounding aside, so their target passes are
            comparable.
    """

    def __init__(
        self,
        answers: Mapping[str, Sequence[Decoded]],
        grouping: Grouping,
        arms: Sequence[str],
        plain: str | None,
        same_text: bool,
        yardstick: Yardstick = "mat",
    ):
        self.answers, self.arms, self.plain = answers, arms, plain
        self.sessions, self.games = grouping[:2]
        self._texts = grouping.texts or range(len(self.games))
        self.yardstick = yardstick
        self._measure = metrics.mat if yardstick == "mat" else metrics.tokens_per_s
        self.best_arm_of = self._best()
        self.has_regret = bool(self.best_arm_of) and same_text and yardstick == "mat"  # whether a regret is defined
        fastest = [(metrics.tokens_per_s(answers[arm]) or 0.0, arm) for arm in arms]
        self.fastest = max(fastest)[1] if fastest else None

    def _best(self) -> dict[str, str]:
        """Game → the arm with the highest mat, or the most tokens per second."""
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
        """Answers of the oracle: every game is played by its best arm."""
        if not self.best_arm_of:
            return []
        return [self.answers[self.best_arm_of[game]][place] for place, game in enumerate(self.games)]

    def share_of_best(self, name: str, least: int = 0) -> Measured:
        """mat (or tokens per second) of a policy ÷ the oracle's, over the games with at least `least` tokens."""
        if not self.best_arm_of:
            return Measured()
        tokens: Counter[str] = Counter()
        for game, answer in zip(self.games, self.answers[name], strict=True):
            tokens[game] += answer.decoded_tokens
        places = [place for place, game in enumerate(self.games) if tokens[game] >= least]
        sessions = [self.sessions[place] for place in places]
        paid = attrgetter("target_passes" if self.yardstick == "mat" else "decode_s")
        mine, best = ([answers[place] for place in places] for answers in (self.answers[name], self.oracle))
        ours, theirs = (([answer.decoded_tokens for answer in part], [*map(paid, part)]) for part in (mine, best))
        return measured.relative(sessions, ours, theirs)

    def regret(self, name: str) -> list[float]:
        """Cumulative target passes in excess of the oracle's, by prompt; defined only if `has_regret`."""
        excess = [
            answer.target_passes - best.target_passes
            for answer, best in zip(self.answers[name], self.oracle, strict=True)
        ]
        return np.cumsum(excess).astype(float).tolist()

    @property
    def oracle_mat(self) -> float | None:
        return metrics.mat(self.oracle)

    def relative_seconds(self, name: str, other: str) -> list[float]:
        """[texts] seconds per token, divided by another contender's: the mean over the repeats of each text. A text
        without a decoded token is left out."""
        ratios: dict[Hashable, list[float]] = {}
        for text, mine, theirs in zip(self._texts, self.answers[name], self.answers[other], strict=True):
            if mine.decoded_tokens and theirs.decoded_tokens and theirs.decode_s > 0:
                ratio = (mine.decode_s / mine.decoded_tokens) / (theirs.decode_s / theirs.decoded_tokens)
                ratios.setdefault(text, []).append(ratio)
        return [fmean(repeats) for repeats in ratios.values()]

    def certificates(self, name: str) -> Certificates:
        """Lower bounds of a contender's speed. Those over arms need every arm measured by itself."""
        plain = self.relative_seconds(name, self.plain) if self.plain else None
        return certified(plain, [self.relative_seconds(name, arm) for arm in self.arms])

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
            share_of_best_256=self.share_of_best(name, LONG_GAME_TOKENS).value,
            regret=int(self.regret(name)[-1]) if self.has_regret else None,
            best_arm_ratio=best_arm_ratio,
            rounds=sum(answer.target_passes for answer in mine),
            pulls={arms[arm]: count for arm, count in sorted(tally.pulls.items())} if tally else {},
            switches=tally.switches if tally else None,
            caught_up=tally.caught_up if tally else None,
            switch_ms=_milliseconds(tally.switch_s.mean) if tally else None,
            decide_us_p50=tally.decide_us.median if tally else None,
            scorings=tally.score_s.count if tally else None,
            score_ms_p50=_milliseconds(tally.score_s.median) if tally else None,
            score_share=tally.score_s.total / sum(answer.decode_s for answer in mine)
            if tally and tally.score_s.count
            else None,
            failures=failures,
            dropped=tally.dropped if tally else 0,
            unusable=measured.unusable(speedup, mat),
            **(self.certificates(name)._asdict() if kind == "policy" else {}),
            **measured.columns(
                mat=mat,
                speedup=speedup,
                over_best_arm=measured.speedup(self.sessions, mine, fastest),
                share_of_best=self.share_of_best(name),
            ),
        )


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds
