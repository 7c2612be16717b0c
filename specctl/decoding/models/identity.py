"""Identity of a target's weights: a digest that detects another checkpoint under the same path."""

import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from specctl import regular_files
from specctl.decoding.models import gguf_file, gguf_target, target_adapter
from specctl.decoding.models.loading import is_gguf, model_directory
from specctl.decoding.models.supported import weight_files
from specctl.errors import CheckpointError

WHOLE = 2**26  # bytes up to which a file is read completely; this takes a twentieth of a second
BLOCK = 2**12  # bytes read in the middle of every tensor of a larger file: some megabytes for a 70B target
BLOCKS = 2**10  # blocks read of a larger file without a list of tensors


def weights_digest(name: str, revision: str | None = None, adapter: str | None = None) -> str | None:
    """16 hex digits over the sizes, headers and a sample of a target's weight files, and of the files of its `adapter`.
    None if there are no such files.

    File times are not used: a copy has new ones, and a file overwritten in place may keep its old one. CheckpointError
    if the files cannot be read.
    """
    try:
        if is_gguf(name):
            files = gguf_target.files(name)
        else:
            directory = model_directory(name, revision)
            files = weight_files(directory) if directory is not None else []
        return _digest([*files, *(target_adapter.files(adapter) if adapter is not None else ())])
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"target {name}: its weights cannot be read: {error}", "copy the weights again"
        ) from error


def adapter_digest(adapter: str) -> str:
    """16 hex digits over the files of a target's adapter, like `weights_digest`. CheckpointError if there are none."""
    try:
        return str(_digest(target_adapter.files(adapter)))
    except OSError as error:
        raise CheckpointError(f"adapter {adapter} cannot be read: {error}", "copy the files again") from error


def _digest(files: list[Path]) -> str | None:
    digest = hashlib.sha256()
    for path in files:
        with regular_files.open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            digest.update(f"{size}\n".encode())
            for start, length in [(0, size)] if size <= WHOLE else _sample(path, file, size):
                file.seek(start)
                digest.update(file.read(length))
    return digest.hexdigest()[:16] if files else None


def with_weights_digest(kept: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """The description `kept` of an earlier run, made comparable with `now`; both have an identity under `target`. If an
    older specctl has stored no weights digest, the digest of `now` is filled in, and thus makes no difference."""
    there, here = kept.get("target"), now.get("target")
    if not isinstance(there, Mapping) or not isinstance(here, Mapping) or "weights" not in here:
        return dict(kept)
    return {**kept, "target": {"weights": here["weights"], **there}}


def _sample(path: Path, file: IO[bytes], size: int) -> Iterator[tuple[int, int]]:
    """(start, length) of the parts of a file to read: the header and a block of every tensor, or blocks spread over the
    whole file."""
    start = file.read(8)
    if start[:4] == b"GGUF":
        contents = gguf_file.read(path)
        begin = contents.headers[path]
        ranges = [(one.start, one.start + one.size) for one in contents.tensors.values() if one.file == path]
    else:
        header = int.from_bytes(start, "little")
        begin = 8 + header
        if not 0 < header < size:  # not a safetensors file
            return ((size * block // BLOCKS, BLOCK) for block in range(BLOCKS))
        entries = regular_files.parse_json(file.read(header)).items()
        offsets = [entry["data_offsets"] for name, entry in entries if name != "__metadata__"]
        ranges = [(begin + first, begin + end) for first, end in offsets]
    middles = sorted(max(first, (first + end - BLOCK) // 2) for first, end in ranges)
    return iter([(0, begin), *((middle, BLOCK) for middle in middles)])
