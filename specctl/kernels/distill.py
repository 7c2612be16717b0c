"""Distillation loss of a vocabulary head without storing its logits: computed and differentiated part by part.

A head of Vd rows on n hidden states has n·Vd logits, and autograd through their softmax stores several times as much.
Here part of the rows is multiplied, compared with the teacher, turned into its gradient in place, and multiplied back.
Only the gradients of the hidden states and of the head are stored. (As in the fused linear losses of Liger Kernel, Hsu
et al. 2024, arXiv 2410.10989.)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from . import distill_rows

PART = {"cpu": 2**23, "cuda": 2**26}  # logits per part
MASS = 2**25  # probabilities of the vocabulary that are held at once
LEAST_MASS = 1e-6  # of a row on the sampled tokens


class Squash(NamedTuple):
    """Transform of a vocabulary head's products x: cap · tanh(y / cap) with y = scale · x + shift; y without a cap."""

    scale: float = 1.0  # Command R, Granite
    cap: float | None = None  # Gemma 2
    shift: Tensor | None = None  # [V] fp32: Phi-2, GPT-J

    def __call__(self, products: Tensor) -> Tensor:
        scaled = products if self.scale == 1 else products * self.scale
        if self.shift is not None:
            scaled = scaled + self.shift
        return scaled if self.cap is None else (scaled / self.cap).tanh() * self.cap

    def of(self, ids: Tensor | slice) -> Squash:
        """This transform restricted to the tokens `ids`."""
        return self if self.shift is None else self._replace(shift=self.shift[ids])


class SoftmaxSample(NamedTuple):
    """Tokens [n] that a softmax is computed over, and the logarithm [n] fp32 of how many tokens each stands for."""

    tokens: Tensor
    log_count: Tensor

    def of(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """Rows [n, H] of a vocabulary matrix [V, H] for these tokens, and their bias [n]."""
        return weight[self.tokens], self.log_count if bias is None else bias[self.tokens] + self.log_count


class Teacher(NamedTuple):
    """R distributions to learn from: probabilities, sampled tokens, or hidden states with their vocabulary head."""

    rows: Tensor  # [R, Vd] probabilities; [R] int64 tokens; [R, Ht] hidden states
    head: Tensor | None = None  # [Vd, Ht], for hidden states
    squash: Squash = Squash()
    sample: SoftmaxSample | None = None  # the tokens of `rows`, if they are not all of the vocabulary

    def sampled(self, count: int) -> Teacher:
        """These distributions on a sample of `count` tokens: two thirds the likeliest of all rows together, the rest
        drawn at random from torch's generator. Unchanged if the vocabulary is less than twice as large.

        A drawn token stands for all tokens that are not among the likeliest (sampled softmax: Bengio and Senécal 2008).
        Without drawn tokens nothing would lower the drafter's probabilities of the others.
        """
        likely = count * 2 // 3
        width = self.rows.shape[1] if self.head is None else len(self.head)
        if width < 2 * count:
            return self
        every = torch.arange(len(self.rows), device=self.rows.device)
        parts = every.split(max(1, MASS // width))
        known = [self.known(every)] if len(parts) == 1 else None
        mass = torch.stack([part.sum(0, dtype=torch.float32) for part in known or map(self.known, parts)]).sum(0)
        others = torch.ones_like(mass, dtype=torch.bool)
        others[mass.topk(likely).indices] = False
        rest = others.nonzero()[:, 0]
        drawn = rest[torch.randperm(len(rest))[: count - likely].to(rest.device)]
        tokens = torch.cat(((~others).nonzero()[:, 0], drawn))
        each = torch.ones(count, device=mass.device)
        each[likely:] = len(rest) / len(drawn)
        rows = torch.cat([part[:, tokens] for part in known or map(self.known, parts)]) * each
        return Teacher(rows / rows.sum(1, keepdim=True).clamp_min(LEAST_MASS), sample=SoftmaxSample(tokens, each.log()))

    def known(self, at: Tensor) -> Tensor:
        """Rows `at` [n] as probabilities [n, Vd], or as tokens [n].

        A row that appears several times is computed once.
        """
        if self.head is None:
            return self.rows[at]
        asked, place = at.unique(return_inverse=True)
        logits = linear(self.rows[asked].to(self.head.dtype), self.head)
        return self.squash(logits.float()).softmax(-1).to(logits.dtype)[place]


def linear_distill(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    teacher: Teacher,
    at: Tensor,
    share: Tensor,
    objective: str,
) -> tuple[Tensor, Tensor]:
    """Distillation loss of softmax(hidden · weightᵀ + bias).

    Args:
        hidden: [n, H].
        weight, bias: [Vd, H] and [Vd] or None. Products run in the dtype of autocast, else in the dtype of `weight`.
        at: [n] int64, the teacher's row for each hidden state; rows may repeat.
        share: [n] ≥ 0, each row's weight in the total. Rows with 0 are skipped.
        objective: a name in `kernels.objectives`.

    Returns:
        Σ share·loss, with gradients for hidden, weight and bias; and the losses [n] fp32 without gradients, 0 if share
            is 0.
    """
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
    with torch.autocast(device, enabled=False):
        grad = torch.is_grad_enabled()
        wanted = [grad and part is not None and part.requires_grad for part in (hidden, weight, bias)]
        return _LinearDistill.apply(hidden, weight, bias, teacher, at, share, objective, dtype, wanted)


class _LinearDistill(torch.autograd.Function):
    """Computes gradients in the forward pass, while the logits exist. The backward pass scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        teacher: Teacher,
        at: Tensor,
        share: Tensor,
        objective: str,
        dtype: torch.dtype,
        wanted: list[bool],
    ) -> tuple[Tensor, Tensor]:
        """(Σ share·loss, losses [n]). Keeps the gradients of the first by hidden, weight and bias, if `wanted`."""
        losses = torch.zeros(len(hidden), dtype=torch.float32, device=hidden.device)
        d_hidden = torch.zeros_like(hidden) if wanted[0] else None
        d_weight = None
        d_bias = torch.zeros_like(bias) if bias is not None and wanted[2] else None
        head, offset = weight.to(dtype), None if bias is None else bias.to(dtype)
        used = share.nonzero()[:, 0]
        used = used[at[used].argsort()]  # neighbors share teacher rows
        for rows in used.split(max(1, PART.get(hidden.device.type, PART["cuda"]) // len(weight))):
            x = hidden[rows].to(dtype)
            logits = linear(x, head, offset)
            losses[rows] = distill_rows(logits, teacher.known(at[rows]), share[rows], objective).to(losses.dtype)
            if d_hidden is not None:
                d_hidden[rows] = (logits @ head).to(d_hidden.dtype)
            if wanted[1]:
                part = (logits.T @ x).to(weight.dtype)
                d_weight = part if d_weight is None else d_weight.add_(part)
            if d_bias is not None:
                d_bias += logits.sum(0, dtype=d_bias.dtype)
        ctx.mark_non_differentiable(losses)
        ctx.save_for_backward(d_hidden, d_weight, d_bias)
        return torch.dot(share.float(), losses), losses

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> Any:
        return *(None if part is None else part * grad for part in ctx.saved_tensors), *(None,) * 6
