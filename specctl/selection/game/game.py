"""Game between a policy and the rounds of decoding, for live decoding and for replays."""

from collections import deque
from dataclasses import dataclass, field, replace
from math import inf, isfinite
from time import perf_counter_ns

import numpy as np

from specctl.selection.game.clock import ArmClock, TextRate
from specctl.selection.game.delay import Delay
from specctl.selection.game.drift import Drift
from specctl.selection.game.length_correction import LengthCorrection
from specctl.selection.game.losses import per_second, usable, with_failures
from specctl.selection.game.rewards import Outcome, reward, surplus_lost
from specctl.selection.game.rules import Rules, ScoringSchedule
from specctl.selection.policies.contextual import ContextualUcb
from specctl.selection.policies.policy import AnyArray, Arms, Array, Numbers, Policy

# Rounds of plain decoding that are timed, for a policy that knows the rest of their reward: the first `TIMED` of a
# stream, then one in `TIMED_EVERY`, since machines are shared. If drafting doubles the speed, this costs 0.3 %.
TIMED, TIMED_EVERY = 3, 256
FIRST = 16  # rounds of an arm, about, in the mean overlap at the first position of its drafts
RECENT = 4  # rounds of an arm, about, over which the share of its failures is taken


@dataclass
class Round:
    """One round of a game.

    Attributes:
        weights: [N] probabilities with which the arm was drawn.
        reward: of the arm, on the policy's scale, or None if the policy was told none.
        losses: arrays [M, N] of the vectors that were fed between this round and the next.
        regret: until this round, Σ losses of the arms played − Σ losses of the best arm in hindsight.
        decide_us: microseconds of choosing and learning.
        scored: tokens that were scored between this round and the next.
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

    A round is `choose`, `round_finished`, then `scored` with the tokens that `due` asks for; `ended` closes a text. A
    round may be chosen while earlier ones are unfinished. The rounds are then played in the same order, or withdrawn.

    Attributes:
        keeps_log: whether `log` gets every round, as replays need. The stream of a server has no end.
        rounds: number of finished rounds.
    """

    keeps_log = False

    def __init__(self, policy: Policy, rules: Rules, arms: Arms, clock: ArmClock | None = None):
        """`clock`: measurements of earlier games."""
        if arms.depth != rules.depth or (rules.costs and len(rules.costs) != arms.count):
            raise ValueError(f"the rules do not fit the arms: {rules} and {arms}")
        self.policy = policy
        self.rules = rules
        self.arms = arms
        self.log: list[Round] = []
        self.rounds = 0
        self._open: deque[Round] = deque()  # chosen rounds that are not over
        self._last_round: Round | None = None  # the last round that is over
        self.dropped = 0  # rewards, and loss vectors, with a value that was not finite
        self.unscored = 0  # committed tokens that `scored` has not covered
        self._schedule = ScoringSchedule(rules)
        self._drift = Drift(arms.count, rules.drift) if rules.drift and policy.learns == "losses" else None
        self._stale_vectors = 0  # number of next vectors that are older than the noticed change
        self._delay = Delay(arms.count, rules)
        self._reach = np.array(rules.reach or [rules.longest] * arms.count)
        self._realised = LengthCorrection(arms.count) if rules.depth < rules.horizon else None
        # For each token (chunk: round) with a vector that was not fed yet: the arm that played it and, at the start of
        # a round that can be judged, the number of accepted draft tokens.
        self._owners: list[tuple[int, int | None]] = []
        self._update: list[Numbers] = []  # vectors for the next update
        self._guessed: list[Array] = []  # vectors that were fed while the seconds of some arm were a guess
        self._timed = 0  # number of arms with known seconds at that time
        self.clock = clock or ArmClock.of(arms.count)
        self._text = TextRate()
        self._cost = np.zeros(arms.count)  # Σ losses of each arm
        self._own_cost = 0.0
        self._played = [0] * arms.count  # rounds of each arm
        self._first_overlap: list[float | None] = [None] * arms.count  # mean overlap at the first position
        self._first_overlap_count = [0] * arms.count  # rounds in this mean
        self._success_share = [1.0] * arms.count  # share of an arm's last rounds in which its drafter did not fail
        self._reader = policy if isinstance(policy, ContextualUcb) and arms.plain is not None else None

    def choose(self) -> int:
        """Choose the arm of a round."""
        began = perf_counter_ns()
        if self._reader is not None:
            self._reader.set_plain_reward(self._plain_reward())
        weights = self.policy.weights()
        arm = self.policy.choose()
        regret = self._last_round.regret if self._last_round is not None else 0.0
        entry = Round(arm, weights, regret=regret, decide_us=(perf_counter_ns() - began) / 1000)
        self._open.append(entry)
        if self.keeps_log:
            self.log.append(entry)
        return arm

    @property
    def time_cost(self) -> Numbers:
        """[N] present cost of the time of a round of each arm, in rewards."""
        if self.rules.reward != "surplus":
            return [0.0] * self.arms.count
        return surplus_lost(self.clock.costs(), self.clock.rate, self.rules.depth)

    def _plain_reward(self) -> float:
        """Reward of a round of plain decoding, which commits one token; infinite if it is to be timed now."""
        assert self.arms.plain is not None
        rounds = self.clock.n[self.arms.plain]
        timed = rounds >= TIMED and rounds * TIMED_EVERY >= sum(self.clock.n)
        if not timed and self.rules.reward in ("throughput", "surplus"):
            return inf
        # A draft makes no round shorter, so plain decoding is as fast as the fastest arm.
        outcome = Outcome(1, 0, overlap=np.zeros(0), seconds=min(self.clock.costs()))
        worth = reward(self.rules, outcome, self.clock.rate)
        return worth if isfinite(worth) else 0.0

    def withdraw(self) -> None:
        """Undo the last choice: its round did not take place."""
        self._open.pop()
        if self.keeps_log:
            self.log.pop()

    @property
    def awaits_reward(self) -> bool:
        """Whether a bandit must hear of its unfinished rounds before it chooses again. Otherwise it would try an arm
        without any reward once more, or play arms that take turns unequally often."""
        if self.policy.learns != "reward" or not self._open:
            return False
        return self.policy.takes_turns or any(not self._played[entry.arm] for entry in self._open)

    def round_finished(self, arm: int, outcome: Outcome) -> Round:
        """Finish the oldest chosen round, which was a round of this arm, and return it."""
        self._schedule.rounds += 1
        entry = self._last_round = self._open.popleft()
        self.rounds += 1
        self._played[arm] += 1
        entry.committed = outcome.committed
        began = perf_counter_ns()
        rate = self._rate()
        if outcome.seconds is not None:
            seconds = self.clock.record(arm, outcome.seconds / outcome.texts, outcome.committed / outcome.texts)
            outcome = replace(outcome, seconds=seconds * outcome.texts)
            self._text.record(seconds, outcome.committed / outcome.texts)
        if self.policy.learns == "losses":
            self._committed(arm, outcome)
            self._replace_guesses()
        elif self.policy.learns == "reward" and outcome.complete:
            unit = reward(self.rules, outcome, rate, self._first_overlap[arm])
            if outcome.overlap is not None and isfinite(unit) and not outcome.failed:
                self._overlapped(arm, float(outcome.overlap[0]) if len(outcome.overlap) else 0.0)
            if not isfinite(unit):  # worth 0: without any reward the arm would be tried for ever
                self.dropped += 1
                unit = 0.0
            entry.reward = unit if self.policy.scale == "unit" else 1 + self.rules.depth * unit
            if isinstance(self.policy, ContextualUcb):
                self.policy.excess_cost = self._dear()
            self.policy.drawn_from = entry.weights  # on a device, a reward comes after the next choice
            self.policy.reward(arm, entry.reward)
        entry.decide_us += (perf_counter_ns() - began) / 1000
        return entry

    def _rate(self) -> float:
        """Tokens per second to compare the next round with: the text's rate. A policy that compares rewards across
        texts gets the stream's rate instead."""
        stream = self.clock.rate
        return stream if isinstance(self.policy, ContextualUcb) else self._text.rate(stream)

    def _dear(self) -> Numbers:
        """[N] excess of the reward of a round of each arm over its worth in this text, if seconds are dearer here."""
        if self.rules.reward != "surplus":
            return [0.0] * self.arms.count
        stream = self.clock.rate
        return surplus_lost(self.clock.costs(), self._text.rate(stream) - stream, self.rules.depth)

    def _overlapped(self, arm: int, first: float) -> None:
        """Record the overlap at the first position of a draft."""
        self._first_overlap_count[arm] += 1
        mean = self._first_overlap[arm] or 0.0
        self._first_overlap[arm] = mean + (first - mean) / min(self._first_overlap_count[arm], FIRST)

    def _committed(self, arm: int, outcome: Outcome) -> None:
        """Record everything that a round shows before its tokens are scored."""
        self.unscored += outcome.committed
        vectors = self._delay.committed(outcome.committed)
        fair = outcome.complete and not outcome.failed
        self._owners += [(arm, outcome.accepted if fair and not later else None) for later in range(vectors)]
        if self._drift and self._drift.record(arm, outcome.accepted if outcome.complete else None, vectors):
            self._restart(self._drift)
        self._success_share[arm] += (1 - outcome.failed - self._success_share[arm]) / min(self._played[arm], RECENT)
        if outcome.failed:
            self._schedule.hurry()  # until something is learned, the failing arm plays on

    def _restart(self, drift: Drift) -> None:
        """Forget everything learned before the change that the drift test has noticed; scoring begins anew."""
        hurried = self._realised is not None and self.rules.unit == "token"
        if hurried:  # one scored depth is a loss at once, as at the start of a game
            self._feed(self._delay.flush())
        self._stale_vectors = max(len(self._owners) - drift.since, 0)
        if hurried:
            self._delay.complete_at_once(self._stale_vectors)
        self._update.clear()
        self._guessed.clear()
        self.policy.forget()
        drift.reset()
        self._schedule.begin(0)

    def _replace_guesses(self) -> None:
        """Feed all vectors once more if the seconds of an arm, a guess until now, are known: this game or another one
        of its clock has timed a round. In a sum of losses, a guess that is too low would remain an advantage for a long
        time."""
        timed = sum(map(bool, self.clock.n))
        if not self._guessed or timed == self._timed:
            return
        self._timed = timed
        self.policy.forget()
        self._update = self._costly(np.concatenate(self._guessed)).tolist()
        size = 1 if self._schedule.warm else self.rules.tokens_per_update
        self._learn(max(min(size, len(self._update)), 1))  # at once, even with few: the learner has forgotten
        if all(self.clock.n):
            self._guessed.clear()

    def due(self) -> int:
        """Number of committed tokens to score now: all unscored ones, or 0. To be called once per round."""
        return self.unscored if self.policy.learns == "losses" and self._schedule.due() else 0

    def scored(self, gamma: AnyArray, hit: AnyArray) -> None:
        """Take in the scores of the oldest unscored tokens, and feed the vectors that are now complete.

        Args:
            gamma, hit: [N, S, K] of these tokens, as in `Trace`. If a value is not finite, its arm's loss is 1; if no
                arm has a finite loss, the vector is dropped. Both are counted.
        """
        tokens = gamma.shape[1]
        if tokens > self.unscored:
            raise ValueError(f"{tokens} tokens are scored, but only {self.unscored} were committed")
        self.unscored -= tokens
        if self._last_round is not None:
            self._last_round.scored += tokens
        self._feed(self._delay.scored(gamma, hit))

    def _feed(self, losses: Array) -> None:
        """Feed loss vectors [M, N], in text order."""
        owners, self._owners = self._owners[: len(losses)], self._owners[len(losses) :]
        stale = min(self._stale_vectors, len(losses))
        self._stale_vectors -= stale
        broken = ~np.isfinite(losses).all(axis=1)
        if broken.any():
            self.dropped += int(broken.sum())
            losses, finite = usable(losses)
            losses = losses[finite]
            owners = [owner for owner, known in zip(owners, finite.tolist(), strict=True) if known]
            stale = int(finite[:stale].sum())
        if not owners:
            return
        losses = self._corrected(np.maximum(losses, 0), owners)  # Σ min(p, q) may be rounded past 1
        self._replace_guesses()
        if self.rules.loss == "throughput" and not all(self.clock.n):
            self._guessed.append(losses[stale:])
            self._timed = sum(map(bool, self.clock.n))
        losses = self._costly(losses)
        self._cost += losses.sum(axis=0)
        self._own_cost += float(losses[np.arange(len(owners)), [arm for arm, _ in owners]].sum())
        self._update += losses[stale:].tolist()
        self._learn(1 if self._schedule.warm else self.rules.tokens_per_update)
        if self._last_round is not None:
            self._last_round.losses.append(losses)
            self._last_round.regret = self._own_cost - float(self._cost.min())

    def _corrected(self, losses: Array, owners: list[tuple[int, int | None]]) -> Array:
        """[M, N] losses of whole drafts that were scored at some depths only, corrected by the rounds played before."""
        if self._realised is None:
            return losses
        horizon = self.rules.horizon
        for row, (arm, accepted) in zip(losses, owners, strict=True):
            if accepted is not None:
                self._realised.record(arm, accepted, (1 - float(row[arm])) * (horizon + 1) - 1)
        return self._realised.corrected(losses, self._reach, horizon)

    def _costly(self, losses: Array) -> Array:
        """[M, N] losses that count the seconds of a round (throughput) and the share of failed rounds of each arm."""
        if self.rules.loss == "throughput":
            assert self.rules.step is not None, "throughput needs the seconds of a plain step"
            losses = per_second(losses, self.clock.costs(self.rules.step), self.rules.step)
        return (
            losses if all(share == 1 for share in self._success_share) else with_failures(losses, self._success_share)
        )

    def _learn(self, size: int) -> None:
        """Update the policy with the mean of every `size` waiting vectors."""
        began = perf_counter_ns()
        while len(self._update) >= size:
            together, self._update = self._update[:size], self._update[size:]
            self.policy.losses(together[0] if size == 1 else [sum(ones) / size for ones in zip(*together, strict=True)])
        if self._last_round is not None:
            self._last_round.decide_us += (perf_counter_ns() - began) / 1000

    def ended(self) -> None:
        """Close a text. Beyond its end nothing is accepted, so the waiting vectors are complete; all are fed.

        If the game goes on to another text, score the `unscored` tokens before (`score_ends`); here they are forgotten.
        """
        self._text.begin()
        self._feed(self._delay.ended())
        if self._update:
            self._learn(len(self._update))
        self.unscored = self._stale_vectors = 0
        self._owners.clear()
