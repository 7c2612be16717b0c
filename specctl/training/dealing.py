"""The dealing of texts to processes: in every step each has about as much work as the others.

A step ends when the slowest process has ended. Batches are therefore made of rows: as many texts with about the same
work as there are processes, one for each. In a batch of several rows what is left of a difference is dealt away, the
longest first to the least loaded (LPT); but where one process keeps the features of a text in memory, it has the text.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Container, Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from specctl.training.example import Example

WINDOW = 8  # batches whose texts are sorted by length together: little padding, still shuffled

Row: TypeAlias = "Sequence[Example | None]"
"""A text for each process, of about the same work; the last row may not have one for all."""
Batch: TypeAlias = "list[list[Example]]"
"""Texts of one step, by process."""


def rows(examples: Sequence[Example], ranks: int, work: Callable[[Example], float]) -> list[Row]:
    """The texts in groups of `ranks` that follow each other by `work`, in the order of the data. The group that may not
    be full has the least work."""
    ordered = sorted(examples, key=lambda example: (-work(example), example.index))
    dealt: list[Row] = []
    for number, start in enumerate(range(0, len(ordered), ranks)):
        row: list[Example | None] = [*ordered[start : start + ranks]]
        row += [None] * (ranks - len(row))
        dealt.append(row if number % 2 == 0 else row[::-1])  # or the first would have the longest of every row
    return sorted(dealt, key=_first)


def without(rows: Sequence[Row], seen: Container[int]) -> list[Row]:
    """The rows without the texts of these indices. Each text that is left stays with its process."""
    left = [[None if example is None or example.index in seen else example for example in row] for row in rows]
    return [row for row in left if any(row)]


def batches(rows: Sequence[Row], batch_tokens: int, *, seed: int, epoch: int) -> list[Batch]:
    """One epoch as batches of at most `batch_tokens` response tokens, but of one row at least; a function of its
    arguments alone. A process without a text is only in a batch that has fewer texts than there are processes, or whose
    rows had more (`without`)."""
    rng = random.Random(f"{seed}/{epoch}")
    order = list(rows)
    rng.shuffle(order)
    mean = sum(map(_response, order)) / len(order)
    window = max(1, round(WINDOW * batch_tokens / mean))
    result: list[Batch] = []
    for start in range(0, len(order), window):
        part = sorted(order[start : start + window], key=lambda row: (_length(row), _first(row)))
        packed = [columns(batch) for batch in _pack(part, batch_tokens)]
        rng.shuffle(packed)
        result += packed
    return result


def columns(rows: Sequence[Row]) -> Batch:
    """The texts of each process."""
    return [[example for example in column if example is not None] for column in zip(*rows, strict=True)]


def level(batch: Batch, work: Callable[[Example], float]) -> Batch:
    """The texts of a batch dealt out again: the one with the most work first, each to the process with the least. Each
    process has its texts in the order of the batch."""
    texts = [example for share in batch for example in share]
    loads, rank_of = [0.0] * len(batch), {}
    for example in sorted(texts, key=lambda example: (-work(example), example.index)):
        rank = rank_of[example.index] = loads.index(min(loads))
        loads[rank] += work(example)
    return [[example for example in texts if rank_of[example.index] == rank] for rank in range(len(batch))]


def useful_share(batches: Sequence[Batch], work: Callable[[Example], float]) -> float:
    """How much of their time in steps the processes work: Σ of the mean work over Σ of the slowest one's."""
    loads = [[sum(map(work, share)) for share in batch] for batch in batches]
    return sum(map(sum, loads)) / sum(len(load) * max(load) for load in loads)


def _pack(rows: Sequence[Row], batch_tokens: int) -> Iterator[list[Row]]:
    batch: list[Row] = []
    size = 0
    for row in rows:
        if batch and size + _response(row) > batch_tokens:
            yield batch
            batch, size = [], 0
        batch.append(row)
        size += _response(row)
    if batch:
        yield batch


def _texts(row: Row) -> list[Example]:
    return [example for example in row if example is not None]


def _first(row: Row) -> int:
    return min(example.index for example in _texts(row))


def _length(row: Row) -> int:
    return sum(len(example.tokens) for example in _texts(row))


def _response(row: Row) -> int:
    return sum(example.response_length for example in _texts(row))
