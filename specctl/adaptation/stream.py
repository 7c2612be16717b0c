"""The stream of prompts that `specctl online` answers, in chunks.

Sources are read line by line and never held in memory. A file is read once to count its prompts and once to give them
out; stdin is read as its lines come. The stream is a function of sources, schedule and seed. So a run can resume at any
chunk by reading the earlier prompts again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from operator import index
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specctl import data_prep
from specctl.decoding.target import Target
from specctl.distillation.prompts import Prompt, candidates, check_files, no_prompts, render
from specctl.distillation.rejections import EXPECTED, Rejections
from specctl.errors import DataError, Interrupted, UsageError
from specctl.progress import interrupts, warn
from specctl.recipe import DataRecipe, LearningRecipe, StreamRecipe
from specctl.recipe.stream import Kind

MIN_LINES_TO_JUDGE = 100  # lines after which the share of rejected lines is judged


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt and its token ids."""

    prompt: Prompt
    ids: list[int]


@dataclass(frozen=True)
class Position:
    """A place in a stream, after the prompts already given out. `digest` is a hash chain of the prompts' ids."""

    chunks: int = 0
    prompts: int = 0
    digest: str = ""

    def after(self, chunk: Iterable[EncodedPrompt]) -> Position:
        prompts, digest = self.prompts, self.digest
        for arrival in chunk:
            prompts, digest = prompts + 1, hashlib.sha256((digest + arrival.prompt.id).encode()).hexdigest()[:16]
        return Position(self.chunks + 1, prompts, digest)


class PromptStream:
    """Chunks of prompts, given out once.

    Lines that are no prompts, and prompts that leave the target no room for an answer, go to `rejections`. A file with
    too many bad lines is refused. Otherwise too many rejections stop the stream, from the hundredth line on. Repeated
    prompts stay, because users repeat prompts, too.

    Attributes:
        total: number of prompts in all, or None if only the end of stdin or of a generator tells.
    """

    def __init__(
        self,
        data: DataRecipe,
        recipe: StreamRecipe,
        target: Target,
        rejections: Rejections,
        *,
        size: int,
        chat_template_kwargs: dict[str, Any] | None = None,
    ):
        """
        Args:
            size: prompts in a chunk (`StreamRecipe.chunk_of`); the last one may have fewer.

        Raises:
            UsageError: an unknown domain, one file for several domains, or a schedule together with data.limit.
            DataError: a file is missing, has no prompts, has too many bad lines, or has fewer prompts than the schedule
                asks for.
        """
        segments: list[tuple[str, int | None]] = [*recipe.segments]
        if segments and data.limit is not None:
            raise UsageError("a schedule determines the number of prompts: leave out data.limit")
        segments = segments or [(domain, data.limit) for domain in data.domain]
        self.data = data.model_copy(update={"domain": list(dict.fromkeys(domain for domain, _ in segments))})
        check_files(self.data)
        if data.prompts is None and data.source != "unconditional":
            for domain in self.data.domain:
                data_prep.get(domain)
        self.recipe, self.target, self.rejections, self.size = recipe, target, rejections, size
        self.options = chat_template_kwargs or {}
        self.stdin = data.prompts == "-"
        self.counted = not self.stdin and bool(data.prompts or recipe.schedule or recipe.kind != "abrupt")
        self.segments = self._count(segments) if self.counted else segments
        counts = [count for _, count in self.segments if count is not None]
        self.total = sum(counts) if len(counts) == len(self.segments) else None
        self._at = Position()
        self._left = self._arrivals()

    @classmethod
    def of_pass(cls, recipe: LearningRecipe, target: Target, rejections: Rejections, seed: int) -> PromptStream:
        """The stream for one of the `seeds` of `specctl online`."""
        data = recipe.data.model_copy(update={"seed": recipe.data.seed + seed})
        options = recipe.target.chat_template_kwargs
        return cls(data, recipe.stream, target, rejections, size=recipe.chunk, chat_template_kwargs=options)

    def position(self) -> dict[str, Any]:
        """The position after the last chunk that was given out; JSON-able, for `resume`."""
        return asdict(self._at)

    def resume(self, position: dict[str, Any], *, rewind: bool = True) -> None:
        """Go to a `position` of an equal stream, before any chunk is taken, by reading the earlier prompts again.

        With `rewind=False` nothing is read again: the stream goes on with the prompts that come next, as on stdin.

        Raises UsageError for stdin, which cannot be rewound, and DataError if the earlier prompts are not the same.
        """
        if self.stdin and rewind:
            raise UsageError(
                f"stdin cannot be rewound to the position after its first {position['prompts']} prompts",
                "name the file with --prompts, or continue with new lines from stdin",
            )
        self._at = Position(index(position["chunks"]), index(position["prompts"]), position["digest"])
        if not rewind:
            return
        reached = Position().after(islice(self._left, self._at.prompts))
        if (reached.prompts, reached.digest) != (self._at.prompts, self._at.digest):
            raise DataError(
                f"the stream does not begin with the {self._at.prompts} prompts that this run has already answered",
                hint="resume with the original prompts, schedule and seed, or start again",
            )

    def chunks(self) -> Iterator[list[EncodedPrompt]]:
        """The remaining chunks.

        Raises:
            DataError: no prompts at all, or too many rejected.
            Interrupted: a signal, between two prompts.
        """
        chunk: list[EncodedPrompt] = []
        try:
            for arrival in self._left:
                chunk.append(arrival)
                if len(chunk) == self.size:
                    yield self._close(chunk)
                    chunk = []
        except Interrupted:
            if self.stdin:
                warn(f"stdin lines after the first {self._at.prompts} prompts are not answered: send them again")
            raise
        if chunk:
            yield self._close(chunk)
        if not self._at.prompts or self.rejections.seen >= MIN_LINES_TO_JUDGE:
            self.rejections.check()
        self.rejections.report()  # a few bad lines do not void the answers to the others
        if not self._at.prompts:
            raise no_prompts(", ".join(self.data.prompts_of(domain) or domain for domain in self.data.domain))
        if self.recipe.schedule and self._at.prompts < (self.total or 0):
            warn(f"the schedule asks for {self.total} prompts, but only {self._at.prompts} prompts could be answered")

    def _close(self, chunk: list[EncodedPrompt]) -> list[EncodedPrompt]:
        self._at = self._at.after(chunk)
        if self.rejections.seen >= MIN_LINES_TO_JUDGE:
            self.rejections.check()
        return chunk

    def _arrivals(self) -> Iterator[EncodedPrompt]:
        """All prompts, in the order of the schedule."""
        needed: dict[str, int | None] = {}
        for domain, count in self.segments:
            needed[domain] = None if count is None else (needed.get(domain) or 0) + count
        sources = {domain: self._source(domain, count) for domain, count in needed.items()}
        for domain, count in self._runs():
            yield from islice(sources[domain], count)

    def _runs(self) -> Iterable[tuple[str, int | None]]:
        if self.recipe.kind == "abrupt" or self.total is None:
            return self.segments
        counts = [count or 0 for _, count in self.segments]
        return ((self.segments[at][0], 1) for at in interleave(counts, self.recipe.kind, self.data.seed).tolist())

    def _source(self, domain: str, needed: int | None) -> Iterator[EncodedPrompt]:
        """The prompts of one domain that can be answered."""
        rejections = self.rejections
        lines = Rejections(None, 1) if self.counted else rejections  # counting has already reported bad lines
        for prompt in self._candidates(domain, needed, lines):
            rejections.seen += not self.counted
            ids = None if prompt is None else render(self.target, prompt, rejections, self.options)
            if prompt is not None and ids is not None:
                yield EncodedPrompt(prompt, ids)
            elif rejections.seen >= MIN_LINES_TO_JUDGE and rejections.too_many:
                rejections.check()
            interrupts.check()

    def _candidates(self, domain: str, needed: int | None, rejections: Rejections) -> Iterator[Prompt | None]:
        data = self.data.model_copy(update={"limit": needed})
        prompts = candidates(data, domain, self.recipe.split, rejections)
        return _shuffled(prompts, self.data.seed) if self.recipe.shuffle else prompts

    def _count(self, segments: list[tuple[str, int | None]]) -> list[tuple[str, int | None]]:
        """The segments with their numbers of prompts, from a first reading that keeps nothing."""
        counted: list[tuple[str, int | None]] = []
        for domain in self.data.domain:
            wanted = sum(count or 0 for name, count in segments if name == domain) or None
            there = 0
            for prompt in self._candidates(domain, wanted, self.rejections):
                interrupts.check()
                self.rejections.seen += 1
                there += prompt is not None
                if there == wanted and not self.recipe.shuffle:  # shuffled, all lines are read anyway
                    break
            self.rejections.check()
            if there < (wanted if wanted and self.recipe.schedule else 1):
                asked = f", but the schedule asks for {wanted} of {domain}" if self.recipe.schedule else ""
                raise DataError(
                    f"{self.data.prompts_of(domain) or domain} has {there} prompts{asked}",
                    "ask for fewer with --schedule" if asked else f"expected {EXPECTED}",
                )
            counted.append((domain, min(there, wanted or there)))
        return segments if self.recipe.schedule else counted


def _shuffled(prompts: Iterable[Prompt | None], seed: int) -> Iterator[Prompt | None]:
    """Sort by a hash of the seed and each prompt's id, so that other lines of the file do not affect the order."""

    def rank(prompt: Prompt | None) -> bytes:
        return hashlib.sha256(f"{seed}/{prompt.id}".encode()).digest() if prompt is not None else b""

    return iter(sorted(prompts, key=rank))


def interleave(counts: list[int], kind: Kind, seed: int) -> NDArray[np.int64]:
    """[Σ counts] the segment of every prompt; segment i comes `counts[i]` times, with any kind of mixing.

    abrupt: one segment after the other. mix: shuffled. drift: around every change from one segment to the next, the
    share of the next one rises linearly from 0 to 1, over half of the shorter segment to each side. With segments of
    equal size the mixture changes all the time, from the middle of one segment to the middle of the next.
    """
    segments = np.repeat(np.arange(len(counts)), counts)
    random = np.random.default_rng(seed)
    if kind == "mix":
        random.shuffle(segments)
    elif kind == "drift":
        # The k-th prompt of a segment comes at a time, drawn at random, when its cumulated share is between k and k +
        # 1.
        shown = np.concatenate(([0.0], np.ones(len(segments)))).cumsum() - 0.5
        times = []
        for count, share in zip(counts, _shares(counts), strict=True):
            reached = np.concatenate(([0.0], share.cumsum() * (count / share.sum())))
            times.append(np.interp(np.arange(count) + random.random(count), reached, shown))
        segments = segments[np.argsort(np.concatenate(times), kind="stable")]
    return segments


def _shares(counts: list[int]) -> list[NDArray[np.float64]]:
    """[n] share of each segment in the mixture, by prompt. The shares at one prompt sum to 1, and the shares of one
    segment sum to its number of prompts."""
    middle = np.arange(sum(counts)) + 0.5
    gone = [np.ones(len(middle))]  # progress of the change from the segment before
    for before, after, change in zip(counts, counts[1:], np.cumsum(counts), strict=False):
        width = min(before, after) / 2
        gone.append(np.clip((middle - change + width) / (2 * width), 0, 1))
    return [came - went for came, went in zip(gone, [*gone[1:], np.zeros(len(middle))], strict=True)]
