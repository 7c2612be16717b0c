"""Deal texts out to processes so that all have about the same work in every step.

A step lasts until the slowest process has finished. Batches are therefore made of rows: one text per process, all with
about the same work. In a batch of several rows the remaining imbalance is reduced by dealing again: the longest text
first, to the least loaded process (LPT). There is one exception: if one process keeps the features of a text in memory,
the text stays with that process.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Container, Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from specctl.training.example import Example

WINDOW = 8  # batches with texts that are sorted by length together: little padding, still shuffled

Row: TypeAlias = "Sequence[Example | None]"
"""One text per process, all with about the same work; the last row may have gaps."""
Batch: TypeAlias = "list[list[Example]]"
"""Texts of one step, by process."""


def balanced_rows(examples: Sequence[Example], ranks: int, work: Callable[[Example], float]) -> list[Row]:
    """Rows of `ranks` texts with similar work, in the order of the data. If one row has gaps, it is the row with the
    least work."""
    ordered = sorted(examples, key=lambda example: (-work(example), example.index))
    dealt: list[Row] = []
    for number, start in enumerate(range(0, len(ordered), ranks)):
        row: list[Example | None] = [*ordered[start : start + ranks]]
        row += [None] * (ranks - len(row))
        dealt.append(row if number % 2 == 0 else row[::-1])  # or process 0 would get each row's longest text
    return sorted(dealt, key=_first)


def drop_seen(rows: Sequence[Row], seen: Container[int]) -> list[Row]:
    """The rows without the texts with indices in `seen`. Every remaining text stays with its process."""
    left = [[None if example is None or example.index in seen else example for example in row] for row in rows]
    return [row for row in left if any(row)]


def batches(
    rows: Sequence[Row], batch_tokens: int, length: float | None = None, *, seed: int, epoch: int
) -> list[Batch]:
    """Batches of an epoch, with at most `batch_tokens` response tokens, and at most `length` tokens of each process
    before `rebalance`, but at least one row each. They depend on the arguments alone. A process has no text only in a
    batch with fewer texts than processes, or in rows that `drop_seen` has thinned."""
    rng = random.Random(f"{seed}/{epoch}")
    order = list(rows)
    rng.shuffle(order)
    mean = sum(map(_response, order)) / len(order)
    window = max(1, round(WINDOW * batch_tokens / mean))
    result: list[Batch] = []
    for start in range(0, len(order), window):
        part = sorted(order[start : start + window], key=lambda row: (_length(row), _first(row)))
        packed = [texts_by_rank(batch) for batch in _pack(part, batch_tokens, length or math.inf)]
        rng.shuffle(packed)
        result += packed
    return result


def texts_by_rank(rows: Sequence[Row]) -> Batch:
    return [[example for example in column if example is not None] for column in zip(*rows, strict=True)]


def rebalance(batch: Batch, work: Callable[[Example], float]) -> Batch:
    """Deal the texts of a batch again: the text with the most work first, each to the least loaded process. Within a
    process, texts keep the order of the batch."""
    texts = [example for share in batch for example in share]
    loads, rank_of = [0.0] * len(batch), {}
    for example in sorted(texts, key=lambda example: (-work(example), example.index)):
        rank = rank_of[example.index] = loads.index(min(loads))
        loads[rank] += work(example)
    return [[example for example in texts if rank_of[example.index] == rank] for rank in range(len(batch))]


def useful_share(batches: Sequence[Batch], work: Callable[[Example], float]) -> float:
    """Share of the steps' time in which processes do not wait: Σ mean work / Σ work of the slowest process."""
    loads = [[sum(map(work, share)) for share in batch] for batch in batches]
    return sum(map(sum, loads)) / sum(len(load) * max(load) for load in loads)


def _pack(rows: Sequence[Row], batch_tokens: int, length: float) -> Iterator[list[Row]]:
    batch: list[Row] = []
    size = longest = 0
    for row in rows:
        most = max(len(example.tokens) for example in _texts(row))
        if batch and (size + _response(row) > batch_tokens or longest + most > length):
            yield batch
            batch, size, longest = [], 0, 0
        batch.append(row)
        size += _response(row)
        longest += most
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
