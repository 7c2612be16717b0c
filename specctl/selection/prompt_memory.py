"""Memory of what arms have been worth at the prompts so far: the Gaussian processes of `policies.contextual`.

Symbols as there; x [D] features of a prompt, k the covariance of two prompts, w its width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

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
FEW = 4  # rewards of texts by which variances are known; without, nothing is said but of what arms were trained on
SIGNAL = NOISE = 0.005  # s² and σ² until then
UNKNOWN = 1e3  # τ² until then: the mean of rewards is not known
# Variance of what training lets expect, in units of s²: chosen on 100 development prompts of five domains, one of them
# nobody's, with four arms in 16 orders.
FAITH = 0.1
DIRECTION = 4.0  # the same of the square of an error that is as large as what sets a kind apart
FADES = 100.0  # texts after which one adds s² to that: what is seen counts more
NEVER = 1e9  # variance of what was not seen, in units of s²
LEAST = 1e-3  # variance of a reward, in the same: equal prompts leave the system solvable in single precision


def covariance(a: Tensor, b: Tensor, width: float = WIDTH) -> Tensor:
    """[…, A, B] k = c + (1 − c)·exp(−|a − b|²/2w²) of a […, A, D] and b […, B, D], where c is `EVERYWHERE`."""
    half = (a @ b.mT).sub_(0.5 * a.square().sum(-1)[..., None]).sub_(0.5 * b.square().sum(-1)[..., None, :])
    return half.div_(width**2).exp_().mul_(1 - EVERYWHERE).add_(EVERYWHERE)


def factored(x: Tensor, noise: Tensor, width: float = WIDTH) -> Tensor:
    """[N, M, M] Cholesky factors of the covariances of rewards at prompts x [N, M, D] with variances `noise` [N, M]."""
    return torch.linalg.cholesky(covariance(x, x, width).double() + torch.diag_embed(noise))


def regression(x: Tensor, y: Tensor, factor: Tensor, at: Tensor, width: float = WIDTH) -> tuple[Tensor, Tensor]:
    """Means and variances [N] of f_i at a prompt [D], given rewards y [N, M] at prompts x [N, M, D], `factored`, all in
    units of s (Krause and Ong 2011, Eq. 2 and 3)."""
    k = covariance(x, at[None], width)[..., 0].double()
    solved = torch.cholesky_solve(torch.stack((y, k), -1), factor)
    mean, explained = (k[..., None] * solved).sum(1).unbind(-1)
    return mean, (1 - explained).clamp_min(1e-6)


def expected(x: Tensor, owner: Sequence[int], count: int, width: float = WIDTH) -> Tensor:
    """[N, P] what `count` arms are expected to be worth at the kinds of prompts x [P, D] that they were trained on, in
    units of s: an arm 1 at its own (`owner` [P]), −1 far from all of them; 0 where nothing is known of it."""
    near = (covariance(x, x, width) - EVERYWHERE) / (1 - EVERYWHERE)
    found = torch.zeros(count, len(x), dtype=torch.double)
    for arm in set(owner):
        found[arm] = 2 * near[[of == arm for of in owner]].amax(0) - 1
    return found


@dataclass(frozen=True)
class PromptFit:
    """The half of a belief that is the same for all prompts.

    Attributes:
        x, y, factor: as in `regression`, of M remembered texts; y less `mean`.
        center: [D] that features are centred by.
        mean, noise, signal, shared: μ, σ², s² and τ².
    """

    x: Tensor
    y: Tensor
    factor: Tensor
    center: Tensor
    mean: float
    noise: float
    signal: float
    shared: float


class PromptMemory:
    """Rewards of `count` arms at the prompts that have been.

    What arms were trained on is remembered as if each had been tried there: choices are right before anything was seen,
    and rewards correct them.
    """

    def __init__(self, count: int, width: float = WIDTH, trained_on: Sequence[Kinds] = ()):
        """
        Args:
            width: w, of features other than `prompt_features.features_of`.
            trained_on: the kinds of prompts that each arm was trained on, none where that is not known.
        """
        self.count, self.width = count, width
        known = [own for own in trained_on if len(own.means)]
        self._owner = [arm for arm, own in enumerate(trained_on) for _ in own.means]
        self._kinds = (
            torch.from_numpy(np.concatenate([own.means for own in known])).float() if known else torch.zeros(0, 0)
        )
        self._errors = torch.tensor([error for own in known for error in own.errors.tolist()])
        self.forget()

    def forget(self) -> None:
        """Forget all prompts."""
        self._heard = 0  # texts
        self._fit: PromptFit | None = None
        self._prompts = torch.zeros(CENTER, 0)
        self._x = torch.zeros(self.count, WINDOW, self._kinds.shape[1])
        # Of an arm's mean reward in a text: that, less the text's ease; its rounds, 0 = none; the variance of the ease;
        # Σ (reward − mean)²; the number of the text.
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
            at = _direction(torch.from_numpy(features).float() - fit.center)
            m, v = regression(fit.x, fit.y, fit.factor, at, self.width)
        return Belief((fit.mean + m).tolist(), v.tolist(), fit.noise, fit.signal, fit.shared)

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
        mean, noise, signal = self._scales(seen)
        shared = signal * SHARED / (1 - SHARED) if int(seen.sum()) >= FEW else UNKNOWN
        filled = max(self.texts)
        center = torch.cat([part for part in (self._prompts[: self._heard], self._kinds) if len(part)]).mean(0)
        doubt = (noise / self._rounds.clamp_min(1) + self._doubt) / signal + (self._heard - self._when) / AGE
        doubt = torch.where(seen, doubt.clamp_min(LEAST), NEVER)[:, :filled]
        off = torch.where(seen, self._y - mean, 0.0)[:, :filled]
        with threads.suited(0):
            x = _direction(self._x[:, :filled] - center)
            if self._owner:
                kinds, worth, unsure = self._expectations(center)
                x = torch.cat([x, kinds.expand(self.count, -1, -1)], 1)
                off = torch.cat([off, worth * math.sqrt(signal)], 1)
                doubt = torch.cat([doubt, unsure], 1)
            factor = factored(x, doubt, self.width)
        return PromptFit(x, off, factor, center, mean, noise, signal, shared)

    def _expectations(self, center: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The kinds of prompts [P, D] that arms were trained on; what each arm is expected to be worth there [N, P] and
        the variance of that, in units of s and s²."""
        apart = self._kinds - center
        kinds = _direction(apart)
        error = (self._errors / apart.norm(dim=1).clamp_min(1e-12)).square()
        unsure = FAITH + self._heard / FADES + DIRECTION * error.double()
        known = torch.tensor([arm in self._owner for arm in range(self.count)])
        return (
            kinds,
            expected(kinds, self._owner, self.count, self.width),
            torch.where(known[:, None], unsure, NEVER),
        )

    def _scales(self, seen: Tensor) -> tuple[float, float, float]:
        """μ, σ² and s² of the rewards that were `seen` [N, M]."""
        y, rounds = self._y[seen], self._rounds[seen]
        mean = float((y * rounds).sum() / rounds.sum()) if len(y) else 0.0
        if len(y) < FEW:
            return mean, NOISE, SIGNAL
        # Texts of a round per arm do not tell chance from difference: then it is all of the variance.
        squares = float(y.var(correction=0)) + float(self._within.sum())
        noise = max(squares / (1 + float(rounds.sum()) - len(rounds)), 1e-9)
        between = max(float((y - mean).square().mean() - (noise / rounds).mean()), 0.05 * noise)
        return mean, noise, (1 - SHARED) * between

    def learn(self, features: Array, belief: Belief | None, shown: Sequence[Shown]) -> None:
        """Take in a text that is over: its features, what was thought of it, and what each arm has shown."""
        self._fit = None
        n = [one.rounds for one in shown]
        r = [one.total / max(one.rounds, 1) for one in shown]
        known = sum(self.texts) >= FEW  # else the belief has no idea of the mean
        d, doubt = ease(belief, n, r) if belief is not None and known else (0.0, 0.0)
        x = torch.from_numpy(features).float()
        if not self._prompts.shape[1]:
            self._x, self._prompts = torch.zeros(self.count, WINDOW, len(x)), torch.zeros(CENTER, len(x))
        self._prompts[self._heard % CENTER] = x
        self._heard += 1
        for arm, (one, mean) in enumerate(zip(shown, r, strict=True)):
            if one.rounds:
                place, self._next[arm] = self._next[arm], (self._next[arm] + 1) % WINDOW
                self._x[arm, place] = x
                self._y[arm, place], self._rounds[arm, place], self._doubt[arm, place] = mean - d, one.rounds, doubt
                self._within[arm, place] = max(one.squares - one.rounds * mean * mean, 0.0)
                self._when[arm, place] = self._heard


def _direction(x: Tensor) -> Tensor:
    """[…, D] vectors of length 1; those of length 0 as they are."""
    return x / x.norm(dim=-1, keepdim=True).clamp_min(1e-12)
