"""C++ step: all layers of a lean model, or the layer of a draft head, in one call (`specctl/kernels/native`)."""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specctl.decoding.cache import KVCache
from specctl.decoding.models.layers import RMSNorm
from specctl.decoding.plan import Plan
from specctl.decoding.rope import Rope
from specctl.kernels import native
from specctl.kernels.self_check import LayerShape

ROWS = 64  # most rows, over all sequences; beyond, PyTorch's attention over blocks of keys is faster


PRODUCTS = "qkv", "o", "gate_up", "down"
NORMS = "input_norm", "post_norm", "q_norm", "k_norm", "o_norm", "down_norm"


class NativeStep:
    """Layers as C++ structures, with pointers into the model's `Linear` weights.

    Attributes:
        keepalive: keeps alive all tensors and objects that the structures point to.
    """

    def __init__(
        self, library: ctypes.CDLL, layers: Sequence[Any], norm: RMSNorm | None, shape: LayerShape, int8: bool
    ):
        self.library = library
        products = [_product(layer, name, int8) for layer in layers for name in PRODUCTS]
        native.NativeProduct.gather(products)
        self.keepalive: list[object] = [*products]
        self.layers = (native.StepLayer * len(layers))()
        for at, layer in zip(self.layers, layers, strict=True):
            for name in PRODUCTS:
                setattr(at, name, _product(layer, name, int8).weights)
            for name in NORMS:
                self._point(at, name, getattr(layer, name, None))
            at.table, at.window = getattr(layer, "table", 0), getattr(layer, "window", None) or 0
        inputs = _product(layers[0], "qkv", int8).inputs
        self.model = native.StepModel(
            *(shape.hidden, shape.inner, shape.heads, shape.kv_heads, shape.dim, len(layers), inputs),
            *(layers[0].post_norm.eps, shape.dim**-0.5, self.layers),
        )
        self._point(self.model, "final_norm", norm)

    def _point(self, at: ctypes.Structure, name: str, norm: RMSNorm | None) -> None:
        if norm is not None:
            tensor = norm.weight.contiguous()
            self.keepalive.append(tensor)
            setattr(at, name, tensor.data_ptr())

    def supports(self, cache: KVCache, plan: Plan) -> bool:
        """Whether the C++ step supports this forward: few rows, a contiguous cache, a mask and no ancestry."""
        return plan.positions.numel() <= ROWS and type(cache) is KVCache and plan.ancestry is None

    def forward(
        self,
        x: Tensor,
        cache: KVCache,
        plan: Plan,
        rope: Rope,
        taps: Sequence[int] = (),
        entered: Tensor | None = None,
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Run all layers on embeddings x [N, H] fp32. Afterwards x holds the residual stream after the last layer. Keys
        and values are written to the cache. Returns the normed states [N, H], and the tapped states [N, H] by tap.

        Args:
            entered: [N, I] bf16, the input of the first layer's projections (default: its norm of x).
        """
        batch, rows = plan.positions.shape
        count = len(self.layers)
        y = torch.empty(x.shape, dtype=torch.bfloat16)
        tapped = {tap: torch.empty_like(y) for tap in taps}
        addresses = (ctypes.c_void_p * (count + 1))(
            *(tapped[i].data_ptr() if i in tapped else None for i in range(count + 1))
        )
        positions, slots = plan.positions.contiguous(), cache.slots(plan, rows).contiguous()
        pairs = [one.data_ptr() for kind in (rope, *rope.others) for one in (kind.cos, kind.sin)]
        tables = (ctypes.c_void_p * len(pairs))(*pairs)
        strides = cache.store.stride()
        call = native.StepCall(
            *(batch, rows, plan.span, torch.get_num_threads()),
            *(positions.data_ptr(), slots.data_ptr(), ctypes.addressof(tables)),
            *(cache.store.data_ptr(), *strides[:3]),
        )
        if entered is not None:
            assert entered.is_contiguous() and entered.shape[1] == self.model.inputs
            call.entered = entered.data_ptr()
        if (mask := plan.mask) is not None:
            assert mask.dtype == y.dtype and mask.stride(3) == 1
            call.mask = mask.data_ptr()
            call.mask_sequence = mask.stride(0) if mask.shape[0] > 1 else 0
            call.mask_row = mask.stride(2) if mask.shape[2] > 1 else 0
        call.x, call.y, call.taps = x.data_ptr(), y.data_ptr(), ctypes.addressof(addresses)
        self.library.specctl_forward(self.model, call)
        return y, tapped


def _product(layer: Any, name: str, int8: bool) -> native.NativeProduct:
    linear = getattr(layer, name)
    product = linear.int8 if int8 else linear.native
    assert isinstance(product, native.NativeProduct)
    return product


def native_step(
    layers: Sequence[Any], norm: RMSNorm | None, shape: LayerShape, int8: bool = False
) -> NativeStep | None:
    """Build the C++ step of a model's or draft head's layers, or return None if C++ cannot compute them.

    Args:
        layers: have the products and norms of a decoder layer. A learner's model has none.
        norm: norm of the last layer's output, if it has one.
        shape: sizes of every layer.
        int8: use the int8 weights of `DraftLinear`.
    """
    kept = "int8" if int8 else "native"
    products = [getattr(getattr(layer, name), kept, None) for layer in layers for name in PRODUCTS]
    # Only bf16 products on a CPU are native.
    if not products or not all(isinstance(product, native.NativeProduct) for product in products):
        return None
    library = native.library() if fits(shape.hidden, shape.inner, shape.dim) else None
    return None if library is None else NativeStep(library, layers, norm, shape, int8)


def fits(hidden: int, inner: int, head_dim: int) -> bool:
    """Whether C++ can compute layers of these sizes."""
    return not any(size % native.LANES for size in (hidden, inner, head_dim // 2)) and head_dim <= 256
