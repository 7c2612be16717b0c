"""The game between a policy and the rounds of decoding, whoever plays them: live decoding, or a replay."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import asdict, dataclass, field
from math import inf, isfinite, nan
from time import perf_counter_ns
from typing import Any

import numpy as np

from specctl.selection.clock import Clock
from specctl.selection.delay import Delay
from specctl.selection.drift import Drift
from specctl.selection.losses import per_second, usable
from specctl.selection.policy import AnyArray, Arms, Array, Numbers, Policy
from specctl.selection.rules import Rules


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

    A round is `choose`, `played`, then `scored` with the tokens that `due` asks for; `ended` closes a text.
    """

    def __init__(self, policy: Policy, rules: Rules, arms: Arms, clock: Clock | None = None):
        """`clock`: what games before this one have measured, where costs are not declared."""
        if arms.depth != rules.depth or (rules.costs and len(rules.costs) != arms.count):
            raise ValueError(f"rules for other arms: {rules} and {arms}")
        self.policy = policy
        self.rules = rules
        self.arms = arms
        self.log: list[Round] = []
        self.dropped = 0  # rewards, and vectors of losses, that were not finite throughout
        self.unscored = 0  # committed tokens that no `scored` has covered
        self._rounds = 0
        self._begin_scoring(rules.warmup_rounds)
        self._drift = Drift(arms.count, rules.drift) if rules.drift and policy.learns == "losses" else None
        self._stale = 0  # so many of the next vectors are older than the change that was noticed
        self._delay = Delay(arms.count, rules)
        self._owners: list[int] = []  # the arm that played each token (chunk: round) whose vector was not fed
        self._update: list[Numbers] = []  # vectors that wait to become one update
        self._best_rate = 0.0
        self._clock = clock or Clock.of(arms.count)
        self._cost = np.zeros(arms.count)  # Σ losses of each arm
        self._own_cost = 0.0

    def weights(self) -> Numbers:
        """[N] probabilities of the next choice."""
        return self.policy.weights()

    def shows(self, reward: str) -> bool:
        """Whether a round's reward is made of this; saves computing what nobody is shown."""
        return self.policy.learns == "reward" and self.rules.reward == reward

    def choose(self) -> int:
        """The arm of the round that begins; opens its entry in the log."""
        began = perf_counter_ns()
        weights = self.policy.weights()
        arm = self.policy.choose()
        self.log.append(Round(arm, weights, decide_us=(perf_counter_ns() - began) / 1000))
        return arm

    def played(
        self,
        arm: int,
        committed: int,
        accepted: int,
        drafted: int,
        complete: bool,
        overlap: AnyArray | None = None,
        seconds: float | None = None,
    ) -> None:
        """A round is over.

        Args:
            committed: tokens it added to the text, bonus token included.
            accepted, drafted: tokens of its draft.
            complete: False if the text ended inside the round, which a bandit is then not shown.
            overlap: [≤ K] 1 − TV(p, q) of each draft position (bd).
            seconds: that the round took (throughput, of reward or loss, without declared costs).
        """
        self._rounds += 1
        entry = self.log[-1]
        entry.committed = committed
        if self.policy.learns == "losses":
            self.unscored += committed
            vectors = self._delay.committed(committed)
            self._owners += [arm] * vectors
            if seconds is not None:
                self._clock.took(arm, seconds)
            if self._drift is not None:
                began = perf_counter_ns()
                if self._drift.seen(arm, accepted if complete else None, vectors):
                    self._begin_again(self._drift)
                entry.decide_us += (perf_counter_ns() - began) / 1000
        elif self.policy.learns == "reward" and complete:
            unit = self._reward(arm, committed, accepted, overlap, seconds)
            if not isfinite(unit):
                self.dropped += 1
                return
            entry.reward = unit if self.policy.scale == "unit" else 1 + self.rules.depth * unit
            began = perf_counter_ns()
            self.policy.reward(arm, entry.reward)
            entry.decide_us += (perf_counter_ns() - began) / 1000

    def _begin_scoring(self, rounds: int) -> None:
        """So many rounds from now on are all scored, then some after ever longer intervals."""
        self._warm_until = self._rounds + rounds
        self._interval = float(self.rules.batch_rounds)
        self._next_scoring = self._warm_until + self.rules.batch_rounds

    def _begin_again(self, drift: Drift) -> None:
        """An alarm: what was learnt before the change is forgotten, scoring begins now and anew."""
        self._stale = max(len(self._owners) - drift.since, 0)
        self._update.clear()
        self.policy.forget()
        drift.reset()
        self._begin_scoring(0)

    def _reward(
        self, arm: int, committed: int, accepted: int, overlap: AnyArray | None, seconds: float | None
    ) -> float:
        """Of a round, in [0, 1]; NaN if what it is made of is not usable."""
        K = self.rules.depth
        match self.rules.reward:
            case "tokens":
                return (committed - 1) / K
            case "be":
                return accepted / K
            case "bd":
                if overlap is None:
                    raise ValueError("the reward bd needs the overlap of every round")
                return float(overlap.sum()) / K
            case "throughput":
                cost = self.rules.costs[arm] if self.rules.costs else seconds
                if cost is None:
                    raise ValueError("the reward throughput needs the seconds of every round, or declared costs")
                if not 0 < cost < inf:
                    return nan
                largest = (K + 1) / min(self.rules.costs) if self.rules.costs else committed / cost
                self._best_rate = max(self._best_rate, largest)
                return committed / cost / self._best_rate

    def due(self) -> int:
        """How many of the oldest committed tokens without scores it wants scored now: all or none of them."""
        if self.policy.learns != "losses":
            return 0
        if self._rounds <= self._warm_until:
            return self.unscored
        if self._rounds < self._next_scoring:
            return 0
        self._interval *= self.rules.batch_growth
        self._next_scoring = self._rounds + round(self._interval)
        return self.unscored

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
        if self.log:
            self.log[-1].scored += tokens
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
            losses, owners = losses[told], [arm for arm, known in zip(owners, told.tolist(), strict=True) if known]
            stale = int(told[:stale].sum())
        if not owners:
            return
        losses = np.maximum(losses, 0)  # Σ min(p, q) may be rounded past 1
        if self.rules.loss == "throughput":
            losses = per_second(losses, self.rules.costs or self._clock.costs())
        self._cost += losses.sum(axis=0)
        self._own_cost += float(losses[np.arange(len(owners)), owners].sum())
        self._update += losses[stale:].tolist()
        self._learn(1 if self._rounds <= self._warm_until else self.rules.tokens_per_update)
        if self.log:
            self.log[-1].losses.append(losses)
            self.log[-1].regret = self._own_cost - float(self._cost.min())

    def _learn(self, size: int) -> None:
        """One update with the mean of every `size` vectors that wait."""
        began = perf_counter_ns()
        while len(self._update) >= size:
            together, self._update = self._update[:size], self._update[size:]
            self.policy.losses(together[0] if size == 1 else [sum(ones) / size for ones in zip(*together, strict=True)])
        if self.log:
            self.log[-1].decide_us += (perf_counter_ns() - began) / 1000

    def ended(self) -> None:
        """The text is over: nothing is accepted beyond its end, so the vectors that wait are complete; all are fed.

        In a game that goes on to another text the `unscored` tokens are to be scored before (`score_ends`); here they
        are forgotten.
        """
        self._feed(self._delay.ended())
        if self._update:
            self._learn(len(self._update))
        self.unscored = self._stale = 0
        self._owners.clear()

    def state(self) -> dict[str, Any]:
        """All that play depends on, as JSON can hold it; the log is not part of it."""
        return {
            **{name: getattr(self, name) for name in _PLAIN},
            "owners": list(self._owners),
            "cost": self._cost.tolist(),
            "update": list(self._update),
            "delay": self._delay.state(),
            "drift": self._drift and self._drift.state(),
            "policy": self.policy.state(),
            "clock": asdict(self._clock),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a `state`."""
        for name in _PLAIN:
            setattr(self, name, state[name])
        self._owners = list(state["owners"])
        self._cost = np.array(state["cost"])
        self._update = list(state["update"])
        self._delay.restore(state["delay"])
        if self._drift is not None:
            self._drift.restore(state["drift"])
        self.policy.restore(state["policy"])
        self._clock = Clock(**deepcopy(state["clock"]))


_PLAIN = (
    "dropped",
    "unscored",
    "_rounds",
    "_warm_until",
    "_interval",
    "_next_scoring",
    "_stale",
    "_best_rate",
    "_own_cost",
)
