"""Memory of the arms' rewards at earlier prompts: the Gaussian processes of `policies.contextual`.

The symbols of that module apply. In addition: x [D] features of a prompt; k covariance of two prompts; w its width; p
[P] memberships of a prompt in the kinds of prompts that arms were trained on; φ [N] what the arms' training says about
a prompt (`training_advantage`); θ the worth of φ in rewards.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from specctl import threads
from specctl.decoding.prompt_features import PromptClusters
from specctl.selection.policies.contextual import TRIAL_ROUNDS, ArmRounds, Belief, ease
from specctl.selection.policies.policy import Array

WINDOW = 64  # remembered texts of each arm: the oldest makes room
CENTER = 256  # number of recent prompts that features are centered by
# Constants of the model, chosen on 140 development prompts of seven domains. Halving or doubling one changes results by
# 1 to 4 %.
WIDTH = 0.5  # w, for the distance of two directions: 0 if they are equal, 2 if opposite
SHARED = 0.5  # share of the variance between texts that all arms have in common: τ² ÷ (τ² + s²)
SHARE_EVERYWHERE = 0.2  # share of s² that is the same at all prompts; an arm that loses everywhere is soon left alone
AGE = 200.0  # texts after which the variance of a reward has grown by s²: arms and requests may change
# λ, share of the rest that is the same at all prompts of a kind. Chosen together with `PRIOR_SLOPE_SD`, below.
SHARE_BY_KIND = 0.4
# Cosine at which a prompt belongs to a kind as likely as to none, and temperature of this softmax. Half as much again,
# or a third less, changes results by less than 1 %.
NEAR, SHARP = 0.3, 0.08
# Most texts in a row that are decoded plainly before drafts are tried again. The number doubles when a trial does not
# pay.
LONGEST_SILENCE = 8
MIN_REWARDS = 4  # rewards needed to estimate variances; with fewer, only the training of the arms is known
SIGNAL = NOISE = 0.005  # s² and σ² until then
UNKNOWN = 1e3  # τ² until then: the mean of rewards is not known
# Prior standard deviation of θ, in units of its prior mean, s. Chosen with 100 development prompts of five domains, one
# of them not trained for by any arm, and with four arms in 16 orders. With more, single orders lose a fifth. With less,
# all orders lose if arms are labeled with the kinds of other arms.
PRIOR_SLOPE_SD = 0.7
ERROR_WEIGHT = 4.0  # weight of the squared relative error of a kind's mean, which lowers the trust in that kind
EMPTY_VARIANCE = 1e9  # variance of an empty entry, in units of s²
# Least variance of a reward, in units of s²: with it the system of equal prompts is solvable in single precision.
MIN_VARIANCE = 1e-3


@dataclass(frozen=True)
class Covariance:
    """k = c + (1 − c)·[λ·g(p, p') + (1 − λ)·g(x, x')] of two prompts, with g(a, b) = exp(−|a − b|²/2w²), c =
    `SHARE_EVERYWHERE` and λ = `SHARE_BY_KIND`; λ = 0 if no kinds are known.

    Single prompts of a kind are far from each other, and from their mean. Their common part shows in their membership:
    it names the nearest kind.

    Attributes:
        width: w, for directions x; memberships p have `WIDTH`.
        kinds: P; the last P numbers of a prompt are its p.
    """

    width: float = WIDTH
    kinds: int = 0

    def squares(self, a: Tensor) -> list[Tensor]:
        """½|x|² and, if kinds are known, ½|p|² of prompts a […, A, D + P], each […, A]."""
        parts = a.split([a.shape[-1] - self.kinds, self.kinds], -1) if self.kinds else (a,)
        return [part.square().sum(-1).mul_(0.5) for part in parts]

    def of_squares(self, a: Tensor, of_a: list[Tensor], b: Tensor, of_b: list[Tensor]) -> Tensor:
        """[…, A, B] covariances of prompts a […, A, D + P] and b […, B, D + P] with these `squares`."""
        size = a.shape[-1] - self.kinds
        k = _gaussian(a[..., :size] @ b[..., :size].mT, of_a[0], of_b[0], self.width)
        if self.kinds:
            by_kind = _gaussian(a[..., size:] @ b[..., size:].mT, of_a[1], of_b[1], WIDTH)
            k = k.mul_(1 - SHARE_BY_KIND).add_(by_kind, alpha=SHARE_BY_KIND)
        return k.mul_(1 - SHARE_EVERYWHERE).add_(SHARE_EVERYWHERE)


def _gaussian(products: Tensor, a: Tensor, b: Tensor, width: float) -> Tensor:
    return products.sub_(a[..., None]).sub_(b[..., None, :]).div_(width**2).exp_()


def membership(x: Tensor, kinds: Tensor) -> Tensor:
    """p […, P] of directions x […, D], given the directions of the kinds [P, D]: a softmax of their cosines. An
    additional kind, which no arm was trained on, has the cosine `NEAR`."""
    cosines = x @ kinds.mT
    unowned = torch.full_like(cosines[..., :1], NEAR)
    return (torch.cat([cosines, unowned], -1) / SHARP).softmax(-1)[..., :-1]


@dataclass(frozen=True)
class Regression:
    """Regression of f_i on prompts, all in units of s (Krause and Ong 2011, Eq. 2 and 3).

    Attributes:
        x: [N, M, D] prompts.
        squares: of x, from `Covariance.squares`.
        precision: [N, M, M] inverse covariances of the rewards.
        weights: [N, M] rewards multiplied by the precision.
    """

    k: Covariance
    x: Tensor
    squares: list[Tensor]
    precision: Tensor
    weights: Tensor

    @classmethod
    def of(cls, x: Tensor, y: Tensor, noise: Tensor, k: Covariance = Covariance()) -> Self:
        """The regression of rewards y [N, M] with variances `noise` [N, M] at prompts x [N, M, D]."""
        squares = k.squares(x)
        covariance = k.of_squares(x, squares, x, squares).double()
        covariance.diagonal(dim1=1, dim2=2).add_(noise)
        precision = torch.cholesky_inverse(torch.linalg.cholesky(covariance))
        return cls(k, x, squares, precision, (precision @ y[..., None])[..., 0])

    def at(self, prompt: Tensor) -> tuple[Tensor, Tensor]:
        """Means and variances [N] of f_i at a prompt [D]."""
        b = prompt[None]
        near = self.k.of_squares(self.x, self.squares, b, self.k.squares(b))[..., 0].double()
        explained = ((self.precision @ near[..., None])[..., 0] * near).sum(1)
        return (self.weights * near).sum(1), (1 - explained).clamp_min(1e-6)


def training_advantage(p: Tensor, owner: Sequence[int], trust: Tensor, count: int) -> Tensor:
    """φ […, N] of `count` arms at prompts with memberships p […, P]; `owner` [P] names the arm that was trained on each
    kind. φ is 1 at an arm's own kind, −1 far from all its kinds, and 0 for an arm with unknown training. It is smaller
    if the mean of a kind comes from few prompts (`trust` [P])."""
    own = trust * (2 * p.double() - 1)
    phi = own.new_zeros(*p.shape[:-1], count)
    for arm in set(owner):
        phi[..., arm] = own[..., [of == arm for of in owner]].amax(-1)
    return phi


class Trend(NamedTuple):
    """Linear trend of rewards in φ: mean μ, slope θ, and the variance of the slope."""

    mean: float
    slope: float
    doubt: float


def trend(phi: Tensor, y: Tensor, variance: Tensor, slope: float, doubt: float) -> Trend:
    """Bayesian linear regression y = μ + θφ + ε of rewards [M] with known variances, and prior θ ~ N(slope, doubt)."""
    w = 1 / variance
    a = float(w.sum()), float((w * phi).sum()), float((w * phi * phi).sum()) + 1 / doubt
    b = float((w * y).sum()), float((w * phi * y).sum()) + slope / doubt
    if not len(y):
        return Trend(0.0, slope, doubt)
    det = a[0] * a[2] - a[1] * a[1]
    return Trend((a[2] * b[0] - a[1] * b[1]) / det, (a[0] * b[1] - a[1] * b[0]) / det, a[0] / det)


@dataclass(frozen=True)
class PromptFit:
    """The part of a belief that is the same for all prompts.

    Attributes:
        regression: of the residuals of the trend on the remembered texts.
        center: [D] mean that features are centered by.
        trend: μ and θ.
        noise, signal, shared: σ², s² and τ².
    """

    regression: Regression
    center: Tensor
    trend: Trend
    noise: float
    signal: float
    shared: float


class PromptMemory:
    """Rewards of `count` arms at earlier prompts.

    This approximates the model in `policies/contextual.py`: the rewards of a text are stored minus its estimated ease,
    each with the variance of that estimate. The ease was estimated from the same rewards, so their errors are in fact
    correlated, and the exact posterior would move further on the first few texts. In streams of 60 to 80 texts the two
    choose alike.

    φ expresses what each arm was trained on. The worth of φ is learned from the rewards of all arms at all kinds,
    beginning with a guess, so that choices are right before any reward was seen.
    """

    def __init__(self, count: int, width: float = WIDTH, trained_on: Sequence[PromptClusters] = ()):
        """
        Args:
            width: w, for other features than `prompt_features.features_of`.
            trained_on: the kinds of prompts that each arm was trained on, empty if not known.
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
        self._texts_seen = 0  # number of texts learned from
        self._fit: PromptFit | None = None
        self._prompts = torch.zeros(CENTER, 0)
        self._x = torch.zeros(self.count, WINDOW, self._kinds.shape[1])
        self._time_cost = torch.zeros(self.count, 1, dtype=torch.double)  # present cost of a round's time in rewards
        # By arm and remembered text: mean reward minus the text's ease, plus the cost of the time; rounds, 0 = no
        # entry; variance of the ease; Σ (reward − mean)²; number of the text.
        self._y, self._rounds, self._doubt, self._squares, self._seen_at = (
            torch.zeros(self.count, WINDOW, dtype=torch.double) for _ in range(5)
        )
        self._next = [0] * self.count  # entry for the next text of each arm
        # Texts in a row that were decoded plainly; the number of them after which drafts are tried.
        self._plain_streak, self._plain_limit = 0, 1

    @property
    def texts(self) -> list[int]:
        """[N] number of remembered texts of each arm."""
        return (self._rounds > 0).sum(1).tolist()

    @property
    def should_try_drafts(self) -> bool:
        """Whether drafts should be tried after many plainly decoded texts: meanwhile datastores and requests change."""
        return self._plain_streak >= self._plain_limit

    def belief(self, features: Array) -> Belief | None:
        """Expected rewards at a prompt with these features, or None if too little is known."""
        fit = self.fit()
        if fit is None:
            return None
        with threads.step_threads(0):  # matrices too small for two threads, which would wait for each other
            at = self._place(torch.from_numpy(features).float(), fit.center)
            m, v = fit.regression.at(at)
            m = fit.trend.mean + m
            if self._owner:
                phi = self._known_for(at, fit.center)
                # Doubt about θ makes no difference between arms at their own kinds. For an arm with unknown training φ
                # may be anything, with a variance of 1.
                unsure = torch.where(self._informed, (1 - phi).square() * fit.trend.doubt, fit.trend.slope**2)
                m, v = m + fit.trend.slope * phi, v + unsure / fit.signal
        return Belief(m.tolist(), v.tolist(), fit.noise, fit.signal, fit.shared)

    def fit(self) -> PromptFit | None:
        """The part of all beliefs that holds until the next text, or None if too little is known. It is computed once:
        a call after a text saves the next text the wait."""
        if self._fit is None:
            self._fit = self._fitted()
        return self._fit

    def _fitted(self) -> PromptFit | None:
        seen = self._rounds > 0
        if int(seen.sum()) < MIN_REWARDS and not self._owner:
            return None
        filled = max(self.texts)
        center = torch.cat([part for part in (self._prompts[: self._texts_seen], self._kinds) if len(part)]).mean(0)
        with threads.step_threads(0):
            x = self._place(self._x[:, :filled], center)
            phi = self._known_for(x, center).diagonal(dim1=0, dim2=2).T
            y = self._y - self._time_cost
            line, noise, signal = self._scales(y[seen], seen, phi[seen[:, :filled]])
            shared = signal * SHARED / (1 - SHARED) if int(seen.sum()) >= MIN_REWARDS else UNKNOWN
            doubt = (noise / self._rounds.clamp_min(1) + self._doubt) / signal
            doubt += (self._texts_seen - self._seen_at) / AGE
            doubt = torch.where(seen, doubt.clamp_min(MIN_VARIANCE), EMPTY_VARIANCE)[:, :filled]
            off = torch.where(seen[:, :filled], y[:, :filled] - line.mean - line.slope * phi, 0.0)
            found = Regression.of(x, off, doubt, self._k)
        return PromptFit(found, center, line, noise, signal, shared)

    def _place(self, x: Tensor, center: Tensor) -> Tensor:
        """[…, D + P] prompts as the covariance compares them: directions from the center, and memberships in kinds."""
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
        return training_advantage(p, self._owner, 1 / (1 + ERROR_WEIGHT * error.double()), self.count)

    def _scales(self, y: Tensor, seen: Tensor, phi: Tensor) -> tuple[Trend, float, float]:
        """The trend, σ² and s² from the rewards y [M] of the `seen` [N, WINDOW] entries and their φ, `phi` [M]."""
        rounds = self._rounds[seen]
        noise, signal = NOISE, SIGNAL
        slope, doubt = math.sqrt(SIGNAL), PRIOR_SLOPE_SD**2 * SIGNAL
        if len(y) < MIN_REWARDS:
            return trend(phi, y, signal + noise / rounds, slope, doubt), noise, signal
        # With one round per arm and text, chance cannot be told from difference; then the noise is all of the variance.
        squares = float(y.var(correction=0)) + float(self._squares.sum())
        noise = max(squares / (1 + float(rounds.sum()) - len(rounds)), 1e-9)
        for _ in range(2):  # the trend from the variances, then these from its residuals
            line = trend(phi, y, signal + noise / rounds, slope, doubt)
            left = (y - line.mean - line.slope * phi).square()
            between = max(float((left - noise / rounds).mean()), 0.05 * noise)
            signal = (1 - SHARED) * between
        return line, noise, signal

    def learn(
        self, features: Array, belief: Belief | None, shown: Sequence[ArmRounds], lost: Sequence[float] | None = None
    ) -> None:
        """Take in a finished text: its features, the belief before it, and the rounds of each arm.

        `lost` [N]: present cost of the time of a round of each arm in rewards (`rewards.surplus_lost`). It follows the
        rate of all rounds, so that rewards of earlier texts count as if they had been earned at the present rate.
        """
        self._fit = None
        drafted = sum(one.rounds for one in shown)
        if drafted > TRIAL_ROUNDS:
            self._plain_streak, self._plain_limit = 0, 1
        elif drafted:
            self._plain_streak, self._plain_limit = 0, min(2 * self._plain_limit, LONGEST_SILENCE)
        else:
            self._plain_streak += 1
        if lost is not None:
            self._time_cost = torch.tensor(lost, dtype=torch.double)[:, None]
        n = [one.rounds for one in shown]
        r = [one.total / max(one.rounds, 1) for one in shown]
        known = sum(self.texts) >= MIN_REWARDS  # otherwise the belief does not know the mean
        d, doubt = ease(belief, n, r) if belief is not None and known else (0.0, 0.0)
        x = torch.from_numpy(features).float()
        if not self._prompts.shape[1]:
            self._x, self._prompts = torch.zeros(self.count, WINDOW, len(x)), torch.zeros(CENTER, len(x))
        self._prompts[self._texts_seen % CENTER] = x
        self._texts_seen += 1
        lost_of = self._time_cost[:, 0].tolist()
        for arm, (one, mean) in enumerate(zip(shown, r, strict=True)):
            if one.rounds:
                place, self._next[arm] = self._next[arm], (self._next[arm] + 1) % WINDOW
                self._x[arm, place] = x
                self._y[arm, place] = mean - d + lost_of[arm]
                self._rounds[arm, place], self._doubt[arm, place] = one.rounds, doubt
                self._squares[arm, place] = max(one.squares - one.rounds * mean * mean, 0.0)
                self._seen_at[arm, place] = self._texts_seen


def _direction(x: Tensor) -> Tensor:
    """[…, D] vectors scaled to length 1; vectors of length 0 are unchanged."""
    return x / x.norm(dim=-1, keepdim=True).clamp_min(1e-12)
