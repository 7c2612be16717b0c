"""Selection of a run's prompts: each once, without excluded prompts and their near-duplicates, up to the limit.

All decisions are made before anything is answered, and depend on the prompts and their order alone. So a resumed run
and all jobs of an array decide the same. Prompts wait on disk; memory holds the id and place of each.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from math import ceil
from pathlib import Path
from tempfile import TemporaryFile

import numpy as np

from specctl import progress, regular_files
from specctl.distillation.messages import ChatMessage, text_of
from specctl.distillation.prompts import Prompt, candidates, check_files, no_prompts, prompts_in
from specctl.distillation.rejections import Rejections
from specctl.errors import DataError
from specctl.recipe import DataRecipe, DistillRecipe, FilterRecipe

REPEATED, EXCLUDED, NEAR_EXCLUDED = "repeated", "excluded", "near-excluded"
REASONS = {
    REPEATED: "they repeat earlier prompts",
    EXCLUDED: "they are in {file}",
    NEAR_EXCLUDED: "they are nearly the same as prompts in {file}",
}
LISTED = 1000  # most ids per reason in a data card; left-out.jsonl in the run directory has all


GRAM = 5  # words, as in Lee et al. 2022, "Deduplicating training data makes language models better"


SHORTEST = 8  # n-grams: texts with fewer are never near-duplicates, since a single word would decide


_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|\w+")  # in scripts without spaces, a character is a word


@dataclass
class LeftOut:
    """Prompts that are left out: counted, and written to `path` as they occur, with the id of the prompt they
    repeat."""

    path: Path
    file: Path | None = None  # file of excluded prompts, such as a test set
    counts: Counter[str] = field(default_factory=Counter)
    ids: dict[str, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.path.unlink(missing_ok=True)

    def add(self, reason: str, id: str, where: str, like: str) -> None:
        self.counts[reason] += 1
        if reason == REPEATED:
            return
        listed = self.ids.setdefault(reason, [])
        if len(listed) < LISTED:
            listed.append(id)
        with regular_files.open_regular(self.path, "a", encoding="utf-8", follow=False) as file:
            file.write(json.dumps({"prompt_id": id, "where": where, "reason": reason, "like": like}) + "\n")

    def report(self) -> None:
        """Report in one line per reason."""
        for reason, words in REASONS.items():
            if count := self.counts[reason]:
                progress.log(f"prompts left out: {count:,}; {words.format(file=self.file)}")
        if self.ids:
            progress.log(f"the prompts left out are listed in {self.path}")


class PromptFilter:
    """Decides about prompts, one after the other, whether they are kept."""

    def __init__(self, filters: FilterRecipe, exclude: Path | None, left_out: LeftOut):
        self._left_out = left_out
        self._seen: set[bytes] = set()
        self._excluded: set[bytes] = set()
        self._near = None if filters.near_excluded is None else NearDuplicateIndex(filters.near_excluded)
        for prompt in prompts_in(exclude):
            self._excluded.add(bytes.fromhex(prompt.id))
            if self._near is not None and (question := _first_question(prompt.messages)):
                self._near.add(prompt.id, question)

    def accept(self, id: str, messages: list[ChatMessage], where: str) -> bool:
        """Whether a prompt is kept. A kept prompt counts as seen; any other is recorded as left out."""
        key = bytes.fromhex(id)
        if key in self._excluded:
            reason, like = EXCLUDED, id
        elif key in self._seen:
            reason, like = REPEATED, id
        elif self._near is not None and (other := self._near.find(_first_question(messages))):
            reason, like = NEAR_EXCLUDED, other
        else:
            self._seen.add(key)
            return True
        self._left_out.add(reason, id, where, like)
        return False

    @property
    def count(self) -> int:
        """Number of prompts that were kept."""
        return len(self._seen)

    def was_kept(self, id: str) -> bool:
        return bytes.fromhex(id) in self._seen


def _first_question(messages: Sequence[ChatMessage]) -> str:
    """The question of a first turn, or nothing. Later turns are not compared, because the conversation before them
    decides the answer."""
    first = messages and all(message["role"] != "assistant" for message in messages)
    return text_of(messages[-1]) if first else ""


class Prompts:
    """The prompts of a run on disk, in order."""

    def __init__(self, spool: Spool, kept: array[int]):
        self.licenses: Counter[str] = Counter()
        self.languages: Counter[str] = Counter()
        self._spool, self._kept = spool, kept

    @property
    def read(self) -> int:
        """Number of prompts that were read, including prompts that were left out."""
        return len(self._spool)

    def keep(self, place: int, prompt: Prompt) -> None:
        """Add the prompt that is at `place` in the spool."""
        self._kept.append(place)
        self.licenses.update([prompt.license] if prompt.license else [])
        self.languages.update([prompt.language] if prompt.language else [])

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, number: int) -> Prompt:
        row = json.loads(self._spool[self._kept[number]])
        return Prompt(**row | {"later_turns": tuple(row["later_turns"])})

    def __iter__(self) -> Iterator[Prompt]:
        return (self[number] for number in range(len(self)))


def prepare(recipe: DistillRecipe, rejections: Rejections, left_out: LeftOut) -> Prompts:
    """Select the prompts of all domains, domain by domain, up to `data.limit` per domain.

    The prompts of a file come in an order drawn with `data.seed`, because files are often sorted by origin; a smaller
    limit gives a prefix of a larger one. Raises DataError (unreadable file, too many rejections, no prompt left) and
    UsageError.
    """
    data = recipe.data
    check_files(data)
    wanted = PromptFilter(recipe.filters, recipe.exclude, left_out)
    spool = Spool()
    kept = Prompts(spool, array("Q"))
    for domain in data.domain:
        before, read = len(kept), len(spool)
        with progress.Progress(f"compare prompts of {domain}", unit="prompts") as bar:
            for place, prompt in _in_order(data, domain, rejections, spool):
                progress.interrupts.check()
                bar.update(1)
                if wanted.accept(prompt.id, prompt.messages, prompt.where):
                    kept.keep(place, prompt)
                if len(kept) - before == data.limit:
                    break
        rejections.check()
        if len(spool) == read:
            raise no_prompts(str(data.prompts_of(domain) or domain))
        if len(kept) == before:
            left_out.report()
            raise DataError(
                f"every prompt of {domain} is left out, {len(spool) - read:,} in all", hint=f"see {left_out.path}"
            )
    left_out.report()
    return kept


def _in_order(data: DataRecipe, domain: str, rejections: Rejections, spool: Spool) -> Iterator[tuple[int, Prompt]]:
    """Yield prompts with their places in `spool`: prompts of a file in drawn order, others in source order."""
    drawn = data.prompts_of(domain) not in (None, "-")
    ranks, start = array("Q"), len(spool)
    for prompt in candidates(data, domain, "train", rejections):
        rejections.seen += 1
        if prompt is None:
            continue
        progress.interrupts.check()
        place = spool.append(json.dumps(asdict(prompt), ensure_ascii=False).encode())
        if drawn:
            ranks.append(_rank(data.seed, prompt.id))
        else:
            yield place, prompt
    for offset in np.argsort(np.frombuffer(ranks, np.uint64), kind="stable") if ranks else ():
        place = start + int(offset)
        yield place, Prompts(spool, array("Q", [place]))[0]


def _rank(seed: int, id: str) -> int:
    """Rank of a prompt in the drawn order, which is also the order of `read_prompts` with `sample`."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{id}".encode()).digest()[:8])


def word_ngrams(text: str) -> list[str]:
    """Word n-grams of a text, without case and punctuation."""
    words = _WORD.findall(text.lower())
    return [" ".join(words[start : start + GRAM]) for start in range(len(words) - GRAM + 1)]


class NearDuplicateIndex:
    """Texts with their ids. `find` returns a near-duplicate: a text with n-grams of a Jaccard similarity of at least
    `threshold`.

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


class Spool:
    """Rows of bytes by their place; the temporary file disappears with this object."""

    def __init__(self) -> None:
        self._file = TemporaryFile()  # noqa: SIM115 (closed with this object)
        self._ends = array("Q", [0])
        self._flushed = 0  # bytes

    def append(self, row: bytes) -> int:
        """Add a row and return its place."""
        self._file.write(row)
        self._ends.append(self._ends[-1] + len(row))
        return len(self) - 1

    def __getitem__(self, place: int) -> bytes:
        start, end = self._ends[place : place + 2]
        if end > self._flushed:
            self._file.flush()
            self._flushed = self._ends[-1]
        return os.pread(self._file.fileno(), end - start, start)

    def __len__(self) -> int:
        return len(self._ends) - 1
