"""GGUF files with every quantization of llama.cpp: our weights equal llama.cpp's own dequantization."""

import ctypes
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from specctl.decoding.models import gguf_file
from specctl.decoding.models.loading import load_model
from specctl.decoding.sampling import GREEDY
from specctl.decoding.target import load_target
from tests.conftest import write_tiny
from tests.engines.test_llamacpp_server import NO_LLAMACPP, PLACE, PYTHON
from tests.toys.decoding import decode
from tests.toys.gguf import write

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not PYTHON.is_file(), reason=NO_LLAMACPP)]
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
FLOATS = ctypes.POINTER(ctypes.c_float)
WHOLE = {"F32", "F16", "BF16"}
UNWRITTEN = {"NVFP4"}  # has a scale per tensor, in a separate tensor


class LlamaCpp:
    """llama.cpp's functions that quantize and dequantize rows."""

    def __init__(self, library: Path):
        self.library = ctypes.CDLL(str(library))
        self.library.ggml_quantize_chunk.restype = ctypes.c_size_t
        counts = [ctypes.c_int64] * 3
        self.library.ggml_quantize_chunk.argtypes = [ctypes.c_int, FLOATS, ctypes.c_void_p, *counts, FLOATS]

    def quantize(self, rows: np.ndarray, kind: Kind) -> np.ndarray:
        """Quantize fp32 rows. Every value is equally important."""
        rows = np.ascontiguousarray(rows, np.float32)
        values, size = gguf.GGML_QUANT_SIZES[kind]
        data = np.empty((len(rows), rows.shape[1] // values * size), np.uint8)
        even = np.ones(rows.shape[1], np.float32)
        written = self.library.ggml_quantize_chunk(
            int(kind), floats(rows), data.ctypes.data, 0, *rows.shape, floats(even)
        )
        assert written == data.nbytes
        return data

    def dequantize(self, data: np.ndarray, kind: Kind) -> np.ndarray:
        values, size = gguf.GGML_QUANT_SIZES[kind]
        rows = np.empty((len(data), data.shape[1] // size * values), np.float32)
        name = kind.name if kind.name.endswith("_K") else kind.name.lower()
        function = getattr(self.library, f"dequantize_row_{name.replace('Q', 'q')}")
        function.argtypes = [ctypes.c_void_p, FLOATS, ctypes.c_int64]
        function(np.ascontiguousarray(data).ctypes.data, floats(rows), rows.size)
        return rows


def floats(array: np.ndarray) -> ctypes._Pointer:
    return array.ctypes.data_as(FLOATS)


@pytest.fixture(scope="module")
def llamacpp():
    (library,) = PLACE.glob("lib/python3*/site-packages/xllamacpp/xllamacpp*.so")
    return LlamaCpp(library)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("model"), "LlamaConfig", SIZES)


@pytest.mark.parametrize("kind", sorted({*gguf_file.kind_names()} - WHOLE - UNWRITTEN))
def test_weights_equal_llamacpps_dequantized_weights(directory, llamacpp, tmp_path, monkeypatch, kind):
    """With a wrong scale, sign or order, heads would be trained for weights that no engine serves."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    codec = {"quantize": _whole_or(llamacpp.quantize), "dequantize": _whole_or(llamacpp.dequantize)}
    monkeypatch.setattr("tests.toys.gguf.gguf", SimpleNamespace(**vars(gguf) | codec))
    file = tmp_path / "m.gguf"
    original = write(directory, file, Kind[kind])
    loaded = load_model(str(file), device=torch.device("cpu"), dtype=torch.float32).state_dict()
    assert loaded.keys() == original.state_dict().keys()
    for key, weights in original.state_dict().items():
        torch.testing.assert_close(loaded[key], weights, rtol=1e-6, atol=0)
    ids = [(37 * i) % 500 + 10 for i in range(20)]
    text = original.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False, eos_token_id=3)[0, len(ids) :]
    target = load_target(str(file), device="cpu", dtype="fp32")
    assert decode(target, [ids], sampling=GREEDY, max_new_tokens=8, seeds=[0])[0].output_ids == text.tolist()


def _whole_or(function):
    """`function` for quantized rows, and the rows as floats for `WHOLE` types."""
    return lambda rows, kind: rows.astype(np.float32) if kind.name in WHOLE else function(rows, kind)
