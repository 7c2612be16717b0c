"""Target in a GGUF file: conversion of its configuration, tokenizer and weights to the form that `transformers` reads.

Configuration and tokenizer are written once into the user's cache, in a directory named by a digest of the file's
header. `transformers` reads that directory like any model directory. The weights stay in the file: loading dequantizes
one tensor at a time in fp32 and rounds it to the requested dtype. The C++ step of a CPU takes the quantized weights.
"""

import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specctl import regular_files
from specctl.decoding.models import gguf_file, gguf_tokenizer
from specctl.decoding.models.gguf_file import GGUFContents, StoredTensor
from specctl.errors import CheckpointError, one_line
from specctl.kernels import cache
from specctl.kernels.native import GroupedWeights
from specctl.runs import atomic_write

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""GGUF's architecture names, which are also `transformers`' model types, and their model classes."""
CACHE_VERSION = 3  # version of the cached directories; increase it when their contents change
LARGEST = 2**31  # upper limit of the sizes in the metadata
MOST_LAYERS = 1000
FREQUENCIES = "rope_freqs.weight"
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
ROWS = 2**22  # values that are dequantized together


def directory(name: str) -> Path:
    """Directory in the cache with config.json, tokenizer and chat template of a GGUF file. It is created if missing.

    Raises CheckpointError: the file cannot be read or holds no supported model, or the cache cannot be written.
    """
    path = Path(name).expanduser()
    contents = gguf_file.read(path)
    digest = hashlib.sha256(f"{CACHE_VERSION}".encode())
    for part, size in contents.headers.items():
        with regular_files.open_regular(part) as file:
            digest.update(file.read(size))
    if FREQUENCIES in contents.tensors:  # the configuration also depends on these values
        digest.update(dequantised(contents.tensors[FREQUENCIES], torch.float32).numpy().tobytes())
    folder = cache.directory() / "gguf"
    place = folder / digest.hexdigest()[:32]
    if not (place / "config.json").is_file():  # the last file to be written
        files = _files(name, contents)
        try:
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
            for each, text in files.items():
                atomic_write(place / each, text)
        except OSError as error:
            raise CheckpointError(
                f"target {name}: {folder} cannot be written: {error.strerror}",
                "set XDG_CACHE_HOME to a directory that you can write to",
            ) from error
    return place


def _files(name: str, contents: GGUFContents) -> dict[str, str]:
    """Contents of every file of a cached directory, by name. config.json is the last."""
    config = configuration(name, contents)
    _check_tensors(name, contents, _parameters(name, config))
    tokenizer = gguf_tokenizer.build(name, contents.metadata, config["vocab_size"])
    special = {key: value for key, value in tokenizer.special.items() if value is not None}
    config |= special
    if tokenizer.ends:
        config["eos_token_id"] = tokenizer.ends
    generation = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in config}
    return {
        **tokenizer.files(config["max_position_embeddings"]),
        "generation_config.json": json.dumps(generation, indent=1),
        "config.json": json.dumps(config, indent=1),
    }


def configuration(name: str, contents: GGUFContents) -> dict[str, Any]:
    """The config.json of a GGUF model, without the special tokens.

    Raises CheckpointError: the architecture or its variant is not supported; or a number is missing or impossible.
    """
    facts = _Metadata(name, contents.metadata)
    kind = facts.architecture
    hidden, heads = facts.size("embedding_length"), facts.size("attention.head_count")
    dimension = facts.size("attention.key_length", hidden // heads)
    for key, wanted in (
        ("attention.value_length", dimension),
        ("rope.dimension_count", dimension),
        ("expert_count", 0),
    ):
        held = contents.metadata.get(f"{kind}.{key}", wanted)
        if held != wanted:
            raise facts.unsupported(f"{kind}.{key} is {held}; only {wanted} is supported")
    embedding = contents.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"target {name}: the GGUF file lacks token_embd.weight", gguf_file.REDOWNLOAD_HINT)
    layers = facts.size("block_count")
    if layers > MOST_LAYERS:
        raise facts.unsupported(f"{kind}.block_count is {layers}; at most {MOST_LAYERS} layers are supported")
    biased = {"attention_bias": "blk.0.attn_q.bias" in contents.tensors} if kind != "qwen2" else {}
    if kind == "llama":
        biased["mlp_bias"] = "blk.0.ffn_gate.bias" in contents.tensors
    return {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        "hidden_size": hidden,
        "intermediate_size": facts.size("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": facts.size("attention.head_count_kv", heads),
        "head_dim": dimension,
        "vocab_size": embedding.shape[0],
        "max_position_embeddings": facts.size("context_length"),
        "rms_norm_eps": facts.real("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(name, facts, contents.tensors.get(FREQUENCIES), dimension),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in contents.tensors,
        "dtype": "float32",
        **biased,
    }


class _Metadata:
    """Checked access to the metadata of a file."""

    def __init__(self, name: str, metadata: dict[str, Any]):
        self.name, self.metadata = name, metadata
        self.architecture: Any = metadata.get("general.architecture")
        if self.architecture not in ARCHITECTURES:
            raise CheckpointError(
                f"target {name}: the GGUF file is of architecture {self.architecture!r:.60}, which is not supported",
                f"use one of {', '.join(ARCHITECTURES)}, or the model's safetensors files",
            )

    def unsupported(self, what: str) -> CheckpointError:
        return CheckpointError(f"target {self.name}: {what}", "use the model's safetensors files")

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key of this architecture. CheckpointError if it is missing and there is no `default`."""
        value = self.metadata.get(f"{self.architecture}.{key}", default)
        if value is None:
            raise CheckpointError(
                f"target {self.name}: the metadata of the GGUF file lacks {self.architecture}.{key}",
                gguf_file.REDOWNLOAD_HINT,
            )
        return value

    def size(self, key: str, default: int | None = None) -> int:
        """A positive integer."""
        value = self.get(key, default)
        if type(value) is not int or not 0 < value < LARGEST:
            shown = "a list (the layers differ)" if isinstance(value, gguf_file.Numbers) else f"{value!r:.60}"
            raise self.unsupported(f"{self.architecture}.{key} is {shown}, not a single positive integer")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        """A positive number, as `shortest` of the file's."""
        value = self.get(key, default)
        found = shortest(value)
        if type(found) is not float or not (math.isfinite(found) and found > 0):
            raise self.unsupported(f"{self.architecture}.{key} is {value!r:.60}, not a positive number in fp32")
        return found


def shortest(value: Any) -> Any:
    """The shortest decimal number with the fp32 value of a number in the metadata. Other values are unchanged."""
    with np.errstate(over="ignore"):
        return float(str(np.float32(value))) if type(value) in (int, float) else value


def _rope(name: str, facts: _Metadata, frequencies: StoredTensor | None, dimension: int) -> dict[str, Any]:
    """The `rope_parameters` for config.json."""
    theta = facts.real("rope.freq_base", 10000.0)
    factors = ("rope.scaling.factor", "rope.scale_linear")  # the second in files of 2023
    factor = next((key for key in factors if f"{facts.architecture}.{key}" in facts.metadata), None)
    kind = facts.get("rope.scaling.type", "linear" if factor else "none")  # as in llama.cpp
    if frequencies is not None:
        found = _llama3(name, frequencies, theta, dimension)
        if found and kind != "none":
            raise facts.unsupported(f"its RoPE is scaled twice, by {FREQUENCIES} and by {kind!r:.60}")
        if found:
            return found
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    if kind not in ("linear", "yarn") or facts.get("rope.scaling.attn_factor", 1.0) != 1.0:
        raise facts.unsupported(f"its RoPE is scaled by {kind!r:.60}, which is not supported")
    scaled = {"rope_type": kind, "rope_theta": theta, "factor": facts.real(factor or factors[0])}
    if kind == "yarn":
        scaled["original_max_position_embeddings"] = facts.size("rope.scaling.original_context_length")
        for key in ("beta_fast", "beta_slow"):
            if f"{facts.architecture}.rope.scaling.yarn_{key}" in facts.metadata:
                scaled[key] = facts.real(f"rope.scaling.yarn_{key}")
    return scaled


def _llama3(name: str, frequencies: StoredTensor, theta: float, dimension: int) -> dict[str, Any] | None:
    """Recover Llama 3's RoPE scaling from the frequency divisors in a file. Returns None if they are all 1.

    llama.cpp's converter computes the divisors and drops the four numbers they follow from. Three of these are the same
    in all of Meta's models, and the fourth is the largest divisor. CheckpointError if other divisors are found.
    """
    if frequencies.shape != (dimension // 2,):
        raise CheckpointError(
            f"target {name}: {FREQUENCIES} has shape {list(frequencies.shape)}, not [{dimension // 2}]",
            gguf_file.REDOWNLOAD_HINT,
        )
    held = dequantised(frequencies, torch.float32).double()
    if bool((held == 1).all()):
        return None
    factor = round(float(held.max()), 3)
    low, high, original = LLAMA3.values()
    wavelengths = 2 * math.pi * theta ** (torch.arange(0, dimension, 2).double() / dimension)
    smooth = ((original / wavelengths - low) / (high - low)).clamp(0, 1)
    if not torch.allclose(1 / ((1 - smooth) / factor + smooth), held, rtol=1e-4):
        raise CheckpointError(
            f"target {name}: {FREQUENCIES} scales RoPE differently from Llama 3",
            "use the model's safetensors files",
        )
    return {"rope_type": "llama3", "rope_theta": theta, "factor": factor, **LLAMA3}


@dataclass(frozen=True)
class GGUFParameter:
    """The `transformers` parameter that a tensor in a GGUF file corresponds to.

    Attributes:
        key: name in `transformers`.
        shape: shape of both.
        pairs: number of heads with rotary dimensions stored in pairs (llama.cpp) rather than halves (`transformers`); 0
            if the order is the same.
    """

    key: str
    shape: tuple[int, ...]
    pairs: int = 0

    def ordered(self, rows: Tensor) -> Tensor:
        """Rows of the stored tensor in the order of `transformers`."""
        if not self.pairs:
            return rows
        return rows.view(self.pairs, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def _parameters(name: str, config: dict[str, Any]) -> dict[str, GGUFParameter]:
    """The parameter for every tensor that a file with this configuration has, by the tensor's name.

    Raises CheckpointError if `transformers` refuses the configuration.
    """
    from gguf import MODEL_ARCH, get_tensor_name_map
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    except Exception as error:  # sizes that do not fit together can make `transformers` raise anything
        reason = one_line(getattr(error, "__cause__", None) or error)
        raise CheckpointError(
            f"target {name}: its metadata describes no model: {reason}", gguf_file.REDOWNLOAD_HINT
        ) from error
    names = get_tensor_name_map(MODEL_ARCH[config["model_type"].upper()], config["num_hidden_layers"])
    pairs = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    if config["model_type"] != "llama":
        pairs = {}
    return {
        names.get_name(key, (".weight", ".bias")) or key: GGUFParameter(
            key, tuple(parameter.shape), pairs.get(key.split(".")[-2], 0)
        )
        for key, parameter in model.named_parameters()
    }


def _check_tensors(name: str, contents: GGUFContents, wanted: dict[str, GGUFParameter]) -> None:
    """Raise CheckpointError if a tensor of a file is missing, has a wrong shape, or is unexpected."""
    for tensor, parameter in wanted.items():
        held = contents.tensors.get(tensor)
        if held is None:
            raise CheckpointError(f"target {name}: the GGUF file lacks the tensor {tensor}", gguf_file.REDOWNLOAD_HINT)
        if held.shape != parameter.shape:
            shapes_differ = f"{list(held.shape)}, but its metadata requires {list(parameter.shape)}"
            raise CheckpointError(
                f"target {name}: the tensor {tensor} of the GGUF file has shape {shapes_differ}",
                gguf_file.REDOWNLOAD_HINT,
            )
        if held.kind == gguf_file.I64:
            raise CheckpointError(
                f"target {name}: the tensor {tensor} of the GGUF file holds integers", gguf_file.REDOWNLOAD_HINT
            )
    unexpected = sorted(contents.tensors.keys() - wanted.keys() - {FREQUENCIES})
    if unexpected:
        raise CheckpointError(
            f"target {name}: the GGUF file has a tensor {unexpected[0]:.60}, which its model type does not have",
            "use the model's safetensors files",
        )


class Weight:
    """A parameter that is read when it is indexed, like a slice of a safetensors file.

    Attributes:
        quantized_only: indexing gives NaN without memory, for a model that does not use the parameter.
    """

    quantized_only = False

    def __init__(self, stored: StoredTensor, place: GGUFParameter, dtype: torch.dtype):
        self.stored, self._place, self.dtype, self.shape = stored, place, dtype, torch.Size(place.shape)

    def get_shape(self) -> list[int]:
        return list(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes that the parameter takes in memory, once it is read."""
        from specctl.decoding.models import gguf_blocks

        if not self.quantized_only:
            return self.shape.numel() * self.dtype.itemsize
        return int(self.shape.numel() * gguf_blocks.bytes_per_weight(self.stored))

    def __getitem__(self, index: Any) -> Tensor:
        if self.quantized_only:
            return torch.full((), torch.nan, dtype=self.dtype).expand(self.shape)[index]
        return self.dequantized()[index]

    def dequantized(self) -> Tensor:
        """The whole parameter."""
        return self._place.ordered(dequantised(self.stored, self.dtype))

    def quantized(self) -> GroupedWeights | None:
        """The weights in the file's quantization, or None if the C++ step cannot read it."""
        from specctl.decoding.models import gguf_blocks

        if not gguf_blocks.readable(self.stored):
            return None
        held = gguf_blocks.read(self.stored)
        codes, scale, low = (self._place.ordered(part) for part in (held.codes, held.scale, held.low))
        return GroupedWeights(codes, scale, low, held.bits)


def weights(name: str, dtype: torch.dtype) -> dict[str, Weight]:
    """Weights of a GGUF file, by their names in `transformers`' `state_dict`. Each is read when it is indexed.

    Raises CheckpointError like `directory`.
    """
    contents = gguf_file.read(Path(name).expanduser())
    parameters = _parameters(name, configuration(name, contents))
    _check_tensors(name, contents, parameters)
    return {one.key: Weight(contents.tensors[tensor], one, dtype) for tensor, one in parameters.items()}


def quantized_weights(name: str, dtype: torch.dtype) -> dict[str, Weight] | None:
    """`weights` with the matrices of the layers `quantized_only`, or None if the C++ step cannot read every matrix. A
    separate vocabulary head is `quantized_only`, too, if the C++ step can read it."""
    from specctl.decoding.models import gguf_blocks

    found = weights(name, dtype)
    matrices = [one for key, one in found.items() if key.startswith("model.layers.") and len(one.shape) == 2]
    if not all(gguf_blocks.readable(one.stored) for one in matrices):
        return None
    head = found.get("lm_head.weight")
    if head is not None and gguf_blocks.readable(head.stored):
        matrices.append(head)
    for one in matrices:
        one.quantized_only = True
    return found


def dequantised(stored: StoredTensor, dtype: torch.dtype) -> Tensor:
    """Dequantize a tensor in fp32 and round it to `dtype`. Integers are converted directly."""
    from gguf import GGMLQuantizationType, dequantize

    if stored.kind == gguf_file.I64:
        whole = np.fromfile(stored.file, "<i8", stored.size // 8, offset=stored.start)
        return torch.from_numpy(whole).view(stored.shape).to(dtype)
    kind = GGMLQuantizationType(stored.kind)
    width = stored.size // math.prod(stored.shape[:-1])
    data = np.memmap(stored.file, np.uint8, "r", stored.start, (stored.size // width, width))
    values = torch.empty(data.shape[0], stored.shape[-1], dtype=dtype)
    rows = max(1, ROWS // stored.shape[-1])
    for first in range(0, len(data), rows):
        part = dequantize(np.ascontiguousarray(data[first : first + rows]), kind)
        values[first : first + rows] = torch.from_numpy(np.require(part, np.float32, "W"))
    return values.view(stored.shape)


def stored_as(name: str) -> str:
    """Quantizations of a GGUF file, sorted by their share of bytes, largest first."""
    tensors = gguf_file.read(Path(name).expanduser()).tensors.values()
    sizes: dict[int, int] = {}
    for tensor in tensors:
        sizes[tensor.kind] = sizes.get(tensor.kind, 0) + tensor.size
    ordered = sorted(sizes, key=lambda kind: -sizes[kind])
    return ", ".join((gguf_file.kind_names({kind}) or ["I64"])[0] for kind in ordered)


def files(name: str) -> list[Path]:
    """The files of a GGUF model: one, or all parts."""
    return list(gguf_file.read(Path(name).expanduser()).headers)
