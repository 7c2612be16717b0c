"""Write a complete model directory in which some tensors are replaced, as engines load it."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from specctl import regular_files
from specctl.drafters import checkpoint
from specctl.errors import CheckpointError
from specctl.runs import atomic_write, to_json

CONFIG = "config.json"
OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack")  # such files would still hold the old tensors


def write(source: Path, place: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
    """Fill `place` with the files of the model in `source`, with `tensors` in place of its tensors of these names.

    Weight files without replaced tensors become hard links, if the file system has them: they take no space. All other
    files are copies. `config`: keys of config.json that change.

    Raises CheckpointError if the model lacks one of the tensors, or has it in another shape.
    """
    left = set(tensors)
    for file in sorted(source.iterdir()):
        if not file.is_file() or file.suffix in OTHER_WEIGHTS:
            continue
        if file.suffix != ".safetensors":
            shutil.copy(file, place / file.name)
            continue
        held = _held(file, tensors)
        if held:
            _exchange(file, place / file.name, {name: tensors[name] for name in held})
            left -= held
        else:
            _link(file, place / file.name)
    if left:
        raise CheckpointError(f"{source} has no tensor {min(left)}", "name the target that the drafter was made from")
    if config:
        known = regular_files.read_json(place / CONFIG)
        atomic_write(place / CONFIG, to_json({**known, **config}, indent=2) + "\n")


def _held(file: Path, tensors: Mapping[str, Tensor]) -> set[str]:
    """Names among `tensors` that a file has. Raises CheckpointError if a shape differs."""
    try:
        regular_files.check(file)
        with safe_open(file, framework="pt") as weights:
            found = tensors.keys() & set(weights.keys())
            for name in found:
                if (shape := weights.get_slice(name).get_shape()) != list(tensors[name].shape):
                    raise CheckpointError(
                        f"{file}: {name} has shape {shape}, but the drafter's has {list(tensors[name].shape)}"
                    )
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file} is not a safetensors file: {error}", "copy the target again") from error
    return found


def _exchange(file: Path, to: Path, tensors: Mapping[str, Tensor]) -> None:
    with safe_open(file, framework="pt") as weights:
        metadata = weights.metadata()
    # Keep the drafter's precision: engines round the weights to the target's when they load them.
    checkpoint.write_tensors(to, checkpoint.untied_cpu_copies({**load_file(file), **tensors}), metadata)


def _link(file: Path, to: Path) -> None:
    try:
        os.link(file.resolve(), to)
    except OSError:  # another file system, or one without links
        shutil.copy(file, to)
