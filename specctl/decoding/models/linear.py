"""Matrix products y = x Wᵀ (+ b) of a step, with W packed once for the processor.

A step of few rows reads every weight once. On a CPU this reading sets the time, together with how well the library
handles products of a few rows:

- bf16: our C++ product (`kernels/native`); if that is not compiled, oneDNN's layout on CPUs with bf16 instructions.
  The C++ product also reads quantized weights of a GGUF file as they are stored, in a third to two thirds of the bytes.
- fp32, on x86: FBGEMM keeps the weights in fp16, computes in fp32, and is made for few rows. All products of the
  built-in target take a third of the time (AMD Zen 3, one thread: 1.6 ms instead of 4.8 for one row, 3.0 instead of 9.7
  for eight). Only weights that fp16 can hold are packed, namely weights stored as bf16 in their file.
"""

import functools
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from specctl.kernels import native
from specctl.kernels.native import GroupedWeights

Product = Callable[[Tensor], Tensor]

# bf16 weights have 8 significant bits. fp16 has 11 down to 2⁻¹⁴, and smaller values round to multiples of 2⁻²⁴. This
# error is smaller than the rounding of fp32 sums.
ROUNDED = 2.0**-25
LARGEST = torch.finfo(torch.float16).max
# Number of weights of a product, and number of rows, from which a second thread pays: the multi-threaded call takes 15
# µs longer. Smaller products are packed for both calls, which takes as much memory as the fp32 weights.
THREADED, ROWS_THREADED = 2**20, 8
PART = 2**16  # weights that are checked together: 256 KB of fp32


class Linear:
    """Product y = x Wᵀ (+ b) for inference.

    Attributes:
        packed: the product has its weights in a packed layout; otherwise it reads `weight`.
    """

    rough = False  # whether W may be rounded

    def __init__(self, weight: Tensor | GroupedWeights, bias: Tensor | None = None):
        """Quantized weights need the C++ product (`lean.stored_weights`)."""
        # detached like the weight: it outlives the module, which may be emptied
        self.bias = None if bias is None else bias.detach()
        if isinstance(weight, GroupedWeights):
            library = native.library()
            assert library is not None
            self._product: Product | None = native.NativeProduct(weight, self.bias, library)
            weight = torch.empty(0, weight.codes.shape[1], dtype=torch.bfloat16)
        else:
            weight = weight.detach().contiguous()
            self._product = _packed(weight, self.bias, self.rough)
        self.dtype = weight.dtype
        self.packed = self._product is not None
        self.weight = weight.new_empty(0, weight.shape[1]) if self.packed else weight

    @property
    def native(self) -> native.NativeProduct | None:
        """The packed product, if the C++ step can read it."""
        return self._product if isinstance(self._product, native.NativeProduct) else None

    def __call__(self, x: Tensor) -> Tensor:
        if self._product is not None:
            return self._product(x)
        return F.linear(x, self.weight, self.bias)


class VocabularyHead(Linear):
    """Vocabulary head of a target. On a GPU its logits are fp32 even for half-precision weights: bf16 numbers around 20
    are 0.125 apart, so different logits would tie. A CPU rounds them like other products."""

    def __call__(self, x: Tensor) -> Tensor:
        if not _keeps_sums(self.weight.device, self.weight.dtype):
            return super().__call__(x)
        y = torch.mm(x.reshape(-1, x.shape[-1]), self.weight.T, out_dtype=torch.float32)
        if self.bias is not None:
            y += self.bias
        return y.view(*x.shape[:-1], -1)


class DraftLinear(Linear):
    """Product of a drafter. It may be slightly wrong, as every proposal is verified. On a CPU in bf16, products of a
    few rows read int8 weights (symmetric, one scale per output), in half the time.

    Attributes:
        int8: the product for few rows, if there is one.
        few: number of rows up to which it is faster.
    """

    FEW, FEW_OF_TORCH = 16, 3  # measured: for our product, and for torch's product compared with oneDNN's
    LANES = 16  # both kernels handle only full vectors: for other input widths torch's reads past the weights
    rough = True

    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        super().__init__(weight, bias)
        self.int8: Product | None = None
        self.few = self.FEW
        if not self.packed or self.dtype != torch.bfloat16 or weight.shape[1] % self.LANES:
            return
        if self.native is not None:
            library = native.library()
            assert library is not None
            self.int8 = native.NativeProduct(weight, self.bias, library, int8=True)
        else:
            self.int8, self.few = _of_int8(weight.detach(), self.bias), self.FEW_OF_TORCH

    def __call__(self, x: Tensor) -> Tensor:
        if self.int8 is not None and x.shape[0] <= self.few:
            return self.int8(x)
        return super().__call__(x)


def _of_int8(weight: Tensor, bias: Tensor | None) -> Product:
    """PyTorch's product of bf16 rows and int8 weights."""
    wide = weight.float()
    scale = (wide.abs().amax(1) / 127).clamp_min(1e-12).to(weight.dtype)
    int8 = (wide / scale.float()[:, None]).round_().clamp_(-127, 127).to(torch.int8)

    def product(x: Tensor) -> Tensor:
        y = torch._weight_int8pack_mm(x, int8, scale)
        return y if bias is None else y.add_(bias)

    return product


def _packed(weight: Tensor, bias: Tensor | None, rough: bool) -> Product | None:
    """The product in this CPU's fast layout, or None if that is the plain weight."""
    if weight.device.type != "cpu":
        return None
    library = native.library() if weight.dtype == torch.bfloat16 else None
    if library is not None and weight.shape[1] % 2 == 0:
        return native.NativeProduct(weight, bias, library)
    if weight.dtype == torch.bfloat16 and torch.backends.mkldnn.is_available():
        return _of_onednn(weight, bias) if torch.ops.mkldnn._is_mkldnn_bf16_supported() else None
    if weight.dtype == torch.float32 and weight.numel() and _half_computes():
        return _of_fbgemm(weight, bias) if fits_half(weight, rough) else None
    return None


def _of_onednn(weight: Tensor, bias: Tensor | None) -> Product:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


def _of_fbgemm(weight: Tensor, bias: Tensor | None) -> Product:
    pack, several = torch.ops.quantized.linear_prepack_fp16, torch.ops.quantized.linear_dynamic_fp16
    if weight.numel() >= THREADED:
        shared = pack(weight, bias)
        return lambda x: several(x, shared) if x.dim() > 1 else several(x[None], shared)[0]
    own, one = torch.fbgemm_pack_gemm_matrix_fp16(weight), torch.fbgemm_linear_fp16_weight_fp32_activation
    many = ROWS_THREADED * THREADED // weight.numel()
    half = weight.half()  # until the first call of several threads: packing takes most of the time of loading

    def product(x: Tensor) -> Tensor:
        nonlocal half
        if x.dim() == 1:
            return one(x[None], own, bias)[0]
        if x.shape[0] >= many and torch.get_num_threads() > 1:
            weights = half
            if isinstance(weights, Tensor):
                half = weights = pack(weights.float(), bias)
            return several(x, weights)
        return one(x, own, bias)

    return product


def fits_half(weight: Tensor, rough: bool) -> bool:
    """Whether fp16 can hold the weights: each within `ROUNDED`, or only their range if they may be rounded."""
    bound = torch.inf if rough else ROUNDED
    parts = weight.split(max(1, PART // weight.shape[1]))  # a copy of a large matrix would take much memory
    return all(bool(part.abs().amax() <= LARGEST and (part - part.half()).abs_().amax() <= bound) for part in parts)


@functools.cache
def _keeps_sums(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a half-precision product can return fp32 on this device. PyTorch supports this only for CUDA."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return False
    x = torch.full((8, 8), 1 + 2.0**-7, dtype=dtype, device=device)
    try:
        return bool(torch.mm(x, x, out_dtype=torch.float32).eq(8 * (1 + 2.0**-7) ** 2).all())
    except (TypeError, RuntimeError):  # another vendor's
        return False


@functools.cache
def _half_computes() -> bool:
    """Whether torch has the fp16-weight products and they are right on this machine. Their first calls warn that a
    future torch may drop them; the warning is suppressed."""
    weight, x, bias = torch.arange(-12.0, 12.0).view(4, 6) / 8, torch.arange(12.0).view(2, 6), torch.ones(4)
    exact = F.linear(x, weight, bias)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            packed = torch.fbgemm_pack_gemm_matrix_fp16(weight)
            one = torch.fbgemm_linear_fp16_weight_fp32_activation(x, packed, bias)
            several = torch.ops.quantized.linear_prepack_fp16(weight, bias)
            other = torch.ops.quantized.linear_dynamic_fp16(x, several)
    except (AttributeError, RuntimeError):
        return False
    return torch.equal(one, exact) and torch.equal(other, exact)
