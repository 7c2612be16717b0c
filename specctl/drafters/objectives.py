"""Distillation objectives: the target's distribution p against the drafter's q."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK = 128  # rows at a time: their fp32 work fits the second-level cache of a core


class _SoftCrossEntropy(torch.autograd.Function):
    """−Σ_v p log q of every row, with the gradient softmax(z)·Σp − p computed in the same pass, kept in the logits'
    dtype.

    Autograd through log_softmax would keep two fp32 [N, V] tensors and read them four more times.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, teacher: Tensor, weight: Tensor) -> Tensor:
        grad = torch.empty_like(logits)
        losses = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
        for start in range(0, logits.shape[0], CHUNK):
            part = slice(start, start + CHUNK)
            z, p, w = logits[part].float(), teacher[part].float(), weight[part].float()
            lse = z.logsumexp(-1)
            losses[part] = w * (lse * p.sum(-1) - torch.linalg.vecdot(p, z))
            q = z.sub(lse.unsqueeze(-1)).exp_()  # a new tensor: `float()` of fp32 logits is those logits
            grad[part] = q.sub_(p).mul_(w.unsqueeze(-1))
        ctx.save_for_backward(grad)
        return losses

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = ctx.saved_tensors
        return grad * grads[0].unsqueeze(-1).to(grad.dtype), None, None


def soft_cross_entropy(logits: Tensor, teacher: Tensor, weight: Tensor) -> Tensor:
    """[N] losses weight_n · (−Σ_v teacher_nv log softmax(logits_n)_v) in fp32.

    Args:
        logits: [N, Vd]; teacher: [N, Vd] rows that sum to one; weight: [N] (bool or float).
    """
    return _SoftCrossEntropy.apply(logits, teacher, weight)
