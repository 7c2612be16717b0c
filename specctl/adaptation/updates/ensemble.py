"""Ensemble of N learners with different rates under Hedge; a single learner is the case N = 1."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from specctl.adaptation.updates import formulas, holdout
from specctl.adaptation.updates.ensemble_member import EnsembleMember, InnerLoop, inner_loop
from specctl.adaptation.updates.holdout import STAY, Point
from specctl.adaptation.updates.objective import Objective
from specctl.errors import CheckpointError
from specctl.recipe.learner import LearnerRecipe
from specctl.training.checkpoint import add_prefix, strip_prefix

COLLAPSED = 0.99  # weight of one member above which the others have no influence


@dataclass(frozen=True)
class UpdateOutcome:
    """Result of the update on a chunk.

    Attributes:
        status: updated; rested = the chunk was skipped, because the last updates were in vain, or because learning had
            used up its share of the time; refused = a loss or gradient of every member was not finite, and all stay
            unchanged; empty = the chunk had nothing to learn from; static = the algorithm does not learn; pending = the
            learner in another process has not finished.
        loss: per token, before learning, or None if nothing was measured. A single member has the loss of its first
            pass, each batch before the step on it. Several members have Σ p_i f(w_i), which bounds the loss of their
            mean if f is convex.
        losses, weights: [N] of an ensemble's members: f(w_i), and the p_i with which the chunk was decoded.
        refused: members that stay unchanged.
        effective: exp(entropy) of the weights after the chunk, the effective number of members.
        collapsed: whether one member has (nearly) all of the weight after the chunk.
        scales: [N] how far each member moved along its descent, by decision of the held-out texts; empty without such
            texts.
        steps: optimizer steps per member.
    """

    status: Literal["updated", "rested", "refused", "empty", "static", "pending"]
    loss: float | None = None
    losses: tuple[float, ...] = ()
    weights: tuple[float, ...] = (1.0,)
    refused: tuple[int, ...] = ()
    effective: float = 1.0
    collapsed: bool = False
    scales: tuple[Point, ...] = ()
    steps: int = 0

    @property
    def no_improvement(self) -> bool:
        """Whether no member found better weights for the held-out texts."""
        return bool(self.scales) and all(scale == STAY for scale in self.scales)


class Ensemble:
    """`ensemble` and `opt-ensemble`: w_t = Σ p_i w_t^i, p_i ∝ exp(−ε (Σ_s f_s(w_s^i) + guess)).

    f_s is the mean loss per token of chunk s before the update on it, over its first batch unless
    `LearnerRecipe.measure` says otherwise. The guess of the next losses makes the meta learner optimistic, with the
    same kind of hint as its members: the last losses, or their mean; otherwise it is 0.
    """

    def __init__(
        self, objective: Objective, members: list[EnsembleMember], options: LearnerRecipe, hint: formulas.Hint
    ):
        self.members = members
        self._objective, self._options, self._hint = objective, options, hint
        self._t = self._draw = self._judged = 0  # chunks; batches drawn; chunks with finite losses
        self.L = torch.zeros(len(members), dtype=torch.float64)
        self._guess = torch.zeros_like(self.L)

    @property
    def p(self) -> Tensor:
        """[N] fp64 weights of the members."""
        return formulas.hedge_weights(self.L, self._guess, self._options.epsilon)

    @property
    def rates(self) -> tuple[float, ...]:
        """η of every member."""
        return tuple(member.eta for member in self.members)

    def play(self) -> Tensor:
        """[P] the weights for the next chunk: the members' mean."""
        return formulas.mean_of(self.p, [member.w for member in self.members])

    def learn(self, chunk: Iterable[Any], held: Sequence[Any] = ()) -> UpdateOutcome:
        """Learn from a chunk that was decoded with `play()`: batches, which are iterated once per epoch. A loss or
        gradient that is not finite raises no exception: the outcome is `refused`.

        `held` are held-out texts, a batch each, that are not learned from here. They decide how far every member moves
        along its descent, or whether it goes back to the start. (A rate that follows a change of domain fast does harm
        if there is nothing to follow. So the result of the descent is judged, and the rate stays.)
        """
        p, losses = self.p, self._measured(chunk)
        descents = [InnerLoop(member) for member in self.members]
        self._draw = inner_loop(self._objective, descents, chunk, self._options, self._draw)
        self._t += 1
        moved = [place for place, descent in enumerate(descents) if descent.sound and descent.steps]
        refused = tuple(place for place, descent in enumerate(descents) if not descent.sound)
        scales = self._settled(descents, held) if moved and held else ()
        if len(self.members) > 1 and losses is None:
            losses = self._seen(descents)
        for place in moved:
            self.members[place].end(descents[place])
        if moved and losses is not None:
            self._weigh(losses)
        nothing = not moved and not refused
        return UpdateOutcome(
            status="empty" if nothing else "updated" if moved else "refused",
            loss=None if nothing else descents[0].loss if losses is None else float((p * losses)[p > 0].sum()),
            losses=() if nothing or losses is None else tuple(losses.tolist()),
            weights=tuple(p.tolist()),
            refused=refused,
            effective=formulas.effective_members(self.p),
            collapsed=losses is not None and float(self.p.max()) > COLLAPSED,
            scales=scales,
            steps=max(descent.steps for descent in descents),
        )

    def _measured(self, chunk: Iterable[Any]) -> Tensor | None:
        """[N] the members' losses on the whole chunk before any step, if the recipe asks for this extra pass."""
        if len(self.members) == 1 or self._options.measure != "chunk" or self._options.step == "chunk":
            return None
        return self._objective.losses([member.w for member in self.members], chunk)

    def _seen(self, descents: Sequence[InnerLoop]) -> Tensor:
        """[N] the members' losses in the first pass: over all batches, or over the batches before any step."""
        met = (descent.first if self._options.measure == "batch" else descent.before for descent in descents)
        return torch.stack([total / weight for total, weight in met])

    def _settled(self, descents: Sequence[InnerLoop], texts: Sequence[Any]) -> tuple[Point, ...]:
        """Stop each descent at the place that the held-out texts choose, and return the places."""

        def losses(*places: Point) -> Tensor:
            vectors = [descent.at(place) for place in places for descent in descents]
            total, weight = self._objective.sums(vectors, texts).unbind(1)
            return (total / weight).unflatten(1, (len(places), -1)).movedim(1, 0)

        places = holdout.best_places(losses, self._options.level)
        for descent, place in zip(descents, places, strict=True):
            descent.stop_at(place)
        return places

    def slow(self, factor: float) -> None:
        """Multiply the members' rates, after an update that did harm."""
        for member in self.members:
            member.eta *= factor

    def state(self) -> dict[str, Tensor]:
        """Everything learned, as tensors that are never changed afterwards: for a checkpoint, and to go back to."""
        tensors = {"t": torch.tensor([self._t, self._draw, self._judged]), "L": self.L, "guess": self._guess}
        for place, member in enumerate(self.members):
            tensors |= add_prefix(f"{place}.", member.state())
        return tensors

    def restore(self, state: dict[str, Tensor]) -> None:
        """Restore a `state()`. Raises CheckpointError if it belongs to another learner."""
        expected = {name: (value.shape, value.dtype) for name, value in self.state().items()}
        if expected != {name: (value.shape, value.dtype) for name, value in state.items()}:
            raise CheckpointError(
                "the learner's state does not fit its recipe", "resume with the same algo, optimizer and members"
            )
        self._t, self._draw, self._judged = state["t"].tolist()
        self.L, self._guess = state["L"], state["guess"]
        for place, member in enumerate(self.members):
            member.restore(strip_prefix(f"{place}.", state))

    def _weigh(self, losses: Tensor) -> None:
        """Weigh the members anew, unless no loss is finite. Every `resync` chunks they restart from their mean."""
        L = formulas.cumulated(self.L, losses, self._options.discount)
        if L.isfinite().any():
            self._judged += 1
            known = losses.nan_to_num(nan=0.0, posinf=0.0)  # a member without a finite loss has no weight anyway
            self.L, self._guess = L, formulas.next_hint(self._hint, self._guess, known, self._judged)
        if self._options.resync and self._t % self._options.resync == 0:
            self._resync()

    def _resync(self) -> None:
        """Restart all members from their mean. A member that had no weight gets the largest loss of the others."""
        common = formulas.mean_of(self.p, [member.w_hat for member in self.members])
        for member in self.members:
            member.w_hat = common
        dead = self.L.isinf()
        self.L = torch.where(dead, self.L[~dead].max(), self.L)
        self._guess = torch.where(dead, self._guess[~dead].max(), self._guess)
