"""Quantized blocks of GGUF tensors as codes, scales and lows, so that a CPU can compute with them as they are stored.

The layouts are ggml's. `gguf.quants` has the same formulas, but returns only the dequantized values.
"""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import Q4_K

from specctl.decoding.models.gguf_file import StoredTensor
from specctl.kernels.native import GroupedWeights

Blocks = np.ndarray  # [blocks, bytes]
Parts = tuple[np.ndarray, np.ndarray, np.ndarray]  # codes [blocks, values], scales and lows [blocks, groups]
ROWS = 2**20  # values that a thread reads together


def _halves(blocks: Blocks, at: int) -> np.ndarray:
    """The fp16 number at byte `at` of every block, [blocks, 1] in fp32."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def _nibbles(data: np.ndarray, width: int) -> np.ndarray:
    """Codes of 4 bits: of every `width` bytes the lower nibbles, then the upper ones."""
    codes = np.empty((len(data), data.shape[1] // width, 2, width), np.uint8)
    runs = data.reshape(len(data), -1, width)
    np.bitwise_and(runs, 15, out=codes[:, :, 0])
    np.right_shift(runs, 4, out=codes[:, :, 1])
    return codes.reshape(len(data), -1)


def _fifth_bits(data: np.ndarray) -> np.ndarray:
    """32 bits of a block, each as 16 or 0."""
    return np.unpackbits(data, axis=1, bitorder="little") << 4


def _q4_0(blocks: Blocks) -> Parts:
    scale = _halves(blocks, 0)
    return _nibbles(blocks[:, 2:], 16), scale, -8 * scale


def _q4_1(blocks: Blocks) -> Parts:
    return _nibbles(blocks[:, 4:], 16), _halves(blocks, 0), _halves(blocks, 2)


def _q5_0(blocks: Blocks) -> Parts:
    scale = _halves(blocks, 0)
    return _nibbles(blocks[:, 6:], 16) | _fifth_bits(blocks[:, 2:6]), scale, -16 * scale


def _q5_1(blocks: Blocks) -> Parts:
    codes = _nibbles(blocks[:, 8:], 16) | _fifth_bits(blocks[:, 4:8])
    return codes, _halves(blocks, 0), _halves(blocks, 2)


def _q8_0(blocks: Blocks) -> Parts:
    scale = _halves(blocks, 0)
    return blocks[:, 2:].view(np.int8), scale, np.zeros_like(scale)


def _super_blocks(blocks: Blocks) -> tuple[np.ndarray, np.ndarray]:
    """Scales and lows [blocks, 8] of Q4_K and Q5_K."""
    scale, low = Q4_K.get_scale_min(blocks[:, 4:16])
    return _halves(blocks, 0) * scale.astype(np.float32), -(_halves(blocks, 2) * low.astype(np.float32))


def _q4_k(blocks: Blocks) -> Parts:
    return _nibbles(blocks[:, 16:], 32), *_super_blocks(blocks)


def _q5_k(blocks: Blocks) -> Parts:
    fifth = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1  # [blocks, 8, 32]
    return _nibbles(blocks[:, 48:], 32) | fifth.reshape(len(blocks), -1) << 4, *_super_blocks(blocks)


def _q6_k(blocks: Blocks) -> Parts:
    lower = _nibbles(blocks[:, :128], 64)
    upper = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    codes = (lower | upper.reshape(len(blocks), -1) << 4).astype(np.int8) - 32
    scale = _halves(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    return codes, scale, np.zeros_like(scale)


KINDS: dict[GGMLQuantizationType, tuple[int, Callable[[Blocks], Parts]]] = {
    GGMLQuantizationType.Q4_0: (4, _q4_0),
    GGMLQuantizationType.Q4_1: (4, _q4_1),
    GGMLQuantizationType.Q5_0: (8, _q5_0),
    GGMLQuantizationType.Q5_1: (8, _q5_1),
    GGMLQuantizationType.Q8_0: (8, _q8_0),
    GGMLQuantizationType.Q4_K: (4, _q4_k),
    GGMLQuantizationType.Q5_K: (8, _q5_k),
    GGMLQuantizationType.Q6_K: (8, _q6_k),
}
"""Bits of a code in memory, and the reader of blocks, of each quantization."""


def readable(stored: StoredTensor) -> bool:
    """Whether `read` supports a matrix."""
    return stored.kind in KINDS and len(stored.shape) == 2


def bytes_per_weight(stored: StoredTensor) -> float:
    """Bytes of memory per weight of a `readable` matrix: its code, and a share of two fp16 numbers per group."""
    bits, parse = KINDS[GGMLQuantizationType(stored.kind)]
    values, width = GGML_QUANT_SIZES[GGMLQuantizationType(stored.kind)]
    groups = parse(np.zeros((1, width), np.uint8))[1].shape[1]
    return bits / 8 + 4 * groups / values


def read(stored: StoredTensor) -> GroupedWeights:
    """Read a matrix without dequantizing it."""
    kind = GGMLQuantizationType(stored.kind)
    bits, parse = KINDS[kind]
    values, width = GGML_QUANT_SIZES[kind]
    blocks = np.memmap(stored.file, np.uint8, "r", stored.start, (math.prod(stored.shape) // values, width))
    step = ROWS // values
    whole = [np.empty((len(blocks), part.shape[1]), part.dtype) for part in parse(blocks[:1])]

    def fill(at: int) -> None:
        for out, part in zip(whole, parse(np.ascontiguousarray(blocks[at : at + step])), strict=True):
            out[at : at + step] = part

    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        list(threads.map(fill, range(0, len(blocks), step)))
    codes, scale, low = (torch.from_numpy(part).view(stored.shape[0], -1) for part in whole)
    return GroupedWeights(codes.view(torch.int8), scale, low, bits)
