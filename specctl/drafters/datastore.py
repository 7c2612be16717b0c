"""Documents behind a suffix array: where in them a context stands, and what followed it."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specctl.drafters.blueprint import WEIGHTS, misfit
from specctl.drafters.trie import Follower

if TYPE_CHECKING:
    from specctl.decoding.target import Target

SEPARATOR = -1  # behind every document: no context holds it, no draft crosses it
LONGEST = 16  # tokens of context that are looked up; a power of two
# Shorter contexts are added until so many occurrences are found. Tokens a pass with a store of 400 responses, the text
# and 14 nodes, for 1 / 8 / 32 / 128 of them: sql 3.37 / 3.49 / 3.49 / 3.51, code 3.78 / 3.91 / 3.87 / 3.86,
# summarization 2.50 / 2.74 / 2.82 / 2.88.
ENOUGH = 32
# Set aside for each kind of follower found, for those not seen yet (PPM): what stood there once is no certainty.
UNSEEN = 0.5
SAMPLE = 64  # occurrences that are read of one context, evenly spaced: 512 tell no more


def flatten(documents: Iterable[list[int]]) -> Tensor:
    """[N] int32, a separator behind each document."""
    return torch.tensor([token for document in documents for token in (*document, SEPARATOR)], dtype=torch.int32)


def suffix_array(tokens: Tensor) -> Tensor:
    """[N] int32: the positions of `tokens` [N], ordered by the `LONGEST` tokens from there on, then by position.

    Prefix doubling (Manber and Myers 1993): positions ordered by 2k tokens are positions ordered by the pair of their
    ranks by k tokens. No context is longer than `LONGEST`, so the doubling ends there, in repetitive text, too.
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
    """`tokens` [N] and their suffix array [N], both int32: 8 bytes a token, shared by all sequences."""

    def __init__(self, tokens: Tensor, suffixes: Tensor):
        self.tokens, self.suffixes = tokens, suffixes
        self._text: NDArray[np.int32] = tokens.numpy()
        self._order: NDArray[np.int32] = suffixes.numpy()
        # Slices of an array compare token by token, as bisect wants it.
        self._tokens, self._suffixes = array("i", self._text.tobytes()), array("i", self._order.tobytes())

    def check(self, target: Target) -> None:
        """Raise CheckpointError where it holds tokens that `target` does not have."""
        low, high = self.tokens.aminmax()
        if low < SEPARATOR or high >= target.vocab_size:
            has = f"target {target.name} has ids 0 … {target.vocab_size - 1}"
            raise misfit(WEIGHTS, "tokens", f"holds ids {int(low)} … {int(high)}, {has}")

    @classmethod
    def of(cls, documents: Iterable[list[int]]) -> Datastore:
        tokens = flatten(documents)
        return cls(tokens, suffix_array(tokens))

    def occurrences(self, context: list[int]) -> range:
        """Places in the suffix array of the suffixes that begin with `context` (at most `LONGEST` tokens)."""
        size, wanted, text = len(context), array("i", context), self._tokens

        def head(position: int) -> array[int]:
            return text[position : position + size]

        start = bisect_left(self._suffixes, wanted, key=head)
        if start == len(text) or head(self._suffixes[start]) != wanted:
            return range(0)
        return range(start, bisect_right(self._suffixes, wanted, start, key=head))

    def find(self, ids: list[int], depth: int) -> Occurrences:
        """Find what followed the end of `ids`, `depth` tokens each: longest context first, shorter ones up to `ENOUGH`.

        An occurrence of a long context is one of each shorter context, too, and so weighs the more.
        """
        rows: list[list[int]] = []
        for size in range(min(LONGEST, len(ids)), 0, -1):
            found = self.occurrences(ids[-size:])
            if found:
                rows += self._continuations(found, size, depth)
            if len(rows) >= ENOUGH:
                break
        return Occurrences(rows, 0)

    def _continuations(self, found: range, size: int, depth: int) -> list[list[int]]:
        picked = np.linspace(found.start, found.stop - 1, min(len(found), SAMPLE)).astype(np.int64)
        places = self._order[picked, None] + np.arange(size, size + depth)
        return self._text[np.minimum(places, len(self._text) - 1)].tolist()  # the last token is a separator


class Occurrences:
    """Continuations that agree in their first `depth` tokens, as the place from which a draft reads on."""

    def __init__(self, rows: list[list[int]], depth: int):
        self.rows, self.depth = rows, depth

    def followers(self, limit: int) -> list[Follower]:
        """The `limit` most frequent tokens; a document that ends here counts as one that goes on otherwise."""
        groups: dict[int, list[list[int]]] = {}
        for row in self.rows:
            if self.depth < len(row):
                groups.setdefault(row[self.depth], []).append(row)
        weight = len(self.rows) + UNSEEN * len(groups)
        groups.pop(SEPARATOR, None)
        best = sorted(groups.items(), key=lambda item: -len(item[1]))[:limit]
        return [Follower(token, len(rows) / weight, Occurrences(rows, self.depth + 1)) for token, rows in best]
