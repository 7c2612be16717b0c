"""Near-duplicate texts: most of their word 5-grams are the same.

5-grams are the unit of Lee et al. 2022, "Deduplicating training data makes language models better".
"""

import re
from collections import defaultdict
from math import ceil

GRAM = 5  # words
SHORTEST = 8  # n-grams: texts with fewer are never near-duplicates, since a single word would decide
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|\w+")  # in scripts without spaces, a character is a word


def word_ngrams(text: str) -> list[str]:
    """Word n-grams of a text, without case and punctuation."""
    words = _WORD.findall(text.lower())
    return [" ".join(words[start : start + GRAM]) for start in range(len(words) - GRAM + 1)]


class NearDuplicateIndex:
    """Texts with their ids. `find` returns a text with n-grams of a Jaccard similarity of at least `threshold`.

    A share of `threshold` of a text's n-grams must then be in the other text. So only texts with one of the remaining
    n-grams, and the rarest ones at that, are compared (Bayardo et al. 2007, "Scaling up all pairs similarity search").
    """

    def __init__(self, threshold: float):
        self.threshold = threshold
        self._ids: list[str] = []
        self._ngrams: list[frozenset[int]] = []  # hashes, by text
        self._texts: defaultdict[int, list[int]] = defaultdict(list)  # numbers of the texts with an n-gram

    def add(self, id: str, text: str) -> None:
        ngrams = _hashes(text)
        for ngram in ngrams:
            self._texts[ngram].append(len(self._ids))
        self._ids.append(id)
        self._ngrams.append(ngrams)

    def find(self, text: str) -> str | None:
        """The id of the most similar near-duplicate, the first one in a tie, or None."""
        ngrams = _hashes(text)
        shared = ceil(self.threshold * len(ngrams) - 1e-9)
        rarest = sorted(ngrams, key=lambda ngram: len(self._texts.get(ngram, ())))[: len(ngrams) - shared + 1]
        candidates = sorted({number for ngram in rarest for number in self._texts.get(ngram, ())})
        similarity = {n: len(ngrams & self._ngrams[n]) / len(ngrams | self._ngrams[n]) for n in candidates}
        best = max(candidates, key=similarity.__getitem__, default=None)
        return None if best is None or similarity[best] < self.threshold else self._ids[best]


def _hashes(text: str) -> frozenset[int]:
    """Hashes of a text's n-grams; none for a short text."""
    ngrams = word_ngrams(text)
    return frozenset(map(hash, ngrams)) if len(ngrams) >= SHORTEST else frozenset()
