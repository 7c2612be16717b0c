"""The game between a policy and the rounds of decoding, whoever plays them: live decoding, or a replay."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from math import isfinite
from time import perf_counter_ns

import numpy as np

from specctl.selection.game.clock import ArmClock, TextRate
from specctl.selection.game.delay import Delay
from specctl.selection.game.drift import Drift
from specctl.selection.game.losses import at_success, per_second, usable
from specctl.selection.game.realised import Realised
from specctl.selection.game.rewards import Outcome, reward, surplus_lost
from specctl.selection.game.rules import Rules
from specctl.selection.game.scoring import ScoringSchedule
from specctl.selection.policies.contextual import ContextualUcb
from specctl.selection.policies.policy import AnyArray, Arms, Array, Numbers, Policy

FIRST = 16  # rounds of an arm, about, that the overlap at the first position of its drafts is a mean of
RECENT = 4  # rounds of an arm, about, that the share of its failures is taken over


@dataclass
class Round:
    """One round of the log.

    Attributes:
        weights: [N] with which the arm was drawn.
        reward: of the arm, on the policy's scale; None if the policy was told none.
        losses: arrays [M, N] of the vectors that were fed after this round and before the next.
        regret: up to then, Σ losses of the arms played − Σ losses of the arm that was best in hindsight.
        decide_us: microseconds of choosing and learning.
        scored: tokens that were scored behind this round and before the next.
    """

    arm: int
    weights: Numbers
    committed: int = 0
    reward: float | None = None
    losses: list[Array] = field(default_factory=list)
    regret: float = 0.0
    decide_us: float = 0.0
    scored: int = 0


class Game:
    """One policy against the rounds of decoding until its reset.

    A round is `choose`, `played`, then `scored` with the tokens that `due` asks for; `ended` closes a text. Rounds may
    be chosen before those that were chosen before them are over: they are played in the same order, or `withdrawn`.
    """

    def __init__(self, policy: Policy, rules: Rules, arms: Arms, clock: ArmClock | None = None):
        """`clock`: what games before this one have measured."""
        if arms.depth != rules.depth or (rules.costs and len(rules.costs) != arms.count):
            raise ValueError(f"rules for other arms: {rules} and {arms}")
        self.policy = policy
        self.rules = rules
        self.arms = arms
        self.log: list[Round] = []
        self._open: deque[Round] = deque()  # rounds that were chosen and are not over, the last ones of the log
        self._over: Round | None = None  # the last round that is
        self.dropped = 0  # rewards, and vectors of losses, that were not finite throughout
        self.unscored = 0  # committed tokens that no `scored` has covered
        self._schedule = ScoringSchedule(rules)
        self._drift = Drift(arms.count, rules.drift) if rules.drift and policy.learns == "losses" else None
        self._stale = 0  # so many of the next vectors are older than the change that was noticed
        self._delay = Delay(arms.count, rules)
        self._reach = np.array(rules.reach or [rules.longest] * arms.count)
        self._realised = Realised(arms.count) if rules.depth < rules.horizon else None
        # Of each token (chunk: round) whose vector was not fed, the arm that played it and, where its round began and
        # can be judged, the draft tokens that were accepted.
        self._owners: list[tuple[int, int | None]] = []
        self._update: list[Numbers] = []  # vectors that wait to become one update
        self._guessed: list[Array] = []  # vectors that were fed while the seconds of some arm were a guess
        self.clock = clock or ArmClock.of(arms.count)
        self._text = TextRate()
        self._cost = np.zeros(arms.count)  # Σ losses of each arm
        self._own_cost = 0.0
        self._played = [0] * arms.count  # rounds of each arm
        self._first: list[float | None] = [None] * arms.count  # that mean
        self._shown = [0] * arms.count  # rounds in it
        self._kept = [1.0] * arms.count  # share of its last rounds in which its drafter did not fail

    def weights(self) -> Numbers:
        """[N] probabilities of the next choice."""
        return self.policy.weights()

    def choose(self) -> int:
        """The arm of the round that begins, the last one to be told; opens its entry in the log."""
        began = perf_counter_ns()
        weights = self.policy.weights()
        arm = self.policy.choose()
        regret = self._over.regret if self._over is not None else 0.0
        self.log.append(Round(arm, weights, regret=regret, decide_us=(perf_counter_ns() - began) / 1000))
        self._open.append(self.log[-1])
        return arm

    @property
    def lost(self) -> Numbers:
        """[N] what the time of a round of each arm counts in its reward now."""
        if self.rules.reward != "surplus":
            return [0.0] * self.arms.count
        return surplus_lost(self.clock.costs(), self.clock.rate, self.rules.depth)

    def withdraw(self) -> None:
        """Strike the last choice out: there was no round."""
        self._open.pop()
        self.log.pop()

    @property
    def rounds(self) -> int:
        """Rounds that are over."""
        return len(self.log) - len(self._open)

    @property
    def curious(self) -> bool:
        """Whether a round is under way of an arm whose reward was never told: a bandit that chooses without it would
        try the arm once more."""
        return self.policy.learns == "reward" and any(not self._played[entry.arm] for entry in self._open)

    def played(self, arm: int, outcome: Outcome) -> Round:
        """The oldest round that was chosen, which was of this arm, is over; returns its entry in the log."""
        self._schedule.rounds += 1
        entry = self._over = self._open.popleft()
        self._played[arm] += 1
        entry.committed = outcome.committed
        began = perf_counter_ns()
        rate = self._rate()
        first = not self.clock.n[arm]
        if outcome.seconds is not None:
            seconds = self.clock.took(arm, outcome.seconds / outcome.texts, outcome.committed / outcome.texts)
            outcome = replace(outcome, seconds=seconds * outcome.texts)
            self._text.took(seconds, outcome.committed / outcome.texts)
        if self.policy.learns == "losses":
            self._committed(arm, outcome)
            if first and self.clock.n[arm] and self._guessed:
                self._tell_again()
        elif self.policy.learns == "reward" and outcome.complete:
            unit = reward(self.rules, outcome, rate, self._first[arm])
            if outcome.overlap is not None and isfinite(unit) and not outcome.failed:
                self._overlapped(arm, float(outcome.overlap[0]) if len(outcome.overlap) else 0.0)
            if not isfinite(unit):  # worth nothing: an arm of which nothing were told would be tried for ever
                self.dropped += 1
                unit = 0.0
            entry.reward = unit if self.policy.scale == "unit" else 1 + self.rules.depth * unit
            if isinstance(self.policy, ContextualUcb):
                self.policy.dear = self._dear()
            self.policy.reward(arm, entry.reward)
        entry.decide_us += (perf_counter_ns() - began) / 1000
        return entry

    def _rate(self) -> float:
        """Tokens a second that the next round is held against: of the text, or, for a policy whose rewards of earlier
        texts are held against the same rate, of the stream."""
        stream = self.clock.rate
        return stream if isinstance(self.policy, ContextualUcb) else self._text.rate(stream)

    def _dear(self) -> Numbers:
        """[N] what a round of each arm is worth less than its reward says, as its seconds are dearer in this text."""
        if self.rules.reward != "surplus":
            return [0.0] * self.arms.count
        stream = self.clock.rate
        return surplus_lost(self.clock.costs(), self._text.rate(stream) - stream, self.rules.depth)

    def _overlapped(self, arm: int, first: float) -> None:
        """Note the overlap at the first position of a draft."""
        self._shown[arm] += 1
        mean = self._first[arm] or 0.0
        self._first[arm] = mean + (first - mean) / min(self._shown[arm], FIRST)

    def _committed(self, arm: int, outcome: Outcome) -> None:
        """Note all that a round shows before its tokens are scored."""
        self.unscored += outcome.committed
        vectors = self._delay.committed(outcome.committed)
        fair = outcome.complete and not outcome.failed
        self._owners += [(arm, outcome.accepted if fair and not later else None) for later in range(vectors)]
        if self._drift and self._drift.seen(arm, outcome.accepted if outcome.complete else None, vectors):
            self._begin_again(self._drift)
        self._kept[arm] += (1 - outcome.failed - self._kept[arm]) / min(self._played[arm], RECENT)
        if outcome.failed:
            self._schedule.hurry()  # until something is learnt, it is played on

    def _begin_again(self, drift: Drift) -> None:
        """Forget what was learnt before the change that the drift test has noticed; scoring begins anew."""
        hurried = self._realised is not None and self.rules.unit == "token"
        if hurried:  # one depth is scored, so that something is known at once, as when the game began
            self._feed(self._delay.given_up())
        self._stale = max(len(self._owners) - drift.since, 0)
        if hurried:
            self._delay.hurry(self._stale)
        self._update.clear()
        self._guessed.clear()
        self.policy.forget()
        drift.reset()
        self._schedule.begin(0)

    def _tell_again(self) -> None:
        """Feed all vectors once more: the seconds of an arm, which were a guess, are known now. Summed up, a guess that
        is too low would be an advantage for long."""
        self.policy.forget()
        self._update = self._costly(np.concatenate(self._guessed)).tolist()
        size = 1 if self._schedule.warm else self.rules.tokens_per_update
        self._learn(max(min(size, len(self._update)), 1))  # at once, also where they are few: the learner has forgotten
        if all(self.clock.n):
            self._guessed.clear()

    def due(self) -> int:
        """Number of committed tokens to be scored now: all that have no scores, or none. To be asked once a round."""
        return self.unscored if self.policy.learns == "losses" and self._schedule.due() else 0

    def scored(self, gamma: AnyArray, hit: AnyArray) -> None:
        """The oldest committed tokens without scores; every vector that they complete is fed.

        Args:
            gamma, hit: [N, S, K] of those tokens, as in `Trace`. Where a value is not finite its arm's loss is 1, and
                where no arm's is, the vector is dropped; both are counted.
        """
        tokens = gamma.shape[1]
        if tokens > self.unscored:
            raise ValueError(f"{tokens} tokens are scored, {self.unscored} were committed")
        self.unscored -= tokens
        if self._over is not None:
            self._over.scored += tokens
        self._feed(self._delay.scored(gamma, hit))

    def _feed(self, losses: Array) -> None:
        """[M, N] vectors, in the order of the text."""
        owners, self._owners = self._owners[: len(losses)], self._owners[len(losses) :]
        stale = min(self._stale, len(losses))
        self._stale -= stale
        broken = ~np.isfinite(losses).all(axis=1)
        if broken.any():
            self.dropped += int(broken.sum())
            losses, told = usable(losses)
            losses, owners = losses[told], [owner for owner, known in zip(owners, told.tolist(), strict=True) if known]
            stale = int(told[:stale].sum())
        if not owners:
            return
        losses = self._corrected(np.maximum(losses, 0), owners)  # Σ min(p, q) may be rounded past 1
        if self.rules.loss == "throughput" and not all(self.clock.n):
            self._guessed.append(losses[stale:])
        losses = self._costly(losses)
        self._cost += losses.sum(axis=0)
        self._own_cost += float(losses[np.arange(len(owners)), [arm for arm, _ in owners]].sum())
        self._update += losses[stale:].tolist()
        self._learn(1 if self._schedule.warm else self.rules.tokens_per_update)
        if self._over is not None:
            self._over.losses.append(losses)
            self._over.regret = self._own_cost - float(self._cost.min())

    def _corrected(self, losses: Array, owners: list[tuple[int, int | None]]) -> Array:
        """[M, N] losses of whole drafts of which not all depths were scored, by what such scores were worth so far."""
        if self._realised is None:
            return losses
        horizon = self.rules.horizon
        for row, (arm, accepted) in zip(losses, owners, strict=True):
            if accepted is not None:
                self._realised.seen(arm, accepted, (1 - float(row[arm])) * (horizon + 1) - 1)
        return self._realised.corrected(losses, self._reach, horizon)

    def _costly(self, losses: Array) -> Array:
        """[M, N] losses that count a round's seconds (throughput) and the share of rounds in which the arm failed."""
        if self.rules.loss == "throughput":
            assert self.rules.step is not None, "throughput needs the seconds of a plain step"
            losses = per_second(losses, self.clock.costs(self.rules.step), self.rules.step)
        return losses if all(share == 1 for share in self._kept) else at_success(losses, self._kept)

    def _learn(self, size: int) -> None:
        """One update with the mean of every `size` vectors that wait."""
        began = perf_counter_ns()
        while len(self._update) >= size:
            together, self._update = self._update[:size], self._update[size:]
            self.policy.losses(together[0] if size == 1 else [sum(ones) / size for ones in zip(*together, strict=True)])
        if self._over is not None:
            self._over.decide_us += (perf_counter_ns() - began) / 1000

    def ended(self) -> None:
        """The text is over: nothing is accepted beyond its end, so the vectors that wait are complete; all are fed.

        In a game that goes on to another text the `unscored` tokens are to be scored before (`score_ends`); here they
        are forgotten.
        """
        self._text.begin()
        self._feed(self._delay.ended())
        if self._update:
            self._learn(len(self._update))
        self.unscored = self._stale = 0
        self._owners.clear()
