"""The identity of a target's weights: a digest that another checkpoint behind the same path does not share."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

from specctl.decoding.models.loading import model_directory
from specctl.decoding.models.tensors import weight_files

WHOLE = 2**26  # bytes of a file that is read through: a twentieth of a second
BLOCK = 2**12  # bytes in the middle of every tensor of a larger one: some megabytes of a target of 70B
BLOCKS = 2**10  # of a larger file that does not say where its tensors are


def weights_digest(name: str, revision: str | None = None) -> str | None:
    """16 hex digits over the sizes, the headers and a sample of the weight files of a target; None where it has none.

    The times of the files say nothing: a copy has others, and a file written over in place may keep its own.
    """
    directory = model_directory(name, revision)
    files = weight_files(directory) if directory is not None else []
    if not files:
        return None
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        digest.update(f"{size}\n".encode())
        with open(path, "rb") as file:
            for start, length in [(0, size)] if size <= WHOLE else _sample(file, size):
                file.seek(start)
                digest.update(file.read(length))
    return digest.hexdigest()[:16]


def with_weights(kept: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """The description `kept` of an earlier run, to be compared with `now`; both have an identity as `target`. Where an
    earlier specctl has kept no digest of its weights, the two do not differ by that."""
    there, here = kept.get("target"), now.get("target")
    if not isinstance(there, Mapping) or not isinstance(here, Mapping) or "weights" not in here:
        return dict(kept)
    return {**kept, "target": {"weights": here["weights"], **there}}


def _sample(file: BinaryIO, size: int) -> Iterator[tuple[int, int]]:
    """(start, length) of what is read of a file: the header and a block of every tensor, or blocks all over it."""
    header = int.from_bytes(file.read(8), "little")
    if not 0 < header < size:  # no safetensors
        return ((size * block // BLOCKS, BLOCK) for block in range(BLOCKS))
    tensors = json.loads(file.read(header))
    ranges = [entry["data_offsets"] for name, entry in tensors.items() if name != "__metadata__"]
    middles = sorted(8 + header + max(first, (first + end - BLOCK) // 2) for first, end in ranges)
    return iter([(0, 8 + header), *((start, BLOCK) for start in middles)])
