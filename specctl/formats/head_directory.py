"""Read head directories from other sources: config.json and weights. No code in them is ever executed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from specctl import regular_files
from specctl.decoding.models import gguf_file
from specctl.drafters.mtp import layouts
from specctl.errors import CheckpointError, UsageError, brief, near_path
from specctl.hub import DOWNLOAD

WEIGHTS = ("*.safetensors", "pytorch_model*.bin", "*_lm_head.pt", "*.gguf")
"""File names of weights, in order of preference. A pickle is opened only if there is nothing better."""


@dataclass(frozen=True)
class HeadDirectory:
    """The contents of a directory. `file` is the first file of weights, for messages.

    `config` is config.json, or the metadata of a GGUF file.
    """

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    file: Path

    @property
    def config_file(self) -> Path:
        return self.file if self.file.suffix == ".gguf" else self.file.parent / "config.json"

    def with_tensors(self, tensors: dict[str, Tensor]) -> HeadDirectory:
        return replace(self, tensors=tensors)

    def bare(self) -> HeadDirectory:
        """The same without the prefix `model.` in names of tensors, which some files have."""
        return self.with_tensors({name.removeprefix("model."): tensor for name, tensor in self.tensors.items()})

    def without(self, names: Collection[str]) -> HeadDirectory:
        return self.with_tensors({name: tensor for name, tensor in self.tensors.items() if name not in names})

    def invalid(self, key: str, found: Any, right: str, *, where: Path | None = None) -> CheckpointError:
        """The error for a value that our head cannot have: the file, the key, the value found, and the right value."""
        value = brief(" ".join(str(found).split()))
        return CheckpointError(f"{where or self.config_file}: {key} is {value}", hint=right)


def read(directory: str | Path) -> HeadDirectory:
    """Read config and weights of a head: a directory, or a GGUF file.

    Raises:
        UsageError: no such directory (nothing is downloaded).
        CheckpointError: no config.json, no weights, or weights that are more than tensors.
    """
    root = Path(directory).expanduser()
    if root.suffix == ".gguf" and root.is_file():
        return _gguf(root)
    if not root.is_dir():
        raise UsageError(regular_files.no_directory("head directory", directory), near_path(directory) + DOWNLOAD)
    files = next((found for pattern in WEIGHTS if (found := sorted(root.glob(pattern)))), [])
    if files and files[0].suffix == ".gguf":
        return _gguf(files[0])
    config = _config(root / "config.json")
    if not files:
        raise CheckpointError(f"no weights in {root}", hint=f"expected {', '.join(WEIGHTS)}")
    wanted = _of_layer if layouts.kind_of(name for file in files for name in _names(file)) else None
    tensors: dict[str, Tensor] = {}
    for file in files:
        tensors |= _tensors(file, wanted)
    tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith("rotary_emb.inv_freq")}
    return _finite(HeadDirectory(config, tensors, files[0]))


def _gguf(file: Path) -> HeadDirectory:
    """The metadata and dequantized tensors of a GGUF file."""
    contents = gguf_file.read(file)
    kinds = {
        name: torch.int64 if one.kind == gguf_file.I64 else torch.float32 for name, one in contents.tensors.items()
    }
    tensors = {name: gguf_file.dequantised(one, kinds[name]) for name, one in contents.tensors.items()}
    return _finite(HeadDirectory(contents.metadata, tensors, file))


def _finite(found: HeadDirectory) -> HeadDirectory:
    """`found`. Raises CheckpointError if a tensor contains values that are not finite."""
    for name, tensor in found.tensors.items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise CheckpointError(f"{found.file}: {name} contains values that are not finite", hint="download it again")
    return found


def _of_layer(name: str) -> bool:
    """Whether a tensor of a whole target belongs to its MTP layer. Only these tensors are read."""
    return name == layouts.FINAL_NORM or layouts.kind_of([name]) is not None


def _config(file: Path) -> dict[str, Any]:
    try:
        config = regular_files.read_json(file)
    except FileNotFoundError as error:
        raise CheckpointError(f"{file} is missing", hint="a head consists of config.json and weights") from error
    except OSError as error:
        raise _unreadable(file, error) from error
    except ValueError as error:
        raise CheckpointError(f"{file} is not JSON: {error}", "download it again") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{file} does not contain a JSON object", "download it again")
    return config


def _names(file: Path) -> list[str]:
    """Names of the tensors in a safetensors file; empty for a pickle, which would have to be loaded for them."""
    if file.suffix != ".safetensors":
        return []
    with _safetensors(file), safe_open(file, framework="pt") as weights:
        return list(weights.keys())


@contextmanager
def _safetensors(file: Path) -> Iterator[None]:
    """Turn errors of reading `file` in this context into CheckpointError."""
    try:
        regular_files.check(file)
        yield
    except OSError as error:
        raise _unreadable(file, error) from error
    except SafetensorError as error:
        raise CheckpointError(f"{file} is not a safetensors file: {error}", hint="download it again") from error


def _unreadable(file: Path, error: OSError) -> CheckpointError:
    why = error.strerror or str(error)  # errors of safetensors have no strerror
    return CheckpointError(f"{file} cannot be read: {why}", hint="a head consists of config.json and weights")


def _tensors(file: Path, wanted: Callable[[str], bool] | None) -> dict[str, Tensor]:
    """The tensors in a file; with `wanted`, only the tensors with such names."""
    if file.suffix == ".safetensors":
        with _safetensors(file):
            if wanted is None:
                return load_file(file)
            with safe_open(file, framework="pt") as weights:
                return {name: weights.get_tensor(name) for name in filter(wanted, weights.keys())}
    found = unpickled(file)
    if not isinstance(found, dict) or not all(isinstance(tensor, Tensor) for tensor in found.values()):
        raise CheckpointError(f"{file} does not contain named tensors", hint="the file must be a state dict")
    return {str(name): tensor for name, tensor in found.items()}


def unpickled(file: Path) -> Any:
    """The tensors and plain values of a pickle. Raises CheckpointError if it holds anything else, or is no file."""
    try:
        regular_files.check(file)
    except OSError as error:
        raise _unreadable(file, error) from error
    try:
        with warnings.catch_warnings():  # the error below reports the fault
            warnings.simplefilter("ignore")
            return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged pickle may request anything, and the refusals raise many kinds of errors
        raise CheckpointError(
            f"{file} is damaged, or contains more than tensors, which could run code: it was not loaded",
            hint="ask the authors for a safetensors file",
        ) from error
