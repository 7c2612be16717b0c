"""Loss f of a module as a function of its trainable parameters, flattened into one vector."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import linear

from specctl.drafters.feature.head import SlotBatch
from specctl.errors import RecipeError
from specctl.kernels.distill import Squash, Teacher
from specctl.training.optimizers import is_embedding_like

Run = Callable[[Any, Any], Sequence[Any]]
"""(the module or a stand-in, a batch) → (Σ loss, Σ weight, …), like `training.trainable.TrainableDrafter.loss`."""

Prepare = Callable[[Any], Any]
"""A batch ↦ the batch with values that every learner and draft depth would otherwise compute again. It may draw from
torch's generator."""


class Objective:
    """f(w; chunk) = Σ loss / Σ weight over the batches of a chunk, for parameters w [P] in fp32.

    With vectors, an update rule is one line, and a learner's state a few tensors. Several learners take turns at every
    batch. A pass over stacked parameters [N, P] is no faster on a CPU, as products of different large matrices share no
    work.
    """

    def __init__(self, module: nn.Module, run: Run, seed: int = 0, prepare: Prepare = lambda batch: batch):
        """
        Args:
            seed: of dropout, noise and samples.
            prepare: applied to every batch, once for all learners: `with_distributions`.

        Raises RecipeError if the module has no trainable parameters.
        """
        self.module, self._run, self._prepare, self._seed = module, run, prepare, seed
        self._shapes = {name: p.shape for name, p in module.named_parameters() if p.requires_grad}
        if not self._shapes:
            raise RecipeError(
                "this drafter has no trainable weights", "use --algo static, or a drafter from another family"
            )

    @property
    def matrices(self) -> list[tuple[int, torch.Size]]:
        """(index of its first element in w [P], shape) of every trainable matrix that has no row per token."""
        sizes = [shape.numel() for shape in self._shapes.values()]
        places = zip(accumulate(sizes, initial=0), self._shapes.items(), strict=False)
        return [(first, shape) for first, (name, shape) in places if len(shape) == 2 and not is_embedding_like(name)]

    def start(self) -> Tensor:
        """[P] the module's present parameters."""
        parameters = dict(self.module.named_parameters())
        return torch.cat([parameters[name].detach().reshape(-1).float() for name in self._shapes])

    def parameters(self, w: Tensor) -> dict[str, Tensor]:
        """Parameters by name, as views of w [P]."""
        parts = w.split([shape.numel() for shape in self._shapes.values()])
        return {name: part.view(shape) for part, (name, shape) in zip(parts, self._shapes.items(), strict=True)}

    def state(self, w: Tensor) -> dict[str, Tensor]:
        """The module's state dict with the parameters w [P]. A tied weight has several names, but one place in w."""
        parameters = self.parameters(w)
        names = {parameter: name for name, parameter in self.module.named_parameters()}
        every = self.module.named_parameters(remove_duplicate=False)
        aliases = {alias: parameters[names[parameter]] for alias, parameter in every if names[parameter] in parameters}
        return self.module.state_dict() | aliases

    def prepare(self, batch: Any, draw: int) -> Any:
        """Prepare a batch for `gradient`. `draw` numbers the samples, as the dropout masks there."""
        with torch.random.fork_rng([]):
            torch.manual_seed(seed_of(self._seed, draw))
            return self._prepare(batch)

    def gradient(self, w: Tensor, batch: Any, draw: int) -> tuple[Tensor, Tensor, Tensor]:
        """(Σ loss, Σ weight, gradient of Σ loss [P]) of one prepared batch at w [P], in training mode.

        `draw` numbers the dropout masks. They depend only on `draw` and the seed, so a resumed run draws the same.
        """
        leaves = {name: part.requires_grad_() for name, part in self.parameters(w.detach()).items()}
        devices = [w.device] if w.device.type == "cuda" else []
        self.module.train()
        with torch.enable_grad(), torch.random.fork_rng(devices):
            torch.manual_seed(seed_of(self._seed, draw))
            total, weight = self._sums(leaves, batch)
            parts = torch.autograd.grad(total, list(leaves.values()), allow_unused=True, materialize_grads=True)
        gradient = torch.cat([part.flatten() for part in parts])
        return total.detach(), weight.detach().to(total), gradient

    def losses(self, vectors: Sequence[Tensor], chunk: Iterable[Any]) -> Tensor:
        """f [N] in fp64 at every w, on the CPU, without dropout; NaN if no row of the chunk has weight."""
        total, weight = self.sums(vectors, chunk).sum(0)
        return total / weight

    @torch.no_grad()
    def sums(self, vectors: Sequence[Tensor], chunk: Iterable[Any]) -> Tensor:
        """(Σ loss, Σ weight) of every batch at every w [batches, 2, N], as in `losses`."""
        self.module.eval()
        several, sums = [self.parameters(w) for w in vectors], []
        for draw, batch in enumerate(chunk):
            prepared = self.prepare(batch, draw)
            parts = [torch.stack(self._sums(parameters, prepared)).double() for parameters in several]
            sums.append(torch.stack(parts, -1).cpu())
        return torch.stack(sums) if sums else torch.zeros(0, 2, len(vectors), dtype=torch.float64)

    def _sums(self, parameters: dict[str, Tensor], batch: Any) -> tuple[Tensor, Tensor]:
        """(Σ loss, Σ weight) of a batch with these parameters in place of the module's."""

        def forward(*args: Any, **options: Any) -> Any:
            return functional_call(self.module, parameters, args, options)

        total, weight, *_ = self._run(forward, batch)
        return total, weight


def seed_of(seed: int, draw: int) -> int:
    """A seed for the draw with this number. A sum would not do: torch's generator on a CPU reads the lowest 32 bits."""
    return int(np.random.SeedSequence((seed, draw)).generate_state(1)[0])


def with_distributions(batch: SlotBatch, target_head: Tensor, squash: Squash, sample: int = 0) -> SlotBatch:
    """Add the target's distributions to a batch, once for all learners and draft depths. With `sample`, they
    are of that number of sampled tokens, and all learners and places of a descent are compared on this one sample."""
    logits = squash(linear(batch.teacher.to(target_head.dtype), target_head).float())
    teacher = Teacher(logits.softmax(-1).to(target_head.dtype))
    return replace(batch, distributions=teacher.sampled(sample) if sample else teacher)
