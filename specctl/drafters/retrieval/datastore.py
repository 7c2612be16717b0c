"""Datastore of documents with a suffix array: find where a context occurs, and what followed it."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from specctl.drafters.blueprint import WEIGHTS, config_error
from specctl.drafters.text.text_tree import NextToken

if TYPE_CHECKING:
    from specctl.decoding.target import Target

SEPARATOR = -1  # after every document: no context contains it, and no draft crosses it
LONGEST = 16  # tokens of context that are looked up; a power of two
# Shorter contexts are added until there are ENOUGH occurrences. Tokens per pass with a store of 400 responses, the text
# and 14 nodes, for 1 / 8 / 32 / 128 occurrences: sql 3.37 / 3.49 / 3.49 / 3.51, code 3.78 / 3.91 / 3.87 / 3.86,
# summarization 2.50 / 2.74 / 2.82 / 2.88.
ENOUGH = 32
# Escape mass (PPM) that each distinct follower adds to the denominator: one past occurrence is no certainty.
ESCAPE_MASS = 0.5
SAMPLE = 64  # maximal occurrences read per context: 512 give no better drafts


def flatten(documents: Iterable[list[int]]) -> Tensor:
    """Concatenate documents into one tensor [N] int32, with a separator after each document."""
    return torch.tensor([token for document in documents for token in (*document, SEPARATOR)], dtype=torch.int32)


def suffix_array(tokens: Tensor) -> Tensor:
    """Suffix array [N] int32: positions of `tokens` [N], ordered by the next `LONGEST` tokens, then by position.

    Built by prefix doubling (Manber and Myers 1993): the order by 2k tokens follows from the pairs of ranks by k
    tokens. The doubling stops at `LONGEST`, the longest context, even in repetitive text.
    """
    rank = np.unique(tokens.numpy(), return_inverse=True)[1].astype(np.int64)
    count, ordered = len(rank), 1
    while ordered < LONGEST:
        key = rank * (count + 1)
        key[:-ordered] += rank[ordered:] + 1
        rank = np.unique(key, return_inverse=True)[1]
        ordered *= 2
    return torch.from_numpy(np.argsort(rank, kind="stable").astype(np.int32))


class Datastore:
    """Read-only store of `tokens` [N] and their suffix array [N], both int32: 8 bytes per token for all sequences."""

    def __init__(self, tokens: Tensor, suffixes: Tensor):
        self.tokens, self.suffixes = tokens, suffixes
        # Slices of an array compare token by token, which bisect needs.
        self._tokens, self._suffixes = (array("i", part.numpy().tobytes()) for part in (tokens, suffixes))

    def check(self, target: Target) -> None:
        """Raise CheckpointError if it holds tokens that `target` does not have."""
        low, high = self.tokens.aminmax()
        if low < SEPARATOR or high >= target.vocab_size:
            has = f"target {target.name} has ids 0 … {target.vocab_size - 1}"
            raise config_error(WEIGHTS, "tokens", f"contains ids {int(low)} … {int(high)}, but {has}")

    @classmethod
    def of(cls, documents: Iterable[list[int]]) -> Datastore:
        tokens = flatten(documents)
        return cls(tokens, suffix_array(tokens))

    def documents(self) -> Iterator[list[int]]:
        """Yield the documents, oldest first."""
        ends = (self.tokens == SEPARATOR).nonzero()[:, 0].tolist()
        for start, end in zip([0, *(end + 1 for end in ends)], ends, strict=False):
            yield self.tokens[start:end].tolist()

    def occurrences(self, context: array[int]) -> range:
        """Range in the suffix array of the suffixes that begin with `context` (at most `LONGEST` tokens)."""
        start = self._first(context)
        if start is None:
            return range(0)
        return range(start, bisect_right(self._suffixes, context, start, key=self._heads(len(context))))

    def longest(self, context: array[int]) -> int:
        """Number of last tokens of `context` that occur in the store.

        If n tokens occur, so do fewer; therefore a binary search finds it.
        """
        return bisect_left(range(1, len(context) + 1), True, key=lambda size: self._first(context[-size:]) is None)

    def _first(self, context: array[int]) -> int | None:
        """First suffix that begins with `context`, or None if there is none."""
        head = self._heads(len(context))
        start = bisect_left(self._suffixes, context, key=head)
        return start if start < len(self._suffixes) and head(self._suffixes[start]) == context else None

    def _heads(self, size: int) -> Callable[[int], array[int]]:
        text = self._tokens
        return lambda position: text[position : position + size]

    def find(self, ids: list[int], depth: int) -> Occurrences:
        """Find continuations of the end of `ids`, `depth` tokens each."""
        return find([self], ids, depth)

    def continuations(self, context: array[int], depth: int) -> list[list[int]]:
        """The `depth` tokens after each occurrence of `context`, for at most `SAMPLE` evenly spaced occurrences."""
        found, size, text = self.occurrences(context), len(context), self._tokens
        places = self._suffixes[found.start : found.stop : len(found) // SAMPLE + 1]
        return [text[place + size : place + size + depth].tolist() for place in places]


class GrowingDatastore:
    """Datastore of the most recently added documents, at most `limit` tokens.

    The store is a list of sorted parts (Bentley and Saxe 1980). A new addition is merged with the preceding parts that
    are less than `GROWTH` times its size, and sorted. Each token is sorted a logarithmic number of times, and a lookup
    reads a logarithmic number of parts.
    """

    def __init__(self, limit: int):
        self.limit = limit
        self.parts: list[Datastore] = []  # oldest documents first

    def __len__(self) -> int:
        return sum(len(part.tokens) for part in self.parts)

    @property
    def tokens(self) -> Tensor:
        """All documents, oldest first, as one tensor [N] int32 with a separator after each document."""
        return torch.cat([torch.empty(0, dtype=torch.int32), *(part.tokens for part in self.parts)])

    def add(self, documents: Iterable[list[int]]) -> None:
        """Add documents. If the limit is exceeded, drop the oldest ones until a quarter of the store is free."""
        tokens = flatten(documents)
        if not len(tokens):
            return
        while self.parts and len(self.parts[-1].tokens) < GROWTH * len(tokens):
            tokens = torch.cat([self.parts.pop().tokens, tokens])
        if len(self) + len(tokens) > self.limit:
            tokens = newest(torch.cat([self.tokens, tokens]), self.limit - self.limit // 4)
            self.parts.clear()
        if len(tokens):
            self.parts.append(Datastore(tokens, suffix_array(tokens)))

    def clear(self) -> None:
        """Forget all documents."""
        self.parts.clear()

    def state(self) -> dict[str, Tensor]:
        """Return the tensors from which `restore` rebuilds the store."""
        return {"tokens": self.tokens, "sizes": torch.tensor([len(part.tokens) for part in self.parts])}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Replace the contents by the `state` of another store."""
        parts = state["tokens"].split(state["sizes"].tolist())
        self.parts = [Datastore(tokens, suffix_array(tokens)) for tokens in parts if len(tokens)]

    def find(self, ids: list[int], depth: int) -> Occurrences:
        """Find continuations of the end of `ids`, `depth` tokens each."""
        return find(self.parts, ids, depth)


GROWTH = 2  # a part of at least GROWTH times the size of an addition is not merged with it


def newest(tokens: Tensor, limit: int) -> Tensor:
    """Return the newest whole documents, at most `limit` tokens including separators."""
    ends = (tokens == SEPARATOR).nonzero()[:, 0] + 1
    starts = torch.cat([ends.new_zeros(1), ends])
    first = int(torch.searchsorted(starts, len(tokens) - limit))
    return tokens[int(starts[first]) :]


def find(parts: Sequence[Datastore], ids: list[int], depth: int) -> Occurrences:
    """Find continuations of the end of `ids` in all `parts`: longest context first, then shorter ones up to `ENOUGH`.

    An occurrence of a long context is also an occurrence of each shorter one, so it counts several times.
    """
    context = array("i", ids[-LONGEST:])
    sizes = [part.longest(context) for part in parts]
    rows: list[list[int]] = []
    for size in range(max(sizes, default=0), 0, -1):
        end = context[-size:]
        for part, longest in zip(parts, sizes, strict=True):
            if longest >= size:
                rows += part.continuations(end, depth)
        if len(rows) >= ENOUGH:
            break
    return Occurrences(rows, 0)


class Occurrences:
    """Continuations that agree in their first `depth` tokens: a place from which a draft continues."""

    def __init__(self, rows: list[list[int]], depth: int):
        self.rows, self.depth = rows, depth

    def followers(self, limit: int) -> list[NextToken]:
        """The `limit` most frequent next tokens. A document that ends here counts as one with another next token."""
        groups: dict[int, list[list[int]]] = {}
        for row in self.rows:
            if self.depth < len(row):
                groups.setdefault(row[self.depth], []).append(row)
        weight = len(self.rows) + ESCAPE_MASS * len(groups)
        groups.pop(SEPARATOR, None)
        best = sorted(groups.items(), key=lambda item: -len(item[1]))[:limit]
        return [NextToken(token, len(rows) / weight, Occurrences(rows, self.depth + 1)) for token, rows in best]
