"""N learners of different rates under Hedge, as one; a single learner is the case N = 1."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from specctl.adaptation import rules
from specctl.adaptation.member import Descent, Member, inner_loop
from specctl.adaptation.objective import Objective, seed_of
from specctl.errors import CheckpointError
from specctl.recipe.learner import LearnerRecipe

SHARES = (1.0, 0.5, 0.25)
"""Of the way that a chunk leads a member: how far texts held out may let it go."""

DOUBT = 0.5  # standard errors by which the mean gain over those texts must exceed 0

COLLAPSED = 0.99  # weight of one member beyond which the others have no say


@dataclass(frozen=True)
class Play:
    """What to decode with: the draft distributions of `vectors` [P] each, mixed by `weights`, which sum to 1."""

    weights: tuple[float, ...]
    vectors: tuple[Tensor, ...]


@dataclass(frozen=True)
class Outcome:
    """What a chunk did to a learner.

    Attributes:
        status: updated; rested = it was not learnt from, as nothing had come of that lately; refused = a loss or
            gradient of every member was not finite, and they stay as they were; empty = the chunk had nothing to learn
            from; static = the algorithm does not learn; pending = a process of its own has not come to an end of it.
        loss: per token, before learning: of the only member during the first pass, each batch before the step on it; of
            several Σ p_i f(w_i), which bounds that of their mean where f is convex. None if nothing was measured.
        losses, weights: [N] of an ensemble's members, f(w_i) and p_i with which the chunk was decoded.
        refused: members that stay as they were.
        effective: exp(entropy) of the weights after the chunk, the number of members that count.
        collapsed: one member has (nearly) all of the weight after the chunk.
        scales: [N] how far the members went on the way that they found: 1, less, 0 where nothing was better for the
            texts held out, None where the weights that the stream began with were; empty where no texts were held out.
        steps: optimizer steps of a member.
    """

    status: Literal["updated", "rested", "refused", "empty", "static", "pending"]
    loss: float | None = None
    losses: tuple[float, ...] = ()
    weights: tuple[float, ...] = (1.0,)
    refused: tuple[int, ...] = ()
    effective: float = 1.0
    collapsed: bool = False
    scales: tuple[float | None, ...] = ()
    steps: int = 0

    @property
    def vain(self) -> bool:
        """No member found anything better for the texts held out."""
        return bool(self.scales) and all(scale == 0 for scale in self.scales)


class Held(NamedTuple):
    """Texts of a chunk that are held out to judge its update: a batch each, and packed into batches to learn from."""

    texts: Sequence[Any]
    batches: Sequence[Any]


class Ensemble:
    """`ensemble` and `opt-ensemble`: w_t = Σ p_i w_t^i, p_i ∝ exp(−ε (Σ_s f_s(w_s^i) + guess)).

    f_s is the mean loss per token of chunk s before anything was learnt from it, on its first batch unless
    `LearnerRecipe.measure` says otherwise. The guess of the next losses is the optimistic meta learner's, by
    the same kind of hint as its members': the last losses, or their mean; else 0.
    """

    def __init__(
        self, objective: Objective, members: list[Member], options: LearnerRecipe, hint: rules.Hint, seed: int
    ):
        self.members = members
        self._objective, self._options, self._hint, self._seed = objective, options, hint, seed
        self._t = self._draw = self._judged = 0  # chunks; batches drawn; chunks that were judged
        self.L = torch.zeros(len(members), dtype=torch.float64)
        self._guess = torch.zeros_like(self.L)

    @property
    def p(self) -> Tensor:
        """[N] fp64 weights of the members."""
        return rules.hedge_weights(self.L, self._guess, self._options.epsilon)

    @property
    def rates(self) -> tuple[float, ...]:
        """η of every member."""
        return tuple(member.eta for member in self.members)

    def play(self) -> Play:
        """The weights for the chunk to come, by `combine`: their mean, one member drawn, or all with their shares."""
        p, vectors, combine = self.p, [member.w for member in self.members], self._options.combine
        if combine == "weights":
            return Play((1.0,), (rules.mean_of(p, vectors),))
        if combine == "sample":
            generator = torch.Generator().manual_seed(seed_of(self._seed, self._t))
            return Play((1.0,), (vectors[int(torch.multinomial(p, 1, generator=generator))],))
        shares = [(share, vector) for share, vector in zip(p.tolist(), vectors, strict=True) if share > 0]
        return Play(*zip(*shares, strict=True))

    def learn(self, chunk: Iterable[Any], held: Held | None = None) -> Outcome:
        """Learn from a chunk that was decoded with `play()`: batches, iterable again for every epoch.

        Texts that are `held` out decide how far every member goes on the way that the chunk leads it, or whether it
        goes back to the start; who goes all of the way learns from these texts, too. (A rate that follows a change of
        domain fast does harm where there is nothing to follow. So what it leads to is judged, and the rate stays.)
        """
        members, p, options = self.members, self.p, self._options
        losses = None
        if len(members) > 1 and options.measure == "chunk" and options.step == "batch":
            losses = self._objective.losses([member.w for member in members], chunk)
        descents = [Descent(member) for member in members]
        self._draw = inner_loop(self._objective, descents, chunk, options, self._draw)
        scales: tuple[float | None, ...] = ()
        if held is not None and any(descent.sound and descent.steps for descent in descents):
            scales = self._judged_by(held.texts, descents)
            whole = [descent for descent, scale in zip(descents, scales, strict=True) if scale == 1]
            if whole:
                self._draw = inner_loop(self._objective, whole, held.batches, options, self._draw)
        self._t += 1
        if len(members) > 1 and losses is None:
            seen = (descent.first if options.measure == "batch" else descent.before for descent in descents)
            losses = torch.stack([total / weight for total, weight in seen])
        moved = [place for place, descent in enumerate(descents) if descent.sound and descent.steps]
        refused = tuple(place for place, descent in enumerate(descents) if not descent.sound)
        for place in moved:
            members[place].end(descents[place])
        if moved and losses is not None:
            self._judge(losses)
            if options.resync and self._t % options.resync == 0:
                self._resync()
        nothing = not moved and not refused
        return Outcome(
            status="empty" if nothing else "updated" if moved else "refused",
            loss=None if nothing else descents[0].loss if losses is None else _suffered(p, losses),
            losses=() if nothing or losses is None else tuple(losses.tolist()),
            weights=tuple(p.tolist()),
            refused=refused,
            effective=rules.effective_members(self.p),
            collapsed=losses is not None and float(self.p.max()) > COLLAPSED,
            scales=scales,
            steps=max(descent.steps for descent in descents),
        )

    def _judged_by(self, texts: Sequence[Any], descents: Sequence[Descent]) -> tuple[float | None, ...]:
        """Take every descent back to the longest of `SHARES` of its way that is better for these texts than staying
        where it was, or to the start where that is better still; which that is. Texts without weight forbid nothing."""

        def losses(point: float | None) -> Tensor:
            """[n, N]: a text's loss with every member there."""
            vectors = [descent.at(point) for descent in descents]
            return torch.stack([self._objective.losses(vectors, [text]) for text in texts])

        def gains(point: float | None) -> list[tuple[float, float]]:
            """Of every member, the mean gain over the texts, and what it has to exceed."""
            found = (stay - losses(point))[known]
            error = found.std(0) / math.sqrt(len(found)) if len(found) > 1 else torch.zeros(len(descents))
            return list(zip(found.mean(0).tolist(), (DOUBT * error).tolist(), strict=True))

        stay = losses(0.0)
        known = ~stay.isnan().all(1)
        if not known.any():
            return (1.0,) * len(descents)
        best: list[tuple[float, float | None]] = [(0.0, 0.0)] * len(descents)
        for share in SHARES:
            if all(point for _, point in best):
                break
            for place, (gain, doubt) in enumerate(gains(share)):
                if not best[place][1] and gain > doubt:
                    best[place] = (gain, share)
        for place, (gain, doubt) in enumerate(gains(None)):
            if gain > max(best[place][0], doubt):
                best[place] = (gain, None)
        for descent, (_, point) in zip(descents, best, strict=True):
            if point != 1:
                descent.back_to(point)
        return tuple(point for _, point in best)

    def slow(self, factor: float) -> None:
        """Multiply the members' rates: after an update that did harm."""
        for member in self.members:
            member.eta *= factor

    def state(self) -> dict[str, Tensor]:
        """All that was learnt, as tensors that are never changed afterwards: for a checkpoint, and to go back to."""
        found = {"t": torch.tensor([self._t, self._draw, self._judged]), "L": self.L, "guess": self._guess}
        for place, member in enumerate(self.members):
            found |= {f"{place}.{name}": value for name, value in member.state().items()}
        return found

    def restore(self, state: dict[str, Tensor]) -> None:
        """Go on from a `state()`. CheckpointError where it is that of another learner."""
        own = {name: (value.shape, value.dtype) for name, value in self.state().items()}
        if own != {name: (value.shape, value.dtype) for name, value in state.items()}:
            raise CheckpointError(
                "the learner's state does not fit its recipe", "resume with the algo, optimizer and members it had"
            )
        self._t, self._draw, self._judged = state["t"].tolist()
        self.L, self._guess = state["L"], state["guess"]
        for place, member in enumerate(self.members):
            prefix = f"{place}."
            mine = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
            member.restore(mine)

    def _judge(self, losses: Tensor) -> None:
        """Weigh the members anew, unless none has a finite loss."""
        L = rules.cumulated(self.L, losses, self._options.discount)
        if L.isfinite().any():
            self._judged += 1
            known = losses.nan_to_num(nan=0.0, posinf=0.0)  # a member without a finite loss has no weight anyway
            self.L, self._guess = L, rules.next_hint(self._hint, self._guess, known, self._judged)

    def _resync(self) -> None:
        """All members restart from their mean; one that had no weight is as good as the worst of the others again."""
        common = rules.mean_of(self.p, [member.w_hat for member in self.members])
        for member in self.members:
            member.w_hat = common
        dead = self.L.isinf()
        self.L = torch.where(dead, self.L[~dead].max(), self.L)
        self._guess = torch.where(dead, self._guess[~dead].max(), self._guess)


def _suffered(p: Tensor, losses: Tensor) -> float:
    """Σ p_i f_i over the members with weight."""
    return float((p * losses)[p > 0].sum())
