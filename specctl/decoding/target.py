"""Target model: any decoder-only causal LM of `transformers`, with its tokenizer (see `loading` for how it is read)."""

from __future__ import annotations

import gc
import traceback
import weakref
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from specctl import processes
from specctl.decoding.cache import KVCache
from specctl.decoding.models import gguf_target, lean, target_adapter
from specctl.decoding.models.ends import LayerlessModel, ModelEnds, load_layerless
from specctl.decoding.models.layouts import logits_divisor
from specctl.decoding.models.loading import (
    Source,
    first_line,
    load_config,
    load_model,
    load_tokenizer,
    pick_device,
    pick_dtype,
    settle_memory,
)
from specctl.decoding.models.model import Model
from specctl.decoding.models.parallel import WHOLE, Slice, load_slice
from specctl.decoding.models.supported import check_decodable, unsupported_error, unsupported_reason
from specctl.decoding.pages import PagePool, budget
from specctl.decoding.plan import Plan
from specctl.decoding.prefill import prefill, prefill_shared
from specctl.decoding.records import Request
from specctl.decoding.target_text import UNKNOWN_VERSION, ModelVersion, TargetText, adapter_digest, version_of
from specctl.errors import CheckpointError, DataError, UsageError
from specctl.kernels.distill import Squash

if TYPE_CHECKING:
    from specctl.decoding.models.hf import HFModel


class LoadedAs(NamedTuple):
    """The state of a loaded model.

    Attributes:
        consume: the target takes over the model's weights. The model must not be used afterwards.
        whole: the model has its layers.
        part: the slice of the target that the model holds; the other tensor-parallel ranks hold the rest.
        stored: tensors of a GGUF file by parameter. The model lacks the ones that are `quantized_only`.
    """

    consume: bool = False
    whole: bool = True
    part: Slice = WHOLE
    stored: Mapping[str, gguf_target.Weight] | None = None


WHOLE_MODEL = LoadedAs()


class Target(TargetText):
    """A loaded target and its tokenizer.

    Attributes:
        model: runs the steps (`LeanModel` or `HFModel`). Unless the target is `whole`, it is an `LayerlessModel`,
            without layers.
        row_flops: floating-point operations of one row's products with all loaded weights. Attention is not counted; in
            a mixture, all experts are.
        squash: maps products with the vocabulary head to logits.
        adapter: directory of the LoRA adapter that `use_adapter` has merged; None = the weights as they were loaded.
        read_again: reads the model again, with the adapter in a directory (None = as it was loaded). Returns it with
            `LoadedAs.stored`.
    """

    adapter: str | None = None
    read_again: Callable[[str | None], tuple[Any, Mapping[str, gguf_target.Weight] | None]] | None = None

    def __init__(
        self,
        name: str,
        model,
        tokenizer,
        *,
        version: ModelVersion = UNKNOWN_VERSION,
        path: str = "auto",
        loaded: LoadedAs = WHOLE_MODEL,
    ):
        consume, whole, part, stored = loaded
        reason = lean.unsupported_reason(model.config)
        if not type(model).__module__.startswith("transformers.models."):
            reason = reason or "the model has custom code"
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
            version=version,
        )
        self.whole, self.part = whole, part
        self._take(model, consume, stored)
        if self.path == "lean":
            self.squash = Squash(1 / logits_divisor(self.config))
        else:
            self.squash = _squash(self.model, self.head_weight, self.config)

    def _take(self, model, consume: bool, stored: Mapping[str, gguf_target.Weight] | None) -> None:
        """Run the steps on a `transformers` model from now on."""
        self._pool: weakref.ref[PagePool] | None = None  # a new one, as pages with a name hold keys of one model
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        count = sum(parameter.numel() for parameter in model.parameters())  # tied weights appear once
        self.row_flops = 2 * (count - (0 if head is embedding else embedding.numel()))
        quantized = (stored or {}).get("lm_head.weight")
        if quantized is not None and quantized.quantized_only:
            self._head: Tensor | gguf_target.Weight = quantized
        else:
            self._head = head.detach()
        _check_finite(self.name, model, self._head)
        assert stored is None or self.path == "lean"  # the model lacks weights
        own = lean.LeanModel(model, consume, self.part, stored) if self.path == "lean" else None
        if self.whole:
            self.model: Model = own or _checked_hf_model(self.name, model)
        else:
            self.model = LayerlessModel(own or (model if isinstance(model, ModelEnds) else ModelEnds(model)))
        self.device, self.dtype = self.model.device, self.model.dtype
        self.norm_weight = _norm_weight(_final_norm(model))

    def use_adapter(self, adapter: str | None) -> None:
        """Run the steps with the LoRA adapter in the directory `adapter` (None = as the target was loaded).

        If a head reads the target, the adapter must change the layers alone (`target_adapter.check_outside`). The
        present weights are freed before the new ones are read, so memory never holds both. The steps equal, to the bit,
        the steps of a target that was loaded with the adapter. A target without its layers has nothing to change.

        Raises CheckpointError like `load_target`, or if the adapter's files differ from the files that the identity
        names. The steps then run as before.
        """
        if adapter == self.adapter or not self.whole:
            return
        known = {one["adapter"]: one["adapter_weights"] for one in self.identity.get("adapters", ())}
        if adapter in known and adapter is not None and adapter_digest(adapter) != known[adapter]:
            raise CheckpointError(f"adapter {adapter} has changed since the run began", "put the old files back")
        del self.model, self._head, self.norm_weight
        vars(self).pop("head_weight", None)
        gc.collect()  # models of transformers may hold themselves
        try:
            self._take_again(adapter)
        except Exception as error:
            traceback.clear_frames(error.__traceback__)  # its frames hold the half-loaded model
            gc.collect()
            try:
                self._take_again(self.adapter)
            except Exception as again:
                raise CheckpointError(
                    f"{first_line(error)}; and target {self.name} cannot be read again: {first_line(again)}",
                    "put the files back, and start again",
                ) from error
            raise
        self.adapter = adapter
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # as after loading

    def _take_again(self, adapter: str | None) -> None:
        assert self.read_again is not None
        model, stored = self.read_again(adapter)
        self._take(model, True, stored)

    @property
    def quantized(self) -> bool:
        """Whether steps read quantized weights."""
        return isinstance(self.model, lean.LeanModel) and self.model.quantized

    @property
    def step_bytes(self) -> int:
        """Bytes of the weights that a step of one row reads; in a mixture, of all experts."""
        if isinstance(self.model, lean.LeanModel) and self.model.quantized:
            return sum(product.native.nbytes for product in self.model.products if product.native is not None)
        return self.row_flops // 2 * self.dtype.itemsize

    @cached_property
    def head_weight(self) -> Tensor:
        """[V, H] the vocabulary head. If it is quantized, it is dequantized on first access. With tensor parallelism it
        is gathered on first access, which all ranks must make."""
        with torch.inference_mode(False):  # a normal tensor: some callers train on it
            if isinstance(self._head, gguf_target.Weight):
                return self._head.dequantized()
            if self.part.count == 1:
                return self._head.to(self.device)
            return self.part.gather(self._head.to(self.device).T, self.vocab_size).T.contiguous()

    def pool(self) -> PagePool | None:
        """The page pool for keys and values. All engines of this target share it, and it lives as long as one of them
        does. Returns None if caches are contiguous. UsageError if there is no memory for a pool."""
        if not isinstance(self.model, lean.LeanModel) or not self.model.pages:
            return None
        pool = None if self._pool is None else self._pool()
        if pool is None:
            form = self.model.form
            pool = PagePool(form, budget(form.device) // form.page_bytes - 1)  # minus the page `SCRATCH_PAGE`
            self._pool = weakref.ref(pool)
        return pool

    def new_cache(self, batch: int, capacity: int, pool: PagePool | None = None) -> KVCache:
        """A cache for `batch` sequences, in pages of `pool` if given."""
        if pool is None:
            return self.model.new_cache(batch, capacity)
        assert isinstance(self.model, lean.LeanModel)
        return self.model.new_cache(batch, capacity, pool)

    def check_request(self, request: Request) -> None:
        """Raise DataError if the prompt is empty, too long for the context or has an id outside of the vocabulary, if
        `max_new_tokens` is below 1, or if `ends` has an id outside of the vocabulary."""
        size = len(request.prompt)
        if not 0 < size < self.context_length:
            raise DataError(
                f"a prompt has {size} tokens; target {self.name} takes 1 to {self.context_length - 1}",
                "shorten the prompt",
            )
        if request.max_new_tokens < 1:
            raise DataError(f"max_new_tokens is {request.max_new_tokens}; it must be at least 1")
        for name, ids in (("a prompt", request.prompt), ("ends", request.ends)):
            unknown = [id for id in ids if not 0 <= id < self.vocab_size]
            if unknown:
                raise DataError(
                    f"{name} contains token id {unknown[0]}; target {self.name} has ids 0 to {self.vocab_size - 1}"
                )

    @torch.inference_mode()
    def prefill(
        self,
        prompts: list[list[int]],
        cache: KVCache,
        taps: tuple[int, ...] = (),
        slots: list[int] | None = None,
        starts: list[int] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Run prompts into `slots` of the cache (None = all slots, in order). Positions before `starts` are cached
        already and are not run.

        Returns (logits [n, V] of each prompt's last token, h [n, P, H], taps [n, P, F]), padded on the right.
        """
        slots = [*range(len(prompts))] if slots is None else slots
        return prefill(self.model, prompts, cache, taps, slots, starts)

    @torch.inference_mode()
    def prefill_shared(self, prompts: list[list[int]], cache: KVCache, slots: list[int]) -> tuple[Tensor, list[int]]:
        """Run prompts that share the pages of common prefixes. Returns the logits [n, V] of each prompt's last token
        (see `prefill.prefill_shared`)."""
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
    """Measure how the model turns products with its head into logits, except for the cap, which the configuration
    states. Measuring is safer: with `logits_scaling`, one architecture multiplies and another divides."""
    states = torch.randn(4, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight)
    products = (states @ weight.T).float()
    states /= 10 * products.std()  # small products, which a cap does not change
    products = (states @ weight.T).float()
    shift = model.logits(torch.zeros_like(states))[0].float()
    added = model.logits(states).float() - shift
    scale = (torch.sum(added * products) / torch.sum(products * products)).item()
    cap = getattr(config, "final_logit_softcapping", None)
    return Squash(1.0 if abs(scale - 1) < 0.01 else scale, cap, shift if shift.any() else None)


def _final_norm(model) -> Any:
    """The final norm of a model, or None if it does not have one under a common name, or it is no RMS norm."""
    if isinstance(model, ModelEnds):
        return None if getattr(model.norm, "bias", None) is not None else model.norm
    return getattr(getattr(model, "model", None), "norm", None)


def _check_finite(name: str, model, head_weight: Tensor | gguf_target.Weight) -> None:
    """Check the final norm and one row of the vocabulary head, unless it is quantized: if a file was filled with NaN,
    these are NaN, too."""
    norm = getattr(_final_norm(model), "weight", None)
    row = head_weight[0] if isinstance(head_weight, Tensor) else None
    for key, weight in (("model.norm.weight", norm), ("lm_head.weight", row)):
        if weight is not None and not weight.isfinite().all():
            raise CheckpointError(
                f"target {name}: {key} contains values that are not finite: its weights are damaged",
                "copy the weights again",
            )


@torch.no_grad()
def _norm_weight(norm) -> Tensor | None:
    """The weight of the final norm as a factor. Gemma and some others store it minus one."""
    weight = getattr(norm, "weight", None)
    if weight is None:
        return None
    added = (norm(torch.ones_like(weight)) - weight).float().mean().item()  # on a row with root mean square 1
    return weight + 1 if round(added) == 1 else weight


def _checked_hf_model(name: str, model) -> HFModel:
    """Wrap a model with its own `transformers` forward, after a trial whether drafts can be verified on it.
    CheckpointError if not."""
    from specctl.decoding.models.hf import HFModel
    from specctl.decoding.models.self_check import trial

    reason = unsupported_reason(model.config, type(model))
    if reason is None:
        try:
            wrapped = HFModel(model)
        except Exception as error:  # the code of an unknown architecture may raise anything
            reason = f"its code does not accept an external cache ({type(error).__name__}: {error})"
        else:
            reason = trial(wrapped)
    if reason is not None:
        raise unsupported_error(name, reason)
    return wrapped


def load_target(
    name: str = "builtin",
    *,
    device: str = "auto",
    dtype: str = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
    adapter: str | None = None,
    device_map: str | None = None,
    max_memory: str | None = None,
    path: str = "auto",
    whole: bool = True,
    tensor_parallel: int = 1,
) -> Target:
    """Load a target with its tokenizer. CheckpointError, with the file and the reason, if it cannot be used.

    adapter: directory of a LoRA adapter of peft, which is merged into the weights.
    device_map: how `accelerate` spreads the layers over the GPUs of this process; max_memory: upper limit per GPU.
    whole: load the layers, too. Otherwise the target has only embedding, final norm and vocabulary head, and no
    forward.
    tensor_parallel: number of slices, one for each process of torchrun (UsageError if their numbers differ). All ranks
    must then make the same calls on the target.
    """
    where = pick_device(device)
    options: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    config = load_config(name, **options)
    if adapter is not None:
        target_adapter.check(adapter, name, config, trust_remote_code=trust_remote_code)
    kind = pick_dtype(dtype, where) if path == "transformers" else lean.pick_target_dtype(dtype, where, config)
    part, read_again, stored = WHOLE, None, None
    if whole and tensor_parallel > 1:
        check_decodable(name, config)
        if path == "transformers":
            raise UsageError(
                "the path 'transformers' does not support tensor parallelism", "use the path 'auto' or 'lean'"
            )
        lean.check_slices(name, config, tensor_parallel)
        part = Slice(processes.join_group(tensor_parallel, where), tensor_parallel)
        model = load_slice(name, config, part, device=where, dtype=pick_dtype(dtype, where), revision=revision)
    elif whole:

        def read_again(other: str | None) -> tuple[Any, Mapping[str, gguf_target.Weight] | None]:
            merged = other or adapter
            kept = None
            if merged is None and path != "transformers":
                kept = lean.stored_weights(name, config, where, kind)
            model = load_model(name, device=where, dtype=kind, source=Source(device_map, max_memory, kept), **options)
            return model if merged is None else target_adapter.merge(model, merged, name), kept

        model, stored = read_again(None)
    else:
        model = load_layerless(name, device=where, dtype=kind, **options)
        if adapter is not None:
            target_adapter.check_outside(adapter, name)
    tokenizer = load_tokenizer(name, **options)
    version = version_of(name, revision, adapter)
    loaded = LoadedAs(consume=True, whole=whole, part=part, stored=stored)
    target = Target(name, model, tokenizer, version=version, path=path, loaded=loaded)
    target.read_again = read_again
    # Return the memory that packing has used: other processes, and on a GPU other libraries, cannot use it.
    if where.type == "cuda":
        torch.cuda.empty_cache()
    else:
        settle_memory()
    return target
