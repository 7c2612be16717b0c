"""Reading other people's head directories: config.json and weights, of which nothing is ever executed."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from specctl.drafters.mtp import layouts
from specctl.errors import CheckpointError, UsageError, brief

WEIGHTS = ("*.safetensors", "pytorch_model*.bin", "*_lm_head.pt")
"""Names of weights, in order of preference; a pickle is only opened where there is nothing better."""


@dataclass(frozen=True)
class Foreign:
    """The contents of a directory; `file` is where the weights (or the first part of them) are, for messages."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    file: Path

    @property
    def config_file(self) -> Path:
        return self.file.parent / "config.json"

    def renamed(self, tensors: dict[str, Tensor]) -> Foreign:
        return replace(self, tensors=tensors)

    def refuse(self, key: str, found: Any, right: str, *, where: Path | None = None) -> CheckpointError:
        """The error for a value that our head cannot have: file, key, what was found, what would be right."""
        value = brief(" ".join(str(found).split()))
        return CheckpointError(f"{where or self.config_file}: {key} is {value}", hint=right)


def read(directory: str | Path) -> Foreign:
    """Config and weights of a head.

    Raises:
        UsageError: no such directory (nothing is downloaded).
        CheckpointError: no config.json, no weights, or weights that are more than tensors.
    """
    root = Path(directory).expanduser()
    if not root.is_dir():
        hint = f"a directory on this machine; from the hub: huggingface-cli download {directory} --local-dir DIR"
        raise UsageError(f"no head directory {directory}", hint=hint)
    config = _config(root / "config.json")
    files = next((found for pattern in WEIGHTS if (found := sorted(root.glob(pattern)))), [])
    for file in files:
        if not file.is_file():  # a pipe would keep whoever opens it waiting
            raise CheckpointError(f"{file} is no regular file", hint="a head is config.json and weights")
    if not files:
        raise CheckpointError(f"no weights in {root}", hint=f"expected {', '.join(WEIGHTS)}")
    wanted = _of_layer if layouts.kind_of(name for file in files for name in _names(file)) else None
    tensors: dict[str, Tensor] = {}
    for file in files:
        tensors |= _tensors(file, wanted)
    tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith("rotary_emb.inv_freq")}
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise CheckpointError(f"{files[0]}: {name} holds values that are not finite", hint="download it again")
    return Foreign(config, tensors, files[0])


def _of_layer(name: str) -> bool:
    """Whether a tensor of a whole target with an MTP layer belongs to that, of which alone the values are read."""
    return name == layouts.FINAL_NORM or layouts.kind_of([name]) is not None


def _config(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise CheckpointError(f"{file} is missing", hint="a head is config.json and weights")
    try:
        config = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{file} does not hold a JSON object")
    return config


def _names(file: Path) -> list[str]:
    """Names of the tensors in a safetensors file; none of a pickle, which would have to be loaded for them."""
    if file.suffix != ".safetensors":
        return []
    with _safetensors(file), safe_open(file, framework="pt") as weights:
        return list(weights.keys())


@contextmanager
def _safetensors(file: Path) -> Iterator[None]:
    """Raise CheckpointError where what is within cannot read `file`."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file} is not a safetensors file: {error}", hint="download it again") from error


def _tensors(file: Path, wanted: Callable[[str], bool] | None) -> dict[str, Tensor]:
    """The tensors in a file; with `wanted` those of such names alone."""
    if file.suffix == ".safetensors":
        with _safetensors(file):
            if wanted is None:
                return load_file(file)
            with safe_open(file, framework="pt") as weights:
                return {name: weights.get_tensor(name) for name in filter(wanted, weights.keys())}
    found = unpickled(file)
    if not isinstance(found, dict) or not all(isinstance(tensor, Tensor) for tensor in found.values()):
        raise CheckpointError(f"{file} does not hold named tensors", hint="it has to be a state dict")
    return {str(name): tensor for name, tensor in found.items()}


def unpickled(file: Path) -> Any:
    """The tensors and plain values of a pickle. CheckpointError where it holds more, or is no file."""
    if not file.is_file():  # a pipe would keep whoever opens it waiting
        raise CheckpointError(f"{file} is no regular file", hint="a head is config.json and weights")
    try:
        with warnings.catch_warnings():  # about what is wrong with it, which the error says
            warnings.simplefilter("ignore")
            return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged pickle can ask its reader for anything, and is refused it by many errors
        raise CheckpointError(
            f"{file} is damaged, or holds more than tensors, which could run code: it was not loaded",
            hint="ask its authors for safetensors",
        ) from error
