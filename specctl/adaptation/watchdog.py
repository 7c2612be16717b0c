"""An update that does harm is taken back."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from specctl.adaptation.ensemble import Held, Outcome
from specctl.adaptation.learners import Learner
from specctl.adaptation.objective import Objective
from specctl.recipe.learner import LearnerRecipe

Z = 3.0  # standard errors by which acceptance must have fallen: one false suspicion in 700 updates

BLAME = 0.5  # share of a rise of the loss that an update must be to blame for

Ruling = Literal["keep", "drift", "rollback"]


@dataclass(frozen=True)
class Acceptance:
    """Of a chunk: accepted draft tokens among the verified positions, accepted + rejections."""

    accepted: int
    verified: int

    @property
    def rate(self) -> float:
        return self.accepted / self.verified if self.verified else 0.0


def fell(before: Acceptance, after: Acceptance, tolerance: float) -> bool:
    """Whether acceptance fell by more than the share `tolerance`, and by more than chance (two proportions)."""
    if not before.verified or not after.verified:
        return False
    pooled = (before.accepted + after.accepted) / (before.verified + after.verified)
    error = math.sqrt(pooled * (1 - pooled) * (1 / before.verified + 1 / after.verified))
    return before.rate - after.rate > max(tolerance * before.rate, Z * error)


class Watchdog:
    """Judges every update by the chunk that was decoded after it, before the next one is made.

    A stream that turns to another domain lowers acceptance as a bad update does. So a fall alone is a suspicion; it is
    confirmed where the update is to blame for at least half of it: of the rise of the loss from the chunk before to the
    one that was just decoded, that much would not have been with the weights from before the update. (That these are
    a little better is no proof: the last step in the old domain was one away from the new one.)

    Those weights are kept until then, and are part of this object's state.

    Where learning is in vain it rests, twice as long every time, until acceptance falls below all that was seen since.
    """

    def __init__(self, options: LearnerRecipe):
        self._options = options
        self._before: Acceptance | None = None  # of the last chunk that was decoded with weights that stayed
        self._kept: dict[str, Tensor] = {}
        self._loss = math.nan  # of the last chunk, before anything was learnt from it
        self._vain = self._rest = 0  # chunks in a row that were learnt from in vain; chunks still to rest

    def learn(
        self,
        learner: Learner,
        objective: Objective,
        chunk: Sequence[Any],
        acceptance: Acceptance,
        held: Held | None = None,
    ) -> tuple[Ruling, Outcome]:
        """Rule on the last update by a chunk decoded with this acceptance, take it back if it did harm, and learn from
        the chunk. Rates shrink by `backoff` where an update was taken back, or refused by all members.

        A chunk that is refused is tried with the weights from before the last update, too: where that goes well, these
        were beyond recovery, whatever acceptance says. (A drafter that was never right cannot fall.) `held` is the part
        of the chunk by which the new update has to prove itself at once.
        """
        if self._rest and self._before and not fell(self._before, acceptance, self._options.tolerance):
            self._rest -= 1
            self._before = min(self._before, acceptance, key=lambda one: one.rate)
            return "keep", Outcome("rested")
        whole = [*chunk, *(held.batches if held else ())]
        ruling = self.judge(acceptance, lambda kept: _compared(learner, objective, whole, kept))
        if ruling == "rollback":
            outcome = self._again(learner, chunk, held)
        else:
            kept, now = self._kept, learner.state()
            outcome = learner.learn(chunk, held)
            if outcome.status == "refused" and kept and math.isfinite(self._loss):
                again = self._again(learner, chunk, held)
                if again.status == "refused":
                    learner.restore(now)
                else:
                    ruling, outcome = "rollback", again
            if ruling != "rollback":
                self._before, self._kept = acceptance, now if self._options.rollback else {}
        self._vain = self._vain + 1 if outcome.vain else 0
        self._rest = min(2**self._vain - 1, self._options.rest)
        self._loss = math.nan if outcome.loss is None else outcome.loss
        if outcome.status == "refused":
            learner.slow(self._options.backoff)
        return ruling, outcome

    def _again(self, learner: Learner, chunk: Sequence[Any], held: Held | None) -> Outcome:
        """Learn from the chunk with the weights from before the last update, more slowly."""
        learner.restore(self._kept)
        learner.slow(self._options.backoff)
        self._kept = learner.state()
        return learner.learn(chunk, held)

    def judge(self, acceptance: Acceptance, losses: Callable[[dict[str, Tensor]], tuple[float, float]]) -> Ruling:
        """keep; drift, the update stays and the stream has changed; or rollback.

        Args:
            losses: mean loss of the chunk under (a state from before, the present one), asked for on suspicion only.
        """
        if not self._options.rollback or self._before is None or not self._kept:
            return "keep"
        if not fell(self._before, acceptance, self._options.tolerance):
            return "keep"
        old, new = losses(self._kept)
        blame, rise = new - old, new - self._loss
        harmless = blame <= 0 or (math.isfinite(rise) and blame <= BLAME * rise)
        return "drift" if math.isfinite(new) and harmless else "rollback"

    def state(self) -> dict[str, Tensor]:
        """What the next ruling needs."""
        before = [] if self._before is None else [self._before.accepted, self._before.verified]
        numbers = {"before": torch.tensor(before, dtype=torch.int64), "loss": torch.tensor(self._loss).double()}
        numbers["rest"] = torch.tensor([self._vain, self._rest])
        return numbers | {f"kept.{k}": v for k, v in self._kept.items()}

    def restore(self, state: dict[str, Tensor]) -> None:
        before = state["before"].tolist()
        self._before = Acceptance(*before) if before else None
        self._loss = float(state["loss"])
        self._vain, self._rest = state["rest"].tolist()
        self._kept = {name.removeprefix("kept."): value for name, value in state.items() if name.startswith("kept.")}


def _compared(
    learner: Learner, objective: Objective, chunk: Iterable[Any], kept: dict[str, Tensor]
) -> tuple[float, float]:
    """Mean loss of the chunk under what the learner played in the state `kept`, and under what it plays now."""
    now, new = learner.state(), learner.play()
    learner.restore(kept)
    old = learner.play()
    learner.restore(now)
    losses = objective.losses([*old.vectors, *new.vectors], chunk)
    shares = torch.tensor([*old.weights, *new.weights], dtype=losses.dtype)
    before, after = (shares * losses).split([len(old.vectors), len(new.vectors)])
    return float(before.sum()), float(after.sum())
