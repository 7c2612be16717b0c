"""Reader of GGUF files: the metadata, the positions of tensors, and their dequantized values.

The reader in the `gguf` package trusts every count in a file, so a damaged count can take all memory. This one checks
each count against the size of the file. The format is described in the repository ggml-org/ggml.
"""

import functools
import math
import mmap
import os
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from specctl import regular_files
from specctl.errors import CheckpointError, near_path

VERSIONS = (2, 3)
MOST_HEADER = 2**27  # bytes; a vocabulary of 250,000 tokens takes 10 MB
MOST_DIMENSIONS = 4
MOST_PARTS = 1000
ROWS = 2**22  # values that are dequantized together
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
ARCHITECTURE = "general.architecture"
ALIGNMENT = 32  # alignment of the tensors, if the metadata name no other
I64 = 27  # type of a draft vocabulary in a head's file; models have no tensors of integers
PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})(\.gguf)", re.IGNORECASE)
REDOWNLOAD_HINT = "copy the file again"


class Numbers(tuple[Any, ...]):
    """An array of numbers in the metadata. Unlike a numpy array it can be compared with a value of any type.

    Attributes:
        dtype: type of the numbers in the file.
    """

    dtype: np.dtype[Any]

    @classmethod
    def of(cls, array: np.ndarray[Any, Any]) -> "Numbers":
        made = cls(array.tolist())
        made.dtype = array.dtype
        return made


@dataclass(frozen=True)
class StoredTensor:
    """Location of a tensor in a file.

    Attributes:
        kind: number of its type in ggml's table.
        shape: as in torch, with the outermost dimension first.
        start, size: position and length in `file`, in bytes.
    """

    file: Path
    kind: int
    shape: tuple[int, ...]
    start: int
    size: int


@dataclass(frozen=True)
class GGUFContents:
    """A model in one GGUF file or in several parts.

    Attributes:
        metadata: metadata of the first part. Arrays of numbers are `Numbers`, other arrays lists of strings.
        headers: path of each part, and the number of bytes before its first tensor.
    """

    metadata: dict[str, Any]
    tensors: dict[str, StoredTensor]
    headers: dict[Path, int]


def read(path: Path) -> GGUFContents:
    """Read the header of the model at `path`, which may be any part of a split model. No tensor is read.

    Raises CheckpointError: a part is missing, is no regular file, is no GGUF file that this machine can read, or ends
    too early; or the `gguf` package cannot dequantize a tensor.
    """
    split = PART.fullmatch(path.name)
    first = path if split is None else path.with_name(f"{split[1]}-00001-of-{split[3]}{split[4]}")
    metadata, tensors, end = _cached(first)
    count = metadata.get("split.count", 1)
    if type(count) is not int or not 0 <= count <= MOST_PARTS:
        raise _damaged(first, f"split.count is {count!r:.60}")
    headers, tensors = {first: end}, dict(tensors)
    if count > 1:
        if split is None or int(split[3]) != count:
            raise CheckpointError(
                f"GGUF file {path} is one of {count} parts, but its name does not say which one",
                f"rename the parts to NAME-00001-of-{count:05}.gguf and so on, or merge them: llama-gguf-split --merge",
            )
        for number in range(2, count + 1):
            part = path.with_name(f"{split[1]}-{number:05}-of-{split[3]}{split[4]}")
            if not part.exists():
                raise CheckpointError(
                    f"GGUF file {path} has {count} parts, but {part} is missing",
                    "copy the missing part, or merge all parts into one file: llama-gguf-split --merge "
                    f"{first.name} NAME.gguf",
                )
            _, more, headers[part] = _cached(part)
            tensors |= more
    return GGUFContents(metadata, tensors, headers)


def _cached(path: Path) -> tuple[dict[str, Any], dict[str, StoredTensor], int]:
    """Read a file's header, cached by inode, size and modification time."""
    try:
        regular_files.check(path)
        stat = os.stat(path)
    except FileNotFoundError as error:
        hint = f"{near_path(path, suffix='.gguf')}give the path of a .gguf file"
        raise CheckpointError(f"GGUF file {path} does not exist", hint) from error
    except OSError as error:
        raise CheckpointError(f"GGUF file {path} cannot be read: {error.strerror}") from error
    return _read(path, (stat.st_ino, stat.st_size, stat.st_mtime_ns))


@functools.lru_cache(maxsize=8)
def _read(path: Path, _: tuple[int, ...]) -> tuple[dict[str, Any], dict[str, StoredTensor], int]:
    """Metadata, tensors, and number of bytes before the tensors, of one file."""
    try:
        with regular_files.open_regular(path) as file:
            start = file.read(8)
            if start[:4] != b"GGUF":
                raise CheckpointError(f"{path} is not a GGUF file: it does not begin with GGUF", REDOWNLOAD_HINT)
            version = int.from_bytes(start[4:], "little")
            if version & 0xFFFF == 0:
                raise CheckpointError(
                    f"GGUF file {path} is big-endian, which is not supported",
                    "convert it: gguf-convert-endian FILE little",
                )
            if version not in VERSIONS:
                supported = " and ".join(map(str, VERSIONS))
                raise CheckpointError(
                    f"GGUF file {path} has version {version}; {supported} are supported", "convert the model again"
                )
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(path, data).contents()
    except OSError as error:
        raise CheckpointError(f"GGUF file {path} cannot be read: {error.strerror}") from error


class _Reader:
    """A read position in a file, checked against the file's end."""

    def __init__(self, path: Path, data: mmap.mmap):
        self.path, self.data, self.at = path, data, 8
        self.limit = min(len(data), MOST_HEADER)

    def contents(self) -> tuple[dict[str, Any], dict[str, StoredTensor], int]:
        tensors, pairs = self._number("Q"), self._number("Q")
        self._check_room(pairs, 13)  # a key's length, its value's type, and a value
        self._check_room(tensors, 24)  # lengths, type and offset
        metadata: dict[str, Any] = {}
        for _ in range(pairs):
            key = self._string()
            if key in metadata:
                raise _damaged(self.path, f"its metadata have {key:.60} twice")
            metadata[key] = self._value(key, self._number("I"))
        if not isinstance(metadata.get(ARCHITECTURE, ""), str):
            raise _damaged(self.path, f"{ARCHITECTURE} is no name")
        entries = [self._entry() for _ in range(tensors)]
        alignment = metadata.get("general.alignment", ALIGNMENT)
        if type(alignment) is not int or not 0 < alignment <= MOST_HEADER:
            raise _damaged(self.path, f"general.alignment is {alignment!r:.60}")
        end = -(-self.at // alignment) * alignment
        placed: dict[str, StoredTensor] = {}
        expected = 0
        for name, shape, kind, offset in entries:
            if name in placed or offset != expected:  # llama.cpp refuses these, too
                why = "is there twice" if name in placed else f"has offset {offset:,}, expected {expected:,}"
                raise _damaged(self.path, f"tensor {name:.60} {why}")
            placed[name] = self._placed(name, shape, kind, end + offset)
            expected += -(-placed[name].size // alignment) * alignment
        return metadata, placed, end

    def _take(self, size: int) -> int:
        """Advance by `size` bytes and return the position before them."""
        start, self.at = self.at, self.at + size
        if self.at > self.limit:
            if self.at <= len(self.data):
                raise _damaged(self.path, f"its metadata exceeds {MOST_HEADER >> 20} MiB")
            raise _damaged(self.path, f"it ends inside its header, after {len(self.data):,} bytes")
        return start

    def _check_room(self, count: int, size: int) -> None:
        """Raise CheckpointError if the header has no room for `count` entries of at least `size` bytes."""
        if count * size > self.limit - self.at:
            raise _damaged(self.path, f"its header declares {count:,} entries, more than fit in the file")

    def _number(self, code: str) -> Any:
        return struct.unpack_from(f"<{code}", self.data, self._take(struct.calcsize(f"<{code}")))[0]

    def _string(self) -> str:
        size = self._number("Q")
        self._check_room(size, 1)
        start = self._take(size)
        try:
            return self.data[start : self.at].decode()
        except UnicodeDecodeError as error:
            raise _damaged(self.path, f"the string at byte {start:,} is not UTF-8") from error

    def _value(self, key: str, kind: int) -> Any:
        if kind in SCALARS:
            return self._number(SCALARS[kind])
        if kind == STRING:
            return self._string()
        element, count = (self._number("I"), self._number("Q")) if kind == ARRAY else (kind, 0)
        if element in SCALARS:
            numbers = np.dtype(SCALARS[element]).newbyteorder("<")
            self._check_room(count, numbers.itemsize)
            return Numbers.of(np.frombuffer(self.data[self._take(count * numbers.itemsize) : self.at], numbers))
        if element == STRING:
            self._check_room(count, 8)
            return [self._string() for _ in range(count)]
        raise _damaged(self.path, f"{key:.60} has a value of type {element}, which is not supported")

    def _entry(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape, type and offset of a tensor."""
        name, dimensions = self._string(), self._number("I")
        if dimensions > MOST_DIMENSIONS:
            raise _damaged(self.path, f"tensor {name:.60} has {dimensions:,} dimensions")
        shape = tuple(self._number("Q") for _ in range(dimensions))
        return name, shape[::-1], self._number("I"), self._number("Q")

    def _placed(self, name: str, shape: tuple[int, ...], kind: int, start: int) -> StoredTensor:
        block, width = block_of(self.path, name, kind)
        if not shape or shape[-1] % block:
            raise _damaged(
                self.path, f"tensor {name:.60} of shape {list(shape)} does not divide into blocks of {block}"
            )
        size = math.prod(shape) // block * width
        if start + size > len(self.data):
            needed = start + size
            raise _damaged(self.path, f"it has {len(self.data):,} bytes, but tensor {name:.60} ends at byte {needed:,}")
        return StoredTensor(self.path, kind, shape, start, size)


@functools.cache
def _blocks() -> dict[int, tuple[str, int, int] | str]:
    """Name, values per block and bytes per block, by type number. For types that cannot be dequantized, only the
    name."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

    found: dict[int, tuple[str, int, int] | str] = {}
    for kind in GGMLQuantizationType:
        values, size = GGML_QUANT_SIZES[kind]
        try:
            with np.errstate(all="ignore"):
                dequantize(np.zeros((1, size), np.uint8), kind)
            found[int(kind)] = kind.name, values, size
        except NotImplementedError:
            found[int(kind)] = kind.name
    return found


def block_of(path: Path, name: str, kind: int) -> tuple[int, int]:
    """Number of values and bytes of a block of ggml's type `kind`.

    CheckpointError, with the name of the tensor, if the `gguf` package does not know the type or cannot dequantize it.
    """
    found = (1, 8) if kind == I64 else _blocks().get(kind, f"type {kind}")
    if isinstance(found, tuple):
        return found[-2], found[-1]
    raise CheckpointError(
        f"GGUF file {path}: tensor {name:.60} has quantization {found}, which the gguf package cannot dequantize",
        f"use another quantization: {', '.join(kind_names())}",
    )


def kind_names(kinds: set[int] | None = None) -> list[str]:
    """Names of the readable types, limited to `kinds` if given."""
    return [held[0] for kind, held in _blocks().items() if isinstance(held, tuple) and (kinds is None or kind in kinds)]


def dequantised(stored: StoredTensor, dtype: torch.dtype) -> torch.Tensor:
    """Dequantize a tensor in fp32 and round it to `dtype`. Integers are converted directly."""
    from gguf import GGMLQuantizationType, dequantize

    if stored.kind == I64:
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


def shortest(value: Any) -> Any:
    """The shortest decimal number with the fp32 value of a number in the metadata. Other values are unchanged."""
    with np.errstate(over="ignore"):
        return float(str(np.float32(value))) if type(value) in (int, float) else value


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"GGUF file {path} is damaged: {what}", REDOWNLOAD_HINT)
