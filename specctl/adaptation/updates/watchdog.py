"""Watchdog that takes back an update if it lowers acceptance."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from specctl.adaptation.skewed_t_test import normal_equivalent
from specctl.adaptation.updates.ensemble import UpdateOutcome
from specctl.adaptation.updates.objective import Objective
from specctl.adaptation.updates.registry import Learner
from specctl.recipe.learner import LearnerRecipe
from specctl.training.checkpoint import add_prefix, strip_prefix

Z = 3.0  # standard errors by which acceptance must fall: chance does so in at most one update of 250

MIN_BLAME = 0.5  # share of a rise of the loss that the update must have caused

Ruling = Literal["keep", "drift", "rollback"]


@dataclass(frozen=True)
class Acceptance:
    """Acceptance in a chunk: accepted draft tokens and verified positions (rejections included) of each text."""

    texts: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, texts: Iterable[Sequence[int]]) -> Acceptance:
        """Acceptance from (accepted, verified) pairs; texts in which nothing was verified are left out."""
        return cls(tuple((accepted, verified) for accepted, verified in texts if verified))

    @property
    def accepted(self) -> int:
        return sum(accepted for accepted, _ in self.texts)

    @property
    def verified(self) -> int:
        return sum(verified for _, verified in self.texts)

    @property
    def length(self) -> float:
        """Tokens per round, bonus token included, if every round ended with a rejection; 1 if nothing was verified."""
        return self.verified / max(self.verified - self.accepted, 1) if self.verified else 1.0

    @property
    def rate(self) -> float:
        return self.accepted / self.verified if self.verified else 0.0

    @property
    def variance(self) -> float:
        """Variance of the rate, by the formula for a ratio of sums over texts (Cochran 1977, §6.3): the tokens of one
        text are not independent. It needs two or more texts."""
        n, r = len(self.texts), self.rate
        between = sum((accepted - r * verified) ** 2 for accepted, verified in self.texts)
        return between * n / (n - 1) / self.verified**2


def fell(before: Acceptance, after: Acceptance, tolerance: float) -> bool:
    """Whether acceptance fell by more than the share `tolerance`, and by more than chance. The fall must exceed `Z`
    standard errors twice: as if tokens were independent, and by Student's t for texts with correlated tokens. A single
    text on either side says nothing."""
    fall = before.rate - after.rate
    if min(len(before.texts), len(after.texts)) < 2 or fall <= tolerance * before.rate:
        return False
    pooled = (before.accepted + after.accepted) / (before.verified + after.verified)
    if fall <= Z * math.sqrt(pooled * (1 - pooled) * (1 / before.verified + 1 / after.verified)):
        return False
    between = before.variance + after.variance
    return not between or normal_equivalent(fall / math.sqrt(between), len(before.texts) + len(after.texts) - 2) > Z


class Watchdog:
    """Judges every update by the chunk that was decoded after it, before the next update is made.

    A stream that turns to another domain lowers acceptance just as a bad update does. So a fall alone is a suspicion.
    It is confirmed if the update caused more than half of it: more than half of the rise of the loss, from the previous
    chunk to this one, would not have occurred with the weights from before the update. (That the old weights are a
    little better is no proof: the last step in the old domain was a step away from the new one.)

    The old weights are kept until then, and are part of this object's state.

    After updates in vain, learning rests, each time twice as long, until acceptance falls below the lowest value seen
    since then.
    """

    def __init__(self, options: LearnerRecipe):
        self._options = options
        self._before = Acceptance()  # in the last chunk that was decoded with weights that stayed
        self._before_update: dict[str, Tensor] = {}
        self._loss = math.nan  # of the last chunk, before the update on it
        self._vain = self._rest = 0  # chunks in a row that were learned from in vain; chunks still to skip

    def learn(
        self,
        learner: Learner,
        objective: Objective,
        chunk: Sequence[Any],
        acceptance: Acceptance,
        held: Sequence[Any] = (),
        *,
        no_time: bool = False,
    ) -> tuple[Ruling, UpdateOutcome]:
        """Rule on the last update by a chunk decoded with this acceptance, take the update back if it did harm, and
        learn from the chunk. Rates shrink by `backoff` if an update is taken back, or refused by all members.

        If the learner refuses the chunk, it tries again with the weights from before the last update. If that works,
        the present weights were beyond recovery, and the ruling is a rollback, whether acceptance fell or not. (A
        drafter that was never right cannot fall.) `held` are held-out texts of the chunk, a batch each, by which the
        new update is tested at once. With `no_time`, nothing is learned, and the last update is taken back only
        if it did harm.
        """
        if self.rests(acceptance, short=no_time):
            self._skip_chunk(acceptance)
            return "keep", UpdateOutcome("rested")
        whole = [*chunk, *held]
        ruling = self.judge(acceptance, lambda kept: _compared(learner, objective, whole, kept))
        if no_time:
            if ruling == "rollback":
                self._roll_back(learner)
            else:
                self._skip_chunk(acceptance)
            return ruling, UpdateOutcome("rested")
        now = learner.state()
        if ruling == "rollback":
            outcome = self._retry_from_kept(learner, chunk, held)
        else:
            outcome, rescued = self._learn_or_retry(learner, now, chunk, held)
            ruling = "rollback" if rescued else ruling
        if ruling != "rollback":
            self._before, self._before_update = acceptance, now if self._options.rollback else {}
        self._vain = self._vain + 1 if outcome.no_improvement else 0
        self._rest = min(2**self._vain - 1, self._options.rest)
        self._loss = math.nan if outcome.loss is None else outcome.loss
        if outcome.status == "refused":
            learner.slow(self._options.backoff)
        return ruling, outcome

    def acceptance_fell(self, acceptance: Acceptance) -> bool:
        """Whether acceptance has fallen since the last update."""
        return fell(self._before, acceptance, self._options.tolerance)

    def rests(self, acceptance: Acceptance, *, short: bool) -> bool:
        """Whether `learn` would skip the chunk."""
        if self.acceptance_fell(acceptance):
            return short and not self._before_update
        return short or self._rest > 0

    def _skip_chunk(self, acceptance: Acceptance) -> None:
        """Skip a chunk. From now on a fall is measured from the lowest acceptance seen meanwhile."""
        self._rest = max(self._rest - 1, 0)
        known = [one for one in (self._before, acceptance) if one.verified]  # without drafts there is no rate
        self._before = min(known, key=lambda one: one.rate, default=acceptance)

    def _learn_or_retry(
        self, learner: Learner, now: dict[str, Tensor], chunk: Sequence[Any], held: Sequence[Any]
    ) -> tuple[UpdateOutcome, bool]:
        """Learn from the chunk in the present state `now`; if that is refused, with the weights from before the last
        update. Returns the outcome, and whether the second try has helped."""
        outcome = learner.learn(chunk, held)
        if outcome.status != "refused" or not self._before_update or not math.isfinite(self._loss):
            return outcome, False
        again = self._retry_from_kept(learner, chunk, held)
        if again.status == "refused":
            learner.restore(now)
            return outcome, False
        return again, True

    def _retry_from_kept(self, learner: Learner, chunk: Sequence[Any], held: Sequence[Any]) -> UpdateOutcome:
        """Learn from the chunk with the weights from before the last update, more slowly."""
        self._roll_back(learner)
        return learner.learn(chunk, held)

    def _roll_back(self, learner: Learner) -> None:
        """Take the last update back."""
        learner.restore(self._before_update)
        learner.slow(self._options.backoff)
        self._before_update = learner.state()

    def judge(self, acceptance: Acceptance, losses: Callable[[dict[str, Tensor]], tuple[float, float]]) -> Ruling:
        """Rule on the last update: keep; drift, if the update stays and the stream has changed; or rollback.

        Args:
            losses: mean loss of the chunk under (a state from before, the present one), computed on suspicion only.
        """
        if not self._options.rollback or not self._before_update:
            return "keep"
        if not self.acceptance_fell(acceptance):
            return "keep"
        old, new = losses(self._before_update)
        blame, rise = new - old, new - self._loss
        harmless = blame <= 0 or (math.isfinite(rise) and blame <= MIN_BLAME * rise)
        return "drift" if math.isfinite(new) and harmless else "rollback"

    def state(self) -> dict[str, Tensor]:
        """Tensors that the next ruling needs."""
        before = torch.tensor(self._before.texts, dtype=torch.int64)
        numbers = {"texts": before, "loss": torch.tensor(self._loss).double()}
        numbers["rest"] = torch.tensor([self._vain, self._rest])
        return numbers | add_prefix("kept.", self._before_update)

    def restore(self, state: dict[str, Tensor]) -> None:
        self._before = Acceptance.of(state["texts"].tolist())
        self._loss = float(state["loss"])
        self._vain, self._rest = state["rest"].tolist()
        self._before_update = strip_prefix("kept.", state)


def _compared(
    learner: Learner, objective: Objective, chunk: Iterable[Any], kept: dict[str, Tensor]
) -> tuple[float, float]:
    """Mean loss of the chunk with the weights played in the state `kept`, and with the present ones."""
    now, new = learner.state(), learner.play()
    learner.restore(kept)
    old = learner.play()
    learner.restore(now)
    before, after = objective.losses([old, new], chunk).tolist()
    return before, after
