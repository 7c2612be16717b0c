"""Update rules as functions of vectors: OnlineSpec (Qian et al. 2026, arXiv 2603.12617) and its building blocks.

Symbols of the papers: w [P] played weights; ŵ [P] updated weights; f_t loss of chunk t; g [P] its gradient; h [P] a
guess of the gradient (hint); η rate; D radius; p, L [N] weights and cumulated losses of an ensemble's members; ε rate
of Hedge. No function changes its arguments, so an old state stays valid and going back costs nothing.
"""

import math
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.adam import adam as torch_adam

Hint = Literal["last", "mean", "none"]


def project(w: Tensor, origin: Tensor, radius: float | None) -> Tensor:
    """Π: the nearest point to w in the ball of `radius` D around `origin`; w itself without a radius."""
    if radius is None:
        return w
    away = w - origin
    distance = float(torch.linalg.vector_norm(away))
    return w if distance <= radius else origin + away * (radius / distance)


def clipped(g: Tensor, norm: float, limit: float) -> Tensor:
    """Scale g, which has the norm `norm`, to a length of at most `limit`; 0 = no limit."""
    return g * (limit / norm) if 0 < limit < norm else g


def heavy_ball(g: Tensor, v: Tensor, mu: float) -> Tensor:
    """v ← μ v + g, the direction of Polyak's heavy ball in the form of `torch.optim.SGD`; the step is η v."""
    return mu * v + g


def adam(g: Tensor, m: Tensor, v: Tensor, j: int, betas: tuple[float, float]) -> tuple[Tensor, Tensor, Tensor]:
    """Direction of step j ≥ 1 of Adam (Kingma and Ba 2015, Algorithm 1, ε = 1e-8), and the moments m and v after it."""
    m, v, direction = m.clone(), v.clone(), torch.zeros_like(g)
    # One fused pass over the vectors instead of twelve. A step with rate −1 from 0 is the direction.
    rates: dict[str, Any] = {"lr": -1.0, "beta1": betas[0], "beta2": betas[1], "eps": 1e-8, "weight_decay": 0.0}
    done = [torch.tensor(j - 1.0, device=g.device)]
    torch_adam([direction], [g], [m], [v], [], done, fused=True, amsgrad=False, maximize=False, **rates)
    return direction, m, v


def descend(w_hat: Tensor, g: Tensor, eta: float) -> Tensor:
    """ŵ_t − η g, before projection. With g_t(w_t) it is ŵ_{t+1}; this is OGD if ŵ is played (Zinkevich 2003). With a
    hint h_t it is the w_t of optimistic mirror descent (Rakhlin and Sridharan 2013)."""
    return w_hat.sub(g, alpha=eta)


def next_hint(kind: Hint, h: Tensor, g: Tensor, t: int) -> Tensor:
    """h_{t+1} from h_t and g_t: the last gradient, the mean of g_1 … g_t, or 0."""
    if kind == "none":
        return torch.zeros_like(g)
    return g if kind == "last" else h + (g - h) / t


def hedge_weights(L: Tensor, guess: Tensor, epsilon: float) -> Tensor:
    """p ∝ exp(−ε (L + guess)). A member with infinite loss has weight 0; at least one loss must be finite.

    With a guess of the next losses this is optimistic Hedge, with guess = 0 Hedge (Freund and Schapire 1997).
    """
    return torch.softmax(-epsilon * (L + guess), 0)


def cumulated(L: Tensor, losses: Tensor, discount: float) -> Tensor:
    """discount · L + losses; a loss that is not a number counts as infinite."""
    return discount * L + losses.nan_to_num(nan=math.inf, posinf=math.inf)


def effective_members(p: Tensor) -> float:
    """exp(entropy of p): N for uniform weights, 1 for a single member."""
    return float(torch.special.entr(p).sum().exp())


def mean_of(p: Tensor, vectors: list[Tensor]) -> Tensor:
    """Σ p_i w_i; members without weight are left out, so that a single one comes back bit for bit."""
    parts = [
        vector if share == 1 else share * vector for share, vector in zip(p.tolist(), vectors, strict=True) if share
    ]
    return sum(parts[1:], parts[0])
