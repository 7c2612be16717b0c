"""The C++ step for CPUs with AVX512-BF16: compiled on first use, kept in the user's cache, called through `ctypes`.

`step.cpp` computes all layers of a Llama-shaped decoder in one call. It needs a C++ compiler with OpenMP (g++ 11 or
later, or clang). Compiling takes about five seconds once per machine and version. Without a compiler, or where the
trial below fails, everything runs on PyTorch.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

CHOICES = ("native", "torch")
SOURCE = Path(__file__).with_name("step.cpp")
FLAGS = (
    *("-O3", "-std=c++17", "-fPIC", "-shared", "-fopenmp"),
    *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16", "-mfma"),
)
TIMEOUT_S = 120.0
LANES = 16  # outputs in a panel of packed weights


class StepLayer(ctypes.Structure):
    """`Layer` of step.cpp."""

    _fields_ = [
        (name, ctypes.c_void_p)
        for name in (
            *("qkv", "o", "gate_up", "down", "qkv_bias", "o_bias", "gate_up_bias", "down_bias"),
            *("input_norm", "post_norm", "q_norm", "k_norm"),
        )
    ]


class StepModel(ctypes.Structure):
    """`Model` of step.cpp."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("hidden", "inner", "heads", "kv_heads", "dim", "layers")),
        *((name, ctypes.c_float) for name in ("eps", "scale")),
        ("layer", ctypes.POINTER(StepLayer)),
        ("final_norm", ctypes.c_void_p),
    ]


class StepCall(ctypes.Structure):
    """`Call` of step.cpp."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("batch", "rows", "span", "threads")),
        *((name, ctypes.c_void_p) for name in ("positions", "slots", "cos", "sin", "store")),
        *((name, ctypes.c_int64) for name in ("layer_stride", "sequence_stride", "slot_stride")),
        ("mask", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("mask_sequence", "mask_row")),
        *((name, ctypes.c_void_p) for name in ("x", "y", "taps")),
    ]


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled step; None where the processor has no AVX512-BF16, where there is no compiler, or where the trial
    fails (with a warning). The environment variable SPECCTL_STEP=torch turns it off."""
    supported = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    if os.environ.get("SPECCTL_STEP") == "torch" or supported is None or not supported():
        return None
    compiler = shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++")
    if compiler is None:
        return None
    try:
        found = ctypes.CDLL(str(_compiled(compiler)))
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        warnings.warn(f"the CPU step runs on PyTorch: {compiler} failed: {said.strip()[-300:]}", stacklevel=2)
        return None
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    found.specctl_pack.argtypes = [pointer, number, number, pointer]
    found.specctl_product.argtypes = [pointer, pointer, pointer, number, number, number, pointer, number]
    found.specctl_forward.argtypes = [ctypes.POINTER(StepModel), ctypes.POINTER(StepCall)]
    for function in (found.specctl_pack, found.specctl_product, found.specctl_forward):
        function.restype = None
    if not _agrees(found):
        warnings.warn("the CPU step runs on PyTorch: its products differ from PyTorch's", stacklevel=2)
        return None
    return found


def _compiled(compiler: str) -> Path:
    """The shared library, compiled where the cache has none of this source, compiler and flags.

    Raises OSError (the cache cannot be written) and SubprocessError (the compiler fails or takes too long).
    """
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True, timeout=TIMEOUT_S).stdout
    key = hashlib.sha256(b"\0".join((SOURCE.read_bytes(), version, *map(str.encode, FLAGS)))).hexdigest()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specctl" / "native"
    path = cache / f"step-{key[:24]}.so"
    if path.is_file():
        return path
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as place:
        made = Path(place) / path.name
        command = [compiler, *FLAGS, str(SOURCE), "-o", str(made)]
        subprocess.run(command, capture_output=True, check=True, text=True, timeout=TIMEOUT_S)
        made.replace(path)  # processes that compile at the same time write the same library
    return path


class NativeProduct:
    """x [..., I] bf16 → x Wᵀ + b [..., O] bf16, for W [O, I] bf16. The bits of a row do not depend on other rows.

    Attributes:
        packed: W in panels (`pack`).
        bias: [O] fp32, or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, found: ctypes.CDLL):
        self.outputs, self.inputs = weight.shape
        self.packed, self.bias = pack(weight, found), None if bias is None else bias.float()
        self._run = found.specctl_product

    def __call__(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        y = x.new_empty(*x.shape[:-1], self.outputs)
        self._run(
            *(self.packed.data_ptr(), None if self.bias is None else self.bias.data_ptr(), x.data_ptr()),
            *(x.numel() // self.inputs, self.outputs, self.inputs, y.data_ptr(), torch.get_num_threads()),
        )
        return y


def pack(weight: Tensor, found: ctypes.CDLL) -> Tensor:
    """W [O, I] bf16 in panels of 16 outputs, flat. I is even."""
    outputs, inputs = weight.shape
    weight = weight.detach().contiguous()
    packed = weight.new_empty(-(-outputs // LANES) * LANES * inputs)
    found.specctl_pack(weight.data_ptr(), outputs, inputs, packed.data_ptr())
    return packed


def _agrees(found: ctypes.CDLL) -> bool:
    """Whether products of 1 and 13 rows are PyTorch's, up to rounding, and do not depend on the number of rows."""
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(shape, generator=generator).bfloat16() for shape in ((83, 96), (13, 96)))
    bias = torch.randn(83, generator=generator).bfloat16()
    call = NativeProduct(weight, bias, found)
    whole, alone = call(x), torch.cat([call(row) for row in x.split(1)])
    exact = F.linear(x.float(), weight.float(), bias.float())
    return torch.equal(whole, alone) and torch.allclose(whole.float(), exact, rtol=2**-7, atol=1e-2)
