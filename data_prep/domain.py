"""Domains of prompts: each has a public data set to load, and an offline generator."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from random import Random

from ..errors import UsageError

SPLITS = ("train", "test")
TEST_SHARE = 5  # one fingerprint in five belongs to the test split
# Consecutive draws without a new prompt after which the generator gives up. With 5 % of a grammar still unseen, this
# happens once in 1e8 (test split).
GIVE_UP = 2000


class UnknownDomain(UsageError, ValueError):
    """Raised for a name that no domain has; the hint lists the known domains."""


class PromptsExhausted(UsageError, ValueError):
    """Raised if the generator has fewer distinct prompts than requested."""


@dataclass(frozen=True)
class PublicSet:
    """A data set on the Hugging Face hub, and the conversion of its rows to prompts.

    `split` maps our split to the data set's split (slices such as `train[:90%]` if it has only one). `columns` maps a
    field of `template` to a column; a dotted path reaches into structs, and a list is joined by line breaks. Some sets
    are published as a loading script, which `datasets` 4 no longer runs. `revision` and `data_dir` then name their
    converted files.
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
    """One subject. `sample` writes one prompt from a random stream; `generate` drops repeated prompts."""

    name: str
    description: str
    public: PublicSet
    sample: Callable[[Random], str] = field(repr=False)

    def generate(self, n: int, seed: int, split: str = "train") -> Iterator[str]:
        """Yield `n` distinct prompts, the same in every process for one seed and split; a smaller `n` gives a prefix.

        The splits share no prompt, with any seeds: a hash of the text decides the split of a prompt. Raises ValueError
        for an unknown split or a negative `n`, and PromptsExhausted (a ValueError) if the grammar has fewer prompts.
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
                        f"domain {self.name} has about {len(seen)} distinct {split} prompts, but {n} were requested",
                        hint="lower the limit, or give your own prompts with --prompts",
                    )
                continue
            misses = 0
            seen.add(mark)
            yield prompt


def fingerprint(prompt: str) -> int:
    """Stable 64-bit hash of a text."""
    return int.from_bytes(blake2b(prompt.encode(), digest_size=8).digest(), "big")
