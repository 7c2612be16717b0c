"""Token ids of all training texts, four bytes each, in one copy that all processes of a machine share."""

from __future__ import annotations

import socket
import tempfile
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist


class TokenArray:
    """Tokens of many texts, concatenated as int32. A Python integer in a list takes nine times as many bytes.

    Attributes:
        ids: tokens of all texts. Stored tokens never change, so `ids` may be replaced by an equal array.
    """

    def __init__(self) -> None:
        self.ids: array[int] | np.ndarray = array("i")

    def add(self, tokens: Sequence[int]) -> Text:
        """Append a text."""
        assert isinstance(self.ids, array)
        start = len(self.ids)
        self.ids.extend(tokens)
        return Text(self, start, len(self.ids))


class Text(Sequence[int]):
    """A text in a `TokenArray`. Its slices are lists."""

    __slots__ = ("home", "start", "stop")

    def __init__(self, home: TokenArray, start: int, stop: int):
        self.home, self.start, self.stop = home, start, stop

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return self.home.ids[self.start : self.stop][place].tolist()
        if not -len(self) <= place < len(self):
            raise IndexError(place)
        return int(self.home.ids[(self.start if place >= 0 else self.stop) + place])

    def __iter__(self) -> Iterator[int]:
        return iter(self[:])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self[:] == list(other)


def part(tokens: Sequence[int], first: int, stop: int) -> Sequence[int]:
    """Tokens `first` to `stop` of a text; a part of a `Text` is a `Text` and takes no memory for tokens."""
    if isinstance(tokens, Text):
        return Text(tokens.home, tokens.start + first, tokens.start + stop)
    return tokens[first:stop]


def share(tokens: TokenArray) -> None:
    """Keep one copy of `tokens` for all processes of a machine, in a mapped file (all processes of a run call this).

    The file is deleted as soon as all processes have opened it, so none is left on disk. A process keeps its own copy
    if it cannot read the file or has other tokens.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    rank = dist.get_rank()
    machines = _gathered(socket.gethostname())
    writer = machines.index(machines[rank])
    path = None
    try:
        if writer == rank and machines.count(machines[rank]) > 1:
            path = _written(tokens)
        found = _gathered(path)[writer]
        if found is not None:
            tokens.ids = _mapped(found, tokens.ids)
        dist.barrier()  # all processes have opened the file
    finally:
        if path is not None:
            Path(path).unlink(missing_ok=True)


def _gathered(mine: str | None) -> list[Any]:
    """Gather the value of every process, by rank."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return every


def _written(tokens: TokenArray) -> str | None:
    """Write the tokens to a new temporary file and return its path, or None if the disk refuses."""
    try:
        with tempfile.NamedTemporaryFile(prefix="specctl-tokens-", delete=False) as file:
            np.asarray(tokens.ids).tofile(file)
        return file.name
    except OSError:
        return None


def _mapped(path: str, own: Any) -> Any:
    """Map a file of tokens, or return `own` if the file cannot be read or holds other tokens."""
    try:
        ids = np.memmap(path, np.int32, "r")
    except (OSError, ValueError):  # another machine of the same name; an empty file
        return own
    return ids if np.array_equal(ids, np.asarray(own)) else own
