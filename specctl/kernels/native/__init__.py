"""The C++ step for CPUs: compiled on first use, kept in the user's cache, called through `ctypes`.

`step.cpp` computes all layers of a Llama-shaped decoder, or the layer of a draft head, in one call. It needs a
processor with AVX2, AVX-512 or AVX512-BF16, and a C++ compiler with OpenMP (g++ 11 or later, or clang). Compilation
takes about five seconds once per machine and version. Without a compiler, or if the check below fails, everything runs
on PyTorch.
"""

import ctypes
import fcntl
import functools
import hashlib
import itertools
import mmap
import os
import platform
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specctl.kernels import cache

SOURCE, VECTORS = (Path(__file__).with_name(name) for name in ("step.cpp", "vectors.h"))
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-shared", "-fopenmp", "-mfma", "-mf16c")
AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")
INSTRUCTIONS = {"avx512-bf16": (*AVX512, "-mavx512bf16"), "avx512": AVX512, "avx2": ("-mavx2",)}
"""Instruction sets that the step can use, the fastest first, with the compiler's flags."""
VNNI = {"avx512_vnni": "-mavx512vnni", "avx_vnni": "-mavxvnni"}
"""Integer products for quantized weights, on some processors beside AVX-512 or AVX2: torch's name, and the flag."""
TIMEOUT_S = 120.0
LANES = 16  # outputs in a panel of packed weights
ALIGNED = 64  # bytes of a line of the processor's cache
LARGE = 2**25  # bytes of panels that fill huge pages of their own
HUGE_PAGE = 2**21  # bytes
BF16, INT8, GROUPS_OF_4, GROUPS_OF_8 = range(4)  # `Kind` of step.cpp


class Weights(ctypes.Structure):
    """`Weights` of step.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("panels", "scale", "bias")),
        *((name, ctypes.c_int64) for name in ("kind", "group")),
    ]


class StepLayer(ctypes.Structure):
    """`Layer` of step.cpp."""

    _fields_ = [
        *((name, Weights) for name in ("qkv", "o", "gate_up", "down")),
        *((name, ctypes.c_void_p) for name in ("input_norm", "post_norm", "q_norm", "k_norm", "o_norm", "down_norm")),
        *((name, ctypes.c_int64) for name in ("table", "window")),
    ]


class StepModel(ctypes.Structure):
    """`Model` of step.cpp."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("hidden", "inner", "heads", "kv_heads", "dim", "layers")),
        ("inputs", ctypes.c_int64),
        *((name, ctypes.c_float) for name in ("eps", "scale")),
        ("layer", ctypes.POINTER(StepLayer)),
        ("final_norm", ctypes.c_void_p),
        ("gelu", ctypes.c_int64),
    ]


class StepCall(ctypes.Structure):
    """`Call` of step.cpp."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("batch", "rows", "span", "threads")),
        *((name, ctypes.c_void_p) for name in ("positions", "slots", "tables", "store")),
        *((name, ctypes.c_int64) for name in ("layer_stride", "sequence_stride", "slot_stride")),
        ("mask", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("mask_sequence", "mask_row")),
        *((name, ctypes.c_void_p) for name in ("entered", "x", "y", "taps")),
    ]


@functools.cache
def instructions() -> list[str]:
    """Keys of `INSTRUCTIONS` that this processor has, the fastest first; empty for another kind of processor."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return []
    names = "_is_avx512_bf16_supported", "_is_avx512_supported", "_is_avx2_supported"
    supported = [getattr(torch.cpu, name, None) for name in names]
    return [key for key, check in zip(INSTRUCTIONS, supported, strict=True) if check is not None and check()]


def chosen() -> str | None:
    """Key of `INSTRUCTIONS` that the step uses, or None for PyTorch.

    The environment variable SPECCTL_STEP names a key or `torch`. Instructions that this processor lacks are ignored.
    """
    found, named = instructions(), os.environ.get("SPECCTL_STEP")
    if named == "torch" or not found:
        return None
    return named if named in found else found[0]


def flags_of(kind: str) -> tuple[str, ...]:
    """The compiler's flags for one of `INSTRUCTIONS` on this processor."""
    find = getattr(torch.cpu, "get_capabilities", None)  # an older torch does not tell
    name = "avx_vnni" if kind == "avx2" else "avx512_vnni"
    vnni = (VNNI[name],) if find is not None and find().get(name) else ()
    return (*FLAGS, *INSTRUCTIONS[kind], *vnni)


def library() -> ctypes.CDLL | None:
    """Load the compiled step for the `chosen` instructions. Returns None if it is not available.

    It needs a compiler, and its products must agree with PyTorch's. If the compiler fails or the products differ, there
    is a warning.
    """
    kind = chosen()
    return None if kind is None else library_for(kind)


@functools.cache
def library_for(kind: str) -> ctypes.CDLL | None:
    """Load the step that was compiled for one of `INSTRUCTIONS`, as `library` does."""
    compiler = shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++")
    if compiler is None:
        return None
    try:
        found = ctypes.CDLL(str(_compiled(compiler, flags_of(kind))))
    except OSError as error:
        warnings.warn(f"the CPU step runs on PyTorch: {error} (XDG_CACHE_HOME=DIR names another cache)", stacklevel=2)
        return None
    except subprocess.SubprocessError as error:
        warnings.warn(f"the CPU step runs on PyTorch: {compiler} {_failure(error)}", stacklevel=2)
        return None
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    found.specctl_pack.argtypes = found.specctl_pack_int8.argtypes = [pointer, number, number, pointer]
    found.specctl_pack_groups.argtypes = [*[pointer] * 3, *[number] * 4, pointer]
    product: list[Any] = [ctypes.POINTER(Weights), pointer, number, number, number, pointer]
    found.specctl_product.argtypes = [*product, number]
    found.specctl_candidates.argtypes = [*product, number, pointer, pointer, number]
    found.specctl_forward.argtypes = [ctypes.POINTER(StepModel), ctypes.POINTER(StepCall)]
    found.specctl_argmax.argtypes = found.specctl_finite.argtypes = [pointer, number, number, pointer]
    found.specctl_sample.argtypes = [pointer, number, ctypes.c_float, ctypes.c_double]
    found.specctl_sample.restype = number
    for name in ("pack", "pack_int8", "pack_groups", "product", "candidates", "forward", "argmax", "finite"):
        getattr(found, f"specctl_{name}").restype = None
    if not _agrees(found):
        warnings.warn("the CPU step runs on PyTorch: the compiled matrix products differ from PyTorch's", stacklevel=2)
        return None
    return found


def argmax(logits: Tensor) -> Tensor | None:
    """The first place of the maximum of logits [..., V], where NaN counts as −inf. Returns None if the logits are not
    bf16, or if there is no library."""
    return _of_rows("argmax", logits, torch.int64)


def finite(logits: Tensor) -> Tensor | None:
    """Whether logits [..., V] have no NaN and a finite maximum. Returns None as `argmax` does."""
    return _of_rows("finite", logits, torch.bool)


def _of_rows(name: str, logits: Tensor, dtype: torch.dtype) -> Tensor | None:
    found = library() if logits.dtype == torch.bfloat16 else None
    if found is None:
        return None
    logits, out = logits.contiguous(), torch.empty(logits.shape[:-1], dtype=dtype)
    getattr(found, f"specctl_{name}")(logits.data_ptr(), out.numel(), logits.shape[-1], out.data_ptr())
    return out


def sample(logits: Tensor, temperature: float, u: float) -> int | None:
    """Sample from softmax(logits / temperature), for logits [V], at the uniform `u`. Returns None as `argmax` does, and
    if the logits are no distribution."""
    found = library() if logits.dtype == torch.bfloat16 else None
    if found is None:
        return None
    logits = logits.contiguous()
    token = int(found.specctl_sample(logits.data_ptr(), len(logits), 1 / temperature, u))
    return None if token < 0 else token


def _failure(error: subprocess.SubprocessError) -> str:
    """The end of a compiler that made no library, in words: its first error, if it has written one."""
    if isinstance(error, subprocess.TimeoutExpired):
        return f"was stopped after {error.timeout:g} s"
    assert isinstance(error, subprocess.CalledProcessError)
    output = error.stderr.decode(errors="replace") if isinstance(error.stderr, bytes) else error.stderr or ""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    told = next((line for line in lines if "error" in line.lower()), lines[-1] if lines else None)
    if told is not None:
        return f"failed: {told[:300]}"
    return (
        f"was ended by signal {-error.returncode}" if error.returncode < 0 else f"failed with code {error.returncode}"
    )


def version() -> str:
    """Name of the C++ source's version.

    It changes with the source, so that costs measured with other code are not used.
    """
    return f"C++ {hashlib.sha256(_source()).hexdigest()[:8]}"


def _source() -> bytes:
    return SOURCE.read_bytes() + VECTORS.read_bytes()


def _compiled(compiler: str, flags: tuple[str, ...]) -> Path:
    """Path of the shared library. Compiles it if the cache has no library for this source, compiler and flags.

    Raises OSError (the cache cannot be written) and SubprocessError (the compiler fails or takes too long).
    """
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True, timeout=TIMEOUT_S).stdout
    key = hashlib.sha256(b"\0".join((_source(), version, *map(str.encode, flags)))).hexdigest()
    folder = cache.directory() / "native"
    path = folder / f"step-{key[:24]}.so"
    if path.is_file():
        return path
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:  # the compiler's child processes do not inherit it
        with suppress(OSError):  # a file system without locks: every process compiles
            fcntl.flock(lock, fcntl.LOCK_EX)
        if path.is_file():
            return path
        with tempfile.TemporaryDirectory(dir=folder) as place:
            made = Path(place) / path.name
            command = [compiler, *flags, str(SOURCE), "-o", str(made)]
            subprocess.run(command, capture_output=True, check=True, text=True, timeout=TIMEOUT_S)
            made.replace(path)
    return path


def in_huge_pages(nbytes: int) -> Tensor:
    """Zeros [nbytes] in uint8, in huge pages if the system has them and one is filled.

    With pages of 4 KB, the products of SmolLM2's four-bit weights take 1.1 to 1.2 times as long (Zen 4, one to eight
    rows). Most Linux systems give huge pages only on request.
    """
    if nbytes < HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(nbytes, dtype=torch.uint8)
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


@dataclass(frozen=True)
class GroupedWeights:
    """Quantized weights W [O, I] in groups of inputs: W = scale · codes + low.

    Attributes:
        codes: [O, I] int8; 0 to 15 if there are 4 `bits`.
        scale, low: [O, I / group] fp32, for a group of 16 or 32 inputs. Packing rounds them to fp16. That changes only
            products of two numbers, as in the scales of Q4_K: by 2⁻¹² of their size if they are above 6e-5.
        bits: 4 or 8, the bits of a code in memory.

    A product rounds its inputs to codes of one byte in the same groups, as llama.cpp does. The largest input of a group
    has the largest code.
    """

    codes: Tensor
    scale: Tensor
    low: Tensor
    bits: int

    @property
    def group(self) -> int:
        return self.codes.shape[1] // self.scale.shape[1]

    def __getitem__(self, rows: Tensor) -> "GroupedWeights":
        """W with the `rows` alone, in this order."""
        return replace(self, codes=self.codes[rows], scale=self.scale[rows], low=self.low[rows])

    def dequantized(self) -> Tensor:
        """W [O, I] in fp32."""
        groups = self.codes.unflatten(1, (-1, self.group)).float()
        return (groups * self.scale[..., None] + self.low[..., None]).flatten(1)

    @staticmethod
    def stacked(parts: Sequence["GroupedWeights"]) -> "GroupedWeights":
        """Weights of several products on one input as one, with the smallest group and the most bits of the parts."""
        group, bits = min(part.group for part in parts), max(part.bits for part in parts)
        scale, low = (
            torch.cat([getattr(part, name).repeat_interleave(part.group // group, 1) for part in parts])
            for name in ("scale", "low")
        )
        return GroupedWeights(torch.cat([part.codes for part in parts]), scale, low, bits)

    def packed(self, found: ctypes.CDLL) -> Tensor:
        """The panels that step.cpp reads, as bytes: per panel and group, the scales, the lows and the codes."""
        outputs, inputs = self.codes.shape
        group_bytes = 4 * LANES + self.group * LANES * self.bits // 8
        panels = in_huge_pages(-(-outputs // LANES) * (inputs // self.group) * group_bytes)
        parts = [part.contiguous() for part in (self.codes, self.scale, self.low)]
        found.specctl_pack_groups(
            *(part.data_ptr() for part in parts), outputs, inputs, self.group, self.bits, panels.data_ptr()
        )
        return panels


class NativeProduct:
    """x [..., I] bf16 → x Wᵀ + b [..., O] bf16, for W [O, I], I even. A row's bits do not depend on other rows.

    Attributes:
        weights: W in panels of 16 outputs, as C++ reads it.
        panels: the bytes of these panels.
        gathered: they lie in a memory that products share.
    """

    def __init__(self, weight: Tensor | GroupedWeights, bias: Tensor | None, found: ctypes.CDLL, int8: bool = False):
        """`weight` is bf16 or quantized. `int8`: round bf16 to int8, symmetric, with one scale per output, which takes
        half the bytes. I must then be a multiple of 16."""
        self._library = found
        kind, group, scale = BF16, 0, None
        if isinstance(weight, GroupedWeights):
            kind, group = (GROUPS_OF_4 if weight.bits == 4 else GROUPS_OF_8), weight.group
            (self.outputs, self.inputs), packed = weight.codes.shape, weight.packed(found)
        else:
            self.outputs, self.inputs = weight.shape
            weight = weight.detach().contiguous()
            if int8:
                kind, group = INT8, 32 if self.inputs % 32 == 0 else 16
                wide = weight.float()
                scale = (wide.abs().amax(1) / 127).clamp_min(1e-12)
                weight = (wide / scale[:, None]).round_().clamp_(-127, 127).to(torch.int8)
            packed = in_huge_pages(-(-self.outputs // LANES) * LANES * self.inputs * weight.itemsize)
            pack = found.specctl_pack_int8 if int8 else found.specctl_pack
            pack(weight.data_ptr(), self.outputs, self.inputs, packed.data_ptr())
        # padded to whole panels
        rest = -self.outputs % LANES
        padded = [None if x is None else F.pad(x.float(), (0, rest)) for x in (scale, bias)]
        self.panels, self.gathered = packed, False
        self._held = padded  # keeps alive the memory that `weights` points to
        self.weights = Weights(
            *(None if tensor is None else tensor.data_ptr() for tensor in (packed, *padded)), kind, group
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the panels."""
        return self.panels.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        y = x.new_empty(*x.shape[:-1], self.outputs)
        rows = x.numel() // self.inputs
        self._library.specctl_product(
            self.weights, x.data_ptr(), rows, self.outputs, self.inputs, y.data_ptr(), torch.get_num_threads()
        )
        return y

    @staticmethod
    def gather(products: Sequence["NativeProduct"]) -> None:
        """Move the panels of products that are not `LARGE` together into huge pages, each product once. Copy `weights`
        afterwards."""
        moved = [one for one in products if not one.gathered and one.nbytes < LARGE]
        starts = [0, *itertools.accumulate(-(-product.nbytes // ALIGNED) * ALIGNED for product in moved)]
        memory = in_huge_pages(starts[-1])
        for product, start in zip(moved, starts, strict=False):
            to = memory[start : start + product.nbytes]
            product.panels = to.copy_(product.panels)
            product.weights.panels, product.gathered = to.data_ptr(), True

    def candidates(self, x: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the products of x [N, I] bf16 as logits [N, O] fp32, with their top candidates as in `expand_topk`.

        The candidates are the `count` largest log probabilities [N, count] and their indices; of equal values, the
        first. NaN counts as −inf.
        """
        x = x.contiguous()
        logits = torch.empty(len(x), self.outputs)
        gains, index = logits.new_empty(len(x), count), torch.empty(len(x), count, dtype=torch.int64)
        self._library.specctl_candidates(
            *(self.weights, x.data_ptr(), len(x), self.outputs, self.inputs, logits.data_ptr()),
            *(count, gains.data_ptr(), index.data_ptr(), torch.get_num_threads()),
        )
        return logits, gains, index


def in_bytes(x: Tensor, group: int) -> Tensor:
    """x [N, I] in fp32 as products with quantized weights read it: in each group, rounded to multiples of 1/127 of the
    largest value."""
    groups = x.float().unflatten(1, (-1, group))
    top = groups.abs().amax(-1, keepdim=True).clamp_min(1e-30)
    factor = torch.full_like(top, 127) / top  # `127 / top` would multiply by the reciprocal, which rounds twice
    return ((groups * factor).round() * (top / 127)).flatten(1)


def _agrees(found: ctypes.CDLL) -> bool:
    """Whether products of 1 and 13 rows equal PyTorch's up to rounding, and do not depend on the number of rows."""
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(shape, generator=generator).bfloat16() for shape in ((83, 96), (13, 96)))
    bias = torch.randn(83, generator=generator).bfloat16()
    scale, low = torch.randn(2, 83, 3, generator=generator).half().float()
    codes = torch.randint(-128, 128, (83, 96), generator=generator).to(torch.int8)
    four, eight = GroupedWeights(codes & 15, scale, low, 4), GroupedWeights(codes, scale / 16, low, 8)
    kinds: list[Tensor | GroupedWeights] = [weight, four, eight]
    for held in kinds:
        call = NativeProduct(held, bias, found)
        whole, alone = call(x), torch.cat([call(row) for row in x.split(1)])
        dense = held.float() if isinstance(held, Tensor) else held.dequantized()
        exact = F.linear(x.float() if isinstance(held, Tensor) else in_bytes(x, held.group), dense, bias.float())
        if not (torch.equal(whole, alone) and torch.allclose(whole.float(), exact, rtol=2**-7, atol=1e-2)):
            return False
    return True
