"""Memory of what arms have been worth at the prompts so far: the Gaussian processes of `policies.contextual`.

Symbols as there; x [D] features of a prompt, k the covariance of two prompts, w its width; p [P] how much a prompt is
of each of the kinds of prompts that arms were trained on, φ [N] what arms are known for (`known_for`), θ its worth.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specctl import threads
from specctl.decoding.prompt_features import Kinds
from specctl.selection.policies.contextual import Belief, Shown, ease
from specctl.selection.policies.policy import Array

WINDOW = 64  # texts of each arm that are remembered: the oldest makes room
CENTER = 256  # prompts that features are centred by
# Constants of the model, chosen on 140 development prompts of seven domains; half or twice as much makes 1 to 4 %.
WIDTH = 0.5  # w, in the distance of two directions: that of equals is 0, of opposites 2
SHARED = 0.5  # of the variance between texts: τ² ÷ (τ² + s²)
EVERYWHERE = 0.2  # of s²: what an arm is worth at all prompts alike; an arm that loses everywhere is soon left alone
AGE = 200.0  # texts after which one adds s² to the variance of what was seen: arms, and what is asked, may change
# λ, of what is not everywhere: what an arm is worth at all prompts of a kind. Chosen with `FAITH`, below.
KIND = 0.4
# Cosine at which a prompt may be of a kind or of none, and how soon it is one of them: half as much again, or a third
# less, makes less than 1 %.
NEAR, SHARP = 0.3, 0.08
FEW = 4  # rewards of texts by which variances are known; without, nothing is said but of what arms were trained on
SIGNAL = NOISE = 0.005  # s² and σ² until then
UNKNOWN = 1e3  # τ² until then: the mean of rewards is not known
# Standard deviation of θ, in units of its mean, s, before anything was seen: by 100 development prompts of five
# domains, one of them nobody's, with four arms in 16 orders. With more, single orders lose a fifth; with less, all do
# whose arms are told the kinds of others.
FAITH = 0.7
DIRECTION = 4.0  # of the square of an error that is as large as what sets a kind apart, in how little is then expected
NEVER = 1e9  # variance of what was not seen, in units of s²
LEAST = 1e-3  # variance of a reward, in the same: equal prompts leave the system solvable in single precision


@dataclass(frozen=True)
class Covariance:
    """k = c + (1 − c)·[λ·g(p, p') + (1 − λ)·g(x, x')] of prompts, with g(a, b) = exp(−|a − b|²/2w²), c = `EVERYWHERE`
    and λ = `KIND`; λ = 0 where no kinds are known.

    Single prompts of a kind are far from each other, and from their mean: what they share is told by the kind that they
    are nearest to.

    Attributes:
        width: w, for directions x; memberships p have `WIDTH`.
        kinds: P, so many last numbers of a prompt are its p.
    """

    width: float = WIDTH
    kinds: int = 0

    def __call__(self, a: Tensor, b: Tensor) -> Tensor:
        """[…, A, B] of prompts a […, A, D + P] and b […, B, D + P]."""
        size = a.shape[-1] - self.kinds
        k = _gaussian(a[..., :size], b[..., :size], self.width)
        if self.kinds:
            k = k.mul_(1 - KIND).add_(_gaussian(a[..., size:], b[..., size:], WIDTH), alpha=KIND)
        return k.mul_(1 - EVERYWHERE).add_(EVERYWHERE)


def _gaussian(a: Tensor, b: Tensor, width: float) -> Tensor:
    half = (a @ b.mT).sub_(0.5 * a.square().sum(-1)[..., None]).sub_(0.5 * b.square().sum(-1)[..., None, :])
    return half.div_(width**2).exp_()


def membership(x: Tensor, kinds: Tensor) -> Tensor:
    """p […, P] of directions x […, D], given those of the kinds [P, D]: a softmax of their cosines, in which the kind
    that nobody was trained on has `NEAR`."""
    cosines = x @ kinds.mT
    nobody = torch.full_like(cosines[..., :1], NEAR)
    return (torch.cat([cosines, nobody], -1) / SHARP).softmax(-1)[..., :-1]


def factored(x: Tensor, noise: Tensor, k: Covariance = Covariance()) -> Tensor:
    """[N, M, M] Cholesky factors of the covariances of rewards at prompts x [N, M, D] with variances `noise` [N, M]."""
    return torch.linalg.cholesky(k(x, x).double() + torch.diag_embed(noise))


def regression(x: Tensor, y: Tensor, factor: Tensor, at: Tensor, k: Covariance = Covariance()) -> tuple[Tensor, Tensor]:
    """Means and variances [N] of f_i at a prompt [D], given rewards y [N, M] at prompts x [N, M, D], `factored`, all in
    units of s (Krause and Ong 2011, Eq. 2 and 3)."""
    near = k(x, at[None])[..., 0].double()
    solved = torch.cholesky_solve(torch.stack((y, near), -1), factor)
    mean, explained = (near[..., None] * solved).sum(1).unbind(-1)
    return mean, (1 - explained).clamp_min(1e-6)


def known_for(p: Tensor, owner: Sequence[int], trust: Tensor, count: int) -> Tensor:
    """φ […, N] of `count` arms at prompts of memberships p […, P] in the kinds that they were trained on (`owner` [P]):
    1 at an arm's own kind, −1 far from all of them, 0 where nothing is known of it; less where a kind's mean is told by
    few prompts (`trust` [P])."""
    own = trust * (2 * p.double() - 1)
    phi = own.new_zeros(*p.shape[:-1], count)
    for arm in set(owner):
        phi[..., arm] = own[..., [of == arm for of in owner]].amax(-1)
    return phi


class Trend(NamedTuple):
    """Rewards by what arms are known for: mean μ and slope θ, and the variance of the latter."""

    mean: float
    slope: float
    doubt: float


def trend(phi: Tensor, y: Tensor, variance: Tensor, slope: float, doubt: float) -> Trend:
    """Bayesian linear regression y = μ + θφ + ε of rewards [M] whose variances are known; θ ~ N(slope, doubt)."""
    w = 1 / variance
    a = float(w.sum()), float((w * phi).sum()), float((w * phi * phi).sum()) + 1 / doubt
    b = float((w * y).sum()), float((w * phi * y).sum()) + slope / doubt
    if not len(y):
        return Trend(0.0, slope, doubt)
    det = a[0] * a[2] - a[1] * a[1]
    return Trend((a[2] * b[0] - a[1] * b[1]) / det, (a[0] * b[1] - a[1] * b[0]) / det, a[0] / det)


@dataclass(frozen=True)
class PromptFit:
    """The half of a belief that is the same for all prompts.

    Attributes:
        x, y, factor: as in `regression`, of M remembered texts; y less what the trend says of them.
        center: [D] that features are centred by.
        trend: μ and θ.
        noise, signal, shared: σ², s² and τ².
    """

    x: Tensor
    y: Tensor
    factor: Tensor
    center: Tensor
    trend: Trend
    noise: float
    signal: float
    shared: float


class PromptMemory:
    """Rewards of `count` arms at the prompts that have been.

    An approximation of the model in `policies/contextual.py`: the rewards of a text are stored less its estimated ease,
    each with the variance of that estimate. As the ease was estimated from the same rewards, their errors are in fact
    correlated, and the exact posterior would move further on the first few texts. In streams of 60 to 80 texts the two
    choose alike.

    What arms were trained on is what they are known for. How much that is worth is learnt from the rewards of all arms
    at all kinds, beginning with a guess: choices are right before anything was seen.
    """

    def __init__(self, count: int, width: float = WIDTH, trained_on: Sequence[Kinds] = ()):
        """
        Args:
            width: w, of features other than `prompt_features.features_of`.
            trained_on: the kinds of prompts that each arm was trained on, none where that is not known.
        """
        self.count = count
        known = [own for own in trained_on if len(own.means)]
        self._owner = [arm for arm, own in enumerate(trained_on) for _ in own.means]
        self._kinds = (
            torch.from_numpy(np.concatenate([own.means for own in known])).float() if known else torch.zeros(0, 0)
        )
        self._k = Covariance(width, len(self._kinds))
        self._informed = torch.tensor([arm in self._owner for arm in range(count)])
        self._errors = torch.tensor([error for own in known for error in own.errors.tolist()])
        self.forget()

    def forget(self) -> None:
        """Forget all prompts."""
        self._heard = 0  # texts
        self._fit: PromptFit | None = None
        self._prompts = torch.zeros(CENTER, 0)
        self._x = torch.zeros(self.count, WINDOW, self._kinds.shape[1])
        self._lost = torch.zeros(self.count, 1, dtype=torch.double)  # what the time of a round of each arm is worth now
        # Of an arm's mean reward in a text: that, less the text's ease, with what its time was worth; its rounds, 0 =
        # none; the variance of the ease; Σ (reward − mean)²; the number of the text.
        self._y, self._rounds, self._doubt, self._within, self._when = (
            torch.zeros(self.count, WINDOW, dtype=torch.double) for _ in range(5)
        )
        self._next = [0] * self.count  # where the next text of an arm goes

    @property
    def texts(self) -> list[int]:
        """[N] texts of each arm that are remembered."""
        return (self._rounds > 0).sum(1).tolist()

    def belief(self, features: Array) -> Belief | None:
        """Expectations of a prompt with these features; None where too little is known of any."""
        fit = self.fit()
        if fit is None:
            return None
        with threads.suited(0):  # matrices too small for two threads, which would wait for each other
            at = self._place(torch.from_numpy(features).float(), fit.center)
            m, v = regression(fit.x, fit.y, fit.factor, at, self._k)
            phi = self._known_for(at, fit.center)
            # What is not known of θ is no difference between arms in their own kinds. Of an arm of which nothing is
            # known φ may be anything, with a variance of 1.
            unsure = torch.where(self._informed, (1 - phi).square() * fit.trend.doubt, fit.trend.slope**2)
            v = v + unsure / fit.signal if self._owner else v
            m = fit.trend.mean + fit.trend.slope * phi + m
        return Belief(m.tolist(), v.tolist(), fit.noise, fit.signal, fit.shared)

    def fit(self) -> PromptFit | None:
        """The half of all beliefs until the next text; None where too little is known. It is made once: who asks for it
        behind a text need not wait for it before the next one."""
        if self._fit is None:
            self._fit = self._fitted()
        return self._fit

    def _fitted(self) -> PromptFit | None:
        seen = self._rounds > 0
        if int(seen.sum()) < FEW and not self._owner:
            return None
        filled = max(self.texts)
        center = torch.cat([part for part in (self._prompts[: self._heard], self._kinds) if len(part)]).mean(0)
        with threads.suited(0):
            x = self._place(self._x[:, :filled], center)
            phi = self._known_for(x, center).diagonal(dim1=0, dim2=2).T
            y = self._y - self._lost
            told, noise, signal = self._scales(y[seen], seen, phi[seen[:, :filled]])
            shared = signal * SHARED / (1 - SHARED) if int(seen.sum()) >= FEW else UNKNOWN
            doubt = (noise / self._rounds.clamp_min(1) + self._doubt) / signal + (self._heard - self._when) / AGE
            doubt = torch.where(seen, doubt.clamp_min(LEAST), NEVER)[:, :filled]
            off = torch.where(seen[:, :filled], y[:, :filled] - told.mean - told.slope * phi, 0.0)
            factor = factored(x, doubt, self._k)
        return PromptFit(x, off, factor, center, told, noise, signal, shared)

    def _place(self, x: Tensor, center: Tensor) -> Tensor:
        """[…, D + P] prompts as the covariance compares them: directions from the centre, and memberships in kinds."""
        directions = _direction(x - center)
        if not len(self._kinds):
            return directions
        return torch.cat([directions, membership(directions, _direction(self._kinds - center))], -1)

    def _known_for(self, x: Tensor, center: Tensor) -> Tensor:
        """φ […, N] of all arms at prompts […, D + P]."""
        if not self._owner:
            return x.new_zeros(*x.shape[:-1], self.count, dtype=torch.double)
        error = (self._errors / (self._kinds - center).norm(dim=1).clamp_min(1e-12)).square()
        p = x[..., x.shape[-1] - len(self._kinds) :]
        return known_for(p, self._owner, 1 / (1 + DIRECTION * error.double()), self.count)

    def _scales(self, y: Tensor, seen: Tensor, phi: Tensor) -> tuple[Trend, float, float]:
        """The trend, σ² and s² of the rewards y [M] that were `seen` [N, WINDOW], of arms known for `phi` [M]."""
        rounds = self._rounds[seen]
        noise, signal = NOISE, SIGNAL
        slope, doubt = math.sqrt(SIGNAL), FAITH**2 * SIGNAL
        if len(y) < FEW:
            return trend(phi, y, signal + noise / rounds, slope, doubt), noise, signal
        # Texts of a round per arm do not tell chance from difference: then it is all of the variance.
        squares = float(y.var(correction=0)) + float(self._within.sum())
        noise = max(squares / (1 + float(rounds.sum()) - len(rounds)), 1e-9)
        for _ in range(2):  # the trend by the variances, these by what it leaves
            told = trend(phi, y, signal + noise / rounds, slope, doubt)
            left = (y - told.mean - told.slope * phi).square()
            between = max(float((left - noise / rounds).mean()), 0.05 * noise)
            signal = (1 - SHARED) * between
        return told, noise, signal

    def learn(
        self, features: Array, belief: Belief | None, shown: Sequence[Shown], lost: Sequence[float] | None = None
    ) -> None:
        """Take in a text that is over: its features, what was thought of it, and what each arm has shown.

        `lost` [N]: what the time of a round of each arm counts in its rewards now (`rewards.surplus_lost`). It follows
        the rate of all rounds: rewards of earlier texts are looked at as if they had been earned at today's.
        """
        self._fit = None
        if lost is not None:
            self._lost = torch.tensor(lost, dtype=torch.double)[:, None]
        n = [one.rounds for one in shown]
        r = [one.total / max(one.rounds, 1) for one in shown]
        known = sum(self.texts) >= FEW  # else the belief has no idea of the mean
        d, doubt = ease(belief, n, r) if belief is not None and known else (0.0, 0.0)
        x = torch.from_numpy(features).float()
        if not self._prompts.shape[1]:
            self._x, self._prompts = torch.zeros(self.count, WINDOW, len(x)), torch.zeros(CENTER, len(x))
        self._prompts[self._heard % CENTER] = x
        self._heard += 1
        lost_of = self._lost[:, 0].tolist()
        for arm, (one, mean) in enumerate(zip(shown, r, strict=True)):
            if one.rounds:
                place, self._next[arm] = self._next[arm], (self._next[arm] + 1) % WINDOW
                self._x[arm, place] = x
                self._y[arm, place], self._rounds[arm, place], self._doubt[arm, place] = (
                    mean - d + lost_of[arm],
                    one.rounds,
                    doubt,
                )
                self._within[arm, place] = max(one.squares - one.rounds * mean * mean, 0.0)
                self._when[arm, place] = self._heard


def _direction(x: Tensor) -> Tensor:
    """[…, D] vectors of length 1; those of length 0 as they are."""
    return x / x.norm(dim=-1, keepdim=True).clamp_min(1e-12)
