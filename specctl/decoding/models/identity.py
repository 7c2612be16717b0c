"""The identity of a target's weights: a digest that another checkpoint behind the same path does not share."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from specctl import regular
from specctl.decoding.models import gguf_file, gguf_target
from specctl.decoding.models.loading import model_directory
from specctl.decoding.models.tensors import weight_files
from specctl.errors import CheckpointError

WHOLE = 2**26  # bytes of a file that is read through: a twentieth of a second
BLOCK = 2**12  # bytes in the middle of every tensor of a larger one: some megabytes of a target of 70B
BLOCKS = 2**10  # of a larger file that does not say where its tensors are


def weights_digest(name: str, revision: str | None = None) -> str | None:
    """16 hex digits over the sizes, the headers and a sample of the weight files of a target; None where it has none.

    The times of the files say nothing: a copy has others, and a file written over in place may keep its own.
    CheckpointError where the files cannot be read.
    """
    try:
        if gguf_target.is_gguf(name):
            files = gguf_target.files(name)
        else:
            directory = model_directory(name, revision)
            files = weight_files(directory) if directory is not None else []
        digest = hashlib.sha256()
        for path in files:
            with regular.opened(path) as file:
                size = os.fstat(file.fileno()).st_size
                digest.update(f"{size}\n".encode())
                for start, length in [(0, size)] if size <= WHOLE else _sample(path, file, size):
                    file.seek(start)
                    digest.update(file.read(length))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(f"target {name}: its weights cannot be read: {error}", "copy it again") from error
    return digest.hexdigest()[:16] if files else None


def with_weights(kept: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """The description `kept` of an earlier run, to be compared with `now`; both have an identity as `target`. Where an
    earlier specctl has kept no digest of its weights, the two do not differ by that."""
    there, here = kept.get("target"), now.get("target")
    if not isinstance(there, Mapping) or not isinstance(here, Mapping) or "weights" not in here:
        return dict(kept)
    return {**kept, "target": {"weights": here["weights"], **there}}


def _sample(path: Path, file: IO[bytes], size: int) -> Iterator[tuple[int, int]]:
    """(start, length) of what is read of a file: the header and a block of every tensor, or blocks all over it."""
    start = file.read(8)
    if start[:4] == b"GGUF":
        contents = gguf_file.read(path)
        begin = contents.headers[path]
        ranges = [(one.start, one.start + one.size) for one in contents.tensors.values() if one.file == path]
    else:
        header = int.from_bytes(start, "little")
        begin = 8 + header
        if not 0 < header < size:  # no safetensors
            return ((size * block // BLOCKS, BLOCK) for block in range(BLOCKS))
        entries = regular.parsed(file.read(header)).items()
        offsets = [entry["data_offsets"] for name, entry in entries if name != "__metadata__"]
        ranges = [(begin + first, begin + end) for first, end in offsets]
    middles = sorted(max(first, (first + end - BLOCK) // 2) for first, end in ranges)
    return iter([(0, begin), *((middle, BLOCK) for middle in middles)])
