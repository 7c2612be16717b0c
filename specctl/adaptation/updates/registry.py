"""Registry of the learners of `specctl online`, by name: a chunk of verified text in, weights to draft with out."""

from collections.abc import Iterable, Sequence
from typing import Any, Literal

from torch import Tensor

from specctl.adaptation.updates.ensemble import Ensemble, UpdateOutcome
from specctl.adaptation.updates.ensemble_member import EnsembleMember
from specctl.adaptation.updates.objective import Objective
from specctl.recipe.learner import Algo, LearnerRecipe


class Static:
    """`static`: the drafter never changes. It has the methods of `Ensemble`."""

    rates: tuple[float, ...] = ()

    def __init__(self, start: Tensor):
        self._start = start

    def play(self) -> Tensor:
        return self._start

    def learn(self, chunk: Iterable[Any], held: Sequence[Any] = ()) -> UpdateOutcome:
        return UpdateOutcome("static")

    def slow(self, factor: float) -> None:
        pass

    def state(self) -> dict[str, Tensor]:
        return {}

    def restore(self, state: dict[str, Tensor]) -> None:
        pass


Learner = Static | Ensemble
"""`play` before a chunk is decoded, `learn` after it; `state` is complete between chunks."""


def make_learner(objective: Objective, options: LearnerRecipe, start: Tensor) -> Learner:
    """Build the learner `options.algo`, starting from the weights `start` [P].

    `options` has the family's constants filled in (`resolved`).
    """
    algo = options.algo
    if algo == "static":
        return Static(start)
    assert options.lr is not None and options.optimizer is not None, "LearnerRecipe.resolved() fills these in"
    several, hint = "ensemble" in algo, options.hint if algo in ("optimistic", "opt-ensemble") else "none"
    optimizer = "momentum" if algo == "momentum" else options.optimizer
    eta = options.lr * (1 - options.momentum) if algo == "momentum" and options.matched else options.lr
    rates = [eta * options.spacing**place for place in range(options.members if several else 1)]
    matrices = objective.matrices
    members = [EnsembleMember(start, options, rate, optimizer, hint, matrices) for rate in rates]
    return Ensemble(objective, members, options, hint)


def feedback(algo: Algo) -> Literal["all", "rejected"]:
    """Positions that an algorithm learns from: all committed ones, or, with osd (Liu et al. 2023, arXiv 2310.07177),
    only the positions at which a draft was rejected."""
    return "rejected" if algo == "osd" else "all"
