"""The target: any decoder-only causal LM of `transformers`, with its tokenizer. `loading` finds and reads it."""

from __future__ import annotations

import weakref
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specctl import processes
from specctl.decoding.cache import KVCache
from specctl.decoding.models import lean
from specctl.decoding.models.ends import Ends, load_ends
from specctl.decoding.models.identity import weights_digest
from specctl.decoding.models.loading import (
    keep_freed_memory,
    load_config,
    load_model,
    load_tokenizer,
    pick_device,
    pick_dtype,
)
from specctl.decoding.models.model import Model
from specctl.decoding.models.parallel import WHOLE, Slice, load_slice
from specctl.decoding.models.supported import unusable, why_unusable
from specctl.decoding.pages import PagePool, budget
from specctl.decoding.plan import Plan
from specctl.decoding.prefill import prefill, prefill_shared
from specctl.decoding.target_text import TargetText
from specctl.errors import CheckpointError, UsageError
from specctl.kernels.distill import Squash

if TYPE_CHECKING:
    from specctl.decoding.models.hf import HFModel
    from specctl.decoding.models.lean import LeanModel


class Target(TargetText):
    """A loaded target and its tokenizer.

    Attributes:
        model: runs the steps (`LeanModel` or `HFModel`); without `whole` its layers are not there (`Ends`).
        row_flops: of the products of one row with all weights that are there, attention aside; of a mixture, with all
            experts.
        squash: what becomes of the products with the vocabulary head: its logits.

    With `consume` the weights of `model` become the target's alone: nobody else may use it afterwards. `part`: the
    slice of the target that `model` holds; the other processes have the others.
    """

    def __init__(
        self,
        name: str,
        model,
        tokenizer,
        *,
        revision: str | None = None,
        path: str = "auto",
        weights: str | None = None,
        consume: bool = False,
        whole: bool = True,
        part: Slice = WHOLE,
    ):
        reason = lean.why_not(model.config)
        if not type(model).__module__.startswith("transformers.models."):
            reason = reason or "the model brings code of its own"
        if len({parameter.device for parameter in model.parameters()}) > 1:
            reason = reason or "its layers are on several devices"
        if path == "lean" and reason:
            raise UsageError(
                f"the lean step cannot run target {name}: {reason}", "use the path 'auto' or 'transformers'"
            )
        self.path = "transformers" if reason or path == "transformers" else "lean"
        super().__init__(
            name,
            model.config,
            model.generation_config,
            tokenizer,
            vocab_size=model.get_input_embeddings().weight.shape[0],
            revision=revision,
            weights=weights,
        )
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        count = sum(parameter.numel() for parameter in model.parameters())  # tied ones come once
        self.row_flops = 2 * (count - (0 if head is embedding else embedding.numel()))
        _check_finite(name, model, head)
        if self.path == "lean":
            own: LeanModel | HFModel = lean.LeanModel(model, consume, part)
        else:
            own = _tried(name, model, whole)
        self.whole = whole
        self.model: Model = own if whole else Ends(own)
        self.device, self.dtype = self.model.device, self.model.dtype
        self._pool: weakref.ref[PagePool] | None = None
        self.part, self._head = part, head.detach().to(self.device)
        self.squash = Squash() if self.path == "lean" else _squash(self.model, self.head_weight, self.config)
        self.norm_weight = _norm_weight(getattr(getattr(model, "model", None), "norm", None))

    @cached_property
    def head_weight(self) -> Tensor:
        """[V, H] the vocabulary head. That of slices is put together when it is first asked for, by all processes."""
        if self.part.count == 1:
            return self._head
        with torch.inference_mode(False):  # some train on it
            return self.part.gather(self._head.T, self.vocab_size).T.contiguous()

    def pool(self) -> PagePool | None:
        """The pool of its texts' keys and values, which decodings share as long as one of them lasts; None where they
        are contiguous. UsageError where there is no room for one."""
        if not isinstance(self.model, lean.LeanModel) or not self.model.pages:
            return None
        pool = None if self._pool is None else self._pool()
        if pool is None:
            form = self.model.form
            pool = PagePool(form, budget(form.device) // form.page_bytes - 1)  # one for rows without a text
            self._pool = weakref.ref(pool)
        return pool

    def new_cache(self, batch: int, capacity: int, pool: PagePool | None = None) -> KVCache:
        """A cache for so many texts, in pages of `pool` where there is one."""
        if pool is None:
            return self.model.new_cache(batch, capacity)
        assert isinstance(self.model, lean.LeanModel)
        return self.model.paged_cache(pool, batch, capacity)

    @torch.inference_mode()
    def prefill(
        self, prompts: list[list[int]], cache: KVCache, taps: tuple[int, ...] = (), slots: list[int] | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Run prompts into `slots` of the cache (None = all of them, in order).

        Returns (logits of each last row [n, V], h [n, P, H], taps [n, P, F]), padded at the right.
        """
        return prefill(self.model, prompts, cache, taps, [*range(len(prompts))] if slots is None else slots)

    @torch.inference_mode()
    def prefill_shared(self, prompts: list[list[int]], cache: KVCache, slots: list[int]) -> Tensor:
        """Logits of each last row [n, V] of prompts that share the pages they begin with (`prefill.prefill_shared`)."""
        return prefill_shared(self.model, prompts, cache, slots)

    @torch.inference_mode()
    def step(
        self, tokens: Tensor, cache: KVCache, plan: Plan, taps: tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """One forward of T rows per sequence. Returns (logits [B, T, V], h [B, T, H], taps [B, T, F])."""
        hidden, tapped = self.model.forward(tokens, cache, plan, taps)
        return self.model.logits(hidden), hidden, tapped


@torch.inference_mode()
def _squash(model: Model, weight: Tensor, config: Any) -> Squash:
    """Measured, but for the cap: of two configurations with `logits_scaling` one multiplies by it, one divides."""
    states = torch.randn(4, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight)
    products = (states @ weight.T).float()
    states /= 10 * products.std()  # small products: a cap leaves them as they are
    products = (states @ weight.T).float()
    shift = model.logits(torch.zeros_like(states))[0].float()
    added = model.logits(states).float() - shift
    scale = (torch.sum(added * products) / torch.sum(products * products)).item()
    cap = getattr(config, "final_logit_softcapping", None)
    return Squash(1.0 if abs(scale - 1) < 0.01 else scale, cap, shift if shift.any() else None)


def _check_finite(name: str, model, head_weight: Tensor) -> None:
    """Look at the final norm and one row of the vocabulary head: where a file was filled with NaN, so were these."""
    norm = getattr(getattr(getattr(model, "model", None), "norm", None), "weight", None)
    for key, weight in (("model.norm.weight", norm), ("lm_head.weight", head_weight[0])):
        if weight is not None and not weight.isfinite().all():
            raise CheckpointError(
                f"target {name}: {key} holds values that are not finite: its weights are damaged", "copy them again"
            )


@torch.no_grad()
def _norm_weight(norm) -> Tensor | None:
    """The weight of the final norm. Gemma and some others store it minus one."""
    weight = getattr(norm, "weight", None)
    if weight is None:
        return None
    added = (norm(torch.ones_like(weight)) - weight).float().mean().item()  # of a row whose root mean square is 1
    return weight + 1 if round(added) == 1 else weight


def _tried(name: str, model, whole: bool) -> HFModel:
    """The model behind its own forward, after a trial, if it is whole, that it can verify drafts. CheckpointError where
    it cannot."""
    from specctl.decoding.models.hf import HFModel
    from specctl.decoding.models.self_check import trial

    reason = why_unusable(model.config, type(model))
    if reason is None:
        try:
            wrapped = HFModel(model)
        except Exception as error:  # whatever the code of an unknown architecture raises
            reason = f"its code does not take a cache from outside ({type(error).__name__}: {error})"
        else:
            reason = trial(wrapped) if whole else None
    if reason is not None:
        raise unusable(name, reason)
    return wrapped


def load_target(
    name: str = "builtin",
    *,
    device: str = "auto",
    dtype: str = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
    device_map: str | None = None,
    max_memory: str | None = None,
    path: str = "auto",
    whole: bool = True,
    tensor_parallel: int = 1,
) -> Target:
    """Load a target with its tokenizer. Raises CheckpointError when it cannot be used, naming what and where.

    device_map: how `accelerate` spreads the layers over the GPUs of this process; max_memory: at most so much of each.
    whole: with its layers; without, it has embedding, final norm and vocabulary head, and no forward.
    tensor_parallel: slices of it, one for each process of torchrun (UsageError where those are not as many). All of
    them must then do the same with it.
    """
    where = pick_device(device)
    if where.type == "cpu":
        keep_freed_memory()
    options: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    part = WHOLE
    if whole and tensor_parallel > 1:
        config = load_config(name, **options)
        if path == "transformers":
            raise UsageError("transformers' forward has no slices", "use the path 'auto' or 'lean'")
        lean.check_slices(name, config, tensor_parallel)
        part = Slice(processes.join(tensor_parallel, where), tensor_parallel)
        model = load_slice(name, config, part, device=where, dtype=pick_dtype(dtype, where), revision=revision)
    elif whole:
        spread = {"device_map": device_map, "max_memory": max_memory}
        model = load_model(name, device=where, dtype=pick_dtype(dtype, where), **options, **spread)
    else:
        model = load_ends(name, device=where, dtype=pick_dtype(dtype, where), **options)
    tokenizer = load_tokenizer(name, **options)
    weights = weights_digest(name, revision)
    target = Target(
        name, model, tokenizer, revision=revision, path=path, weights=weights, consume=True, whole=whole, part=part
    )
    if where.type == "cuda":
        torch.cuda.empty_cache()  # what was packed left holes, which nobody but torch could use
    return target
