"""Distillation objectives: the target's distribution p against the drafter's q = softmax(z), row by row.

DistillSpec (Zhou et al. 2024, arXiv 2310.08461) compares such objectives; the best one depends on the task.

ce        −log q(x)                    x: the token the target sampled
soft_ce   −Σ p log q
kl        Σ p log(p / q)               soft_ce minus the entropy of p: the same gradient, zero if q = p
reverse_kl  Σ q log(q / p)
tv        ½ Σ |p − q|                  1 − acceptance probability (Leviathan et al. 2023, Corollary 3.6)
log_tv    −log(1 − tv)                 −log of the acceptance probability: LK-α of Samarin et al. 2026, arXiv 2602.23881
lk_lambda   λ kl + (1 − λ) tv          LK-λ of the same paper: λ = exp(−η (1 − tv)), a constant in the gradient. The
                                       paper takes 1 − tv as a batch mean, this code takes it per row
"""

from collections.abc import Callable

import torch
from torch import Tensor

ETA = 3.0  # η of LK-λ
TINY = 1e-9  # replaces a zero probability of the teacher in logarithms


def _soft_ce(z: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    q = z.softmax(-1)
    lse = z.amax(-1) - q.amax(-1).log()  # on a CPU, softmax's exponential is several times as fast as exp
    return lse * p.sum(-1) - torch.linalg.vecdot(p, z), q.sub_(p)


def _kl(z: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    loss, slope = _soft_ce(z, p)
    return loss + torch.xlogy(p, p).sum(-1), slope


def _reverse_kl(z: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    log_q = z.log_softmax(-1)
    q, ratio = log_q.exp(), log_q - p.clamp_min(TINY).log()
    loss = torch.linalg.vecdot(q, ratio)
    return loss, q * (ratio - loss.unsqueeze(-1))


def _tv(z: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    q = z.softmax(-1)
    difference = q - p
    sign = difference.sign().mul_(0.5)
    return 0.5 * difference.abs().sum(-1), q * (sign - torch.linalg.vecdot(q, sign).unsqueeze(-1))


def _log_tv(z: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    loss, slope = _tv(z, p)
    accepted = (1 - loss).clamp_min(TINY)
    return -accepted.log(), slope / accepted.unsqueeze(-1)


def _lk_lambda(z: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    (kl, kl_slope), (tv, tv_slope) = _kl(z, p), _tv(z, p)
    share = (ETA * (tv - 1)).exp()
    slope = torch.lerp(tv_slope, kl_slope, share.unsqueeze(-1))
    return torch.lerp(tv, kl, share), slope


def _ce(z: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
    lse = z.logsumexp(-1)
    slope = z.sub(lse.unsqueeze(-1)).exp_()
    at = label.unsqueeze(-1)
    loss = lse - z.gather(-1, at).squeeze(-1)
    return loss, slope.scatter_add_(-1, at, slope.new_full(at.shape, -1.0))


OBJECTIVES: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "ce": _ce,
    "soft_ce": _soft_ce,
    "kl": _kl,
    "reverse_kl": _reverse_kl,
    "tv": _tv,
    "log_tv": _log_tv,
    "lk_lambda": _lk_lambda,
}
"""Name → function from (fp32 logits [n, Vd], teacher) to (losses [n], their gradient by the logits [n, Vd])."""

CROSS_ENTROPIES = ("soft_ce", "kl")
"""Objectives with the gradient q − p, which a softmax over sampled tokens can estimate."""
