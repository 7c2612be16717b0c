"""Target in a GGUF file: conversion of its configuration, tokenizer and weights to the form that `transformers` reads.

Configuration and tokenizer are written once into the user's cache, in a directory named by a digest of the file's
header. `transformers` reads that directory like any model directory. The weights stay in the file: loading dequantizes
one tensor at a time in fp32 and rounds it to the requested dtype. The C++ step of a CPU takes the quantized weights.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specctl import regular_files
from specctl.decoding.models import gguf_file, gguf_tokenizer
from specctl.decoding.models.gguf_configuration import ARCHITECTURES, ROPE_TENSORS, configuration
from specctl.decoding.models.gguf_file import GGUFContents, StoredTensor, dequantised
from specctl.errors import CheckpointError, one_line
from specctl.kernels import cache
from specctl.kernels.native import GroupedWeights
from specctl.runs import atomic_write

CACHE_VERSION = 4  # version of the cached directories; increase it when their contents change
EXPERTS = "experts.gate_up_proj"
"""Part of the name of a parameter that is two tensors in a file."""


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
    for tensor in sorted(ROPE_TENSORS & contents.tensors.keys()):  # the configuration also depends on these values
        digest.update(dequantised(contents.tensors[tensor], torch.float32).numpy().tobytes())
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
    _parameters(name, contents, config)
    tokenizer = gguf_tokenizer.build(name, contents.metadata, config["vocab_size"])
    config |= tokenizer.special
    if tokenizer.ends:
        config["eos_token_id"] = tokenizer.ends
    generation = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return {
        **tokenizer.files(config["max_position_embeddings"]),
        "generation_config.json": json.dumps(generation, indent=1),
        "config.json": json.dumps(config, indent=1),
    }


@dataclass(frozen=True)
class GGUFParameter:
    """A parameter of `transformers`, and the tensors of a GGUF file that it is made of.

    Attributes:
        key: name in `transformers`.
        shape: shape in `transformers`.
        tensors: names in the file.
        convert: function of these tensors that returns the parameter.
    """

    key: str
    shape: tuple[int, ...]
    tensors: tuple[str, ...]
    convert: Callable[..., Tensor]


def _parameters(name: str, contents: GGUFContents, config: dict[str, Any]) -> list[GGUFParameter]:
    """All parameters of the model with this configuration.

    Raises CheckpointError: `transformers` refuses the configuration; or a tensor of the file is missing, has a wrong
    shape, or is unexpected.
    """
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    except Exception as error:  # sizes that do not fit together can make `transformers` raise anything
        reason = one_line(getattr(error, "__cause__", None) or error)
        raise CheckpointError(
            f"target {name}: its metadata describes no model: {reason}", gguf_file.REDOWNLOAD_HINT
        ) from error
    architecture = contents.metadata[gguf_file.ARCHITECTURE]
    known = {held: number for number, held in MODEL_ARCH_NAMES.items()}
    names = get_tensor_name_map(known[architecture], config["num_hidden_layers"])

    def stored_name(key: str) -> str:
        stem = key.removesuffix(".weight").removesuffix(".bias").removesuffix("_bias")
        return f"{names.get_name(stem) or stem}.{'bias' if key.endswith('bias') else 'weight'}"

    found = []
    for key, parameter in model.named_parameters():
        parts = (key.replace("gate_up", part) for part in ("gate", "up")) if EXPERTS in key else (key,)
        convert = _conversion(key, architecture, config)
        found.append(GGUFParameter(key, tuple(parameter.shape), tuple(map(stored_name, parts)), convert))
    _check_tensors(name, contents, found)
    return found


def _conversion(key: str, architecture: str, config: dict[str, Any]) -> Callable[..., Tensor]:
    """The function that turns the tensors of a file into the parameter `key` of `transformers`."""
    stored, part = ARCHITECTURES[architecture], key.split(".")[-2]
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    if stored.pairs and part in heads:
        return partial(_halves, heads[part])
    if stored.norm_offset and part.endswith("norm"):
        return lambda weights: weights - stored.norm_offset
    if architecture == "gpt-oss" and ".experts." in key:  # rows of gates and of other inputs take turns
        joined = _in_turns if EXPERTS in key else _same
        return joined if key.endswith("bias") else lambda *parts: joined(*parts).mT.contiguous()
    return (lambda gate, up: torch.cat((gate, up), 1)) if EXPERTS in key else _same


def _same(weights: Tensor) -> Tensor:
    return weights


def _halves(heads: int, rows: Tensor) -> Tensor:
    """Rows with rotary dimensions in pairs, reordered so that each head has them in halves."""
    return rows.view(heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def _in_turns(gate: Tensor, up: Tensor) -> Tensor:
    """[experts, 2 · rows, …] with rows of both [experts, rows, …] by turns."""
    return torch.stack((gate, up), 2).flatten(1, 2)


def _check_tensors(name: str, contents: GGUFContents, wanted: list[GGUFParameter]) -> None:
    """Raise CheckpointError if a tensor of a file is missing, has a wrong shape, or is unexpected."""
    for parameter in wanted:
        for tensor in parameter.tensors:
            if tensor not in contents.tensors:
                first = tensor.replace("_exps.", ".0.")
                if first in contents.tensors:
                    raise CheckpointError(
                        f"target {name}: this old GGUF file has a tensor for each expert, such as {first}, in place of "
                        f"{tensor}",
                        "get a newer file, or convert the original with llama.cpp's convert_hf_to_gguf.py",
                    )
                raise CheckpointError(
                    f"target {name}: the GGUF file lacks the tensor {tensor}", gguf_file.REDOWNLOAD_HINT
                )
            if contents.tensors[tensor].kind == gguf_file.I64:
                raise CheckpointError(
                    f"target {name}: the tensor {tensor} of the GGUF file holds integers", gguf_file.REDOWNLOAD_HINT
                )
        shapes = [contents.tensors[tensor].shape for tensor in parameter.tensors]
        try:
            fits = parameter.convert(*(torch.empty(shape, device="meta") for shape in shapes)).shape == parameter.shape
        except RuntimeError:  # a conversion of other shapes
            fits = False
        if not fits:
            shapes_differ = f"{' and '.join(str(list(shape)) for shape in shapes)}, but its metadata requires"
            raise CheckpointError(
                f"target {name}: the tensor {' and '.join(parameter.tensors)} of the GGUF file has shape "
                f"{shapes_differ} {list(parameter.shape)}",
                gguf_file.REDOWNLOAD_HINT,
            )
    used = {tensor for parameter in wanted for tensor in parameter.tensors}
    unexpected = sorted(contents.tensors.keys() - used - ROPE_TENSORS)
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

    def __init__(self, stored: list[StoredTensor], place: GGUFParameter, dtype: torch.dtype):
        self.stored, self._place, self.dtype, self.shape = stored, place, dtype, torch.Size(place.shape)

    def get_shape(self) -> list[int]:
        return list(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes that the parameter takes in memory, once it is read."""
        from specctl.decoding.models import gguf_blocks

        if not self.quantized_only:
            return self.shape.numel() * self.dtype.itemsize
        return int(self.shape.numel() * gguf_blocks.bytes_per_weight(self.stored[0]))

    @property
    def readable(self) -> bool:
        """Whether the C++ step can read the file's quantization."""
        from specctl.decoding.models import gguf_blocks

        return len(self.stored) == 1 and gguf_blocks.readable(self.stored[0])

    def __getitem__(self, index: Any) -> Tensor:
        if self.quantized_only:
            return torch.full((), torch.nan, dtype=self.dtype).expand(self.shape)[index]
        return self.dequantized()[index]

    def dequantized(self) -> Tensor:
        """The whole parameter."""
        # Vectors stay in fp32 until they are converted: the norms of Gemma lose an offset.
        dtypes = (torch.float32 if len(one.shape) == 1 else self.dtype for one in self.stored)
        return self._place.convert(*map(dequantised, self.stored, dtypes)).to(self.dtype)

    def quantized(self) -> GroupedWeights | None:
        """The weights in the file's quantization, or None if the C++ step cannot read it."""
        from specctl.decoding.models import gguf_blocks

        if not self.readable:
            return None
        held = gguf_blocks.read(self.stored[0])
        codes, scale, low = (self._place.convert(part) for part in (held.codes, held.scale, held.low))
        return GroupedWeights(codes, scale, low, held.bits)


def weights(name: str, dtype: torch.dtype) -> dict[str, Weight]:
    """Weights of a GGUF file, by their names in `transformers`' `state_dict`. Each is read when it is indexed.

    Raises CheckpointError like `directory`.
    """
    contents = gguf_file.read(Path(name).expanduser())
    parameters = _parameters(name, contents, configuration(name, contents))
    return {one.key: Weight([contents.tensors[tensor] for tensor in one.tensors], one, dtype) for one in parameters}


def quantized_weights(name: str, dtype: torch.dtype) -> dict[str, Weight] | None:
    """`weights` with the matrices of the layers `quantized_only`, or None if the C++ step cannot read every matrix. A
    separate vocabulary head is `quantized_only`, too, if the C++ step can read it."""
    found = weights(name, dtype)
    matrices = [one for key, one in found.items() if key.startswith("model.layers.") and len(one.shape) == 2]
    if not all(one.readable for one in matrices):
        return None
    head = found.get("lm_head.weight")
    if head is not None and head.readable:
        matrices.append(head)
    for one in matrices:
        one.quantized_only = True
    return found


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
