"""Memory of what arms have been worth at the prompts so far: the Gaussian processes of `policies.contextual`.

Symbols as there; x [D] features of a prompt, k the covariance of two prompts, w its width.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specctl import threads
from specctl.selection.policies.contextual import Belief, Shown, ease
from specctl.selection.policies.policy import Array

WINDOW = 64  # texts of each arm that are remembered: the oldest makes room
CENTER = 256  # prompts that features are centred by
FEATURES = 256  # of a prompt; more are projected
# Constants of the model, chosen on 140 development prompts of seven domains; half or twice as much makes 1 to 4 %.
WIDTH = 0.5  # w, in the distance of two directions: that of equals is 0, of opposites 2
SHARED = 0.5  # of the variance between texts: τ² ÷ (τ² + s²)
EVERYWHERE = 0.2  # of s²: what an arm is worth at all prompts alike; an arm that loses everywhere is soon left alone
AGE = 200.0  # texts after which one adds s² to the variance of what was seen: arms, and what is asked, may change
FEW = 4  # rewards of texts without which nothing is said
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
    """Rewards of `count` arms at the prompts that have been. `width`: w, of features other than `features_of`."""

    def __init__(self, count: int, width: float = WIDTH):
        self.count, self.width = count, width
        self.forget()

    def forget(self) -> None:
        """Forget all prompts."""
        self._heard = 0  # texts
        self._fit: PromptFit | None = None
        self._prompts = torch.zeros(CENTER, 0)
        self._x = torch.zeros(self.count, WINDOW, 0)
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
        if int(seen.sum()) < FEW:
            return None
        y, rounds = self._y[seen], self._rounds[seen]
        # Texts of a round per arm do not tell chance from difference: then it is all of the variance.
        squares = float(y.var(correction=0)) + float(self._within.sum())
        noise = max(squares / (1 + float(rounds.sum()) - len(rounds)), 1e-9)
        mean = float((y * rounds).sum() / rounds.sum())
        between = max(float((y - mean).square().mean() - (noise / rounds).mean()), 0.05 * noise)
        signal, shared = (1 - SHARED) * between, SHARED * between
        filled = max(self.texts)
        center = self._prompts[: self._heard].mean(0)
        doubt = (noise / self._rounds.clamp_min(1) + self._doubt) / signal + (self._heard - self._when) / AGE
        doubt = torch.where(seen, doubt.clamp_min(LEAST), NEVER)
        off = torch.where(seen, self._y - mean, 0.0)
        with threads.suited(0):
            x = _direction(self._x[:, :filled] - center)
            factor = factored(x, doubt[:, :filled], self.width)
        return PromptFit(x, off[:, :filled], factor, center, mean, noise, signal, shared)

    def learn(self, features: Array, belief: Belief | None, shown: Sequence[Shown]) -> None:
        """Take in a text that is over: its features, what was thought of it, and what each arm has shown."""
        self._fit = None
        n = [one.rounds for one in shown]
        r = [one.total / max(one.rounds, 1) for one in shown]
        d, doubt = (0.0, 0.0) if belief is None else ease(belief, n, r)
        x = torch.from_numpy(features).float()
        if not self._x.shape[2]:
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


def features_of(states: Tensor) -> Array:
    """[D] features of a prompt, whose states are [P, F]: their mean, projected where it is long (Achlioptas 2003)."""
    mean = states.float().mean(0).nan_to_num().cpu()
    if len(mean) > FEATURES:
        mean = mean @ _projection(len(mean))
    return mean.double().numpy()


@functools.lru_cache(maxsize=4)
def _projection(size: int) -> Tensor:
    """[size, D] random signs, scaled so that lengths stay as they are."""
    signs = np.random.default_rng(0).choice([-1.0, 1.0], (size, FEATURES))
    return torch.from_numpy(signs / math.sqrt(FEATURES)).float()


def _direction(x: Tensor) -> Tensor:
    """[…, D] vectors of length 1; those of length 0 as they are."""
    return x / x.norm(dim=-1, keepdim=True).clamp_min(1e-12)
