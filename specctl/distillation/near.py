"""Near-duplicate texts: MinHash signatures of their word 5-grams, found again by locality-sensitive hashing.

Broder 1997 for MinHash, Leskovec et al. 2020, section 3.4, for the bands; 5-grams as in Lee et al. 2022 ("Deduplicating
training data makes language models better"). Signatures are rensa's. Its index would take 0.7 KB of memory a text. The
one here takes 0.3 KB, and has the texts on disk: a pair that is found is compared itself, so that an estimate drops
nothing.
"""

from __future__ import annotations

import re
import zlib
from array import array
from collections.abc import Iterator

import numpy as np
from rensa import RMinHash

from specctl.distillation.spool import Spool

GRAM = 5  # words
SHORTEST = 8  # n-grams: a text with fewer is told apart by its id alone, as one word more or less would decide
VALUES = 128  # of a signature: the estimate's standard deviation is 0.027 at a similarity of 0.9
SEED = 0
BANDS = 8
RECALL = 0.95  # of the pairs that are as similar as the threshold, the share that shares a band
MARGIN = 0.1  # by which the estimate may be below the threshold: nearly four standard deviations
CROWD = 64  # texts of a bucket that are compared, newest first: boilerplate would make it quadratic
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|\w+")  # scripts without spaces: a character is a word


def grams(text: str) -> list[str]:
    """The word n-grams of a text, without case and punctuation."""
    words = _WORD.findall(text.lower())
    return [" ".join(words[start : start + GRAM]) for start in range(len(words) - GRAM + 1)]


class NearIndex:
    """Texts by number, in the order in which they were added; `find` names one that a text is nearly the same as.

    A pair as similar as `threshold` (Jaccard) is found with a probability of `RECALL` or more, an equal one always; one
    less similar never. Decisions follow from the texts and their order alone.
    """

    def __init__(self, threshold: float):
        self.threshold = threshold
        self.rows = max(rows for rows in (1, 2, 4, 8, 16) if _shared(threshold, rows) >= RECALL or rows == 1)
        self._buckets = _Buckets()
        self._signatures = bytearray()  # a byte of each value
        self._texts = Spool()

    def find(self, text: str) -> int | None:
        """The number of a text that is nearly the same, None where there is none."""
        found = grams(text)
        return self._find(found, _signature(found)) if len(found) >= SHORTEST else None

    def add(self, text: str) -> int | None:
        """As `find`; where there is none, the text is added under the next number."""
        found, number = grams(text), len(self)
        signature = _signature(found)
        if len(found) >= SHORTEST:
            same = self._find(found, signature)
            if same is not None:
                return same
            for key in self._keys(signature):
                self._buckets.add(key, number)
        self._signatures += signature.astype(np.uint8).tobytes()
        self._texts.append(text.encode())
        return None

    def __len__(self) -> int:
        return len(self._signatures) // VALUES

    def _find(self, found: list[str], signature: np.ndarray) -> int | None:
        there = sorted({number for key in self._keys(signature) for number in self._buckets.of(key)})
        if not there:
            return None
        kept = np.frombuffer(self._signatures, np.uint8).reshape(-1, VALUES)[there]
        estimates = (kept == signature.astype(np.uint8)).mean(axis=1)
        wanted = set(found)
        for place in np.argsort(-estimates, kind="stable"):
            if estimates[place] < self.threshold - MARGIN:
                break
            other = set(grams(self._texts[there[place]].decode()))
            if len(wanted & other) >= self.threshold * len(wanted | other):
                return there[place]
        return None

    def _keys(self, signature: np.ndarray) -> Iterator[int]:
        """One hash for the whole signature, which no crowd hides, and one for each band."""
        yield zlib.crc32(signature.tobytes())
        for band in range(BANDS):
            yield zlib.crc32(signature[band * self.rows : (band + 1) * self.rows].tobytes(), band + 1)


class _Buckets:
    """A hash table with chains in three arrays: of every entry its key, its number, and the entry before it."""

    def __init__(self) -> None:
        self._heads = array("I", bytes(4 << 10))  # by key: the newest entry, counted from 1
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

    def of(self, key: int) -> Iterator[int]:
        """Numbers under a key, newest first, `CROWD` at most."""
        entry, left = self._heads[key % len(self._heads)], CROWD
        while entry and left:
            if self._keys[entry - 1] == key:
                left -= 1
                yield self._numbers[entry - 1]
            entry = self._before[entry - 1]

    def _link(self, entry: int) -> None:
        slot = self._keys[entry - 1] % len(self._heads)
        self._before[entry - 1], self._heads[slot] = self._heads[slot], entry


def _shared(similarity: float, rows: int) -> float:
    """The probability that two texts of a similarity have a band in common: 1 - (1 - s^r)^b."""
    return 1.0 - (1.0 - similarity**rows) ** BANDS


def _signature(found: list[str]) -> np.ndarray:
    """[VALUES] of uint32."""
    sketch = RMinHash(VALUES, SEED)
    sketch.update(found)
    return np.array(sketch.digest(), np.uint32)
