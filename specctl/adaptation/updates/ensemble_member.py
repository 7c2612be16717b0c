"""One learner with one rate: its weights, its inner loop over a chunk, and the step of the online algorithm."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from specctl.adaptation.updates import formulas
from specctl.adaptation.updates.holdout import HOME, STAY, WHOLE, Point
from specctl.adaptation.updates.objective import Objective
from specctl.decoding.models.loading import pick_dtype
from specctl.recipe.learner import LearnerRecipe
from specctl.training.checkpoint import add_prefix
from specctl.training.optimizers import orthogonal, typical_size

Buffers = dict[str, Tensor]
Direction = Callable[[Tensor, Buffers, LearnerRecipe], tuple[Tensor, Buffers]]
"""(gradient, optimizer state, options) → (direction of a step of length η, new optimizer state)."""
Matrices = Sequence[tuple[int, torch.Size]]
"""(index of its first element in a vector w [P], shape [m, n]) of every matrix."""


def _sgd(g: Tensor, buffers: Buffers, options: LearnerRecipe) -> tuple[Tensor, Buffers]:
    return g, buffers


def _momentum(g: Tensor, buffers: Buffers, options: LearnerRecipe) -> tuple[Tensor, Buffers]:
    v = formulas.heavy_ball(g, buffers["v"], options.momentum)
    return v, {"v": v}


def _adam(g: Tensor, buffers: Buffers, options: LearnerRecipe) -> tuple[Tensor, Buffers]:
    j = buffers["j"] + 1
    betas = options.betas[0], options.betas[1]
    direction, m, v = formulas.adam(g, buffers["m"], buffers["v"], int(j), betas)
    return direction, {"m": m, "v": v, "j": j}


def _muon(matrices: Matrices) -> Direction:
    """Muon (Jordan et al. 2024) for matrices, and Adam with smaller steps for all other parameters."""

    def direction(g: Tensor, buffers: Buffers, options: LearnerRecipe) -> tuple[Tensor, Buffers]:
        step, found = _adam(g, buffers, options)
        step *= OTHER_RATE
        average = torch.lerp(buffers["average"], g, 1 - MUON_MOMENTUM)
        ahead = g.lerp(average, MUON_MOMENTUM)  # Nesterov's
        for first, shape in matrices:
            place = slice(first, first + shape.numel())
            matrix = orthogonal(ahead[place].view(shape), pick_dtype("auto", g.device))
            step[place] = matrix.flatten().float() * typical_size(shape)
        return step, found | {"average": average}

    return direction


MUON_MOMENTUM, OTHER_RATE = 0.95, 0.15
"""As in offline training: the defaults of `optimizer.momentum` and `optimizer.other_lr`."""

OPTIMIZERS: dict[str, tuple[Direction, tuple[str, ...]]] = {
    "sgd": (_sgd, ()),
    "momentum": (_momentum, ("v",)),
    "adam": (_adam, ("m", "v")),
    "muon": (_adam, ("m", "v", "average")),
}
"""Optimizers of the inner steps: the direction, and the names of the vectors that each keeps. `_muon` replaces the
direction of muon, because it depends on the module."""


class InnerLoop:
    """The inner loop of a member over one chunk, starting at x = w_t; the member itself does not change.

    Attributes:
        x: [P] the weights that are played, at which the next gradient is taken.
        w_hat, h, t: ŵ, the hint and the number of rounds, as in the member; a round is a step.
        steps: number of optimizer steps.
        sound: whether all losses and gradients were finite. The first that is not ends the descent.
        first: (Σ loss, Σ weight) of the first pass over the chunk, each batch before the step on it.
        before: the same sums over the batches before any step: the first one, or the whole chunk if it is one step.
    """

    def __init__(self, member: EnsembleMember):
        self.x, self.buffers, self._member = member.w, member.buffers, member
        self.w_hat, self.h, self.t = member.w_hat, member.h, member.t
        self.steps, self.sound = 0, True
        self.first = self.before = torch.zeros(2, dtype=torch.float64)
        self._sums = torch.zeros(2, dtype=torch.float64)
        self._gradient: Tensor | None = None

    @property
    def loss(self) -> float:
        """Mean loss of the first pass; NaN if no row had weight."""
        return float(self.first[0] / self.first[1])

    def add(self, total: Tensor, weight: Tensor, gradient: Tensor, *, first: bool) -> None:
        """Add Σ loss, Σ weight and the gradient [P] of a batch at x to the next step."""
        sums = torch.stack((total.double(), weight.double())).cpu()
        self._sums = self._sums + sums
        self._gradient = gradient if self._gradient is None else self._gradient + gradient
        if first:
            self.first = self.first + sums
            self.before = self.before + sums if self.steps == 0 else self.before

    def at(self, place: Point) -> Tensor:
        """[P] the weights that would be played at a place between the member and here."""
        return self._member.play(*self._weights(place))

    def stop_at(self, place: Point) -> None:
        """Stop at that place. At `STAY` the member keeps its optimizer state, and at `HOME` the optimizer starts anew.
        A member that goes part of the way keeps the moments of the whole way, because the direction was right."""
        self.w_hat, self.h = self._weights(place)
        self.x = self._member.play(self.w_hat, self.h)
        if place is HOME:
            self.t, self.buffers = 0, self._member.no_buffers()
        elif place == STAY:
            self.t, self.buffers = self._member.t, self._member.buffers

    def _weights(self, place: Point) -> tuple[Tensor, Tensor | None]:
        """ŵ and h at that place."""
        member = self._member
        if place is HOME:
            return member.origin, None if member.h is None else torch.zeros_like(member.h)
        if place == STAY:
            return member.w_hat, member.h
        if place == WHOLE:
            return self.w_hat, self.h
        h = None if member.h is None or self.h is None else torch.lerp(member.h, self.h, place)
        return torch.lerp(member.w_hat, self.w_hat, place), h

    def step(self) -> None:
        """Step on the mean gradient of the added batches; do nothing if they have no weight."""
        (total, weight), gradient = self._sums.tolist(), self._gradient
        self._sums, self._gradient = torch.zeros_like(self._sums), None
        if gradient is None or weight == 0:
            return
        gradient.div_(weight)  # in place: this object owns the gradient
        norm = float(torch.linalg.vector_norm(gradient))
        member = self._member
        gradient = formulas.clipped(gradient, norm, member.options.clip or 0.0)
        direction, buffers = member.direction(gradient, self.buffers, member.options)
        w_hat, h, t = member.after(self.w_hat, self.h, self.t, direction)
        x = member.play(w_hat, h)
        self.sound = math.isfinite(total + norm + float(x.sum()))  # a sum shows every NaN, in one pass
        if self.sound:
            self.w_hat, self.h, self.t, self.x, self.buffers = w_hat, h, t, x, buffers
            self.steps += 1


class EnsembleMember:
    """w_t = Π[ŵ_t − η h_t], ŵ_{t+1} = Π[ŵ_t − η g_t(w_t)], with a round t for each step of the inner loop.

    (If g_t were the displacement by a whole chunk, w_t would lie a whole chunk beyond ŵ_t: ten steps of Adam ahead,
    which was worse than not learning.) With the hint `none`, h = 0 and this is OGD. All state persists from chunk to
    chunk.
    """

    def __init__(
        self,
        start: Tensor,
        options: LearnerRecipe,
        eta: float,
        optimizer: str,
        hint: formulas.Hint,
        matrices: Matrices = (),
    ):
        """`start` [P] is w_1 = ŵ_1, and the center of the ball; `options` are resolved. `matrices` are for muon."""
        self.options, self.eta, self._hint = options, eta, hint
        self.direction, self._vectors = OPTIMIZERS[optimizer]
        if optimizer == "muon":
            self.direction = _muon(matrices)
        self.w_hat, self.origin, self.t = start, start, 0
        self.buffers = self.no_buffers()
        self.h = None if hint == "none" else torch.zeros_like(start)

    def no_buffers(self) -> Buffers:
        """The optimizer's state before its first step."""
        counts = {"j": torch.tensor(0)} if "m" in self._vectors else {}
        return {name: torch.zeros_like(self.origin) for name in self._vectors} | counts

    @property
    def w(self) -> Tensor:
        """[P] the weights that are played."""
        return self.play(self.w_hat, self.h)

    def play(self, w_hat: Tensor, h: Tensor | None) -> Tensor:
        """w_t from ŵ_t and h_t."""
        return w_hat if h is None else self._project(formulas.descend(w_hat, h, self.eta))

    def after(self, w_hat: Tensor, h: Tensor | None, t: int, g: Tensor) -> tuple[Tensor, Tensor | None, int]:
        """ŵ, h and t of the next round."""
        next_w_hat = self._project(formulas.descend(w_hat, g, self.eta))
        return next_w_hat, None if h is None else formulas.next_hint(self._hint, h, g, t + 1), t + 1

    def end(self, descent: InnerLoop) -> None:
        """Take over the result of the inner loop."""
        self.w_hat, self.h, self.t, self.buffers = descent.w_hat, descent.h, descent.t, descent.buffers

    def state(self) -> dict[str, Tensor]:
        """Everything learned. The tensors are never changed afterwards."""
        tensors = {"w_hat": self.w_hat, "t": torch.tensor(self.t), "eta": torch.tensor(self.eta, dtype=torch.float64)}
        if self.h is not None:
            tensors["h"] = self.h
        if self.options.radius is not None:
            tensors["origin"] = self.origin
        return tensors | add_prefix("optimizer.", self.buffers)

    def restore(self, state: dict[str, Tensor]) -> None:
        """Restore a `state()`, from tensors on any device."""
        here = {name: value.to(self.w_hat.device) for name, value in state.items() if value.ndim}
        self.w_hat, self.t, self.eta = here["w_hat"], int(state["t"]), float(state["eta"])
        self.h, self.origin = here.get("h"), here.get("origin", self.origin)
        stored = {name: f"optimizer.{name}" for name in self.buffers}
        self.buffers = {name: here.get(key, state[key]) for name, key in stored.items()}

    def _project(self, w: Tensor) -> Tensor:
        return formulas.project(w, self.origin, self.options.radius)


def inner_loop(
    objective: Objective, descents: Sequence[InnerLoop], chunk: Iterable[Any], options: LearnerRecipe, draw: int
) -> int:
    """Run all epochs over a chunk; the members learn from each batch in turn.

    `draw` numbers the samples and dropout masks of the first batch, which the members share. Returns the number for the
    next chunk.
    """
    for epoch in range(options.epochs or 1):
        for batch in chunk:
            prepared = objective.prepare(batch, draw)
            for descent in (one for one in descents if one.sound):
                descent.add(*objective.gradient(descent.x, prepared, draw), first=epoch == 0)
                if options.step == "batch":
                    descent.step()
            draw += 1
        if options.step == "chunk":
            for descent in descents:
                descent.step()
    return draw
