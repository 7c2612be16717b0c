"""Tensors of a model's safetensors files by name, on this machine or on the hub. Only headers and wanted tensors are
read."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from specctl import regular_files
from specctl.decoding.models import gguf_target
from specctl.errors import CheckpointError

EMBEDDINGS = ("embed_tokens.weight", "embeddings.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")
"""Ends of the embedding's name in the files of different architectures."""
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
MTP = "mtp"
"""Part of the names of a multi-token-prediction layer, which may have a copy of the embedding and a norm."""


class WeightFiles:
    """The safetensors files of the model at `place`, a directory or a Hugging Face id. If there are none, `files` is
    empty."""

    def __init__(self, place: str, revision: str | None = None):
        self.place, self.revision = place, revision
        self.files: dict[str, str] = {}
        if (index := self._path(INDEX)) is not None:
            self.files = dict(regular_files.read_json(index)["weight_map"])
        elif self._path(SINGLE) is not None:
            with self._opened(SINGLE) as weights:
                self.files = dict.fromkeys(weights.keys(), SINGLE)

    def find(self, ends: tuple[str, ...], shape: tuple[int, ...], like: str = "model.") -> str | None:
        """The tensor of this shape with one of these ends of a name, or None. Tensors in layers do not count.

        Prefixes differ between files: `model.language_model.`, `language_model.model.`, `thinker.model.` … Of several
        tensors, the result is the one with the most parts in common with the name `like`.
        """
        parts = {name: name.split(".") for name in self.files if f".{name}".endswith(tuple(f".{end}" for end in ends))}
        outside = [name for name, those in parts.items() if MTP not in those and not any(map(str.isdigit, those))]
        wanted = set(like.split("."))
        outside.sort(key=lambda name: (-len(wanted & set(parts[name])), len(parts[name]), name))
        return next((name for name in outside if self.shape(name) == shape), None)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, from the header of its file."""
        with self._opened(self.files[name]) as weights:
            return tuple(weights.get_slice(name).get_shape())

    def tensor(self, name: str) -> Tensor:
        """A tensor. CheckpointError if it is not stored as floats of at least two bytes."""
        with self._opened(self.files[name]) as weights:
            tensor: Tensor = weights.get_tensor(name)
        if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
            raise CheckpointError(
                f"target {self.place}: {name} is stored as {tensor.dtype}: quantized weights outside the layers are "
                "not supported",
                "name a copy of the target whose embedding and vocabulary head are not quantized",
            )
        return tensor

    def _path(self, file: str) -> str | None:
        from transformers.utils import cached_file

        options: dict[str, Any] = {"_raise_exceptions_for_missing_entries": False, "revision": self.revision}
        path = cached_file(self.place, file, **options)
        return path if isinstance(path, str) else None

    @contextmanager
    def _opened(self, file: str) -> Iterator[Any]:
        path = self._path(file)
        if path is None:
            raise CheckpointError(f"target {self.place}: its file {file} is missing", "copy the file again")
        regular_files.check(path)
        with safe_open(path, framework="pt") as weights:
            yield weights


class GGUFWeightFiles(WeightFiles):
    """The tensors of a GGUF file by their names in `transformers`, dequantized to `dtype`."""

    def __init__(self, name: str, dtype: torch.dtype):
        self.place, self.weights = name, gguf_target.weights(name, dtype)
        self.files = dict.fromkeys(self.weights, name)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.weights[name].shape)

    def tensor(self, name: str) -> Tensor:
        return self.weights[name].dequantized()
