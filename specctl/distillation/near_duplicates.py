"""Near-duplicate texts: MinHash signatures of word 5-grams, looked up by locality-sensitive hashing.

The methods are from Broder 1997 (MinHash), Leskovec et al. 2020, section 3.4 (bands), and Lee et al. 2022,
"Deduplicating training data makes language models better" (5-grams). The signatures come from the library rensa.
rensa's own index would take 0.7 KB of memory per text. The index here takes 0.3 KB and keeps the texts on disk. Every
candidate pair is compared exactly, so an estimate alone never drops a text.
"""

import re
import zlib
from array import array
from collections.abc import Iterator

import numpy as np
from rensa import RMinHash

from specctl.distillation.spool import Spool

GRAM = 5  # words
SHORTEST = 8  # n-grams: texts with fewer are never near-duplicates, since a single word would decide
VALUES = 128  # per signature: the estimate's standard deviation is 0.027 at a similarity of 0.9
SEED = 0
BANDS = 8
RECALL = 0.95  # least share of pairs at the threshold that have a band in common
MARGIN = 0.1  # how far the estimate may be below the threshold: nearly four standard deviations
CROWD = 64  # most texts of a bucket that are compared, newest first: boilerplate would make it quadratic
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|\w+")  # in scripts without spaces, a character is a word


def word_ngrams(text: str) -> list[str]:
    """Word n-grams of a text, without case and punctuation."""
    words = _WORD.findall(text.lower())
    return [" ".join(words[start : start + GRAM]) for start in range(len(words) - GRAM + 1)]


class NearDuplicateIndex:
    """Texts by number, in the order in which they were added; `find` returns a near-duplicate of a text.

    A pair with a Jaccard similarity of `threshold` or more is found with a probability of at least `RECALL`. Equal
    texts are always found, pairs below the threshold never. The results depend on the texts and their order alone.
    """

    def __init__(self, threshold: float):
        self.threshold = threshold
        self.rows = max(rows for rows in (1, 2, 4, 8, 16) if _shared(threshold, rows) >= RECALL or rows == 1)
        self._buckets = _Buckets()
        self._signatures = bytearray()  # one byte per value
        self._texts = Spool()

    def find(self, text: str) -> int | None:
        """The number of a text that is nearly the same, or None."""
        ngrams = word_ngrams(text)
        return self._find(ngrams, _signature(ngrams)) if len(ngrams) >= SHORTEST else None

    def add(self, text: str) -> int | None:
        """Return the number of a near-duplicate, or else add the text under the next number and return None."""
        ngrams, number = word_ngrams(text), len(self)
        signature = _signature(ngrams)
        if len(ngrams) >= SHORTEST:
            duplicate = self._find(ngrams, signature)
            if duplicate is not None:
                return duplicate
            for key in self._keys(signature):
                self._buckets.add(key, number)
        self._signatures += signature.astype(np.uint8).tobytes()
        self._texts.append(text.encode())
        return None

    def __len__(self) -> int:
        return len(self._signatures) // VALUES

    def _find(self, ngrams: list[str], signature: np.ndarray) -> int | None:
        candidates = sorted({number for key in self._keys(signature) for number in self._buckets.entries(key)})
        if not candidates:
            return None
        signatures = np.frombuffer(self._signatures, np.uint8).reshape(-1, VALUES)[candidates]
        estimates = (signatures == signature.astype(np.uint8)).mean(axis=1)
        distinct = set(ngrams)
        for place in np.argsort(-estimates, kind="stable"):
            if estimates[place] < self.threshold - MARGIN:
                break
            other = set(word_ngrams(self._texts[candidates[place]].decode()))
            if len(distinct & other) >= self.threshold * len(distinct | other):
                return candidates[place]
        return None

    def _keys(self, signature: np.ndarray) -> Iterator[int]:
        """Hash of the whole signature, and hash of each band. The first finds equal texts even in crowded bands."""
        yield zlib.crc32(signature.tobytes())
        for band in range(BANDS):
            yield zlib.crc32(signature[band * self.rows : (band + 1) * self.rows].tobytes(), band + 1)


class _Buckets:
    """Hash table with chains, in three arrays: the key of every entry, its number, and the previous entry."""

    def __init__(self) -> None:
        self._heads = array("I", bytes(4 << 10))  # newest entry by key, counted from 1; 0 = empty
        self._keys, self._numbers, self._before = array("I"), array("I"), array("I")

    def add(self, key: int, number: int) -> None:
        self._keys.append(key)
        self._numbers.append(number)
        self._before.append(0)
        if len(self._keys) > len(self._heads):
            self._heads = array("I", bytes(8 * len(self._heads)))
            for entry in range(1, len(self._keys) + 1):
                self._link(entry)
        else:
            self._link(len(self._keys))

    def entries(self, key: int) -> Iterator[int]:
        """Numbers under a key, newest first, at most `CROWD`."""
        entry, remaining = self._heads[key % len(self._heads)], CROWD
        while entry and remaining:
            if self._keys[entry - 1] == key:
                remaining -= 1
                yield self._numbers[entry - 1]
            entry = self._before[entry - 1]

    def _link(self, entry: int) -> None:
        slot = self._keys[entry - 1] % len(self._heads)
        self._before[entry - 1], self._heads[slot] = self._heads[slot], entry


def _shared(similarity: float, rows: int) -> float:
    """Probability that two texts with this similarity have a band in common: 1 - (1 - s^r)^b."""
    return 1.0 - (1.0 - similarity**rows) ** BANDS


def _signature(ngrams: list[str]) -> np.ndarray:
    """MinHash signature of n-grams: [VALUES] of uint32."""
    sketch = RMinHash(VALUES, SEED)
    sketch.update(ngrams)
    return np.array(sketch.digest(), np.uint32)
