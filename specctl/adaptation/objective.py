"""f: the loss of a module as a function of its trainable parameters, which are one vector here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import linear

from specctl.drafters.head import SlotBatch
from specctl.errors import RecipeError
from specctl.kernels.distill import Squash

Run = Callable[[Any, Any], Sequence[Any]]
"""(the module or its like, a batch) → (Σ loss, Σ weight, …), as `training.trainees.Trainee.loss`."""


class Objective:
    """f(w; chunk) = Σ loss / Σ weight over the batches of a chunk, for parameters w [P] in fp32.

    A vector keeps update rules to one line each, and a learner's state to a few tensors.

    Several learners of one chunk take turns at every batch, so that what a batch needs is made once for all. They are
    not stacked into one batched pass: `torch.func.vmap` refuses the heads' autograd functions
    (`drafters.ttt_attention`, `kernels.distill`), which save for backward what their forward passes compute besides
    their results. On a CPU that costs little, as the time goes into products whose weights differ: three learners take
    2.8 to 3.0 times as long as one (eagle3 and hydra on the built-in target, batches of 392 rows, one thread).
    """

    def __init__(self, module: nn.Module, run: Run, seed: int = 0):
        """Raises RecipeError for a module without trainable parameters. `seed`: of dropout and noise."""
        self.module, self._run, self._seed = module, run, seed
        self._shapes = {name: p.shape for name, p in module.named_parameters() if p.requires_grad}
        if not self._shapes:
            raise RecipeError(
                "this drafter has no trainable weights", "use --algo static, or a drafter of another family"
            )

    def start(self) -> Tensor:
        """The module's parameters at present [P]."""
        parameters = dict(self.module.named_parameters())
        return torch.cat([parameters[name].detach().reshape(-1).float() for name in self._shapes])

    def parameters(self, w: Tensor) -> dict[str, Tensor]:
        """The parameters that w stands for, by name: views of it."""
        parts = w.split([shape.numel() for shape in self._shapes.values()])
        return {name: part.view(shape) for part, (name, shape) in zip(parts, self._shapes.items(), strict=True)}

    @torch.no_grad()
    def load(self, w: Tensor) -> None:
        """Give the module the parameters w."""
        parameters = dict(self.module.named_parameters())
        for name, value in self.parameters(w).items():
            parameters[name].copy_(value)

    def gradient(self, w: Tensor, batch: Any, draw: int) -> tuple[Tensor, Tensor, Tensor]:
        """(Σ loss, Σ weight, gradient of the first [P]) of one batch, in training mode.

        `draw` numbers the dropout masks: a function of it and the seed, so that resuming needs no generator's state.
        """
        leaves = {name: part.requires_grad_() for name, part in self.parameters(w.detach()).items()}
        devices = [w.device] if w.device.type == "cuda" else []
        self.module.train()
        with torch.enable_grad(), torch.random.fork_rng(devices):
            torch.manual_seed(seed_of(self._seed, draw))
            total, weight, *_ = self._run(self._with(leaves), batch)
            parts = torch.autograd.grad(total, list(leaves.values()), allow_unused=True, materialize_grads=True)
        return total.detach(), weight.detach(), torch.cat([part.reshape(-1) for part in parts])

    @torch.no_grad()
    def losses(self, vectors: Sequence[Tensor], chunk: Iterable[Any]) -> Tensor:
        """f [N] fp64 of every w, on the CPU, without dropout; NaN where no row of the chunk has weight."""
        sums = torch.zeros(len(vectors), 2, dtype=torch.float64)
        self.module.eval()
        for batch in chunk:
            for row, w in enumerate(vectors):
                total, weight, *_ = self._run(self._with(self.parameters(w)), batch)
                sums[row] += torch.stack((total.double(), weight.double())).cpu()
        return sums[:, 0] / sums[:, 1]

    def _with(self, parameters: dict[str, Tensor]) -> Callable[..., Any]:
        """The module's forward with other parameters than its own."""
        return lambda *args, **kwargs: functional_call(self.module, parameters, args, kwargs)


def seed_of(seed: int, draw: int) -> int:
    """A seed for the draw of this number. A sum would not do: torch's generator on a CPU reads the lowest 32 bits."""
    return int(np.random.SeedSequence((seed, draw)).generate_state(1)[0])


def with_distributions(batch: SlotBatch, target_head: Tensor, squash: Squash) -> SlotBatch:
    """The batch with the target's distributions [N + T, Vd] in place of the states they are made from: made once for
    all members, epochs and draft depths. The head is then called with None as its `target_head`.

    For heads whose losses read no more of the teacher: eagle3, hydra, medusa.
    """
    logits = squash(linear(batch.teacher.to(target_head.dtype), target_head).float())
    return replace(batch, teacher=logits.softmax(-1).to(target_head.dtype))
