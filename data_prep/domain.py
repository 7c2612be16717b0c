"""What a domain is: a public data set to load, and a generator of our own for work without a network."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from random import Random

from ..errors import UsageError

SPLITS = ("train", "test")
TEST_SHARE = 5  # one fingerprint in five belongs to the test split
# Consecutive draws with nothing new; with 5 % of a grammar still unseen, once in 1e8 (test split).
GIVE_UP = 2000


class UnknownDomain(UsageError, ValueError):
    """No domain has this name; the hint has the nearest ones."""


class PromptsExhausted(UsageError, ValueError):
    """The generator has fewer distinct prompts than were asked for."""


@dataclass(frozen=True)
class PublicSet:
    """A data set on the Hugging Face hub and how its rows become prompts.

    `split` maps our split to the data set's own (slices such as `train[:90%]` where it has only one). `columns` maps a
    field of `template` to a column; a dotted path reaches into structs and a list is joined by line breaks. `revision`
    and `data_dir` name the converted files of a set published as a loading script, which `datasets` 4 no longer runs.
    """

    id: str
    config: str | None
    split: Mapping[str, str]
    columns: Mapping[str, str]
    template: str
    licence: str
    citation: str
    revision: str | None = None
    data_dir: str | None = None


@dataclass(frozen=True)
class Domain:
    """One subject. `sample` writes one prompt from a random stream; `generate` drops those it writes twice."""

    name: str
    description: str
    public: PublicSet
    sample: Callable[[Random], str] = field(repr=False)

    def generate(self, n: int, seed: int, split: str = "train") -> Iterator[str]:
        """Yields `n` distinct prompts, the same for one seed and split in every process; fewer are a prefix of more.

        The splits share no prompt, whatever their seeds: a hash of the text decides where it belongs. Raises ValueError
        for an unknown split or a negative `n`, and PromptsExhausted (a ValueError) when the grammar has fewer.
        """
        if split not in SPLITS:
            raise ValueError(f"split {split!r} is not one of {', '.join(SPLITS)}")
        if n < 0:
            raise ValueError(f"cannot write {n} prompts")
        return self._generate(n, seed, split)

    def _generate(self, n: int, seed: int, split: str) -> Iterator[str]:
        # A string seed goes through SHA-512 in `random`, so it does not depend on PYTHONHASHSEED.
        random = Random(f"{self.name}/{split}/{seed}")
        seen: set[int] = set()
        misses = 0
        while len(seen) < n:
            prompt = self.sample(random)
            mark = fingerprint(prompt)
            if mark in seen or (mark % TEST_SHARE == 0) != (split == "test"):
                misses += 1
                if misses == GIVE_UP:
                    raise PromptsExhausted(
                        f"domain {self.name} has about {len(seen)} distinct {split} prompts; {n} were asked for",
                        hint="lower the limit, or bring your own with --prompts",
                    )
                continue
            misses = 0
            seen.add(mark)
            yield prompt


def fingerprint(prompt: str) -> int:
    """A stable 64-bit hash of a text."""
    return int.from_bytes(blake2b(prompt.encode(), digest_size=8).digest(), "big")
