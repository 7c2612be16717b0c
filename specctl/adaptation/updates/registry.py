"""The learners of `specctl online` by name: a chunk of verified text in, weights to draft with out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, Protocol

from torch import Tensor

from specctl.adaptation.updates.ensemble import Ensemble, EnsemblePlay, UpdateOutcome
from specctl.adaptation.updates.member import Member
from specctl.adaptation.updates.objective import Objective
from specctl.recipe.learner import Algo, LearnerRecipe


class Learner(Protocol):
    """`play` before a chunk is decoded, `learn` after it; `state` between chunks is all there is to keep."""

    @property
    def rates(self) -> tuple[float, ...]:
        """η of every member."""
        ...

    def play(self) -> EnsemblePlay:
        """The weights that the next chunk is decoded with."""
        ...

    def learn(self, chunk: Iterable[Any], held: Sequence[Any] = ()) -> UpdateOutcome:
        """Learn from what was decoded: the batches of a chunk, iterable again for every epoch. Texts that are `held`
        out, a batch each, judge what came of that.

        A loss or gradient that is not finite is no exception but an outcome: `refused`, nothing learnt.
        """
        ...

    def slow(self, factor: float) -> None:
        """Multiply the learning rates."""
        ...

    def state(self) -> dict[str, Tensor]:
        """All that was learnt. Tensors are not changed later: a state can be kept, and restored, as it is."""
        ...

    def restore(self, state: dict[str, Tensor]) -> None:
        """Go on from a `state()`. CheckpointError where it is that of another learner."""
        ...


class Static:
    """`static`: the drafter as it was."""

    rates: tuple[float, ...] = ()

    def __init__(self, start: Tensor):
        self._play = EnsemblePlay((1.0,), (start,))

    def play(self) -> EnsemblePlay:
        return self._play

    def learn(self, chunk: Iterable[Any], held: Sequence[Any] = ()) -> UpdateOutcome:
        return UpdateOutcome("static")

    def slow(self, factor: float) -> None:
        pass

    def state(self) -> dict[str, Tensor]:
        return {}

    def restore(self, state: dict[str, Tensor]) -> None:
        pass


def make_learner(objective: Objective, options: LearnerRecipe, start: Tensor, seed: int = 0) -> Learner:
    """The learner `options.algo`, which starts from the weights `start` [P].

    Args:
        options: resolved.
        seed: of the draws of `combine: sample`.
    """
    algo = options.algo
    if algo == "static":
        return Static(start)
    assert options.lr is not None and options.optimizer is not None, "LearnerRecipe.resolved() fills these in"
    several, hint = "ensemble" in algo, options.hint if algo in ("optimistic", "opt-ensemble") else "none"
    optimizer = "momentum" if algo == "momentum" else options.optimizer
    eta = options.lr * (1 - options.momentum) if algo == "momentum" and options.matched else options.lr
    rates = [eta * options.spacing**place for place in range(options.members if several else 1)]
    members = [Member(start, options, rate, optimizer, hint) for rate in rates]
    return Ensemble(objective, members, options, hint, seed)


def feedback(algo: Algo) -> Literal["all", "rejected"]:
    """Positions that an algorithm learns from: all that were committed; of osd (Liu et al. 2023, arXiv 2310.07177) only
    those where a draft was rejected."""
    return "rejected" if algo == "osd" else "all"
